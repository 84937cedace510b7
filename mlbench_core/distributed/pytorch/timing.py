"""Measure communication, and the part that training waited for, without waiting for a device."""

from __future__ import annotations

import functools
import inspect
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from mlbench_core.processor_time import polled

__all__ = [
    "CommunicationClock",
    "Interval",
    "count_collective",
    "uncounted",
]

# Collectives of this process that no tracker has received yet: (kind, group, bytes,
# overlapped) and their number.
_collectives: Counter[tuple[str, int, int, bool]] = Counter()
# Of each thread, because another one may be training.
_is_counting = ContextVar("is_counting", default=True)


def count_collective(op: str, group: int, size_bytes: int, overlapped: bool = False) -> None:
    """Count a collective; :meth:`CommunicationClock.report` passes the counts on.

    Args:
        op: The kind, for example ``"all_reduce"``; ``"neighbors"`` is an exchange with all
            neighbors at once, and ``"pair"`` one with one other worker.
        group: Number of workers that take part, this one included.
        size_bytes: Payload of this worker in one call.
        overlapped: True if training goes on while the collective runs.
    """
    if _is_counting.get():
        _collectives[op, group, size_bytes, overlapped] += 1


@contextmanager
def uncounted() -> Iterator[None]:
    """Count no collective of this thread in the block, which is not part of a training step."""
    token = _is_counting.set(False)
    try:
        yield
    finally:
        _is_counting.reset(token)


def _work_s() -> float:
    """Return :func:`~mlbench_core.processor_time.work_s`."""
    # Written out so that a step goes through fewer files, as a test of tools/trace_step.py demands.
    return time.thread_time() - polled.total_s


# Reading a signature takes longer than recording an interval.
@functools.lru_cache(maxsize=16)
def _takes_cpu_s(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters
    return "cpu_s" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


class Interval:
    """A period of communication, for example that of one step.

    Attributes:
        size_bytes: Bytes that this worker sent; the sender sets it.
        within: The step of the Tracker in which training waits for the communication; None for a
            communication step.

    Args:
        device: Device of the tensors. On a GPU, the times come from events on its stream.
        within: As above.
    """

    def __init__(self, device: torch.device, within: str | None = None) -> None:
        self.size_bytes = 0
        self.within = within
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device)
        # Begin and end of each exposed part: seconds on the host, or CUDA events.
        self._marks: list[tuple[Any, Any]] = []
        self._cpu_s = 0.0
        self._in_transit = 0
        self._in_transit_since_s = 0.0
        self._in_transit_s = 0.0

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count the time of the block as time that training waits for."""
        # The time of this thread, not of the process. If a compression uses several threads,
        # this one works as long as they do, and the process would count each of them. The
        # process would also count threads that spin after such work, and those that send
        # metrics or load data. Gloo's threads move and sum a message while it travels, so their
        # time is a part of the network's.
        # Polling for messages, as the backend mpi does, is waiting.
        begin, cpu_begin_s = self._now(), _work_s()
        yield
        self._cpu_s += _work_s() - cpu_begin_s
        self._marks.append((begin, self._now()))

    def start_message(self) -> None:
        """Record that a message is about to be packed and sent."""
        # Overlapping messages count once: the clock runs while at least one is in transit.
        if self._in_transit == 0:
            self._in_transit_since_s = time.perf_counter()
        self._in_transit += 1

    def finish_message(self) -> None:
        """Record that a message has arrived."""
        self._in_transit -= 1
        if self._in_transit == 0:
            self._in_transit_s += time.perf_counter() - self._in_transit_since_s

    def is_over(self) -> bool:
        """Return True if the times can be read without waiting."""
        return self._stream is None or not self._marks or bool(self._marks[-1][1].query())

    def total_s(self) -> float:
        """Return the seconds in which a message was in transit.

        On a GPU, this is the time from the start of the first exposed part to the end of the last.
        """
        if self._stream is None:
            # Communication that nothing overlaps is recorded only as exposed time.
            return max(self._in_transit_s, self.exposed_s())
        if not self._marks:
            return 0.0
        return self._between(self._marks[0][0], self._marks[-1][1])

    def exposed_s(self) -> float:
        """Return the seconds that training waited for the communication (exposed communication)."""
        return sum(self._between(begin, end) for begin, end in self._marks)

    def cpu_s(self) -> float | None:
        """Return this thread's processor seconds in the exposed parts.

        None on a GPU, which does the work there.

        Sleeping and waiting for a message or for a core do not count, but packing, compressing and
        summing do.
        """
        if self._stream is not None:
            return None
        return self._cpu_s

    def _now(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        # The device records its own time when it reaches the event, so the host does not wait.
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if self._stream is None:
            return end - begin
        return begin.elapsed_time(end) / 1000


class CommunicationClock:
    """A clock for communication, on the host or with CUDA events.

    The intervals of a GPU are yielded after the device has passed them, usually one step later, so
    that reading them never waits. If nobody reads them, only the last ``limit`` intervals are kept.

    Args:
        limit: Largest number of intervals that are kept.

    Example:
        >>> clock = CommunicationClock()
        >>> with clock.measure(torch.device("cpu")) as interval:
        ...     interval.size_bytes = 8
        >>> [(interval.exposed_s() < 1, interval.size_bytes) for interval in clock.intervals()]
        [(True, 8)]
    """

    def __init__(self, limit: int = 64) -> None:
        self._intervals: deque[Interval] = deque(maxlen=limit)

    @contextmanager
    def measure(self, device: torch.device) -> Iterator[Interval]:
        """Measure communication without overlap; the caller sets the interval's ``size_bytes``."""
        interval = Interval(device)
        with interval.exposed():
            yield interval
        self.add(interval)

    def add(self, interval: Interval) -> None:
        """Add an interval to those that :meth:`intervals` yields."""
        self._intervals.append(interval)

    def intervals(self) -> Iterator[Interval]:
        """Yield the intervals that are over, oldest first, each once."""
        while self._intervals and self._intervals[0].is_over():
            yield self._intervals.popleft()

    def report(self, tracker: Any | None) -> None:
        """Report the intervals that are over to a tracker, each once.

        Args:
            tracker: A tracker, or None. Its ``record_communication(total_s, exposed_s,
                size_bytes)`` is called, with the keyword ``cpu_s`` if the method has it and the
                processor time was measured. If training waited within another step,
                ``book_as_communication(step, seconds)`` is called too. The collectives of this
                process since the last report go to ``record_collective(op, group, size_bytes,
                calls, overlapped)``. A method that the tracker does not have is skipped.
        """
        record = getattr(tracker, "record_communication", None)
        book = getattr(tracker, "book_as_communication", None)
        record_collective = getattr(tracker, "record_collective", None)
        if record_collective is not None:
            for (op, group, size_bytes, overlapped), calls in _collectives.items():
                record_collective(op, group, size_bytes, calls, overlapped)
        # Also without a tracker, so that a later one does not receive
        # the collectives of another run.
        _collectives.clear()
        for interval in self.intervals():
            if record is not None:
                cpu_s = interval.cpu_s()
                more = {}
                # A tracker of somebody else may have the method without this keyword.
                if cpu_s is not None and _takes_cpu_s(getattr(record, "__func__", record)):
                    more["cpu_s"] = cpu_s
                record(interval.total_s(), interval.exposed_s(), interval.size_bytes, **more)
            if book is not None and interval.within is not None:
                book(interval.within, interval.exposed_s())

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the intervals, because events belong to this process."""
        return {"limit": self._intervals.maxlen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._intervals = deque(maxlen=state["limit"])
