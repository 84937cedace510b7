"""Measure step times on a CUDA device with events, without waiting for the device.

An event goes through these states: *free* (may be recorded), *recorded* (in a stream), *pending* (its batch has ended
and the device may not have passed it yet), and *free* again after the times of its batch were read.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceClock", "cuda_event", "cuda_in_use"]

# A null character, so that no name of a step can be the same.
_SKIPPED = "\0skipped"


def cuda_in_use() -> bool:
    """Return True if this process already works on a CUDA device."""
    # torch is looked up and not imported, because a process that has not imported it cannot use CUDA through it.
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def cuda_event() -> torch.cuda.Event:
    """Return a CUDA event that records its time."""
    import torch

    return torch.cuda.Event(enable_timing=True)


class DeviceClock:
    """A clock that measures step times on the device without waiting for it.

    Every mark records an event into the current stream. The events of a batch are read after the device has passed the
    last of them, which :meth:`drain` checks without waiting. The queue of pending batches stays short, because the
    driver lets a host run only about a thousand launches ahead. Events are reused.

    Args:
        book_step: Called with the name of a step and its seconds.
        book_batch: Called with the seconds of a whole batch.
    """

    def __init__(self, book_step: Callable[[str, float], None], book_batch: Callable[[float], None]) -> None:
        self._book_step = book_step
        self._book_batch = book_batch
        self._free: list[torch.cuda.Event] = []
        self._marks: list[tuple[str | None, torch.cuda.Event]] = []
        self._pending: deque[list[tuple[str | None, torch.cuda.Event]]] = deque()

    def batch_start(self) -> None:
        """Mark the start of a batch; discard an unfinished one."""
        self._free.extend(event for _, event in self._marks)
        self._marks = []
        self.mark(None)

    def mark(self, name: str | None) -> None:
        """Mark the end of a step.

        Args:
            name: The step, or None if the time since the previous mark belongs to no step.
        """
        event = self._free.pop() if self._free else cuda_event()
        event.record()
        self._marks.append((name, event))

    def skip(self) -> None:
        """Leave out the time since the previous mark: it belongs neither to a step nor to the batch."""
        self.mark(_SKIPPED)

    def batch_end(self) -> None:
        """Mark the end of a batch, and read the times of the batches that the device has finished."""
        self.mark(None)
        self._pending.append(self._marks)
        self._marks = []
        self.drain()

    def drain(self, wait: bool = False) -> None:
        """Read the times of the batches that the device has finished.

        Args:
            wait: True to wait for all batches. Only for the end of a run.
        """
        while self._pending:
            marks = self._pending[0]
            # Events of one stream are passed in order: after the last of a batch, all its events can be read.
            last = marks[-1][1]
            if wait:
                last.synchronize()
            elif not last.query():
                return
            self._pending.popleft()
            self._book(marks)
            self._free.extend(event for _, event in marks)

    def _book(self, marks: list[tuple[str | None, torch.cuda.Event]]) -> None:
        """Add the times of a batch that the device has finished."""
        batch_s = 0.0
        for (_, before), (name, event) in itertools.pairwise(marks):
            if name == _SKIPPED:
                continue
            # CUDA gives milliseconds.
            seconds = before.elapsed_time(event) / 1e3
            batch_s += seconds
            if name is not None:
                self._book_step(name, seconds)
        self._book_batch(batch_s)
