"""Task 1b: ResNet-50 on ImageNet, synchronous SGD or LARS, time to 75.9 % top-1 accuracy.

The light goal is 70 %. One process per worker, 256 images per worker. In each epoch all workers
share one order of the images, and gradients are averaged before every update. The rate rises
linearly over 5 epochs and then falls in steps (SGD, Goyal et al. 2017, arXiv 1706.02677) or as a
polynomial (LARS, You et al. 2017, arXiv 1708.03888). README.md describes the task. recipe.py has
its numbers."""

from __future__ import annotations

import argparse
import logging
from functools import partial

import recipe
import torch
from torch import channels_last, nn

from mlbench_core.aggregation.pytorch import AllReduceAggregation
from mlbench_core.aggregation.pytorch.consensus import averaged_weights
from mlbench_core.controlflow.pytorch import train_round, validation_round
from mlbench_core.controlflow.pytorch.run import Run, run_task
from mlbench_core.controlflow.task_arguments import add_run_arguments
from mlbench_core.dataset.imagerecognition.pytorch import JpegBatches, decoder_name, find_jpegs
from mlbench_core.dataset.imagerecognition.pytorch.jpeg_files import JpegFiles
from mlbench_core.dataset.pytorch import stratified_split
from mlbench_core.errors import ConfigurationError, DatasetNotFoundError
from mlbench_core.evaluation.goals import time_to_accuracy_goal
from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
from mlbench_core.models.pytorch.autocast import Float32Output
from mlbench_core.models.pytorch.resnet import get_resnet_model
from mlbench_core.optim.pytorch import GenericCentralizedOptimizer

logger = logging.getLogger("mlbench.task1b")

CLASSES = 1_000  # of ImageNet
LABEL_SMOOTHING = 0.1


def find_images(folder: str, preset: str) -> tuple[JpegFiles, JpegFiles]:
    """Return the images for training and for validation.

    The small preset splits a folder without these parts.
    """
    try:
        train, validation = find_jpegs(folder, "train"), find_jpegs(folder, "val")
    except DatasetNotFoundError:
        if preset == "full":
            raise
        images = find_jpegs(folder)
        train, validation = map(images.select, stratified_split(images.targets))
    if train.classes != validation.classes:
        raise ConfigurationError(
            f"train and val in {folder} have different classes, {len(train.classes)} and "
            f"{len(validation.classes)} of which some differ: check the folders of both"
        )
    if preset == "full" and len(train.classes) != CLASSES:
        raise ConfigurationError(
            f"{folder} has {len(train.classes)} classes, not the {CLASSES:,} of ImageNet: use "
            "--preset small for other images"
        )
    return train, validation


def load_data(run: Run) -> tuple[JpegBatches, JpegBatches]:
    """Return this worker's batches of the training images and of the validation images."""
    args, preset = run.args, recipe.PRESETS[run.args.preset]
    train, validation = find_images(args.data or run.dataset_dir, args.preset)
    logger.info(
        "%s images for training, %s for validation, decoded by %s",
        len(train), len(validation), decoder_name(),
    )  # fmt: skip
    make = partial(
        JpegBatches, batch_size=args.batch_size, seed=args.seed,
        rank=run.rank, world_size=run.world_size,
        processes=args.processes, device="cuda" if run.gpu else "cpu",
        gpu_decoding=args.gpu_decoding, memory_format=channels_last,
    )  # fmt: skip
    return make(train, crop=preset.train), make(validation, crop=preset.validation)


def train(run: Run) -> None:
    """Train until the goal is reached or the budget of epochs is spent."""
    args = run.args
    batches, validation_batches = load_data(run)
    classes = len(batches.files.classes)
    name = recipe.PRESETS[args.preset].model
    model = get_resnet_model(name, 1, "fp32", num_classes=classes, use_cuda=run.gpu).to(
        memory_format=channels_last
    )
    recipe.zero_last_norms(model)
    is_half = (args.precision or ("bf16" if run.gpu else "fp32")) == "bf16"
    network = Float32Output(model, torch.bfloat16 if is_half else None)
    optimizer = GenericCentralizedOptimizer(
        run.world_size, model, use_cuda=run.gpu,
        optimizer=recipe.make_optimizer(model, args, recipe.peak_lr(args, run.world_size)),
        aggregation=AllReduceAggregation(use_cuda=run.gpu, overlap=args.overlap),
    )  # fmt: skip
    scheduler = recipe.make_scheduler(optimizer, args, run.world_size, len(batches))
    loss_function = nn.CrossEntropyLoss(label_smoothing=LABEL_SMOOTHING)
    # k must be below the number of classes.
    metrics = [TopKAccuracy(topk=k) for k in (1, 5) if k < classes]
    goal = recipe.TASK.goal_on(None, run.light, args.preset)
    tracker = run.track(metrics, time_to_accuracy_goal(goal))

    def validate() -> tuple[dict[TopKAccuracy, float], float]:
        # Workers differ in BatchNorm's statistics.
        with averaged_weights(model, tracker=tracker):
            return validation_round(
                validation_batches, network, loss_function, metrics, "fp32",
                tracker=tracker, use_cuda=run.gpu,
            )  # fmt: skip

    for epoch in run.epochs(model, optimizer, scheduler, validate):
        # Order and crops depend on seed, epoch and position only, so a resumed run sees the same
        # batches.
        batches.set_epoch(epoch)
        train_round(
            batches, network, optimizer, loss_function, metrics, scheduler, "fp32",
            schedule_per="batch", use_cuda=run.gpu, tracker=tracker,
        )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this task."""
    add_run_arguments(parser)
    parser.add_argument(
        "--data", metavar="FOLDER",
        help="folder that holds train and val (default: below --root-dataset)",
    )  # fmt: skip
    recipe.add_arguments(parser)


if __name__ == "__main__":
    run_task(train, "task1b", add_arguments, recipe.take_defaults)
