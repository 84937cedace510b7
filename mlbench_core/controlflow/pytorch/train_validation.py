"""The training loop."""

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
from mlbench_core.controlflow.pytorch.checkpoint import Checkpointer
from mlbench_core.controlflow.pytorch.controlflow import (
    compute_train_batch_metrics,
    record_train_batch_stats,
    record_validation_stats,
    validation_round,
)
from mlbench_core.controlflow.pytorch.helpers import batch_size, maybe_range, number_of_batches, prepare_batch
from mlbench_core.distributed.pytorch import process_groups
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
) -> float:
    r"""Train for one epoch.

    Each batch goes through these steps, each of which the tracker is told: load (drawing it from the loader included),
    init (gradients to zero), forward pass, loss, backward pass, aggregation and update (both told by the optimizer
    where its ``step`` takes a tracker), metrics.

    All workers train on the number of batches of the worker with the fewest: parts of a data set that differ by one
    sample can differ by one batch, and the worker with one more would wait indefinitely. They agree in one
    small message before the first batch, so every worker's loader must know its length, or none.

    With ``update_freq`` :math:`u > 1` the gradients of u batches are accumulated before an update, and nothing is sent
    in between (the optimizer's ``no_sync`` is used where it has one). With the batches' losses
    :math:`L_1, \dots, L_n` the gradient is

    .. math:: g = \nabla \frac{1}{n} \sum_{j=1}^{n} L_j,

    where n is u, or what is left for the last update of the epoch. With ``step_arguments`` it is that of the sum, and
    what the function returns tells the optimizer what to divide by.

    A scheduler that waits for a plateau needs a validation result, so stepping it once an epoch is the caller's part;
    with ``schedule_per="batch"`` its ``batch_step()`` is called, where it has one, for the warm-up.

    Args:
        dataloader: Gives this worker's pairs (data, target).
        model: The model; it is put into training mode.
        optimizer: The optimizer. If it has ``backward_loss(loss)``, for loss scaling, that replaces
            ``loss.backward()``.
        loss_function: Called ``(output, target)``; gives a loss without dimensions.
        metrics: Metrics to compute on each batch; may be empty.
        scheduler: Learning rate schedule, or None.
        dtype: ``"fp16"``, ``"bf16"``, ``"fp32"`` or ``"fp64"``; type of floating-point data. None leaves it.
        schedule_per: Whether the scheduler steps after each ``"batch"`` (with ``update_freq``, each update) or at the
            end of the ``"epoch"``.
        transform_target_type: Whether targets are converted to ``dtype`` too.
        use_cuda: Whether batches go to the current GPU.
        max_batch_per_epoch: Largest number of batches; None for all.
        tracker: Gets times, loss and metrics.
        update_freq: u, batches before an update; more than one needs a loader that knows its length.
        step_arguments: Called before each update with its batches, pairs (data, target); gives keyword arguments of the
            optimizer's ``step``, such as ``denom``.

    Returns:
        This worker's mean loss over the epoch, each batch weighted by its size; 0 without a batch.

    Raises:
        ValueError: ``schedule_per`` is neither, or ``update_freq`` is below 1 or does not go with the loader.
    """
    if schedule_per not in ("epoch", "batch"):
        raise ValueError(f"schedule_per is {schedule_per!r}; it must be 'epoch' or 'batch'")
    check_at_least("update_freq", update_freq, 1)
    model.train()
    if tracker is not None:
        tracker.train()
    total = number_of_batches(dataloader, max_batch_per_epoch)
    if total is not None:
        total = process_groups.smallest(total)
    elif update_freq > 1:
        raise ValueError(
            f"update_freq is {update_freq}, but {type(dataloader).__name__} has no length, so the last update of the "
            "epoch cannot be known in time; give a loader with __len__"
        )
    updates = Updates(model, optimizer, loss_function, tracker, update_freq, total, step_arguments)
    iterator = iter(dataloader)
    loss_sum: float | Tensor = 0.0
    samples = 0
    for batch_idx in maybe_range(total if total is not None else max_batch_per_epoch):
        if tracker is not None:
            tracker.batch_start()
        batch = next(iterator, None)
        if batch is None:
            break
        data, target = batch
        data, target = prepare_batch(data, target, dtype, transform_target_type, use_cuda)
        _mark(tracker, "batch_load")
        loss, output, updated = updates.train_batch(batch_idx, data, target)
        if updated and scheduler is not None and schedule_per == "batch":
            _step_after_batch(scheduler)
        results = compute_train_batch_metrics(output, target, metrics)
        _mark(tracker, "comp_metrics")
        size = batch_size(data, output)
        if tracker is not None:
            tracker.batch_end(samples=size)
        record_train_batch_stats(batch_idx, loss, output, results, tracker, total)
        loss_sum = loss_sum + loss.to(torch.float64) * size
        samples += size
    if scheduler is not None and schedule_per == "epoch" and not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()
    return float(loss_sum) / max(1, samples)


