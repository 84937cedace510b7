"""Add up the times of an observed script's steps, and pass them on to a tracker now and then.

A step of a small model takes a millisecond. Code that runs once in a step is mostly out of the
processor's caches by the next one, so its cost grows with its length: a tracker's bookkeeping took
five times as long there as in a loop. Here, a step only appends moments to a list, which takes no
function in Python. The sums are made once in a while.
"""

from __future__ import annotations

import time
from collections import defaultdict

from mlbench_core.processor_time import work_s
from mlbench_core.tracking.tracker import Tracker

__all__ = ["BATCH_END", "HostTimes"]

BATCH_END = "end of the batch"
"""The name of the mark that ends a batch. The time before it belongs to the step ``other``."""


class HostTimes:
    """The times of steps on the host's clock, which a tracker receives with :meth:`pass_on`.

    Attributes:
        marks: Append a pair at the end of a step: its name, and the moment on
            :func:`time.perf_counter`. The time since the mark before belongs to the step. After
            :data:`BATCH_END`, the next batch begins at once.

    Args:
        tracker: Receives the times.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.marks: list[tuple[str, float]] = []
        self._batches: list[tuple[float, float]] = []
        self._steps_s: defaultdict[str, float] = defaultdict(float)
        self._batch_s = self._mark_s = 0.0
        # Seconds of an open batch that the tracker has already.
        self._passed_s = 0.0
        self._cpu_s = 0.0
        self._validation: tuple[float, float] | None = None

    def batch_start(self) -> None:
        """Start a batch now, after :meth:`pass_on`."""
        self._cpu_s = work_s()
        self._batch_s = self._mark_s = time.perf_counter()

    def validation_start(self) -> None:
        """Start a validation in the middle of a batch."""
        self.add_up()
        # Around the tracker's readings, so that no moment is both training and validation.
        self._validation = time.perf_counter(), work_s()
        self._tracker.validation_start()

    def validation_end(self) -> None:
        """Leave a validation out of its batch; without one, do nothing."""
        self._tracker.validation_end()
        if self._validation is not None:
            begin_s, cpu_s = self._validation
            elapsed_s = time.perf_counter() - begin_s
            self._batch_s += elapsed_s
            self._mark_s += elapsed_s
            self._cpu_s += work_s() - cpu_s
            self._validation = None

    def pass_on(self) -> None:
        """Pass the times since the last call on, those of a batch that has not ended included."""
        self.add_up()
        cpu_s = work_s()
        open_s = self._mark_s - self._batch_s
        passed_s, self._passed_s = self._passed_s, open_s
        self._tracker.add_batches(
            self._batches, self._steps_s, cpu_s - self._cpu_s, open_s - passed_s
        )
        self._batches = []
        self._steps_s.clear()
        self._cpu_s = cpu_s

    def add_up(self) -> None:
        """Add the times of the marks up, and forget the marks."""
        for name, now in self.marks:
            if name == BATCH_END:
                self._steps_s["other"] += now - self._mark_s
                self._batches.append((now, now - self._batch_s))
                self._batch_s = now
            else:
                self._steps_s[name] += now - self._mark_s
            self._mark_s = now
        self.marks.clear()
