"""Give the times of a tracker by phase, and by step in each epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

from mlbench_core.tracking.summary import Totals

__all__ = ["PhaseTimes"]


class PhaseTimes:
    """Times by phase, a part of :class:`~mlbench_core.tracking.tracker.Tracker`.

    A phase is a group of steps: compute, communication, metrics and preprocess. All times are in
    seconds, include the parts before a run was resumed, and on CUDA exclude the batches that the
    device has not finished.

    Attributes:
        communication_steps: Names of the steps that count as communication.
        compute_steps: Names of the steps that count as computation.
        metrics_steps: Names of the steps that count as computing metrics.
        preprocess_steps: Names of the steps that count as loading data.
    """

    communication_steps: list[str]
    compute_steps: list[str]
    metrics_steps: list[str]
    preprocess_steps: list[str]
    _step_s: dict[str, float]
    _epoch_ends: deque[Totals]

    def _totals(self) -> Totals:
        """Return the totals so far."""
        raise NotImplementedError

    def get_total_compute_time(self) -> float:
        """Return the seconds of the compute steps."""
        return self._total_of(self.compute_steps)

    def get_total_communication_time(self) -> float:
        """Return the seconds of the communication steps, which are exposed communication."""
        return self._total_of(self.communication_steps)

    def get_total_metrics_time(self) -> float:
        """Return the seconds of the metrics steps."""
        return self._total_of(self.metrics_steps)

    def get_total_preprocess_time(self) -> float:
        """Return the seconds of the preprocess steps."""
        return self._total_of(self.preprocess_steps)

    @property
    def epoch_metrics(self) -> dict[str, list[float]]:
        """Return the seconds of each step in each epoch.

        The current epoch is last if it has any time.
        In a long run each of the last ``history_size`` epochs has an entry. The first entry then
        also includes all epochs before it.
        """
        return {name: self._by_epoch(partial(Totals.of, steps=[name])) for name in self._step_s}

    @property
    def cumulative_train_time(self) -> list[float]:
        """Return the seconds inside training batches in each epoch, see :attr:`epoch_metrics`.

        The sum is the total.
        """
        return self._by_epoch(lambda totals: totals.train_s)

    @property
    def cumulative_val_time(self) -> list[float]:
        """Return the seconds of validation in each epoch."""
        return self._by_epoch(lambda totals: totals.validation_s)

    @property
    def cumulative_compute_time(self) -> list[float]:
        """Return the seconds of the compute steps in each epoch."""
        return self._by_epoch(lambda totals: totals.of(self.compute_steps))

    @property
    def cumulative_communication_time(self) -> list[float]:
        """Return the seconds of the communication steps in each epoch."""
        return self._by_epoch(lambda totals: totals.of(self.communication_steps))

    @property
    def cumulative_metrics_time(self) -> list[float]:
        """Return the seconds of the metrics steps in each epoch."""
        return self._by_epoch(lambda totals: totals.of(self.metrics_steps))

    @property
    def cumulative_preprocess_time(self) -> list[float]:
        """Return the seconds of the preprocess steps in each epoch."""
        return self._by_epoch(lambda totals: totals.of(self.preprocess_steps))

    def _total_of(self, steps: Iterable[str]) -> float:
        return self._totals().of(steps)

    def _by_epoch(self, pick: Callable[[Totals], float]) -> list[float]:
        """Return the growth of one of the totals in each epoch."""
        totals, now = [Totals(), *self._epoch_ends], self._totals()
        # The current epoch counts if it has any time.
        if now != totals[-1]:
            totals.append(now)
        return [pick(after) - pick(before) for before, after in pairwise(totals)]