class Updates:
    """Trains on one batch after the other, and updates the weights after every few.

    Args:
        model: Called with a batch's data; the model, for example.
        optimizer: The optimizer.
        loss_function: Called ``(output, target)``.
        tracker: Is told of every step; or None.
        frequency: Batches before an update.
        total: Batches of the epoch; None if it is not known, which takes a ``frequency`` of 1.
        step_arguments: As :func:`train_round` has it.
    """

    def __init__(
        self,
        model: Callable[[Any], Any],
        optimizer: Any,
        loss_function: Callable[[Any, Any], Tensor],
        tracker: Tracker | None,
        frequency: int,
        total: int | None,
        step_arguments: StepArguments | None,
    ) -> None:
        self.model, self.optimizer, self.loss_function, self.tracker = model, optimizer, loss_function, tracker
        self.frequency, self.total, self.step_arguments = frequency, total, step_arguments
        self.batches: list[tuple[Any, Any]] = []

    def train_batch(self, batch_idx: int, data: Any, target: Any) -> tuple[Tensor, Any, bool]:
        """Add a batch's gradients; gives the loss, without its graph, the output, and whether there was an update."""
        if not self.batches:
            self.optimizer.zero_grad()
        _mark(self.tracker, "init")
        output = self.model(data)
        _mark(self.tracker, "fwd_pass")
        loss = self.loss_function(output, target)
        _mark(self.tracker, "comp_loss")
        count = self._batches_of_update(batch_idx)
        self.batches.append((data, target))
        ends = len(self.batches) == count
        with contextlib.nullcontext() if ends else self._without_communication():
            self._backward(loss if self.step_arguments is not None or count == 1 else loss / count)
        _mark(self.tracker, "backprop")
        if ends:
            self._step()
            self.batches = []
        return loss.detach(), output, ends

    def _batches_of_update(self, batch_idx: int) -> int:
        """How many batches go into the update that this batch belongs to: the epoch's last one may have fewer."""
        first = batch_idx - len(self.batches)
        return self.frequency if self.total is None else min(self.frequency, self.total - first)

    def _without_communication(self) -> contextlib.AbstractContextManager[Any]:
        return self.optimizer.no_sync() if hasattr(self.optimizer, "no_sync") else contextlib.nullcontext()

    def _backward(self, loss: Tensor) -> None:
        if hasattr(self.optimizer, "backward_loss"):
            self.optimizer.backward_loss(loss)
        else:
            loss.backward()

    def _step(self) -> None:
        arguments = self.step_arguments(self.batches) if self.step_arguments is not None else {}
        if self.tracker is not None and _takes_tracker(self.optimizer):
            self.optimizer.step(tracker=self.tracker, **arguments)
        else:
            self.optimizer.step(**arguments)
            _mark(self.tracker, "opt_step")


def _mark(tracker: Tracker | None, step: str) -> None:
    if tracker is not None:
        tracker.record_batch_step(step)


