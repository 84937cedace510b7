"""Train a model: the training round, and training and validation in turn."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mlbench_core.aggregation.pytorch.centralized import AllReduceAggregation
from mlbench_core.arguments import check_at_least
from mlbench_core.controlflow.pytorch.batches import batch_size, maybe_range, prepare_batch
from mlbench_core.controlflow.pytorch.checkpoint import Checkpointer
from mlbench_core.controlflow.pytorch.controlflow import (
    BatchRecords,
    batch_metrics,
    record_validation_stats,
    validation_round,
)
from mlbench_core.controlflow.pytorch.train_limit import TrainLimit
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.distributed.pytorch.timing import uncounted
from mlbench_core.evaluation.pytorch.metrics import MLBenchMetric
from mlbench_core.tracking.tracker import Tracker

__all__ = ["TrainValidation", "train_round"]

SchedulePer = Literal["epoch", "batch"]
StepArguments: TypeAlias = Callable[[Sequence[tuple[Any, Any]]], Mapping[str, Any]]


def train_round(
    dataloader: Iterable[Any],
    model: nn.Module,
    optimizer: Any,
    loss_function: Callable[[Any, Any], Tensor],
    metrics: Sequence[MLBenchMetric],
    scheduler: Any,
    dtype: str | None,
    schedule_per: SchedulePer = "epoch",
    transform_target_type: bool | None = None,
    use_cuda: bool = False,
    max_batch_per_epoch: int | None = None,
    tracker: Tracker | None = None,
    *,
    update_freq: int = 1,
    step_arguments: StepArguments | None = None,
    counts_tokens: bool = False,
) -> float:
    r"""Train for one epoch.

    The tracker records the steps of each batch: load (including the loader), init (gradients to
    zero), forward pass, loss, backward pass, aggregation, update and metrics. The optimizer records
    aggregation and update if its ``step`` takes a tracker.

    Losses and metrics stay on the device. They are read every 25 batches and after the last one, in
    one transfer each time, so the host does not wait for the device in between. The tracker's goal
    and its sinks receive them then. If the goal does not name a validation statistic, they are read
    after every batch, for the exact time to the goal.

    All workers train on the same number of batches, that of the worker with the fewest. Parts of a
    data set that differ by one sample can differ by one batch, and the worker with an extra batch
    would wait indefinitely. The workers agree on the number in one small message before the first
    batch. So either every worker's loader knows its length, or no worker's does.

    With ``update_freq`` :math:`u > 1` the gradients of u batches are accumulated before an update.
    Nothing is sent in between, through the ``no_sync`` of the optimizer if it has one. With the
    losses :math:`L_1, \dots, L_n` of the batches, the gradient is

    .. math:: g = \nabla \frac{1}{n} \sum_{j=1}^{n} L_j,

    with n = u, or the number of remaining batches for the last update of the epoch. With
    ``step_arguments`` it is the gradient of the sum, and the result of that function gives the
    optimizer its divisor.

    A scheduler that waits for a plateau needs a validation result, so the caller must step it once
    per epoch. With ``schedule_per="batch"``, its ``batch_step()`` is called for the warm-up, if it
    has one.

    Args:
        dataloader: Iterable over this worker's pairs (data, target).
        model: The model; it is set to training mode.
        optimizer: The optimizer. If it has ``backward_loss(loss)``, for loss scaling, that replaces
            ``loss.backward()``.
        loss_function: Called ``(output, target)``; returns a loss without dimensions.
        metrics: Metrics to compute on each batch; may be empty.
        scheduler: Learning rate schedule, or None.
        dtype: ``"fp16"``, ``"bf16"``, ``"fp32"`` or ``"fp64"``; type of floating-point data. None
            keeps it.
        schedule_per: ``"batch"`` to step the scheduler after each batch (with ``update_freq``,
            after each update); ``"epoch"`` to step it at the end of the epoch.
        transform_target_type: True to convert targets to ``dtype`` too.
        use_cuda: True to move batches to the current GPU.
        max_batch_per_epoch: Largest number of batches; None for all.
        tracker: Receives times, loss and metrics.
        update_freq: Number u of batches before an update. A value above 1 needs a loader that knows
            its length.
        step_arguments: Called before each update with its batches, pairs (data, target). It returns
            keyword arguments of the optimizer's ``step``, such as ``denom``.
        counts_tokens: True if the elements of the targets are tokens, whose number the tracker
            counts for the throughput.

    Returns:
        This worker's mean loss over the epoch, with each batch weighted by its size; 0 without a
        batch.

    Raises:
        ValueError: ``schedule_per`` has another value, ``update_freq`` is below 1, or it is above 1
            and the loader has no length.
    """
    if schedule_per not in ("epoch", "batch"):
        raise ValueError(f"schedule_per must be 'epoch' or 'batch', not {schedule_per!r}")
    check_at_least("update_freq", update_freq, 1)
    model.train()
    if tracker is not None:
        tracker.train()
    total = _number_of_batches(dataloader, max_batch_per_epoch, update_freq)
    records = BatchRecords(tracker, total)
    updates = Updates(model, optimizer, loss_function, records, update_freq, step_arguments)
    # An iterator, and not a loop over the loader: the clock of a batch starts before its data is
    # drawn.
    iterator = iter(dataloader)
    loss_sum: float | Tensor = 0.0
    samples = 0
    # A loader without a length has no total, and the loop ends with its last batch at the latest.
    most = total
    if total is None:
        most = max_batch_per_epoch
    with records:
        for batch_idx in maybe_range(most):
            records.start_batch()
            batch = next(iterator, None)
            if batch is None:
                break
            data, target = batch
            data, target = prepare_batch(data, target, dtype, transform_target_type, use_cuda)
            records.mark("batch_load")
            loss, output, updated = updates.train_batch(batch_idx, data, target)
            if updated and scheduler is not None and schedule_per == "batch":
                _step_after_batch(scheduler)
            results = batch_metrics(output, target, metrics)
            records.mark("comp_metrics")
            size = batch_size(data, output)
            tokens = 0
            if counts_tokens:
                tokens = target.numel()
            records.end_batch(batch_idx, loss, size, results, tokens)
            loss_sum = loss_sum + loss.to(torch.float64) * size
            samples += size
        loss_sum = records.read(loss_sum)[0]
    # A scheduler for plateaus needs the result of a validation, which only the caller has.
    waits = scheduler is None or isinstance(scheduler, ReduceLROnPlateau)
    if schedule_per == "epoch" and not waits:
        scheduler.step()
    return loss_sum / max(1, samples)


def _number_of_batches(
    dataloader: Iterable[Any], maximum: int | None, update_freq: int
) -> int | None:
    """Return the number of batches of every worker, or None if the loaders have no length."""
    try:
        length = len(dataloader)  # type: ignore[arg-type]
    except TypeError:
        if update_freq == 1:
            return None
        raise ValueError(
            f"update_freq is {update_freq}, but {type(dataloader).__name__} has no length, so "
            "the last update of the epoch cannot be known in time; give a loader with __len__"
        ) from None
    if maximum is not None:
        length = min(length, maximum)
    return process_groups.smallest(length)


class Updates:
    """Gradient accumulation: a training step per batch, and an update after several batches.

    Args:
        model: Called with the data of a batch, for example a module.
        optimizer: The optimizer.
        loss_function: Called ``(output, target)``.
        records: Marks every step. It knows the number of batches of the epoch, unless ``frequency``
            is 1.
        frequency: Number of batches before an update.
        step_arguments: See :func:`train_round`.
    """

    def __init__(
        self,
        model: Callable[[Any], Any],
        optimizer: Any,
        loss_function: Callable[[Any, Any], Tensor],
        records: BatchRecords,
        frequency: int,
        step_arguments: StepArguments | None,
    ) -> None:
        self.model, self.optimizer, self.loss_function = model, optimizer, loss_function
        self.records, self.frequency, self.step_arguments = records, frequency, step_arguments
        self.batches: list[tuple[Any, Any]] = []
        if records.tracker is not None:
            records.tracker.learning_rate = _learning_rate(optimizer)

    def train_batch(self, batch_idx: int, data: Any, target: Any) -> tuple[Tensor, Any, bool]:
        """Add the gradients of a batch.

        Returns:
            The detached loss, the output, and True after an update.
        """
        # Gradients accumulate until the update, so only its first batch starts from zero.
        if not self.batches:
            self.optimizer.zero_grad()
        self.records.mark("init")
        output = self.model(data)
        self.records.mark("fwd_pass")
        loss = self.loss_function(output, target)
        self.records.mark("comp_loss")
        # The last update of an epoch may have fewer batches.
        first = batch_idx - len(self.batches)
        count = self.frequency
        if self.records.total is not None:
            count = min(count, self.records.total - first)
        self.batches.append((data, target))
        is_last = len(self.batches) == count
        share = loss
        sync: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        # The last backward pass of an update may send gradients while it runs; the ones before it
        # must not.
        if not is_last and hasattr(self.optimizer, "no_sync"):
            sync = self.optimizer.no_sync()
        with sync:
            # step_arguments gives the optimizer the divisor; otherwise the loss is divided here.
            if self.step_arguments is None and count != 1:
                share = loss / count
            if hasattr(self.optimizer, "backward_loss"):
                self.optimizer.backward_loss(share)
            else:
                share.backward()
        self.records.mark("backprop")
        if is_last:
            self._step()
            self.batches = []
        return loss.detach(), output, is_last

    def _step(self) -> None:
        arguments: Mapping[str, Any] = {}
        if self.step_arguments is not None:
            arguments = self.step_arguments(self.batches)
        # An optimizer that takes a tracker marks its own steps.
        tracker = self.records.tracker
        if tracker is not None and "tracker" in inspect.signature(self.optimizer.step).parameters:
            self.optimizer.step(tracker=tracker, **arguments)
        else:
            self.optimizer.step(**arguments)
            self.records.mark("opt_step")


def _learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate of the first group of parameters, or None without one."""
    groups = getattr(optimizer, "param_groups", None)
    if not groups or groups[0].get("lr") is None:
        return None
    # A rate that is a tensor is read once per round.
    return float(groups[0]["lr"])


