"""Train and validate a graph in a session (``tf.compat.v1``).

A session runs a batch as a whole: loading, forward pass, backward pass and update. Therefore the
tracker records each batch as the one step ``opt_step``. ``benchmarks/task1a_tensorflow`` shows a
loop that measures the steps one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mlbench_core.arguments import check_at_least
from mlbench_core.controlflow.validation_stats import record_validation_stats
from mlbench_core.running_statistics import AverageMeter
from mlbench_core.tracking.tracker import Tracker

__all__ = ["TrainValidation", "train_round", "validation_round"]

_LEVELS = (None, "epoch", "batch")
# Interval, in batches, at which training statistics go to the master.
_LOG_EVERY = 25


def train_round(
    session: Any,
    train_set_init_op: Any,
    train_op: Any,
    loss_op: Any,
    metrics: Sequence[Any],
    batch_size: int,
    num_batches_per_epoch: int,
    tracker: Tracker,
    lr_tensor: Any = None,
    lr_scheduler_level: str | None = None,
) -> float:
    """Train for one epoch.

    Args:
        session: The session.
        train_set_init_op: Operation that begins an epoch of the training set.
        train_op: Operation that computes gradients and updates the variables.
        loss_op: The mean loss of a batch, a tensor.
        metrics: Objects with ``name`` and ``metric_op``, see
            :class:`~mlbench_core.evaluation.tensorflow.metrics.TopKAccuracy`.
        batch_size: Samples in a batch. If a metric has a ``size``, the size of each batch is read
            from it.
        num_batches_per_epoch: Largest number of batches. The epoch also ends with the training set.
        tracker: Records the times, the loss and the metrics.
        lr_tensor: The learning rate, a tensor; None if it is not to be recorded.
        lr_scheduler_level: ``"batch"`` records the rate as the statistic ``lr`` after each batch,
            ``"epoch"`` before the first one.

    Returns:
        The mean loss.

    Raises:
        ValueError: ``lr_scheduler_level`` is not as listed above.
    """
    if lr_scheduler_level not in _LEVELS:
        raise ValueError(
            f"lr_scheduler_level must be 'epoch', 'batch' or None, not {lr_scheduler_level!r}"
        )
    session.run(train_set_init_op)
    tracker.train()
    fetches = {
        "loss": loss_op,
        "metrics": _operations(metrics),
        "train": train_op,
        **_size(metrics),
    }
    if lr_tensor is not None:
        tracker.learning_rate = float(session.run(lr_tensor))
        if lr_scheduler_level == "batch":
            fetches["lr"] = lr_tensor
        elif lr_scheduler_level == "epoch":
            tracker.record_stat("lr", tracker.learning_rate, log_to_api=True)
    mean = AverageMeter()
    for index, values in enumerate(_batches(session, fetches, num_batches_per_epoch, tracker)):
        size = int(values.get("size", batch_size))
        tracker.record_batch_opt_step()
        tracker.batch_end(samples=size)
        logs = index % _LOG_EVERY == 0
        tracker.record_loss(values["loss"], size, log_to_api=logs)
        for name, value in values["metrics"].items():
            tracker.record_metric(name, value, size, log_to_api=logs)
        if "lr" in values:
            tracker.record_stat("lr", values["lr"], log_to_api=logs)
        mean.update(float(values["loss"]), size)
    return mean.avg


def validation_round(
    session: Any,
    validation_set_init_op: Any,
    loss_op: Any,
    metrics: Sequence[Any],
    batch_size: int,
    num_batches_per_epoch: int,
    tracker: Tracker,
) -> tuple[dict[Any, float], float]:
    """Validate, and record the means as the result of all workers.

    Each worker validates on all images.

    Args:
        session: As in :func:`train_round`.
        validation_set_init_op: Operation that begins a pass over the validation set.
        loss_op: As in :func:`train_round`.
        metrics: As in :func:`train_round`.
        batch_size: As in :func:`train_round`.
        num_batches_per_epoch: Largest number of batches. The round also ends with the validation
            set.
        tracker: Records the time, the loss and the metrics, and compares the first metric with its
            best value.

    Returns:
        ``({metric: mean}, mean loss)``. Batches are weighted by their sizes.
    """
    tracker.validation()
    tracker.validation_start()
    loss, means = AverageMeter(), {metric: AverageMeter() for metric in metrics}
    try:
        session.run(validation_set_init_op)
        # One call for the loss and the metrics, because each call takes another batch from the
        # data.
        fetches = {"loss": loss_op, "metrics": _operations(metrics), **_size(metrics)}
        for values in _batches(session, fetches, num_batches_per_epoch):
            size = int(values.get("size", batch_size))
            loss.update(float(values["loss"]), size)
            for metric, mean in means.items():
                mean.update(float(values["metrics"][metric.name]), size)
    finally:
        tracker.validation_end()
    averages = {metric: mean.avg for metric, mean in means.items()}
    record_validation_stats(averages, loss.avg, tracker, tracker.rank)
    return averages, loss.avg


def _operations(metrics: Sequence[Any]) -> dict[str, Any]:
    return {metric.name: metric.metric_op for metric in metrics}


def _size(metrics: Sequence[Any]) -> dict[str, Any]:
    """Return the tensor of the batch's size under its name, if a metric has it."""
    for metric in metrics:
        if hasattr(metric, "size"):
            if metric.size is None:
                return {}
            # The last batch of a pass may be smaller, and the means are weighted by size.
            return {"size": metric.size}
    return {}


