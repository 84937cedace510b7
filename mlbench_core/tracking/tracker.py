"""Track the time, the quality and the goal of a training run."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from types import SimpleNamespace, TracebackType
from typing import Any

from mlbench_core.arguments import check_at_least
from mlbench_core.client.log_metrics import LogMetrics
from mlbench_core.errors import CheckpointError
from mlbench_core.processor_time import work_s
from mlbench_core.run_terms import GoalAim, check_unit, length_text
from mlbench_core.running_statistics import AverageMeter, QuantileSketch
from mlbench_core.tracking.clock import DeviceClock, computes_in_this_thread, cuda_in_use
from mlbench_core.tracking.collectives import CollectiveCounts
from mlbench_core.tracking.energy import energy_counter
from mlbench_core.tracking.goal_report import (
    Goal,
    as_goal,
    end_at_exit,
    finite,
    goal_metric,
    send_at_exit,
)
from mlbench_core.tracking.memory import memory_peak_bytes
from mlbench_core.tracking.phase_times import PhaseTimes
from mlbench_core.tracking.process_end import state_after, uncaught_error
from mlbench_core.tracking.progress import ProgressBar, wants_progress
from mlbench_core.tracking.script_results import ScriptResults
from mlbench_core.tracking.sinks import Sink, SinkList
from mlbench_core.tracking.summary import Counters, Totals, TrackerSummary
from mlbench_core.wire_bytes import total_wire_bytes

__all__ = ["AverageMeter", "Goal", "Tracker"]

logger = logging.getLogger(__name__)

TRAIN_PREFIX = "train_"
VALIDATION_PREFIX = "val_"
_STATE_VERSION = 1
_FLUSH_TIMEOUT_S = 5.0

_STATE_ATTRIBUTES = (
    "current_epoch",
    "best_epoch",
    "goal_reached",
    "goal_text",
    "time_to_goal_s",
    "is_training",
    "minimize",
    "_is_latest_best",
    "_batches_in_epoch",
    "batches_per_epoch",
)
"""Attributes that a state dict holds under their own names, without a leading underscore."""

_STEP_GROUPS = ("communication_steps", "compute_steps", "metrics_steps", "preprocess_steps")


@dataclass
class _Validation:
    """The primary metric in one validation: the mean of the values that ``record_metric`` receives.

    A batch may lower this mean. So the best value from before the validation is kept, to compare
    each new mean with it. ``best_before`` is that value with its epoch, and True if it was the
    latest value.
    """

    mean: AverageMeter = field(default_factory=AverageMeter)
    best_before: tuple[float, int, bool] | None = None
    has_final_value: bool = False


def _step_method(name: str) -> Callable[[Tracker], None]:
    """Return a method that does the same as ``record_batch_step(name)``."""

    # These methods run several times per batch. The usual case (host clock, known step) is written
    # out here, because a delegated call would add to the time that is measured.
    def record(self: Tracker) -> None:
        mark = self._mark
        if mark is not None and self._device is None and name in self._step_s:
            self._mark = now = time.perf_counter()
            self._step_s[name] += now - mark
        else:
            self.record_batch_step(name)

    record.__doc__ = f'Mark the end of the step ``"{name}"``, see :meth:`record_batch_step`.'
    return record


class Tracker(PhaseTimes):
    """A tracker of times, statistics and metrics of one worker.

    A batch runs from :meth:`batch_start` to :meth:`batch_end`. Within it, each ``record_batch_...``
    call sets a mark: the end of a step. The time of a step runs from the previous mark to its own.
    Marks outside a batch are ignored. Training time is the time inside batches, without validation
    that ran inside one.

    The clock is :func:`time.perf_counter`, or CUDA events if ``use_cuda`` is True. Events are read
    after the device has passed them, so the host does not wait for the device; only
    :meth:`state_dict` and :meth:`close` do. Memory does not grow with the number of batches.

    Statistics are named ``train_<name>`` or ``val_<name>``. The goal receives each of them until it
    is reached. Numbers for the master go through ``LogMetrics.log``, which adds the rank to the
    name.

    A tracker is not thread-safe.

    Args:
        metrics: The metrics of the run: objects with a ``name``. The first one is the primary
            metric, which decides the best epoch. May be empty.
        run_id: Id of the run, as the master assigned it.
        rank: Rank of this worker.
        goal: Called ``(metric_name, value, tracker)``. It returns None until the goal is reached,
            and then the text of the result. A function without required arguments is called once to
            create the goal.
        communication_steps: Names of the steps that count as communication. Default ``["agg"]``.
        compute_steps: Names of the steps that count as computation. Default ``["fwd_pass",
            "comp_loss", "backprop", "opt_step"]``.
        metrics_steps: Names of the steps that count as computing metrics. Default
            ``["comp_metrics"]``.
        preprocess_steps: Names of the steps that count as loading data. Default ``["batch_load"]``.
        minimize: True if smaller values of the primary metric are better.
        sinks: Additional receivers of every recorded number, see
            :mod:`mlbench_core.tracking.sinks`.
        progress: True to draw a progress bar. None draws one on rank 0 if standard error is a
            terminal.
        use_cuda: True to time steps on the CUDA device. None does so if CUDA is in use at the first
            batch.
        history_size: Number of recent batches and statistics in ``history``, and of epochs in each
            entry of ``records``.
        check_times: True to compare times at the end of the run: the sum of the steps with the time
            inside batches, and training and validation with the wall clock. A difference of more
            than 1 % is logged as a warning. The summary has both differences in any case, as
            ``other_s`` and ``outside_s``.
        results: The result folder to write, see :doc:`/reference/result_folder`. ``"auto"`` is the
            folder in which the master looks for it, or else ``mlbench-results/RUN_ID``. All workers
            open it together in :meth:`start`, or else at their first batch. None writes no folder.
        unit: ``"epochs"``, or ``"steps"`` for a run whose epochs mean nothing, because it counts
            training batches.

    Attributes:
        current_epoch: Current epoch, from 0.
        best_epoch: Epoch of the best value of the primary metric.
        best_metric_value: Best value of the primary metric. Before the first value it is the worst
            possible one: -inf, or inf with ``minimize``.
        start_time: Wall-clock time of :meth:`start`, seconds since 1970; None before. Durations are
            not taken from it.
        train_prefix: Prefix of the names of training statistics, ``"train_"``.
        val_prefix: Prefix of the names of validation statistics, ``"val_"``.
        primary_metric: The first metric, or None.
        goal_reached: True after the goal was reached.
        goal_text: The text that the goal returned, or None before the goal is reached.
        time_to_goal_s: Training seconds until the goal was reached, or None before.
        goal_result: The content of the sinks' event ``"goal"``: the goal, the value that reached
            it, and the position, the :meth:`totals` and the collectives at that moment. None
            before, and if a checkpoint that lacks it resumes a run after its goal.
        epoch_stats: Prefixed name to :class:`AverageMeter`, of the current epoch. The meters of the
            loss and the metrics exist before the first value.
        is_training: True if statistics are recorded as training statistics.
        records: Prefixed name to {epoch: mean of the epoch}.
        history: The most recent records ``(epoch, name, value, batch, time_s)``: one for each
            statistic, and one with the name ``"batch_time_s"`` for each batch. ``batch`` is the
            number of batches finished by then, ``time_s`` the seconds since :meth:`start`.
        learning_rate: Learning rate at the start of the latest training round, or None. The rounds
            of :mod:`mlbench_core.controlflow.pytorch` set it.
        batches_per_epoch: Number of batches in an epoch, for the progress bar. It may be set before
            the first epoch. The end of each epoch sets it to the number of batches in that epoch.

    Raises:
        TypeError: ``goal``, ``results``, the name of a step or a sink has the wrong type.
        ValueError: ``history_size`` is below 1, or ``unit`` is unknown.

    Example:
        >>> tracker = Tracker([], run_id="1", rank=0)
        >>> tracker.start()
        >>> for _ in range(3):
        ...     tracker.batch_start()
        ...     tracker.record_batch_fwd_pass()
        ...     tracker.batch_end(samples=32)
        >>> tracker.record_loss(0.5, n=32)
        >>> tracker.epoch_stats["train_loss"].avg
        0.5
        >>> tracker.summary().samples
        96
    """

    def __init__(
        self,
        metrics: Iterable[Any],
        run_id: str | int,
        rank: int,
        goal: Goal | Callable[[], Goal] | None = None,
        communication_steps: str | Iterable[str] | None = None,
        compute_steps: str | Iterable[str] | None = None,
        metrics_steps: str | Iterable[str] | None = None,
        preprocess_steps: str | Iterable[str] | None = None,
        minimize: bool = False,
        *,
        sinks: Iterable[Sink] = (),
        progress: bool | None = None,
        use_cuda: bool | None = None,
        history_size: int = 1000,
        check_times: bool = False,
        results: str | PathLike[str] | None = None,
        unit: str = "epochs",
    ) -> None:
        check_at_least("history_size", history_size, 1)
        self.metrics = list(metrics or ())
        self.run_id = run_id
        self.rank = rank
        self.unit = check_unit(unit)
        self.goal = goal
        self.communication_steps = _steps("communication_steps", communication_steps, ["agg"])
        self.compute_steps = _steps(
            "compute_steps", compute_steps, ["fwd_pass", "comp_loss", "backprop", "opt_step"]
        )
        self.metrics_steps = _steps("metrics_steps", metrics_steps, ["comp_metrics"])
        self.preprocess_steps = _steps("preprocess_steps", preprocess_steps, ["batch_load"])
        self.minimize = minimize
        self.primary_metric: Any = next(iter(self.metrics), None)
        self._sinks = SinkList(sinks)
        self.current_epoch = 0
        self.best_epoch = 0
        self.best_metric_value = _worst_value(minimize)
        self._is_latest_best = False
        self.goal_reached = False
        self.goal_text: str | None = None
        self.time_to_goal_s: float | None = None
        self.goal_result: dict[str, Any] | None = None
        self.start_time: float | None = None
        self.train_prefix = TRAIN_PREFIX
        self.val_prefix = VALIDATION_PREFIX
        self.is_training = True
        self.epoch_stats = self._empty_meters(self.metrics)
        self.records: dict[str, dict[int, float]] = {}
        self.history: deque[tuple[int, str, float, int, float]] = deque(maxlen=history_size)
        self.batches_per_epoch: int | None = None
        self.learning_rate: float | None = None
        self._most_epochs: int | None = None
        self._has_sent_plan = False

        self._validation = _Validation()

        # The start of each interval that is open now, on time.perf_counter(); None if the interval
        # is closed.
        self._start_s: float | None = None
        self._batch_start: float | None = None
        self._mark: float | None = None
        self._validation_start: float | None = None
        # The processor time of this thread at the start of the batch and of the validation.
        self._batch_cpu_s = self._validation_cpu_s = 0.0
        # Wall time of the runs that this one resumes. It is kept as a duration, because
        # perf_counter() of another process has another zero.
        self._earlier_wall_s = 0.0
        self._step_s: dict[str, float] = {}
        self._epoch_ends: deque[Totals] = deque(maxlen=history_size)
        self._counters = Counters()
        self._collectives: CollectiveCounts | None = CollectiveCounts()
        # The number of batches at the last exchange.
        self._last_exchange: int | None = None
        self._batches_in_epoch = 0
        self._batch_times = QuantileSketch()

        self._use_cuda = use_cuda
        self._device: DeviceClock | None = None
        self._joules: Callable[[], float] | None = None
        self._earlier_energy_j: float | None = None
        self._earlier_memory_peak_bytes: int | None = None
        self._check_times = check_times
        self._results = ScriptResults(results)
        self._wanted_progress = progress
        self._progress: ProgressBar | None = None
        self._prepared = False
        self._is_resumed = False
        self._has_started = self._closed = False
        self._exit_key = object()
        # The number of batches when the end of the run was published.
        self._published: int | None = None

    # ------------------------------------------------------------------ phases of a run

    @property
    def goal(self) -> Goal | None:
        """Return the goal, which is called ``(metric_name, value, tracker)``.

        It may be set at any time.
        """
        return self._goal

    @goal.setter
    def goal(self, goal: Goal | Callable[[], Goal] | None) -> None:
        self._goal = as_goal(goal)

    def goal_watches_training(self) -> bool:
        """Return True if a training statistic may reach the goal.

        It is False without a goal, after it was reached, and for a goal whose attribute ``metric``
        names a validation statistic, as that of each goal of the tasks does. For another function
        it is True, because its statistics are not known.
        """
        if self._goal is None or self.goal_reached:
            return False
        return not str(getattr(self._goal, "metric", "")).startswith(self.val_prefix)

    def start(self) -> None:
        """Start the run's wall clock.

        Raises:
            RuntimeError: The clock was started before.
        """
        if self._start_s is not None:
            raise RuntimeError(
                "the tracker was started before; start() is called once, before the first epoch"
            )
        self._begin()
        self.start_time = time.time()

    def train(self) -> None:
        """Record the following statistics as ``train_...``."""
        self.is_training = True

    def validation(self) -> None:
        """Record the following statistics as ``val_...``."""
        # Only at the change: a second call in the same validation must not discard its mean.
        if self.is_training:
            self._validation = _Validation()
        self.is_training = False

    def validation_start(self) -> None:
        """Start the clock of a validation, and a new mean of the primary metric."""
        self._validation = _Validation()
        self._validation_start = time.perf_counter()
        self._validation_cpu_s = work_s()

    def validation_end(self) -> None:
        """Add the time since :meth:`validation_start`; without that call, do nothing.

        The time of a validation inside a batch is not part of that batch.
        """
        if self._validation_start is None:
            return
        elapsed_s = time.perf_counter() - self._validation_start
        self._validation_start = None
        self._counters.validation_s += elapsed_s
        if self._batch_start is not None and self._mark is not None:
            # Both marks move forward by the validation's time, so neither the batch nor the open
            # step includes it.
            self._batch_start += elapsed_s
            self._mark += elapsed_s
            self._batch_cpu_s += work_s() - self._validation_cpu_s
            if self._device is not None:
                self._device.skip()

    def epoch_end(self) -> None:
        """End the epoch: send the times of the steps and start new means.

        Each worker sends its own times. ``<step>`` and ``CumulativeTrainTimeEpoch`` are seconds of
        the epoch, and ``cum_<step>`` are seconds of the run so far, as are ``cum_validation`` and
        ``cum_hidden_communication`` (that ran while training went on). Rank 0 also sends
        ``samples_per_s``, ``tokens_per_s`` (both of this worker in this epoch), ``lr``, and
        ``tokens`` and ``bytes_on_wire`` (both of this worker so far) if they are known. Nothing is
        sent after an epoch without batches.

        After its first epoch, rank 0 sends the metric ``plan``: JSON of the goal and the budget of
        epochs.
        """
        # Times are kept only as totals since the start, so the times of one epoch are the
        # difference of two totals.
        before = Totals()
        if self._epoch_ends:
            before = self._epoch_ends[-1]
        now = self._totals()
        self._epoch_ends.append(now)
        if self._batches_in_epoch:
            numbers = {name: now.of([name]) - before.of([name]) for name in now.steps_s}
            numbers["CumulativeTrainTimeEpoch"] = now.train_s - before.train_s
            for name, total in now.steps_s.items():
                numbers[f"cum_{name}"] = total
            numbers.update(self._other_numbers(before, now))
            with LogMetrics.together():
                for name, value in numbers.items():
                    self._send(name, value)
                    self._sinks.number(name, value, self.current_epoch, self._counters.batches)
            self.batches_per_epoch = self._batches_in_epoch
        self._batches_in_epoch = 0
        if self._progress is not None:
            self._progress.clear()
        # Before the means are reset and the number moves on: the event is about the epoch that
        # ends.
        self._sinks.event("epoch", self._moment)
        self._sinks.call("flush")
        self.reset_epoch_stats()
        self._validation = _Validation()
        self.current_epoch += 1
        self._report_goal(sends=False)
        self._send_plan()

    def epochs(self, most: int, past_goal: bool = False) -> Iterator[int]:
        """Yield the epochs to train, until the goal is reached or the budget is spent.

        A run that continues from a checkpoint yields only the remaining epochs, and none after its
        goal.

        Args:
            most: The budget in epochs.
            past_goal: True to continue after the goal is reached.

        Yields:
            Epoch numbers, from ``current_epoch`` to at most ``most - 1``.

        Example:
            >>> tracker = Tracker([], "1", 0)
            >>> for epoch in tracker.epochs(most=3):
            ...     tracker.goal_reached = epoch == 1
            ...     tracker.epoch_end()
            >>> tracker.current_epoch
            2
        """
        self._most_epochs = most
        for epoch in range(self.current_epoch, most):
            if self.goal_reached and not past_goal:
                return
            yield epoch

    def reset_epoch_stats(self) -> None:
        """Reset the means of the current epoch."""
        self.epoch_stats = self._empty_meters(self.metrics)

    def _empty_meters(self, metrics: Iterable[Any]) -> dict[str, AverageMeter]:
        names = ["loss", *(metric.name for metric in metrics)]
        meters: dict[str, AverageMeter] = {}
        for prefix in (self.train_prefix, self.val_prefix, f"{self.val_prefix}global_"):
            for name in names:
                meters[prefix + name] = AverageMeter()
        return meters

    # ------------------------------------------------------------------ batches and their steps

    def batch_start(self) -> None:
        """Start a batch.

        If another batch is still open, its time up to its last mark counts as training time.
        """
        if self._batch_start is not None or not self._prepared:
            self._before_batch()
        if self._device is not None:
            self._device.batch_start()
        if self._counters.compute_cpu_s is not None:
            self._batch_cpu_s = work_s()
        # Read last, so that the preparation above is not a part of the batch.
        self._batch_start = self._mark = time.perf_counter()

    def batch_end(self, samples: int = 0, tokens: int = 0) -> None:
        """End a batch; without :meth:`batch_start`, do nothing.

        Args:
            samples: Training samples of the batch on this worker, for the throughput.
            tokens: Training tokens of the batch on this worker.
        """
        start = self._batch_start
        if start is None:
            return
        now = time.perf_counter()
        self._batch_start = self._mark = None
        # The clock was read above, so neither this bookkeeping nor the progress bar is a part of
        # the batch.
        counters = self._counters
        if counters.compute_cpu_s is not None:
            counters.compute_cpu_s += work_s() - self._batch_cpu_s
        counters.batches += 1
        self._batches_in_epoch += 1
        if self._device is not None:
            self._device.batch_end()
        else:
            self._book_batch(now - start, now)
        if samples or tokens:
            self.count(samples, tokens)
        if self._progress is not None and self._progress.due():
            self._progress.draw(
                self.current_epoch, self._batches_in_epoch, self.batches_per_epoch, str(self)
            )

    def prepare(self, again: bool = False) -> bool:
        """Choose the clock, as the start of the first batch does.

        Args:
            again: True to choose it again, between batches, because CUDA is in use only now.

        Returns:
            True if it is that of a CUDA device.
        """
        if again:
            self._prepared = False
        if not self._prepared:
            self._before_batch()
        return self._device is not None

    def add_batches(
        self,
        batches: Sequence[tuple[float, float]],
        steps_s: Mapping[str, float],
        cpu_s: float,
        open_s: float = 0.0,
    ) -> None:
        """Add finished batches that the caller has timed on the host, after :meth:`prepare`.

        Args:
            batches: The end of each batch on :func:`time.perf_counter`, and its seconds.
            steps_s: Seconds of their steps.
            cpu_s: Processor seconds of the training thread in them, see
                :func:`~mlbench_core.processor_time.work_s`.
            open_s: Seconds of training in a batch that has not ended, less those of the last call.
        """
        counters = self._counters
        for end_s, seconds in batches:
            counters.batches += 1
            self._book_batch(seconds, end_s)
        self._batches_in_epoch += len(batches)
        counters.train_s += open_s
        for name, seconds in steps_s.items():
            self._step_s[name] = self._step_s.get(name, 0.0) + seconds
        if counters.compute_cpu_s is not None:
            counters.compute_cpu_s += cpu_s

    def record_batch_step(self, name: str) -> None:
        """Mark the end of a step, whose time runs from the previous mark.

        Outside a batch, it does nothing.

        Args:
            name: Any name of a step, including names that are not in the constructor's lists.

        Raises:
            TypeError: ``name`` is not a string.
        """
        mark = self._mark
        if mark is None:
            return
        now = time.perf_counter()
        steps = self._step_s
        if name not in steps:
            if not isinstance(name, str):
                raise TypeError(f"name must be a string, not {name!r}: pass the name of a step")
            steps[name] = 0.0
        if self._device is None:
            steps[name] += now - mark
        else:
            self._device.mark(name)
        # The clock was read before the bookkeeping above. So the bookkeeping counts towards the
        # next step, and the times of the steps add up to the time of the batch.
        self._mark = now

    record_batch_init = _step_method("init")
    record_batch_load = _step_method("batch_load")
    record_batch_fwd_pass = _step_method("fwd_pass")
    record_batch_comp_loss = _step_method("comp_loss")
    record_batch_backprop = _step_method("backprop")
    record_batch_agg = _step_method("agg")
    record_batch_opt_step = _step_method("opt_step")
    record_batch_comp_metrics = _step_method("comp_metrics")

    def record_communication(
        self,
        total_s: float,
        exposed_s: float,
        size_bytes: int,
        *,
        cpu_s: float | None = None,
        exchanges: int | None = None,
    ) -> None:
        """Add communication that may have overlapped with the backward pass.

        Args:
            total_s: Seconds during which communication ran.
            exposed_s: Seconds of exposed communication, for which training waited; limited to
                ``total_s``.
            size_bytes: Bytes that this worker handed to collectives. With more than 0, the batch
                counts as an exchange.
            cpu_s: Seconds of processor time that the training thread used in ``exposed_s``, limited
                to it; None if they were not measured. Those of the whole run are then unknown, also
                those of computation, which are the rest.
            exchanges: Number of batches that sent these bytes; None for the present one.

        Raises:
            ValueError: An argument is negative or not a number.
        """
        check_at_least("total_s", total_s, 0)
        check_at_least("exposed_s", exposed_s, 0)
        check_at_least("size_bytes", size_bytes, 0)
        if cpu_s is not None:
            check_at_least("cpu_s", cpu_s, 0)
        self._counters.communication_total_s += float(total_s)
        exposed_s = float(min(exposed_s, total_s))
        self._add_exposed(exposed_s, cpu_s)
        # The batch contains this part.
        if self._counters.compute_cpu_s is not None and exposed_s > 0:
            if cpu_s is None:
                self._counters.compute_cpu_s = None
            else:
                self._counters.compute_cpu_s -= float(min(cpu_s, exposed_s))
        self._counters.communication_size_bytes += int(size_bytes)
        self._counters.communication_measured = True
        if exchanges is not None:
            check_at_least("exchanges", exchanges, 0)
            self._count_exchanges(exchanges)
        # Several messages of one update are one exchange.
        elif size_bytes > 0 and self._last_exchange != self._counters.batches:
            self._last_exchange = self._counters.batches
            self._count_exchanges(1)

    def charge_validation_average(
        self, seconds: float, size_bytes: int, *, cpu_s: float | None = None
    ) -> None:
        """Add the average of weights for a validation to the training time.

        It counts as exposed communication. Otherwise a method whose workers differ would get the
        average at no cost, just before its goal is checked. Call it outside of a batch and of a
        validation.

        Args:
            seconds: Seconds that the average took.
            size_bytes: Bytes that this worker handed to collectives.
            cpu_s: Seconds of processor time in it, see :meth:`record_communication`.

        Raises:
            ValueError: An argument is negative or not a number.
        """
        check_at_least("seconds", seconds, 0)
        check_at_least("size_bytes", size_bytes, 0)
        if cpu_s is not None:
            check_at_least("cpu_s", cpu_s, 0)
        self._counters.train_s += float(seconds)
        if self.communication_steps:
            step = self.communication_steps[0]
            self._step_s[step] = self._step_s.get(step, 0.0) + float(seconds)
        self._counters.communication_total_s += float(seconds)
        self._add_exposed(float(seconds), cpu_s)
        self._counters.communication_size_bytes += int(size_bytes)
        self._counters.communication_measured = True
        self._count_exchanges(1)

    def _add_exposed(self, exposed_s: float, cpu_s: float | None) -> None:
        """Add exposed communication. Its processor time is known only if that of every part is."""
        counters = self._counters
        earlier_cpu_s = counters.communication_cpu_s
        # Before the first exposed part, None means "none yet". After it, None means "not known",
        # and a sum with an unmeasured part stays unknown.
        if counters.communication_exposed_s <= 0:
            earlier_cpu_s = 0.0
        if cpu_s is not None and earlier_cpu_s is not None:
            counters.communication_cpu_s = earlier_cpu_s + float(min(cpu_s, exposed_s))
        # A part that took no time changes nothing.
        elif exposed_s > 0:
            counters.communication_cpu_s = None
        counters.communication_exposed_s += exposed_s

    def _count_exchanges(self, exchanges: int) -> None:
        if self._counters.exchanges is not None:
            self._counters.exchanges += exchanges

    def record_collective(
        self, op: str, group: int, size_bytes: int, calls: int, overlapped: bool
    ) -> None:
        """Count collectives of training, to predict times on other networks.

        The predictions are those of :mod:`mlbench_core.prediction`.

        Args:
            op: The kind, for example ``"all_reduce"``; ``"neighbors"`` is an exchange with all
                neighbors at once, and ``"pair"`` one with one other worker.
            group: Number of workers that take part, this one included.
            size_bytes: Payload of this worker in one call.
            calls: Number of calls.
            overlapped: True if training went on while they ran.
        """
        self._counters.communication_measured = True
        if self._collectives is not None:
            self._collectives[op, group, size_bytes, overlapped] += calls

    def book_as_communication(self, step: str, seconds: float) -> None:
        """Move exposed communication time from another step to the first communication step.

        Args:
            step: The step in which training waited, for example ``"backprop"`` if gradients are
                averaged during the backward pass.
            seconds: Seconds that training waited. At most the recorded time of the step is moved.

        Raises:
            ValueError: ``seconds`` is negative or not a number.
        """
        check_at_least("seconds", seconds, 0)
        moved = min(float(seconds), self._step_s.get(step, 0.0))
        if moved > 0 and self.communication_steps:
            target = self.communication_steps[0]
            self._step_s[step] -= moved
            self._step_s[target] = self._step_s.get(target, 0.0) + moved

    def count(self, samples: int = 0, tokens: int = 0) -> None:
        """Count training data, for the throughput.

        Args:
            samples: Samples that this worker trained on.
            tokens: Tokens that this worker trained on.

        Raises:
            ValueError: An argument is negative.
        """
        counters = self._counters
        if samples:
            check_at_least("samples", samples, 0)
            counters.samples += int(samples)
        if tokens:
            check_at_least("tokens", tokens, 0)
            counters.tokens += int(tokens)

    # ------------------------------------------------------------------ statistics

    def record_loss(self, value: float, n: float = 1, log_to_api: bool = False) -> None:
        """Record the loss, see :meth:`record_stat`.

        Args:
            value: Mean loss over ``n`` samples.
            n: Number of samples.
            log_to_api: True to send it to the master.
        """
        self.record_stat("loss", value, n, log_to_api)

    def record_metric(
        self, metric: Any, value: float, n: float = 1, log_to_api: bool = False
    ) -> None:
        """Record the value of a metric, see :meth:`record_stat`.

        In validation, the weighted mean of the primary metric may become the best value, see
        :meth:`is_best`. The mean starts at :meth:`validation_start`, or when :meth:`validation`
        ends training. A value that :meth:`update_primary_metric` receives in the same validation
        replaces this mean.

        Args:
            metric: The metric, or its name.
            value: Its mean over ``n`` samples.
            n: Number of samples.
            log_to_api: True to send it to the master.
        """
        if isinstance(metric, str):
            name = metric
        else:
            name = metric.name
        value = _number(self._prefix + name, value)
        # The best value is updated before the statistic is recorded, because a goal may read it.
        primary = self.primary_metric
        if not self.is_training and primary is not None and name == primary.name:
            self._add_to_validation(value, n)
        self.record_stat(name, value, n, log_to_api)

    def position(self) -> tuple[int, float]:
        """Return the number of finished batches and the seconds since :meth:`start`."""
        return self._counters.batches, self._wall_s()

    def record_stat(
        self,
        name: str,
        value: float,
        n: float = 1,
        log_to_api: bool = False,
        *,
        at: tuple[int, float] | None = None,
    ) -> None:
        """Record a statistic and pass it to the goal.

        Args:
            name: Its name, to which the prefix ``train_`` or ``val_`` is added. A statistic of all
                workers is named ``global_<name>``.
            value: A number, or a tensor of one element: the mean over ``n`` samples.
            n: Number of samples, the weight in the mean of the epoch.
            log_to_api: True to send it to the master.
            at: The :meth:`position` that the value belongs to, if it was read from the device
                later; None for now.

        Raises:
            TypeError: ``value`` is not a number.
            ValueError: ``n`` is negative.
        """
        name = self._prefix + name
        value = _number(name, value)
        meter = self.epoch_stats.get(name)
        if meter is None:
            meter = self.epoch_stats[name] = AverageMeter()
        meter.update(value, n)
        by_epoch = self.records.setdefault(name, {})
        by_epoch[self.current_epoch] = meter.avg
        # Dictionaries keep insertion order, so the first key is the oldest epoch.
        if len(by_epoch) > (self.history.maxlen or 1):
            del by_epoch[next(iter(by_epoch))]
        if at is None:
            at = self.position()
        batch, time_s = at
        self.history.append((self.current_epoch, name, value, batch, time_s))
        if log_to_api:
            self._send(name, value)
        if self._sinks:
            self._sinks.record(name, value, self.current_epoch, batch, time_s)
        if self._goal is not None and not self.goal_reached:
            # Last, because a goal may read the mean, the records and the history with this value.
            self._check_goal(name, value)

    def update_primary_metric(self, new_metric_value: float) -> None:
        """Set the value of the primary metric after a validation.

        The first value is always the best so far. A later value must be strictly better than the
        best. A value that is not a number (nan) is never the best.

        Args:
            new_metric_value: A number, or a tensor of one element.
        """
        value = _number("the primary metric", new_metric_value)
        # Discard the mean of the values that record_metric received in this validation.
        best_before = self._validation.best_before
        if best_before is not None:
            self.best_metric_value, self.best_epoch, self._is_latest_best = best_before
            self._validation.best_before = None
        self._validation.has_final_value = True
        self._compare_with_best(value)

    def _compare_with_best(self, value: float) -> None:
        """Set the latest value of the primary metric, and the best value if it is better."""
        # A comparison with nan is False, so nan is never the best.
        if self.minimize:
            better = value < self.best_metric_value
        else:
            better = value > self.best_metric_value
        self._is_latest_best = better
        if better:
            self.best_metric_value = value
            self.best_epoch = self.current_epoch

    def _add_to_validation(self, value: float, n: float) -> None:
        """Add a value to the mean of this validation, and compare the mean with the best before."""
        mean = self._validation.mean
        is_first = mean.count == 0
        mean.update(value, n)
        if self._validation.has_final_value or mean.count == 0:
            return
        best_before = self._validation.best_before
        if best_before is None:
            best_before = (self.best_metric_value, self.best_epoch, self._is_latest_best)
            self._validation.best_before = best_before
        self.best_metric_value, self.best_epoch, self._is_latest_best = best_before
        latest = mean.avg
        if is_first:
            # The value itself: a mean of one value (v * n / n) may differ from it by rounding.
            latest = value
        self._compare_with_best(latest)

    def is_best(self) -> bool:
        """Return True if the latest value of the primary metric is of this epoch and the best."""
        return self._is_latest_best and self.best_epoch == self.current_epoch

    # ------------------------------------------------------------------ totals

    def get_total_train_time(self) -> float:
        """Return the seconds inside training batches, without validation."""
        self._drain()
        return self._counters.train_s

    def get_total_val_time(self) -> float:
        """Return the seconds of validation."""
        return self._counters.validation_s

    @property
    def batch_times(self) -> list[float]:
        """Return the seconds of the most recent batches, those in ``history``."""
        self._drain()
        return [entry[2] for entry in self.history if entry[1] == "batch_time_s"]

    def totals(self) -> dict[str, Any]:
        """Return seconds and counts since the start of the run.

        On CUDA they lack the batches that the device has not finished.

        Returns:
            ``wall_s``, ``train_s``, ``validation_s``, ``compute_s``, ``communication_s``,
            ``metrics_s``, ``preprocess_s``, ``steps_s`` (by name), ``batches``, ``samples``,
            ``tokens``, ``communication_total_s``, ``communication_exposed_s``,
            ``communication_cpu_s``, ``compute_cpu_s``, ``communication_size_bytes``,
            ``communication_wire_bytes``, ``exchanges`` and ``communication_measured``, see
            :class:`~mlbench_core.tracking.summary.TrackerSummary`. Parts before a resumption count.
        """
        now = self._totals()
        counters = asdict(self._counters)
        # In an open batch, its communication is counted already, and its computation is not.
        if counters["compute_cpu_s"] is not None:
            counters["compute_cpu_s"] = max(0.0, counters["compute_cpu_s"])
        return {
            "wall_s": self._wall_s(),
            "compute_s": now.of(self.compute_steps),
            "communication_s": now.of(self.communication_steps),
            "metrics_s": now.of(self.metrics_steps),
            "preprocess_s": now.of(self.preprocess_steps),
            "steps_s": dict(now.steps_s),
            **counters,
            "communication_wire_bytes": self._wire_bytes(),
        }

    def summary(self) -> TrackerSummary:
        """Return the totals of the run so far.

        On CUDA they lack the batches that the device has not finished.
        """
        best_value: float | None = None
        best_epoch: int | None = None
        if self._has_best:
            best_value, best_epoch = self.best_metric_value, self.best_epoch
        return TrackerSummary(
            run_id=str(self.run_id),
            rank=self.rank,
            epochs=self.current_epoch,
            **self.totals(),
            batch_p50_s=self._batch_times.quantile(0.5),
            batch_p90_s=self._batch_times.quantile(0.9),
            batch_p99_s=self._batch_times.quantile(0.99),
            memory_peak_bytes=self._memory_peak_bytes(),
            energy_j=self._energy_j(),
            best_metric_value=best_value,
            best_epoch=best_epoch,
            goal_reached=self.goal_reached,
            goal_text=self.goal_text,
            time_to_goal_s=self.time_to_goal_s,
        )

    def publish_summary(self, world_size: int = 1) -> None:
        """Send the totals of the run to the master as one metric ``summary``, a JSON text.

        Only rank 0 sends. ``mlbench run --wait`` and ``mlbench charts`` draw their tables and
        charts from it. The metric ``goal`` is sent again, see :meth:`close`.

        Args:
            world_size: Number of workers. The throughput of the run is this worker's throughput
                times this number, since all workers have parts of equal size and wait for one
                another in every step.
        """
        if self.rank == 0:
            self._send("summary", json.dumps(self.summary().report(world_size)))
        self._report_goal()
        send_at_exit(self._exit_key, None)
        # close() compares this number: it sends the goal again only if batches were trained since.
        self._published = self._counters.batches

    def __str__(self) -> str:
        """Return one line: epoch, means of its statistics, best value and training time.

        Epochs count from 0, as in the log. Between two epochs, the line has the number of finished
        epochs instead, and always that of steps if they are the unit.
        """
        count, meters = self.current_epoch, self.epoch_stats.values()
        has_begun = self._batches_in_epoch > 0 or any(meter.count for meter in meters)
        parts = [f"Epoch {count}"]
        if self.unit == "steps":
            parts = [f"{length_text(None, self._counters.batches, self.unit)} done"]
        elif count == 1 and not has_begun:
            parts = ["1 epoch done"]
        elif count > 1 and not has_begun:
            parts = [f"{count} epochs done"]
        global_prefix = f"{self.val_prefix}global_"
        for name, meter in self.epoch_stats.items():
            # A statistic of all workers replaces this worker's own, to keep the line short.
            global_meter = self.epoch_stats.get(global_prefix + name.removeprefix(self.val_prefix))
            if meter.count and (global_meter is None or not global_meter.count):
                parts.append(f"{name} {meter.avg:.4g}")
        if self._has_best:
            metric = getattr(self.primary_metric, "name", "metric")
            place = ""
            if self.unit == "epochs":
                place = f" (epoch {self.best_epoch})"
            parts.append(f"best {metric} {self.best_metric_value:.4g}{place}")
        parts.append(f"train time {self._counters.train_s:.1f} s")
        if self.goal_reached:
            parts.append("goal reached")
        return " | ".join(parts)

    # ------------------------------------------------------------------ end, and state

    def close(self) -> None:
        """End the run: flush and close the sinks, and send the remaining numbers to the master.

        Rank 0 sends the metric ``goal`` again, also if the goal was missed. The call waits for the
        device, and at most 5 seconds for the master. A second call does nothing. A tracker that is
        not closed is ended when the interpreter exits.
        """
        self.end()

    def end(self, at_exit: bool = False, error: BaseException | None = None) -> None:
        """Do the work of :meth:`close`.

        Args:
            at_exit: True to wait neither for the device nor for the master. A device that has
                failed may never finish its last batch, and the client of the master delivers its
                numbers at the exit itself.
            error: The exception that ended the run, for the sinks.
        """
        if self._closed:
            return
        # Set first: after an error below, the handler at the exit must not end the tracker again.
        self._closed = True
        if self._progress is not None:
            self._progress.clear()
            self._progress = None
        if self._device is not None:
            # Before the totals are read, which would lack the batches that the device has yet to
            # finish.
            self._device.drain(wait=not at_exit)
        if self._check_times:
            for gap in self.summary().gaps():
                logger.warning("run %s: %s", self.run_id, gap)
        # A tracker that only validates a checkpoint does not report the goal of the run.
        if self._has_started and self._published != self._counters.batches:
            self._report_goal()
        send_at_exit(self._exit_key, None)
        if at_exit:
            # Nobody passes an exception at the exit, but the interpreter keeps the one that ended
            # it.
            error = uncaught_error()
        state = state_after(error)
        if self._sinks:
            self._sinks.event("end", lambda: {"state": state, **self._end_event()})
            self._sinks.call("write_summary", self.summary().to_dict())
            self._sinks.call("flush")
            self._sinks.call("close")
        failure = error
        # A script may end well by sys.exit(), which is an exception too.
        if state == "finished":
            failure = None
        self._results.end(failure, alone=at_exit)
        if not at_exit:
            LogMetrics.flush(_FLUSH_TIMEOUT_S)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error=error)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain containers.

        It can be written as JSON and read by ``torch.load(weights_only=True)``. It does not include
        an open batch, the sinks, the goal and the progress bar. On CUDA, the call waits until the
        device has finished the batches that the state counts.
        """
        if self._device is not None:
            self._device.drain(wait=True)
        state: dict[str, Any] = {"version": _STATE_VERSION}
        for name in _STATE_ATTRIBUTES:
            state[name.lstrip("_")] = getattr(self, name)
        state.update(asdict(self._counters))
        for group in _STEP_GROUPS:
            state[group] = list(getattr(self, group))
        state["metrics"] = [str(metric.name) for metric in self.metrics]
        # JSON has no infinities, so None means "no value yet".
        state["best_metric_value"] = None
        if self._has_best:
            state["best_metric_value"] = self.best_metric_value
        state["goal_result"] = self.goal_result
        state["steps_s"] = dict(self._step_s)
        state["wall_s"] = self._wall_s()
        state["energy_j"] = self._energy_j()
        state["memory_peak_bytes"] = self._memory_peak_bytes()
        state["batch_times"] = self._batch_times.state()
        state["collectives"] = None
        if self._collectives is not None:
            state["collectives"] = self._collectives.as_list(merged_if_many=False)
        state["epoch_stats"] = {}
        for name, meter in self.epoch_stats.items():
            if meter.count:
                state["epoch_stats"][name] = [meter.val, meter.sum, meter.count]
        state["epoch_ends"] = list(map(asdict, self._epoch_ends))
        state["records"] = {}
        for name, by_epoch in self.records.items():
            # Pairs, because JSON turns the keys of a dictionary into text.
            state["records"][name] = list(map(list, by_epoch.items()))
        state["history"] = list(map(list, self.history))
        state["latest"] = dict(self._sinks.latest)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the :meth:`state_dict` of another tracker. Times continue to accumulate.

        Step lists and ``minimize`` are restored. Metrics are restored only if this tracker was made
        without any; only their names are then known.

        Args:
            state: The result of :meth:`state_dict`, also after a round trip through JSON.

        Raises:
            CheckpointError: ``state`` is not the state of a tracker. This tracker is then
                unchanged.
        """
        # All attributes are computed before the first is set, so a damaged state changes nothing.
        try:
            attributes = self._attributes_of(state)
            latest = {str(name): list(entry) for name, entry in state.get("latest", {}).items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"state must be that of a tracker (version {_STATE_VERSION}), but "
                f"{type(error).__name__}: {error}: pass the result of Tracker.state_dict()"
            ) from error
        for name, value in attributes.items():
            setattr(self, name, value)
        # Open intervals, and events that the device has not passed, belong to the times that were
        # just replaced. The next batch creates the clock of the device again.
        self._batch_start = self._mark = self._validation_start = None
        self._device = None
        self._prepared = False
        # The same holds for the energy, the mean of a validation and the place of an exchange.
        self._joules = None
        self._validation = _Validation()
        self._last_exchange = None
        self._is_resumed = True
        self._sinks.resume(self._counters.batches, latest)
        # The restored wall time covers everything before now.
        if self._start_s is not None:
            self._start_s = time.perf_counter()

    def _attributes_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes of a tracker with the given state."""
        if state["version"] != _STATE_VERSION:
            raise ValueError(f"version {state['version']!r}")
        new: dict[str, Any] = {name: state[name.lstrip("_")] for name in _STATE_ATTRIBUTES}
        counts = {
            # Checkpoints of an earlier version lack these four.
            "exchanges": None,
            "communication_cpu_s": None,
            "compute_cpu_s": None,
            "communication_measured": bool(state["communication_size_bytes"]),
            **state,
        }
        new["_counters"] = Counters(
            **{entry.name: counts[entry.name] for entry in fields(Counters)}
        )
        # A checkpoint from before they were counted has none, and half a run's would be wrong.
        new["_collectives"] = state.get("collectives")
        if new["_collectives"] is not None:
            new["_collectives"] = CollectiveCounts.from_list(new["_collectives"])
        for group in _STEP_GROUPS:
            new[group] = _steps(group, state[group], [])
        new["best_metric_value"] = state["best_metric_value"]
        if new["best_metric_value"] is None:
            new["best_metric_value"] = _worst_value(new["minimize"])
        if not self.metrics and state["metrics"]:
            new["metrics"] = [SimpleNamespace(name=name) for name in state["metrics"]]
            new["primary_metric"] = new["metrics"][0]
        meters = self._empty_meters(new.get("metrics", self.metrics))
        for name, (val, total, count) in state["epoch_stats"].items():
            meters[name] = meter = AverageMeter()
            meter.val, meter.sum, meter.count = val, total, count
            meter.avg = 0
            if count:
                meter.avg = total / count
        new["epoch_stats"] = meters
        new["records"] = {}
        for name, pairs in state["records"].items():
            new["records"][name] = {int(epoch): value for epoch, value in pairs}
        new["history"] = deque(map(tuple, state["history"]), maxlen=self.history.maxlen)
        # Checkpoints that were written before these entries existed lack them.
        new["goal_result"] = state.get("goal_result")
        new["_earlier_memory_peak_bytes"] = state.get("memory_peak_bytes")
        ends = [Totals(**totals) for totals in state.get("epoch_ends", ())]
        new["_epoch_ends"] = deque(ends, maxlen=self._epoch_ends.maxlen)
        new["_batch_times"] = sketch = QuantileSketch()
        sketch.load(state["batch_times"])
        new["_step_s"] = {str(name): float(seconds) for name, seconds in state["steps_s"].items()}
        new["_earlier_wall_s"] = float(state["wall_s"])
        new["_earlier_energy_j"] = state["energy_j"]
        return new

    # ------------------------------------------------------------------ internals

    @property
    def _prefix(self) -> str:
        if self.is_training:
            return self.train_prefix
        return self.val_prefix

    @property
    def _has_best(self) -> bool:
        return self.best_metric_value != _worst_value(self.minimize)

    def _before_batch(self) -> None:
        """Finish a batch that was left open; before the first, prepare clocks and progress bar."""
        if self._batch_start is not None and self._mark is not None and self._device is None:
            self._counters.train_s += self._mark - self._batch_start
        if self._prepared:
            return
        self._prepared = True
        self._begin()
        # Checked here and not in the constructor, because a script may initialize CUDA after it
        # creates the tracker.
        if self._use_cuda or (self._use_cuda is None and cuda_in_use()):
            self._device = DeviceClock(self._book_step, self._book_batch)
            self._joules = energy_counter()
        if self._device is not None or not computes_in_this_thread():
            self._counters.compute_cpu_s = None
        if self._progress is None and wants_progress(self._wanted_progress, self.rank):
            self._progress = ProgressBar()

    def _book_step(self, name: str, seconds: float) -> None:
        self._step_s[name] += seconds

    def _book_batch(self, seconds: float, end_s: float | None = None) -> None:
        counters = self._counters
        counters.train_s += seconds
        self._batch_times.add(seconds)
        wall_s = self._wall_s(end_s)
        self.history.append((self.current_epoch, "batch_time_s", seconds, counters.batches, wall_s))

    def _drain(self) -> None:
        if self._device is not None:
            self._device.drain()

    def _totals(self) -> Totals:
        """Return the totals so far, of the batches that the device has finished."""
        self._drain()
        counters = self._counters
        hidden_s = counters.communication_total_s - counters.communication_exposed_s
        times = (counters.train_s, counters.validation_s, dict(self._step_s))
        return Totals(*times, max(0.0, hidden_s), counters.samples, counters.tokens)

    def _other_numbers(self, before: Totals, now: Totals) -> dict[str, float]:
        """Return the numbers of an epoch that are not times of steps, as far as they are known."""
        numbers: dict[str, float] = {}
        if now.validation_s:
            numbers["cum_validation"] = now.validation_s
        if now.hidden_communication_s:
            numbers["cum_hidden_communication"] = now.hidden_communication_s
        if self.rank != 0:
            return numbers
        train_s = now.train_s - before.train_s
        for name in ("samples", "tokens"):
            count = getattr(now, name) - getattr(before, name)
            if count > 0 and train_s > 0:
                numbers[f"{name}_per_s"] = count / train_s
        if self.learning_rate is not None:
            numbers["lr"] = self.learning_rate
        # Dashboards draw curves against these two.
        if now.tokens:
            numbers["tokens"] = now.tokens
        wire_bytes = self._wire_bytes()
        if wire_bytes:
            numbers["bytes_on_wire"] = wire_bytes
        return numbers

    def _wire_bytes(self) -> int | None:
        """Return the bytes that this worker put on the wire so far; None if they are unknown."""
        if self._collectives is None:
            return None
        return total_wire_bytes(self._collectives.as_list())

    def _wall_s(self, now: float | None = None) -> float:
        if self._start_s is None:
            return self._earlier_wall_s
        if now is None:
            now = time.perf_counter()
        return self._earlier_wall_s + (now - self._start_s)

    def _energy_j(self) -> float | None:
        if self._joules is None:
            return self._earlier_energy_j
        return (self._earlier_energy_j or 0.0) + self._joules()

    def _begin(self) -> None:
        """Start the wall clock, and notify the sinks; a second call does nothing."""
        is_first, self._has_started = not self._has_started, True
        if is_first:
            sinks = self._results.open(self, self._is_resumed)
            self._sinks.extend(sinks)
            # Its result would be lost if nothing else kept the tracker until the exit.
            end_at_exit(self, keep=bool(sinks))
        if self._start_s is None:
            self._start_s = time.perf_counter()
        if is_first:
            start: dict[str, Any] = {
                "resumed": self._is_resumed,
                "epoch": self.current_epoch,
                "step": self._counters.batches,
            }
            if self._is_resumed:
                start["latest"] = dict(self._sinks.latest)
            self._sinks.event("start", lambda: start)
            # Such a run may never end an epoch.
            if self.unit == "steps":
                self._send_plan()

    def _moment(self) -> dict[str, Any]:
        totals = self.totals()
        return {
            "epoch": self.current_epoch,
            "step": totals["batches"],
            "time_s": totals["wall_s"],
            "totals": totals,
        }

    def _end_event(self) -> dict[str, Any]:
        """Return the content of the event ``"end"``."""
        totals, summary = self.totals(), self.summary()
        event: dict[str, Any] = {
            "time_s": totals["wall_s"],
            "totals": totals,
            "batch_times": self._batch_times.state(),
        }
        for name in ("epochs", "best_metric_value", "best_epoch", "memory_peak_bytes", "energy_j"):
            event[name] = getattr(summary, name)
        event["collectives"] = self._collectives_so_far()
        return event

    def _collectives_so_far(self) -> list[dict[str, Any]] | None:
        if self._collectives is None:
            return None
        return self._collectives.as_list()

    def _memory_peak_bytes(self) -> int | None:
        peaks = (self._earlier_memory_peak_bytes, memory_peak_bytes())
        return max((peak for peak in peaks if peak is not None), default=None)

    def _check_goal(self, name: str, value: float) -> None:
        """Call the goal. If it is reached, record that; rank 0 sends the result."""
        assert self._goal is not None
        text = self._goal(name, value, self)
        if text is None:
            return
        self.goal_reached = True
        self.goal_text = str(text)
        # Training time and not wall time: neither validation nor checkpoints count.
        self.time_to_goal_s = self.get_total_train_time()
        # The goal of a fixed training time has the best value so far as its result.
        best_value = getattr(self._goal, "best_value", None)
        if best_value is not None:
            value = best_value(value, self)
        self.goal_result = {
            **self._moment(),
            **GoalAim.of(self._goal).to_dict(),
            "value": finite(value),
            "text": self.goal_text,
            "time_to_goal_s": self.time_to_goal_s,
            # With some methods, the collectives change during a run.
            "collectives": self._collectives_so_far(),
        }
        logger.info("goal reached: %s", text)
        result: dict[str, float | str] = {
            "TaskResult": self.goal_text,
            "TotalCumulativeTrainTime": self.time_to_goal_s,
        }
        groups = (self.preprocess_steps, self.compute_steps, self.communication_steps)
        for steps in (*groups, self.metrics_steps, self._step_s):
            for step in steps:
                result[f"global_cum_{step}"] = self._step_s.get(step, 0.0)
        for key, entry in result.items():
            if self.rank == 0:
                self._send(key, entry)
            self._sinks.number(key, entry, self.current_epoch, self._counters.batches)
        self._report_goal()
        self._sinks.event("goal", lambda: self.goal_result or {})

    def _report_goal(self, sends: bool = True) -> None:
        """Send the metric ``goal``, and keep it for the end of the process.

        It is then sent again, also if this tracker has been deleted before.

        Args:
            sends: False to keep it only.
        """
        if self.rank != 0:
            return
        metric = goal_metric(self)
        if metric is None:
            return
        text = json.dumps(metric)
        if sends:
            self._send("goal", text)
        send_at_exit(self._exit_key, (self.run_id, self.rank, self.current_epoch, "goal", text))

    def _send_plan(self) -> None:
        """Send the goal and the budget of epochs once, for the progress that the master shows."""
        in_steps = self.unit == "steps"
        has_plan = in_steps or self._goal is not None or self._most_epochs is not None
        if self.rank != 0 or self._has_sent_plan or not has_plan:
            return
        self._has_sent_plan = True
        plan = {**GoalAim.of(self._goal).to_dict(), "max_epochs": self._most_epochs}
        if in_steps:
            plan["unit"] = self.unit
        self._send("plan", json.dumps(plan))

    def _send(self, name: str, value: float | str) -> None:
        # The master draws curves against this number.
        place = self.current_epoch
        if self.unit == "steps":
            place = self._counters.batches
        LogMetrics.log(self.run_id, self.rank, place, name, value)


def _worst_value(minimize: bool) -> float:
    """Return the best value of a metric before its first value."""
    if minimize:
        return float("inf")
    return float("-inf")


def _steps(argument: str, steps: str | Iterable[str] | None, default: list[str]) -> list[str]:
    """Return the names of a group of steps as a list; a single string is one name."""
    if steps is None:
        return default
    if isinstance(steps, str):
        steps = [steps]
    names = list(steps)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument} must be names of steps, which are strings, not {name!r}")
    return names


def _number(name: str, value: Any) -> float:
    """Return a plain number."""
    if type(value) in (int, float):
        return value
    # A tensor is converted, because it would keep its autograd graph alive.
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a number or a tensor of one element, not {value!r}"
        ) from error