def _step_after_batch(scheduler: Any) -> None:
    if not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()
    # A scheduler for plateaus steps with validation results; within an epoch it can only warm up.
    elif getattr(scheduler, "batches_per_epoch", None) is not None:
        scheduler.batch_step()  # type: ignore[attr-defined]


class TrainValidation:
    """A loop that trains and validates in turn, up to the goal or the last epoch.

    Args:
        model: The model.
        optimizer: The optimizer.
        loss_function: Called ``(output, target)``; returns the mean loss of a batch.
        metrics: The metrics; the first decides which epoch is the best.
        scheduler: Learning rate schedule, or None. A scheduler that waits for a plateau receives
            the validation loss.
        batch_size: Samples in a batch of one worker.
        train_epochs: Largest number of epochs.
        rank: This worker's rank.
        world_size: Number of workers.
        run_id: Id of the run.
        dtype: Type of floating-point data, as in :func:`train_round`.
        validate: True to validate after each epoch.
        schedule_per: ``"batch"`` or ``"epoch"``: the scheduler steps after each of these.
        checkpoint: The checkpointer that saves after each epoch, and from which ``resume`` loads;
            None for no checkpoints.
        transform_target_type: True to convert targets to ``dtype`` too.
        average_models: True to average the weights over the workers after each epoch.
        use_cuda: True to move batches to the current GPU.
        max_batch_per_epoch: Largest number of batches in a round; None for all.
        tracker: The tracker; None makes one without a goal.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        loss_function: Callable[[Any, Any], Tensor],
        metrics: Sequence[MLBenchMetric],
        scheduler: Any,
        batch_size: int,
        train_epochs: int,
        rank: int,
        world_size: int,
        run_id: str,
        dtype: str | None,
        validate: bool = True,
        schedule_per: SchedulePer = "epoch",
        checkpoint: Checkpointer | None = None,
        transform_target_type: bool | None = None,
        average_models: bool = False,
        use_cuda: bool = False,
        max_batch_per_epoch: int | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss_function = loss_function
        self.metrics = metrics
        self.scheduler = scheduler
        self.batch_size = batch_size
        self.train_epochs = train_epochs
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.dtype = dtype
        self.validate = validate
        self.schedule_per: SchedulePer = schedule_per
        self.checkpoint = checkpoint
        self.transform_target_type = transform_target_type
        self.average_models = average_models
        self.use_cuda = use_cuda
        self.max_batch_per_epoch = max_batch_per_epoch
        self.tracker = tracker if tracker is not None else Tracker(metrics, run_id, rank)

    def run(
        self,
        dataloader_train: Iterable[Any] | None = None,
        dataloader_val: Iterable[Any] | None = None,
        dataloader_train_fn: Callable[[], Iterable[Any]] | None = None,
        dataloader_val_fn: Callable[[], Iterable[Any]] | None = None,
        resume: bool = False,
        repartition_per_epoch: bool = False,
    ) -> None:
        """Train until the goal is reached or all epochs are finished.

        A sweep may also limit the training time.

        Args:
            dataloader_train: This worker's training batches.
            dataloader_val: This worker's validation batches.
            dataloader_train_fn: Makes the training batches; instead of ``dataloader_train``.
            dataloader_val_fn: Makes the validation batches; instead of ``dataloader_val``.
            resume: True to continue from the newest checkpoint.
            repartition_per_epoch: True to call ``dataloader_train_fn`` and ``dataloader_val_fn``
                again before each epoch, to repartition the data.

        Raises:
            ValueError: Batches are missing or given twice, or ``resume`` is True without a
                checkpointer.
        """
        make_train = _maker("dataloader_train", dataloader_train, dataloader_train_fn)
        make_val: Callable[[], Iterable[Any] | None] = _no_batches
        if self.validate:
            make_val = _maker("dataloader_val", dataloader_val, dataloader_val_fn)
        if resume:
            if self.checkpoint is None:
                raise ValueError(
                    "checkpoint must be a checkpointer with resume=True, not None: pass "
                    "checkpoint=Checkpointer(...)"
                )
            trained = (self.model, self.optimizer, self.scheduler)
            Checkpointer.load(self.checkpoint.dirname, self.rank, *trained, tracker=self.tracker)
        elif self.tracker.current_epoch == 0 and self.tracker.start_time is None:
            self.tracker.start()
        train_batches, val_batches = make_train(), make_val()
        first_epoch, limit = self.tracker.current_epoch, TrainLimit()
        for epoch in self.tracker.epochs(self.train_epochs):
            # The batches of the first epoch were made just before.
            if repartition_per_epoch and epoch > first_epoch:
                train_batches, val_batches = make_train(), make_val()
            self._run_epoch(train_batches, val_batches)
            if limit.ends(self.tracker):
                break

    def _run_epoch(self, train_batches: Iterable[Any], val_batches: Iterable[Any] | None) -> None:
        train_loss = train_round(
            train_batches,
            self.model,
            self.optimizer,
            self.loss_function,
            self.metrics,
            self.scheduler,
            self.dtype,
            self.schedule_per,
            self.transform_target_type,
            self.use_cuda,
            self.max_batch_per_epoch,
            self.tracker,
        )
        if self.average_models:
            # The result lists the collectives of training steps only, and averaging the models is
            # not one of them.
            with uncounted():
                AllReduceAggregation(self.world_size).agg_model()(self.model, "avg_world")
        is_best = False
        # Without a validation, a scheduler for plateaus can only follow the training loss.
        plateau_loss = train_loss
        if val_batches is not None:
            values, plateau_loss = validation_round(
                val_batches,
                self.model,
                self.loss_function,
                self.metrics,
                self.dtype,
                self.tracker,
                self.transform_target_type,
                self.use_cuda,
                self.max_batch_per_epoch,
            )
            is_best = record_validation_stats(values, plateau_loss, self.tracker, self.rank)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(plateau_loss)
        # The epoch ends before it is saved, so that a resumed run begins with the next one.
        self.tracker.epoch_end()
        if self.checkpoint is not None:
            self.checkpoint.save(self.tracker, self.model, self.optimizer, self.scheduler, is_best)


def _no_batches() -> None:
    return None


def _maker(
    name: str, batches: Iterable[Any] | None, make: Callable[[], Iterable[Any]] | None
) -> Callable[[], Iterable[Any]]:
    """Return a function that returns the batches, from the one of the two arguments that is set."""
    if batches is None and make is None:
        raise ValueError(f"pass either {name} or {name}_fn, one is missing")
    if batches is not None and make is not None:
        raise ValueError(f"pass either {name} or {name}_fn, not both")
    if make is not None:
        return make
    return lambda: batches  # type: ignore[return-value]