def _batches(
    session: Any, fetches: Mapping[str, Any], most: int, tracker: Tracker | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the results of the batches until the data set ends; start the clock before each."""
    for _ in range(most):
        if tracker is not None:
            # The call after the last batch leaves a batch open. It has no mark of a step, so the
            # next batch_start() adds no time for it.
            tracker.batch_start()
        try:
            yield session.run(fetches)
        except tf.errors.OutOfRangeError:
            return


class TrainValidation:
    """A loop that trains and validates in turn, up to the goal or the last batch.

    Args:
        train_op: As in :func:`train_round`.
        sess: The session.
        loss: The mean loss of a batch, a tensor.
        metrics: As in :func:`train_round`; the first decides which epoch is the best.
        max_train_steps: Largest number of training batches of the run.
        train_set_init_op: As in :func:`train_round`. The data set must end after an epoch.
        validation_set_init_op: As in :func:`validation_round`. The data set must end after a pass.
        run_id: Id of the run.
        rank: This worker's rank.
        lr_scheduler_level: As in :func:`train_round`.
        tracker: The tracker; None makes one without a goal.

    Raises:
        ValueError: ``max_train_steps`` is negative.
    """

    def __init__(
        self,
        train_op: Any,
        sess: Any,
        loss: Any,
        metrics: Sequence[Any],
        max_train_steps: int,
        train_set_init_op: Any,
        validation_set_init_op: Any,
        run_id: str,
        rank: int,
        lr_scheduler_level: str | None = "epoch",
        tracker: Tracker | None = None,
    ) -> None:
        check_at_least("max_train_steps", max_train_steps, 0)
        self.train_op, self.sess, self.loss, self.metrics = train_op, sess, loss, metrics
        self.max_train_steps = max_train_steps
        self.train_set_init_op = train_set_init_op
        self.validation_set_init_op = validation_set_init_op
        self.run_id, self.rank = run_id, rank
        self.lr_scheduler_level = lr_scheduler_level
        self.tracker = tracker if tracker is not None else Tracker(metrics, run_id, rank)

    def train_one_epoch(self, lr_tensor_name: str | None = None) -> float:
        """Train until the training set or the number of batches ends, and return the mean loss.

        Args:
            lr_tensor_name: Name of the learning rate's tensor, for example ``"rate:0"``; None to
                record no rate.
        """
        rate = None
        if lr_tensor_name is not None:
            rate = self.sess.graph.get_tensor_by_name(lr_tensor_name)
        left = self.max_train_steps - self.tracker.position()[0]
        return train_round(
            self.sess, self.train_set_init_op, self.train_op, self.loss, self.metrics, 1, left,
            self.tracker, rate, self.lr_scheduler_level,
        )  # fmt: skip

    def valid_one_epoch(self) -> tuple[dict[Any, float], float]:
        """Validate on the whole validation set; see :func:`validation_round`."""
        # A limit that no data set reaches, so that the round ends with the data set.
        unlimited = 2**62
        return validation_round(
            self.sess,
            self.validation_set_init_op,
            self.loss,
            self.metrics,
            1,
            unlimited,
            self.tracker,
        )

    def train_and_eval(self, initial_epoch: int = 0, lr_tensor_name: str | None = None) -> None:
        """Train and validate in turn.

        Args:
            initial_epoch: Number of the first epoch.
            lr_tensor_name: As in :meth:`train_one_epoch`.
        """
        self.tracker.current_epoch = initial_epoch
        if self.tracker.start_time is None:
            self.tracker.start()
        while self.tracker.position()[0] < self.max_train_steps and not self.tracker.goal_reached:
            before = self.tracker.position()[0]
            self.train_one_epoch(lr_tensor_name)
            # Without batches, the loop would never end.
            if self.tracker.position()[0] == before:
                raise ValueError(
                    "train_set_init_op must begin a training set with batches, but it has none"
                )
            self.valid_one_epoch()
            self.tracker.epoch_end()
