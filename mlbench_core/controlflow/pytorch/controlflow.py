"""Record batches and run validation rounds: the parts of a training script that all tasks share."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import deprecation
import torch
from torch import Tensor, nn

from mlbench_core import __version__
from mlbench_core.controlflow.pytorch.batches import (
    DTYPES,
    batch_size,
    iterate_dataloader,
    prepare_batch,
)
from mlbench_core.controlflow.validation_stats import record_validation_stats
from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.evaluation.pytorch.metrics import MLBenchMetric
from mlbench_core.models.pytorch.modes import evaluation_mode
from mlbench_core.tracking.tracker import Tracker

__all__ = [
    "compute_train_batch_metrics",
    "prepare_batch",
    "record_train_batch_stats",
    "record_validation_stats",
    "validation_round",
]

logger = logging.getLogger(__name__)

LOG_EVERY_N_BATCHES = 25
"""Interval, in batches, at which training statistics go to the master; the last batch does too."""

_Result = tuple[dict[MLBenchMetric, float], float]


def compute_train_batch_metrics(
    output: Any, target: Any, metrics: Iterable[MLBenchMetric]
) -> dict[MLBenchMetric, float]:
    """Compute the metrics of one training batch on this worker.

    The call waits for the device.
    :func:`~mlbench_core.controlflow.pytorch.train_validation.train_round` reads the metrics of
    several batches together instead.

    Args:
        output: Output of the model.
        target: The expected output.
        metrics: The metrics; their averages are not changed.

    Returns:
        The value of each metric.
    """
    results = batch_metrics(output, target, metrics)
    return {metric: value.item() for metric, value in results.items()}


def batch_metrics(
    output: Any, target: Any, metrics: Iterable[MLBenchMetric]
) -> dict[MLBenchMetric, Tensor]:
    """Compute the metrics of one training batch, and leave them on the device."""
    # A metric must not keep the graph of the forward pass in memory.
    detached = output.detach() if isinstance(output, Tensor) else output
    return {metric: metric(detached, target) for metric in metrics}


def record_train_batch_stats(
    batch_idx: int,
    loss: float | Tensor,
    output: Any,
    metric_results: Mapping[MLBenchMetric, float] | None,
    tracker: Tracker | None,
    num_batches_per_device_train: int | None,
) -> None:
    """Record the loss and metrics of one training batch.

    They go to the master every 25 batches and at the last batch of the epoch.

    Args:
        batch_idx: Number of the batch in the epoch, from 0.
        loss: Mean loss of the batch.
        output: Output of the model; its length is the weight of the values in the means of the
            epoch.
        metric_results: The result of :func:`compute_train_batch_metrics`; may be empty or None.
        tracker: The tracker to record with; None records nothing.
        num_batches_per_device_train: Number of this worker's batches in an epoch; None if it is not
            known.
    """
    # Without a tracker the output needs no length.
    if tracker is None:
        return
    records = BatchRecords(tracker, num_batches_per_device_train)
    records.add(batch_idx, loss, batch_size(None, output), metric_results)
    records.read()


class _Record(NamedTuple):
    """The values of one batch, which are still on the device."""

    batch_idx: int
    at: tuple[int, float]
    samples: int
    is_logged: bool
    values: list[tuple[str, Tensor]]


class BatchRecords:
    """The losses and metrics of a round's training batches, read from the device in intervals.

    Reading a number makes the host wait for the device, and the device then waits for the next
    batch. So the values stay on the device up to batch 25, 50 and so on, and to the end of the
    round. One transfer then brings them all.

    The tracker records each value with the batch and the time that it belongs to. Its goal and its
    sinks receive the values when they are read. A goal that a training statistic may reach needs
    them after every batch, so that its time is that of the batch; see
    :meth:`~mlbench_core.tracking.tracker.Tracker.goal_watches_training`. As a context manager, it
    also reads the remaining values after an exception.

    Args:
        tracker: The tracker; None records nothing.
        total: Number of batches of the round; None if it is not known.

    Example:
        >>> tracker = Tracker([], "1", 0)
        >>> with BatchRecords(tracker, total=3) as records:
        ...     for batch_idx, loss in enumerate(torch.tensor([0.5, 0.25, 0.75])):
        ...         records.add(batch_idx, loss, samples=8)
        >>> tracker.epoch_stats["train_loss"].avg
        0.5
    """

    def __init__(self, tracker: Tracker | None, total: int | None) -> None:
        self.tracker = tracker
        self.total = total
        self._pending: list[_Record] = []

    def __enter__(self) -> BatchRecords:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A device that has failed cannot be read, and the error that ended the round shows the
        # cause.
        try:
            self.read()
        except RuntimeError:
            if kind is None:
                raise

    def start_batch(self) -> None:
        """Start the clock of a batch.

        Call it before its data is drawn, so that waiting for the loader counts too.
        """
        if self.tracker is not None:
            self.tracker.batch_start()

    def mark(self, step: str) -> None:
        """Mark the end of a step of the batch."""
        if self.tracker is not None:
            self.tracker.record_batch_step(step)

    def end_batch(
        self,
        batch_idx: int,
        loss: Tensor,
        samples: int,
        results: Mapping[MLBenchMetric, Tensor] | None = None,
        tokens: int = 0,
    ) -> None:
        """Stop the clock of a batch, then add it.

        In this order, sending to the master is not part of the training time.

        Args:
            batch_idx: As in :meth:`add`.
            loss: As in :meth:`add`.
            samples: As in :meth:`add`.
            results: As in :meth:`add`.
            tokens: Number of tokens of the batch, for the throughput.
        """
        if self.tracker is not None:
            self.tracker.batch_end(samples=samples, tokens=tokens)
        self.add(batch_idx, loss, samples, results)

    def add(
        self,
        batch_idx: int,
        loss: float | Tensor,
        samples: int,
        results: Mapping[MLBenchMetric, float | Tensor] | None = None,
    ) -> None:
        """Add a batch, and read the values if an interval ends with it or the goal needs them.

        Args:
            batch_idx: Number of the batch in the round, from 0.
            loss: Mean loss of the batch.
            samples: Number of samples, the weight of the values in the means of the epoch.
            results: Value of each metric.
        """
        if self.tracker is None:
            return
        is_last = self.total is not None and batch_idx >= self.total - 1
        is_logged = batch_idx % LOG_EVERY_N_BATCHES == 0
        # Batch 0 is read with batch 25: the read at the end of the round would otherwise make it
        # one more per interval.
        ends_interval = is_logged and batch_idx > 0
        position = self.tracker.position()
        values = [("loss", _copied(loss))]
        for metric, value in (results or {}).items():
            values.append((metric.name, _copied(value)))
        self._pending.append(_Record(batch_idx, position, samples, is_last or is_logged, values))
        # The last batch is read together with the mean loss of the round, in one transfer.
        if not is_last and (ends_interval or self.tracker.goal_watches_training()):
            self.read()

    def read(self, *others: float | Tensor) -> list[float]:
        """Record the values added so far.

        Args:
            others: Other values to read with them.

        Returns:
            The numbers of ``others``.
        """
        # Emptied first: after an error while reading, the values are not read a second time.
        pending, self._pending = self._pending, []
        tensors: list[Tensor] = []
        for record in pending:
            tensors += [value for _, value in record.values]
        tensors += map(_copied, others)
        numbers = iter(_read(tensors))
        for record in pending:
            assert self.tracker is not None
            for name, _ in record.values:
                number = next(numbers)
                self.tracker.record_stat(
                    name, number, record.samples, record.is_logged, at=record.at
                )
            if record.is_logged:
                logger.debug("batch %d: %s", record.batch_idx, self.tracker)
        return list(numbers)


def _copied(value: float | Tensor) -> Tensor:
    """Return a float64 copy without dimensions."""
    if not isinstance(value, Tensor):
        # Without the dtype, torch would round a Python float to float32.
        return torch.tensor(value, dtype=torch.float64).reshape(())
    # A copy, because a function may return a view of a large tensor, or reuse its result.
    return value.detach().to(torch.float64, copy=True).reshape(())


def _read(tensors: Sequence[Tensor]) -> list[float]:
    """Read numbers from their devices, with one transfer for each device."""
    # A metric may compute on the CPU, for example on text, while the loss is on a GPU.
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    numbers = {device: iter(torch.stack(values).tolist()) for device, values in by_device.items()}
    return [next(numbers[tensor.device]) for tensor in tensors]


_OLDER_KEYWORDS = {"run_id", "rank", "max_batch_per_epoch"}


def _accepts_older_call(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Dispatch calls of mlbench-core 2, which have ``run_id, rank`` before ``dtype``."""

    @functools.wraps(function)
    def dispatch(*args: Any, **kwargs: Any) -> _Result:
        # The older call has its dtype as the seventh positional argument, the current call as the
        # fifth.
        dtypes = tuple(DTYPES)
        has_dtype_seventh = len(args) >= 7 and args[6] in dtypes and args[4] not in dtypes
        if has_dtype_seventh or not _OLDER_KEYWORDS.isdisjoint(kwargs):
            return _validation_round_of_run(*args, **kwargs)
        return function(*args, **kwargs)

    return dispatch