def _takes_tracker(optimizer: Any) -> bool:
    """Whether ``optimizer.step`` has an argument ``tracker``, and so marks its own steps."""
    return "tracker" in inspect.signature(optimizer.step).parameters


def _step_after_batch(scheduler: Any) -> None:
    if not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()
    elif getattr(scheduler, "batches_per_epoch", None) is not None:
        scheduler.batch_step()  # type: ignore[attr-defined]


class TrainValidation:
    """Trains and validates in turn, until the goal is reached or the epochs are over.

    Args:
        model: The model.
        optimizer: The optimizer.
        loss_function: Called ``(output, target)``; gives the mean loss of a batch.
        metrics: The metrics; the first is the one that says which epoch is best.
        scheduler: Learning rate schedule, or None. One that waits for a plateau gets the validation loss.
        batch_size: Samples in a batch of one worker.
        train_epochs: Largest number of epochs.
        rank: This worker's rank.
        world_size: Number of workers.
        run_id: Id of the run.
        dtype: Type of floating-point data, as in :func:`train_round`.
        validate: Whether to validate after each epoch.
        schedule_per: Whether the scheduler steps after each ``"batch"`` or each ``"epoch"``.
        checkpoint: Saves after each epoch and is what ``resume`` loads from; None for neither.
        transform_target_type: Whether targets are converted to ``dtype`` too.
        average_models: Whether weights are averaged over the workers after each epoch.
        use_cuda: Whether batches go to the current GPU.
        max_batch_per_epoch: Largest number of batches in a round; None for all.
        tracker: The tracker; one without a goal is made if it is left out.
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
        """Train.

        Args:
            dataloader_train: This worker's training batches.
            dataloader_val: This worker's validation batches.
            dataloader_train_fn: Makes the training batches; instead of ``dataloader_train``.
            dataloader_val_fn: Makes the validation batches; instead of ``dataloader_val``.
            resume: Whether to go on from the newest checkpoint.
            repartition_per_epoch: Whether ``dataloader_train_fn`` and ``dataloader_val_fn`` are called anew before each
                epoch, to deal the data out again.

        Raises:
            ValueError: Batches are missing or given twice, or ``resume`` has no checkpointer.
        """
        make_train = _maker("dataloader_train", dataloader_train, dataloader_train_fn)
        make_val = _maker("dataloader_val", dataloader_val, dataloader_val_fn) if self.validate else None
        if resume:
            self._resume()
        elif self.tracker.current_epoch == 0 and self.tracker.start_time is None:
            self.tracker.start()
        train_batches = make_train()
        val_batches = make_val() if make_val is not None else None
        first_epoch = self.tracker.current_epoch
        for epoch in self.tracker.epochs(self.train_epochs):
            if repartition_per_epoch and epoch > first_epoch:
                train_batches = make_train()
                val_batches = make_val() if make_val is not None else None
            self._run_epoch(train_batches, val_batches)

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
            AllReduceAggregation(self.world_size).agg_model()(self.model, "avg_world")
        is_best = False
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
        self.tracker.epoch_end()
        if self.checkpoint is not None:
            self.checkpoint.save(self.tracker, self.model, self.optimizer, self.scheduler, is_best)

    def _resume(self) -> None:
        if self.checkpoint is None:
            raise ValueError(
                "resume is True but there is no checkpoint to go on from; pass checkpoint=Checkpointer(...)"
            )
        Checkpointer.load(
            self.checkpoint.dirname,
            self.rank,
            self.model,
            self.optimizer,
            self.scheduler,
            tracker=self.tracker,
        )


def _maker(
    name: str, batches: Iterable[Any] | None, make: Callable[[], Iterable[Any]] | None
) -> Callable[[], Iterable[Any]]:
    """A function that gives the batches, from the one of two arguments that is there."""
    if (batches is None) == (make is None):
        raise ValueError(f"pass either {name} or {name}_fn, {'not both' if make is not None else 'one is missing'}")
    if make is not None:
        return make
    return lambda: batches  # type: ignore[return-value]
