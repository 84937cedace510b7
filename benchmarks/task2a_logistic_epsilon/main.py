"""Task 2a: logistic regression on epsilon, synchronous SGD, time to 89 % validation accuracy.

The light goal is 80 %. One process per worker, 128 rows per worker, a disjoint part of the training
set each; gradients are averaged over the k workers before every update. Binary cross-entropy with
an L2 penalty of 2.5e-6 / 2; learning rate 4 k, halved when the validation loss has not improved.
README.md describes the task."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mlbench_core.controlflow.pytorch import train_round, validation_round
from mlbench_core.controlflow.pytorch.run import Run, run_task
from mlbench_core.controlflow.task_arguments import add_run_arguments
from mlbench_core.dataset.linearmodels.pytorch import LinearBatches
from mlbench_core.dataset.linearmodels.pytorch.preparation import prepare_stores
from mlbench_core.dataset.linearmodels.pytorch.subset import RowSubset, train_and_validation
from mlbench_core.dataset.pytorch import parse_partition, partition_dataset_by_rank
from mlbench_core.evaluation.goals import time_to_accuracy_goal
from mlbench_core.evaluation.pytorch.criterion import BCELossRegularized
from mlbench_core.evaluation.pytorch.metrics import (
    DiceCoefficient,
    F1Score,
    MLBenchMetric,
    TopKAccuracy,
)
from mlbench_core.lr_scheduler.pytorch.lr import SQRTTimeDecayLR
from mlbench_core.models.pytorch.linear_models import LogisticRegression, Standardization
from mlbench_core.optim.pytorch import CentralizedSGD
from mlbench_core.tasks import get_task

TASK = get_task("2a")
L2 = 2.5e-6
# Data sets whose features have different units, so they are standardized without --standardize too.
UNSCALED = ("australian",)


@dataclass(frozen=True)
class Settings:
    """Values that the settings define: rows per worker, and the learning rate of k workers."""

    batch_size: int
    lr: float
    decays_per_batch: bool

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """Return the schedule: lr / sqrt(t) at the t-th update, or halved on a plateau."""
        if self.decays_per_batch:
            return SQRTTimeDecayLR(optimizer)
        # torch acts one epoch after its patience: after the second in a row without an improvement.
        return ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=1)


def settings(name: str, world_size: int) -> Settings:
    """Return the reference settings or those of 2018 for the number of workers."""
    if name == "2018":
        alpha = {1: 200.0, 2: 400.0, 4: 600.0, 8: 700.0, 16: 800.0}
        largest = max(k for k in alpha if k <= world_size)
        return Settings(100, alpha[largest], decays_per_batch=True)
    return Settings(128, 4.0 * world_size, decays_per_batch=False)


def load_data(run: Run, batch_size: int) -> tuple[LinearBatches, LinearBatches, LinearBatches]:
    """Return this worker's batches.

    They are the training set, reshuffled each epoch; the validation set; the training set in order.
    """
    folder = prepare_stores(run.args.dataset, run.dataset_dir, run.args.data)
    training, validation = train_and_validation(run.args.dataset, folder)
    part = {"rank": run.rank, "world_size": run.world_size, "seed": run.args.seed}
    own_rows, own_part = training, part
    if run.args.partition != "uniform":
        # LinearBatches divides by stored blocks. A part by label has rows of all blocks, so it is
        # a separate data set.
        chosen = partition_dataset_by_rank(training, **part, **parse_partition(run.args.partition))
        own_rows, own_part = RowSubset(training, sorted(chosen.indices)), {**part, "world_size": 1}
    # Larger batches are faster, and the results of an evaluation do not depend on their size.
    return (
        LinearBatches(own_rows, batch_size, shuffle=True, **own_part),
        LinearBatches(validation, 8 * batch_size, shuffle=False, **part),
        LinearBatches(training, 8 * batch_size, shuffle=False, **part),
    )


def train(run: Run) -> None:
    """Train until the goal is reached or the budget of epochs is spent."""
    args, chosen = run.args, settings(run.args.settings, run.world_size)
    batches, validation_batches, all_batches = load_data(run, chosen.batch_size)
    # Logits instead of probabilities: above a logit of 17, a probability in float32 is 1 and its
    # gradient is 0.
    n_features, rate_factor = batches.dataset.n_features, 1.0
    model: nn.Module = LogisticRegression(n_features, logits=True)
    if args.standardize or args.dataset in UNSCALED:
        model = nn.Sequential(Standardization.of(all_batches), model)
        # The rates are for rows of length 1; standardized rows have a squared length of n_features
        # on average.
        rate_factor = 1 / n_features
    model = model.cuda() if run.gpu else model
    loss_function = BCELossRegularized(l1=0, l2=L2, model=model, logits=True)
    # The model has logits: 0 is the probability 1/2. The goal watches the first metric.
    accuracy = TopKAccuracy(topk=1, threshold=0.0)
    metrics = [accuracy, F1Score(threshold=0.0), DiceCoefficient(logits=True)]
    optimizer = CentralizedSGD(
        world_size=run.world_size, model=model, lr=chosen.lr * rate_factor,
        momentum=0, nesterov=False, weight_decay=0, dampening=0,
        by_layer=False, use_cuda=run.gpu, overlap=args.overlap,
    )  # fmt: skip
    scheduler = chosen.schedule(optimizer)
    tracker = run.track(metrics, time_to_accuracy_goal(TASK.goal_on(args.dataset, run.light)))
    record = partial(tracker.record_stat, log_to_api=run.rank == 0)

    evaluate = partial(
        validation_round, model=model, loss_function=loss_function, metrics=metrics, dtype="fp32",
        use_cuda=run.gpu,
    )  # fmt: skip

    def validate() -> tuple[dict[MLBenchMetric, float], float]:
        values, loss = evaluate(validation_batches, tracker=tracker)
        if args.full_train:
            full_values, full_loss = evaluate(all_batches)
            record("global_full_train_loss", full_loss)
            for metric, value in full_values.items():
                record(f"global_full_train_{metric.name}", value)
        # Recorded once: the time to the goal of the loss, which is in addition to the goal that
        # ends the run.
        is_reached = args.dataset == TASK.dataset and loss <= TASK.goal_loss
        if is_reached and "val_time_to_loss_s" not in tracker.records:
            record("time_to_loss_s", tracker.get_total_train_time())
        return values, loss

    for epoch in run.epochs(model, optimizer, scheduler, validate):
        batches.set_epoch(epoch)
        train_round(
            batches, model, optimizer, loss_function, metrics, scheduler, "fp32",
            schedule_per="batch", use_cuda=run.gpu, tracker=tracker,
        )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this task."""
    add_run_arguments(parser, TASK.max_epochs)
    names = [TASK.dataset, *sorted(TASK.stand_ins)]
    add = parser.add_argument
    add("--dataset", choices=names, default=TASK.dataset, help="data set (default: %(default)s)")
    add("--data", metavar="FOLDER", help="folder with its LIBSVM text (default: it is downloaded)")
    add("--settings", choices=("reference", "2018"), default="reference", help="rows and rates")
    add("--full-train", action="store_true", help="also evaluate on the whole training set")
    add("--standardize", action="store_true", help="features with mean 0 and deviation 1")
    add("--partition", default="uniform", metavar="KIND",
        help="training rows of a worker: uniform, dirichlet:ALPHA or label_skew:N "
             "(default: uniform)")  # fmt: skip
    add("--overlap", action="store_true", help="average gradients during the backward pass")


def check(args: argparse.Namespace) -> None:
    """Refuse a wrong ``--partition`` before the workers connect."""
    parse_partition(args.partition)


if __name__ == "__main__":
    run_task(train, "task2a", add_arguments, check)
