"""Task 1a: ResNet-20 on CIFAR-10, synchronous SGD, time to 80 % top-1 validation accuracy (light goal: 70 %).

One process per worker, 128 images a worker, a disjoint part of the training set each; gradients are averaged over the
k workers before every update. Learning rate 0.02 k after a linear warm-up of log2(k) epochs (Goyal et al. 2017,
arXiv 1706.02677), halved when the validation loss stands still. README.md has the whole description, variants.py what
flags put in the place of the reference's parts.
"""

from __future__ import annotations

import argparse
import logging

import variants
from torch import channels_last, contiguous_format, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mlbench_core.aggregation.pytorch.consensus import averaged_weights
from mlbench_core.controlflow.pytorch import record_validation_stats, train_round, validation_round
from mlbench_core.controlflow.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.controlflow.pytorch.worker import worker_main
from mlbench_core.controlflow.task_arguments import add_run_arguments, task_main
from mlbench_core.dataset.imagerecognition.pytorch import CIFAR10V1, MNIST, Digits, ImageBatches
from mlbench_core.dataset.util.pytorch import partition_dataset_by_rank
from mlbench_core.distributed.pytorch.memory import fits_on_gpu
from mlbench_core.evaluation.goals import time_to_accuracy_goal
from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
from mlbench_core.lr_scheduler.pytorch.lr import ReduceLROnPlateauWithWarmup
from mlbench_core.models.pytorch.resnet import get_resnet_model
from mlbench_core.optim.pytorch.centralized import CentralizedSGD
from mlbench_core.tasks import get_task
from mlbench_core.tracking.tracker import Tracker

logger = logging.getLogger("mlbench.task1a")

TASK = get_task("1a")
BATCH_SIZE = 128  # images a worker
BASE_LR = 0.02  # of one worker
DATASETS = {"cifar10": CIFAR10V1, "digits": Digits, "mnist": MNIST}


def load_data(
    args: argparse.Namespace, folder: str, batch_size: int, rank: int, world_size: int, gpu: bool
) -> tuple[ImageBatches, ImageBatches]:
    """This worker's batches of the training set (augmented, shuffled anew each epoch) and of the validation set."""
    source = {"partial": True} if args.partial else {} if args.dataset == "digits" else {"download": True}
    train, validation = (DATASETS[args.dataset](folder, train=is_train, **source) for is_train in (True, False))
    if gpu and fits_on_gpu(train.size_bytes + validation.size_bytes):
        train, validation = train.to("cuda"), validation.to("cuda")
    memory_format = channels_last if args.channels_last else contiguous_format
    return (
        ImageBatches(
            train if args.deal_anew else partition_dataset_by_rank(train, rank, world_size),
            batch_size,
            augment=not args.no_augment,
            shuffle=True,
            seed=args.seed,
            rank=rank,
            memory_format=memory_format,
            world_size=world_size if args.deal_anew else 1,
        ),
        ImageBatches(
            partition_dataset_by_rank(validation, rank, world_size, shuffle=False),
            batch_size, augment=False, shuffle=False, memory_format=memory_format,
        ),
    )  # fmt: skip


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
    plan = variants.make_plan(args, world_size, BATCH_SIZE, BASE_LR)
    folder = args.data or dataset_dir
    batches, validation_batches = load_data(args, folder, plan.batch_size, rank, world_size, gpu)
    model = get_resnet_model("resnet20", 1, args.precision, num_classes=10, use_cuda=gpu)
    variants.prepare_model(model, args)
    network, optimizer = variants.make_network(model, plan.lr, args)
    if args.optimizer == "centralized_sgd" and args.precision == "fp32":
        optimizer = CentralizedSGD(
            world_size=world_size,
            model=model,
            lr=plan.lr,
            momentum=0.9,
            nesterov=True,
            weight_decay=1e-4,
            dampening=0,
            by_layer=False,
            use_cuda=gpu,
            overlap=args.overlap,
            shared_memory=args.shared_memory,
        )
    elif optimizer is None:
        optimizer = variants.make_optimizer(model, plan.lr, args, gpu)
    if args.settings == "2018":
        scheduler = variants.make_scheduler_of_2018(optimizer, plan, len(batches))
    else:
        scheduler = ReduceLROnPlateauWithWarmup(
            optimizer,
            warmup_init_lr=plan.lr,
            scaled_lr=plan.scaled_lr,
            warmup_epochs=plan.warmup_epochs,
            batches_per_epoch=len(batches),
            mode="min",
            factor=0.5,
            patience=1,  # torch acts on the first epoch beyond it: the second running without an improvement
            threshold=0.01,
            threshold_mode="abs",
            min_lr=plan.lr,
        )
    loss_function = nn.CrossEntropyLoss()
    metrics = [TopKAccuracy(topk=1)]
    goal = time_to_accuracy_goal(TASK.goal_on(args.dataset, light))
    tracker = Tracker(metrics, run_id, rank, goal=goal)
    checkpointer = Checkpointer(ckpt_run_dir, rank, freq=CheckpointFreq.ALL if args.checkpoint else CheckpointFreq.BEST)
    if args.resume or validation_only:
        checkpointer, model, optimizer, scheduler, tracker = Checkpointer.load(
            ckpt_run_dir, rank, model, optimizer, scheduler, tracker=tracker
        )

    def validate() -> bool:
        with averaged_weights(model):  # what workers do not share: BatchNorm's statistics; in some variants all
            values, loss = validation_round(
                validation_batches, variants.in_precision(model, args), loss_function, metrics, args.precision,
                tracker=tracker, use_cuda=gpu,
            )  # fmt: skip
        is_best = record_validation_stats(values, loss, tracker, rank)
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(loss)
        logger.info("%s", tracker)
        return is_best

    with tracker:
        if validation_only:
            validate()
            return tracker
        if not args.resume:
            tracker.start()
        for epoch in tracker.epochs(args.epochs, args.past_goal):
            batches.set_epoch(epoch)
            train_round(
                batches, network, optimizer, loss_function, metrics, scheduler, args.precision,
                schedule_per="batch", use_cuda=gpu, tracker=tracker,
            )  # fmt: skip
            is_best = validate()
            tracker.epoch_end()
            checkpointer.save(tracker, model, optimizer, scheduler, is_best)
        tracker.publish_summary(world_size)
    return tracker


main = worker_main(train, prepare=variants.check)


def add_arguments(parser: argparse.ArgumentParser, optimizer: str = "centralized_sgd") -> None:
    """What this task takes beyond the arguments that all tasks share."""
    parser.add_argument("--dataset", choices=sorted(DATASETS), default="cifar10", help="data set (default: cifar10)")
    parser.add_argument("--data", metavar="FOLDER", help="folder that holds its files (default: below --root-dataset)")
    parser.add_argument("--partial", action="store_true", help="take what files of the data set there are")
    add_run_arguments(parser, TASK.max_epochs)
    variants.add_arguments(parser, optimizer)


if __name__ == "__main__":
    task_main(main, uid="task1a", add_arguments=add_arguments)