@contextlib.contextmanager
def validating(
    model: nn.Module, metrics: Iterable[MLBenchMetric], tracker: Tracker | None
) -> Iterator[None]:
    """Reset the metrics, and run a block in evaluation mode and without gradients.

    The time of the block counts as validation.
    """
    for metric in metrics:
        metric.reset()
    if tracker is not None:
        tracker.validation()
        tracker.validation_start()
    try:
        with evaluation_mode(model), torch.no_grad():
            yield
    finally:
        # Also after an exception: a clock that runs on would count as validation time.
        if tracker is not None:
            tracker.validation_end()


@_accepts_older_call
def validation_round(
    dataloader: Iterable[Any],
    model: nn.Module,
    loss_function: Callable[[Any, Any], Tensor],
    metrics: Sequence[MLBenchMetric],
    dtype: str | None,
    tracker: Tracker | None = None,
    transform_target_type: bool | None = False,
    use_cuda: bool = False,
    max_batches: int | None = None,
) -> _Result:
    """Evaluate a model on all workers' validation data.

    The model is set to evaluation mode and afterwards back to its previous mode. Every worker must
    call this function, since averages are taken over all of them. A worker may have fewer batches
    than another.

    Args:
        dataloader: Iterable over this worker's pairs (data, target).
        model: The model.
        loss_function: Called ``(output, target)``; returns the mean loss of a batch.
        metrics: The metrics; they are reset first.
        dtype: ``"fp16"``, ``"bf16"``, ``"fp32"`` or ``"fp64"``; type of floating-point data. None
            keeps it.
        tracker: Receives the time of the round, and records the following statistics as
            ``val_...``.
        transform_target_type: True to convert targets to ``dtype`` too.
        use_cuda: True to move batches to the current GPU.
        max_batches: Largest number of batches; None for all.

    Returns:
        ``({metric: average}, loss)``: plain numbers over all batches and workers. The loss of each
        batch is weighted by the size of the batch. Pass both to :func:`record_validation_stats`.
    """
    loss_sum: float | Tensor = 0.0
    samples = 0
    with validating(model, metrics, tracker):
        for data, target in iterate_dataloader(
            dataloader, dtype, max_batches, use_cuda, transform_target_type
        ):
            output = model(data)
            size = batch_size(data, output)
            # The sum stays on the device, because reading the loss of every batch would wait for
            # the device every time. It is in float64, because a float32 sum over many batches loses
            # digits.
            loss = torch.as_tensor(loss_function(output, target)).detach()
            loss_sum = loss_sum + loss.to(torch.float64) * size
            samples += size
            for metric in metrics:
                metric.update(metric(output, target), size)
        averages = {metric: metric.average().item() for metric in metrics}
        return averages, process_groups.global_average(loss_sum, samples).item()


@deprecation.deprecated(
    deprecated_in="3.0.0",
    removed_in="6.0.0",
    current_version=__version__,
    details="Call validation_round(dataloader, model, loss_function, metrics, dtype, tracker=...) "
    "without run_id and rank, then record_validation_stats(metrics_values, loss, tracker, rank).",
)
def _validation_round_of_run(
    dataloader: Iterable[Any],
    model: nn.Module,
    loss_function: Callable[[Any, Any], Tensor],
    metrics: Sequence[MLBenchMetric],
    run_id: str,
    rank: int,
    dtype: str | None,
    transform_target_type: bool | None = None,
    use_cuda: bool = False,
    max_batch_per_epoch: int | None = None,
    tracker: Tracker | None = None,
) -> _Result:
    """Evaluate and record in one call, as in mlbench-core 2. The run is that of the tracker."""
    values, loss = validation_round(
        dataloader,
        model,
        loss_function,
        metrics,
        dtype,
        tracker,
        transform_target_type,
        use_cuda,
        max_batch_per_epoch,
    )
    record_validation_stats(values, loss, tracker, rank)
    return values, loss
