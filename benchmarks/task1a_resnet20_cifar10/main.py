"""Task 1a: ResNet-20 on CIFAR-10, synchronous SGD, time to 80 % top-1 validation accuracy.

The light goal is 70 %. One process per worker, 128 images per worker, a disjoint part of the
training set each; gradients are averaged over the k workers before every update. Learning rate
0.02 k after a linear warm-up of log2(k) epochs (Goyal et al. 2017, arXiv 1706.02677), halved when
the validation loss has not improved. README.md describes the task. variants.py has the parts that
other flags use in place of those of the reference."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import variants
from torch import channels_last, contiguous_format, nn

from mlbench_core.aggregation.pytorch.consensus import averaged_weights
from mlbench_core.controlflow.pytorch import train_round, validation_round
from mlbench_core.controlflow.pytorch.run import Run, run_task
from mlbench_core.controlflow.task_arguments import add_run_arguments
from mlbench_core.dataset.imagerecognition.pytorch import CIFAR10V1, MNIST, Digits, ImageBatches
from mlbench_core.dataset.pytorch import partition_dataset_by_rank
from mlbench_core.distributed.pytorch.memory import fits_on_gpu
from mlbench_core.evaluation.goals import time_to_accuracy_goal
from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
from mlbench_core.lr_scheduler.pytorch.lr import ReduceLROnPlateauWithWarmup
from mlbench_core.models.pytorch.resnet import get_resnet_model
from mlbench_core.optim.pytorch import CentralizedSGD
from mlbench_core.tasks import get_task

TASK = get_task("1a")
BATCH_SIZE = 128  # images per worker
BASE_LR = 0.02  # of one worker
DATASETS = {"cifar10": CIFAR10V1, "digits": Digits, "mnist": MNIST}


def load_data(run: Run, batch_size: int) -> tuple[ImageBatches, ImageBatches]:
    """Return this worker's batches of the training set and of the validation set.

    Training images are augmented, and reshuffled in each epoch.
    """
    args, rank, world_size = run.args, run.rank, run.world_size
    source: dict[str, Any] = {"partial": True} if args.partial else {"download": True}
    if args.dataset == "digits":
        source = {"size": args.image_size}
    load = partial(DATASETS[args.dataset], args.data or run.dataset_dir, **source)
    train, validation = load(train=True), load(train=False)
    if run.gpu and fits_on_gpu(train.size_bytes + validation.size_bytes):
        train, validation = train.to("cuda"), validation.to("cuda")
    # With --repartition, each worker reads the whole set and selects its share of every step in the
    # epoch's order.
    own_part = train if args.repartition else variants.partition(train, args, rank, world_size)
    memory_format = channels_last if args.channels_last else contiguous_format
    batches = ImageBatches(
        own_part, batch_size, augment=not args.no_augment, shuffle=True, seed=args.seed, rank=rank,
        memory_format=memory_format, world_size=world_size if args.repartition else 1,
    )  # fmt: skip
    validation_batches = ImageBatches(
        partition_dataset_by_rank(validation, rank, world_size, shuffle=False), batch_size,
        augment=False, shuffle=False, memory_format=memory_format,
    )  # fmt: skip
    return batches, validation_batches


def train(run: Run) -> None:
    """Train until the goal is reached or the budget of epochs is spent."""
    args = run.args
    plan = variants.make_plan(args, run.world_size, BATCH_SIZE, BASE_LR)
    batches, validation_batches = load_data(run, plan.batch_size)
    model = get_resnet_model(
        args.model, args.model_version, args.precision, num_classes=10, use_cuda=run.gpu
    )
    variants.prepare_model(model, args)
    network, optimizer = variants.make_network(model, plan.lr, args)
    if args.optimizer == "centralized_sgd" and args.precision == "fp32":
        optimizer = CentralizedSGD(
            world_size=run.world_size, model=model, lr=plan.lr,
            momentum=0.9, nesterov=True, weight_decay=1e-4,
            by_layer=False, use_cuda=run.gpu, fused=run.gpu or None,
            aggregation=variants.make_exchange(args, run.gpu),
        )  # fmt: skip
    elif optimizer is None:
        optimizer = variants.make_optimizer(model, plan.lr, args, run.gpu)
    if args.settings == "2018":
        scheduler = variants.make_scheduler_of_2018(optimizer, plan, len(batches))
    else:
        scheduler = ReduceLROnPlateauWithWarmup(
            optimizer, warmup_init_lr=plan.lr, scaled_lr=plan.scaled_lr,
            warmup_epochs=plan.warmup_epochs, batches_per_epoch=len(batches),
            # torch acts one epoch later: after the second in a row without an improvement.
            mode="min", factor=0.5, patience=1,
            threshold=0.01, threshold_mode="abs", min_lr=plan.lr,
        )  # fmt: skip
    loss_function, metrics = nn.CrossEntropyLoss(), [TopKAccuracy(topk=1), TopKAccuracy(topk=5)]
    tracker = run.track(metrics, time_to_accuracy_goal(TASK.goal_on(args.dataset, run.light)))

    def validate() -> tuple[dict[TopKAccuracy, float], float]:
        # Workers differ in BatchNorm's statistics, in some variants in all weights.
        with averaged_weights(model, tracker=tracker):
            return validation_round(
                validation_batches, variants.in_precision(model, args), loss_function, metrics,
                args.precision, tracker=tracker, use_cuda=run.gpu,
            )  # fmt: skip

    for epoch in run.epochs(model, optimizer, scheduler, validate):
        # Order and augmentation depend on seed, rank, epoch and batch only, so a resumed run sees
        # the same batches.
        batches.set_epoch(epoch)
        train_round(
            batches, network, optimizer, loss_function, metrics, scheduler, args.precision,
            schedule_per="batch", use_cuda=run.gpu, tracker=tracker,
        )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser, optimizer: str = "centralized_sgd") -> None:
    """Add the arguments of this task."""
    add = parser.add_argument
    add("--dataset", choices=sorted(DATASETS), default="cifar10",
        help="data set (default: cifar10)")  # fmt: skip
    add("--data", metavar="FOLDER",
        help="folder that holds its files (default: below --root-dataset)")  # fmt: skip
    add("--image-size", type=int, choices=(8, 16, 32), default=32,
        help="height and width of the digits: 16 takes a quarter of the time (default: 32)",
    )  # fmt: skip
    add("--partial", action="store_true",
        help="use the files that exist, even if others are missing")  # fmt: skip
    add_run_arguments(parser, TASK.max_epochs)
    variants.add_arguments(parser, optimizer)


def main(optimizer: str = "centralized_sgd") -> None:
    """Run the task, with this optimizer unless the command line gives another."""
    run_task(train, "task1a", partial(add_arguments, optimizer=optimizer), variants.check)


if __name__ == "__main__":
    main()
