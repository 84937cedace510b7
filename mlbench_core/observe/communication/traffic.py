"""Add up the communication of a worker."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from mlbench_core.observe.communication.ddp_times import DDPTimes
from mlbench_core.tracking.clock import cuda_event, cuda_in_use
from mlbench_core.tracking.tracker import Tracker

__all__ = ["Traffic"]

# Older flights than this number are forgotten.
_MOST_FLIGHTS = 1000


class Traffic:
    """The communication of one worker between two readings.

    Attributes:
        counts: Calls by kind, group size, bytes of one call, and overlap.
        in_hook: True during DDP's hook.
        timed: The times of DDP models that take them themselves.
        size_bytes: Bytes that this worker handed to collectives in this step.
        worked_s: Seconds of processor time in the waits of the training thread.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, int, int, bool]] = Counter()
        self.in_hook = False
        self.timed: list[DDPTimes] = []
        self.size_bytes = 0
        self._steps_bytes = self._exchanges = 0
        self.worked_s = 0.0
        # Begins and ends of DDP's buckets in this backward pass: seconds, or CUDA events.
        self._begins: list[Any] = []
        self._ends: list[Any] = []
        self._on_device: list[tuple[list[Any], list[Any]]] = []
        self._exposed_s = 0.0
        self._hidden_s = 0.0
        self._waited_s = 0.0
        # Times in which collectives were on their way, in their order and apart from each other.
        self._flights: deque[tuple[float, float]] = deque(maxlen=_MOST_FLIGHTS)

    def add(self, op: str, group: int, size_bytes: int, overlapped: bool, calls: int = 1) -> None:
        """Count calls of a collective."""
        self.counts[op, group, size_bytes, overlapped] += calls
        self.size_bytes += calls * size_bytes

    def add_hidden(self, begin_s: float, end_s: float) -> None:
        """Add the time of a collective during which training went on.

        If several collectives are on their way at once, each moment counts once.

        Args:
            begin_s: Moment at which it was sent, on a clock that stands still while training waits.
            end_s: Moment at which training begins to wait for it, not before that of the last call.
        """
        self._hidden_s += end_s - begin_s
        first_s = begin_s
        while self._flights and self._flights[-1][1] >= begin_s:
            other_begin_s, other_end_s = self._flights.pop()
            self._hidden_s -= other_end_s - max(other_begin_s, begin_s)
            first_s = min(first_s, other_begin_s)
        self._flights.append((first_s, end_s))

    def bucket_begins(self, is_cuda: bool) -> None:
        """Note that all gradients of one of DDP's buckets are computed."""
        self._begins.append(_now(is_cuda))

    def bucket_ends(self, is_cuda: bool) -> None:
        """Note that a bucket has arrived; called by a thread of the process group."""
        self._ends.append(_now(is_cuda))

    def end_backward(self) -> None:
        """Book the buckets of a backward pass, which DDP has waited for."""
        for times in self.timed:
            model = times.model()
            if model is not None and times.took_part(model):
                self._exposed_s += times.exposed_s
                self._hidden_s += times.hidden_s
                self.size_bytes += times.sent_bytes
                for size_bytes in times.bucket_bytes:
                    self.counts["all_reduce", times.workers, size_bytes, True] += 1
        if not self._begins:
            return
        if isinstance(self._begins[0], float):
            self._book(self._begins, self._ends)
        else:
            self._on_device.append((self._begins, self._ends))
        self._begins, self._ends = [], []

    def forget_backward(self) -> None:
        """Forget the buckets of a backward pass that has failed."""
        self._begins, self._ends = [], []

    def end_step(self) -> None:
        """Note that the bytes so far are those of a step, and the step is an exchange."""
        if self.size_bytes:
            self._exchanges += 1
            self._steps_bytes += self.size_bytes
            self.size_bytes = 0

    def end_interval(self, tracker: Tracker) -> None:
        """Pass the times and the kinds of the collectives on."""
        for begins, ends in self._on_device:
            first = begins[0]
            ends[-1].synchronize()
            marks = []
            for events in (begins, ends):
                marks.append([first.elapsed_time(event) / 1e3 for event in events])
            self._book(*marks)
        self._on_device = []
        if self._exchanges:
            tracker.record_communication(0.0, 0.0, self._steps_bytes, exchanges=self._exchanges)
            self._steps_bytes = self._exchanges = 0
        tracker.book_as_communication("backprop", self._exposed_s)
        # All waiting is in one step of the tracker: that for DDP was moved there above.
        waited_s = tracker.totals()["steps_s"].get("agg", 0.0)
        exposed_s, self._waited_s = waited_s - self._waited_s, waited_s
        if self.counts:
            # The work of DDP in its backward pass, such as copies of gradients, stays a part of
            # computation.
            cpu_s = None
            if not cuda_in_use():
                cpu_s = self.worked_s
            tracker.record_communication(exposed_s + self._hidden_s, exposed_s, 0, cpu_s=cpu_s)
        self._exposed_s = self._hidden_s = self.worked_s = 0.0
        counts, self.counts = self.counts, Counter()
        for (op, group, size_bytes, overlapped), calls in counts.items():
            tracker.record_collective(op, group, size_bytes, calls, overlapped)

    def _book(self, begins: Sequence[float], ends: Sequence[float]) -> None:
        """Add the times of the buckets of one backward pass.

        Training waits from the moment at which the last gradient is computed to the last arrival.
        """
        exposed_s = max(0.0, max(ends) - max(begins))
        # Several buckets travel at once, and the time of each moment counts once.
        changes = []
        for time_s in begins:
            changes.append((time_s, 1))
        for time_s in ends:
            changes.append((time_s, -1))
        changes.sort()
        total_s, traveling = 0.0, 0
        for (time_s, change), (next_s, _) in itertools.pairwise(changes):
            traveling += change
            if traveling:
                total_s += next_s - time_s
        self._exposed_s += exposed_s
        self._hidden_s += max(0.0, total_s - exposed_s)


def _now(is_cuda: bool) -> Any:
    if not is_cuda:
        return time.perf_counter()
    event = cuda_event()
    event.record()
    return event
