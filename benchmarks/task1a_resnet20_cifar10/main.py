"""Task 1a: ResNet-20 on CIFAR-10, synchronous SGD, time to 80 % top-1 validation accuracy (light goal: 70 %).

One process per worker, 128 images a worker, a disjoint part of the training set each; gradients are averaged over the
k workers before every update. Learning rate 0.02 k after a linear warm-up of log2(k) epochs (Goyal et al. 2017,
arXiv 1706.02677), halved when the validation loss stands still. README.md beside this file has the whole description.
"""

from __future__ import annotations

import argparse
import logging
import math
from typing import Any

import torch
from torch import nn

from mlbench_core.controlflow.pytorch import record_validation_stats, train_round, validation_round
from mlbench_core.dataset.imagerecognition.pytorch import CIFAR10V1, MNIST, Digits, ImageBatches
from mlbench_core.dataset.util.pytorch import partition_dataset_by_rank
from mlbench_core.evaluation.goals import time_to_accuracy_goal
from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
from mlbench_core.lr_scheduler.pytorch.lr import ReduceLROnPlateauWithWarmup
from mlbench_core.models.pytorch.resnet import get_resnet_model
from mlbench_core.optim.pytorch.centralized import CentralizedSGD
from mlbench_core.tasks import get_task
from mlbench_core.utils import Tracker
from mlbench_core.utils.pytorch import initialize_backends
from mlbench_core.utils.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.utils.task_args import task_main

logger = logging.getLogger("task1a")

TASK = get_task("1a")
BATCH_SIZE = 128  # images a worker
BASE_LR = 0.02  # of one worker
SEED = 42
DATASETS = {"cifar10": CIFAR10V1, "digits": Digits, "mnist": MNIST}


def load_data(
    name: str, folder: str, rank: int, world_size: int, channels_last: bool, partial: bool
) -> tuple[Any, Any]:
    """This worker's batches of the training set (augmented, shuffled anew each epoch) and of the validation set."""
    options: dict[str, Any] = {"download": True} if name != "digits" else {}
    if partial:
        options = {"partial": True}
    train = DATASETS[name](folder, train=True, **options)
    validation = DATASETS[name](folder, train=False, **options)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return (
        ImageBatches(
            partition_dataset_by_rank(train, rank, world_size),
            BATCH_SIZE,
            augment=True,
            shuffle=True,
            seed=SEED,
            rank=rank,
            memory_format=memory_format,
        ),
        ImageBatches(
            partition_dataset_by_rank(validation, rank, world_size, shuffle=False),
            BATCH_SIZE,
            augment=False,
            shuffle=False,
            memory_format=memory_format,
        ),
    )


def train(
    rank: int,
    world_size: int,
    run_id: str,
    dataset_dir: str,
    ckpt_run_dir: str,
    gpu: bool,
    light: bool,
    validation_only: bool,
    args: argparse.Namespace,
) -> Tracker:
    """Train until the goal is reached or the budget of epochs is spent."""
    batches, validation_batches = load_data(
        args.dataset, args.data or dataset_dir, rank, world_size, args.channels_last, args.partial
    )
    model = get_resnet_model("resnet20", 1, "fp32", num_classes=10, use_cuda=gpu)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    loss_function = nn.CrossEntropyLoss()
    metrics = [TopKAccuracy(topk=1)]
    optimizer = CentralizedSGD(
        world_size=world_size,
        model=model,
        lr=BASE_LR,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        dampening=0,
        by_layer=False,
        use_cuda=gpu,
    )
    scheduler = ReduceLROnPlateauWithWarmup(
        optimizer,
        warmup_init_lr=BASE_LR,
        scaled_lr=BASE_LR * world_size,
        warmup_epochs=math.log2(world_size),
        batches_per_epoch=len(batches),
        mode="min",
        factor=0.5,
        patience=1,  # torch acts on the first epoch beyond it: the second running without an improvement
        threshold=0.01,
        threshold_mode="abs",
        min_lr=BASE_LR,
    )
    goal = time_to_accuracy_goal(TASK.goal_on(args.dataset, light))
    tracker = Tracker(metrics, run_id, rank, goal=goal)
    checkpointer = Checkpointer(ckpt_run_dir, rank, freq=CheckpointFreq.ALL if args.checkpoint else CheckpointFreq.BEST)
    if args.resume or validation_only:
        checkpointer, model, optimizer, scheduler, tracker = Checkpointer.load(
            ckpt_run_dir, rank, model, optimizer, scheduler, tracker=tracker
        )

    def validate() -> bool:
        values, loss = validation_round(
            validation_batches, model, loss_function, metrics, "fp32", tracker=tracker, use_cuda=gpu
        )
        is_best = record_validation_stats(values, loss, tracker, rank)
        scheduler.step(loss)
        logger.info("%s", tracker)
        return is_best

    with tracker:
        if validation_only:
            validate()
            return tracker
        if not args.resume:
            tracker.start()
        for epoch in range(tracker.current_epoch, args.epochs):
            batches.set_epoch(epoch)
            train_round(
                batches, model, optimizer, loss_function, metrics, scheduler, "fp32",
                schedule_per="batch", use_cuda=gpu, tracker=tracker,
            )  # fmt: skip
            is_best = validate()
            tracker.epoch_end()
            checkpointer.save(tracker, model, optimizer, scheduler, is_best)
            if tracker.goal_reached:
                break
        tracker.publish_summary(world_size)
    return tracker


def main(
    run_id: str,
    dataset_dir: str,
    ckpt_run_dir: str,
    output_dir: str,
    rank: int,
    backend: str,
    hosts: str | None,
    validation_only: bool,
    gpu: bool,
    light_target: bool,
    args: argparse.Namespace,
) -> None:
    """Run the task on this worker."""
    with initialize_backends(
        comm_backend=backend, hosts=hosts, rank=rank, use_cuda=gpu, seed=SEED, ckpt_run_dir=ckpt_run_dir,
        timeout_s=args.timeout,
    ) as (rank, world_size, _):  # fmt: skip
        tracker = train(rank, world_size, run_id, dataset_dir, ckpt_run_dir, gpu, light_target, validation_only, args)
        if rank == 0 and not validation_only:
            logger.info("%s", "goal reached" if tracker.goal_reached else "goal not reached")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this task takes beyond the arguments that all tasks share."""
    parser.add_argument("--dataset", choices=sorted(DATASETS), default="cifar10", help="data set (default: cifar10)")
    parser.add_argument("--data", metavar="FOLDER", help="folder that holds its files (default: below --root-dataset)")
    parser.add_argument("--epochs", type=int, default=TASK.max_epochs, help="at most so many epochs")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of this run")
    parser.add_argument(
        "--checkpoint", action="store_true", help="write a checkpoint after every epoch, not of the best"
    )
    parser.add_argument("--channels-last", action="store_true", help="images and weights in channels-last order")
    parser.add_argument("--partial", action="store_true", help="take what files of the data set there are")


if __name__ == "__main__":
    task_main(main, uid="task1a", add_arguments=add_arguments)
