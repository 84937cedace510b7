"""Step times on a CUDA device, from events that are read once the device has passed them."""

from __future__ import annotations

import itertools
import sys
import time
import types
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["DeviceClock", "DeviceEvent", "cuda_event", "cuda_in_use"]

_SKIPPED = "\0skipped"


class DeviceEvent(Protocol):
    """The part of :class:`torch.cuda.Event` that is used here."""

    def record(self) -> Any:
        """Put the event into the current stream."""

    def query(self) -> bool:
        """Whether the device has passed the event; never waits."""

    def synchronize(self) -> Any:
        """Wait until the device has passed the event."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to a later one."""


def cuda_in_use() -> bool:
    """Whether this process already works on a CUDA device.

    Imports nothing. False where the clock was replaced (a test that moves time by hand wants host times).
    """
    torch = sys.modules.get("torch")
    real_clock = isinstance(time.perf_counter, types.BuiltinFunctionType)
    return torch is not None and real_clock and bool(torch.cuda.is_initialized())


def cuda_event() -> DeviceEvent:
    """A CUDA event that keeps its time."""
    import torch

    return torch.cuda.Event(enable_timing=True)


class DeviceClock:
    """Books step times measured on the device, without waiting for it.

    Every mark records an event into the current stream. The events of a batch are read when the device has passed the
    last of them, which :meth:`drain` asks without waiting. What waits to be read stays short, because the driver lets a
    host run only about a thousand launches ahead. Events are reused.

    Args:
        book_step: Called with a step's name and its seconds.
        book_batch: Called with a whole batch's seconds.
        make_event: Makes an event; tests put their own here.
    """

    def __init__(
        self,
        book_step: Callable[[str, float], None],
        book_batch: Callable[[float], None],
        make_event: Callable[[], DeviceEvent] = cuda_event,
    ) -> None:
        self._book_step = book_step
        self._book_batch = book_batch
        self._make_event = make_event
        self._free: list[DeviceEvent] = []
        self._marks: list[tuple[str | None, DeviceEvent]] = []
        self._pending: deque[list[tuple[str | None, DeviceEvent]]] = deque()

    @property
    def pending(self) -> int:
        """Batches whose times are not booked yet."""
        return len(self._pending)

    def batch_start(self) -> None:
        """Mark the start of a batch; an unfinished one is given up."""
        self._free.extend(event for _, event in self._marks)
        self._marks = []
        self.mark(None)

    def mark(self, name: str | None) -> None:
        """Mark the end of a step.

        Args:
            name: The step, or None where the time since the mark before belongs to no step.
        """
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        self._marks.append((name, event))

    def skip(self) -> None:
        """Leave out the time since the mark before: it is no part of a step nor of the batch."""
        self.mark(_SKIPPED)

    def batch_end(self) -> None:
        """Mark the end of a batch and book the batches that the device has finished."""
        self.mark(None)
        self._pending.append(self._marks)
        self._marks = []
        self.drain()

    def drain(self, wait: bool = False) -> None:
        """Book the batches that the device has finished.

        Args:
            wait: Wait for all of them. Only for the end of a run.
        """
        while self._pending:
            marks = self._pending[0]
            last = marks[-1][1]
            if wait:
                last.synchronize()
            elif not last.query():
                return
            self._pending.popleft()
            self._book(marks)
            self._free.extend(event for _, event in marks)

    def _book(self, marks: list[tuple[str | None, DeviceEvent]]) -> None:
        """Book a batch that the device has finished."""
        batch_s = 0.0
        for (_, before), (name, event) in itertools.pairwise(marks):
            if name == _SKIPPED:
                continue
            seconds = before.elapsed_time(event) / 1e3
            batch_s += seconds
            if name is not None:
                self._book_step(name, seconds)
        self._book_batch(batch_s)
