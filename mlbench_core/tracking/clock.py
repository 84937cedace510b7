"""Measure step times on a CUDA device with events, without waiting for the device.

Each event goes through three states and then starts again:

* *free*: it may be recorded;
* *recorded*: it is in a stream, and its batch is still open;
* *pending*: its batch has ended, but the times of the batch were not read yet. Then it is *free*
  again.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceClock", "computes_in_this_thread", "cuda_event", "cuda_in_use"]

# The null character keeps this mark different from every step name that a script would use.
_SKIPPED = "\0skipped"


def cuda_in_use() -> bool:
    """Return True if this process already works on a CUDA device."""
    # torch is looked up and not imported, because a process that has not imported it cannot use
    # CUDA through it.
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def computes_in_this_thread() -> bool:
    """Return True if torch computes in this thread alone: on a CPU, without other threads."""
    torch = sys.modules.get("torch")
    # Another library, such as TensorFlow, computes in threads of its own.
    if torch is None or cuda_in_use():
        return False
    return bool(torch.get_num_threads() == 1)


def cuda_event() -> torch.cuda.Event:
    """Create a CUDA event that records the time at which the device passes it."""
    import torch

    return torch.cuda.Event(enable_timing=True)


class DeviceClock:
    """A clock that measures step times on the device without waiting for it.

    Every mark records an event into the current stream. The events of a batch are read after the
    device has passed the last of them, which :meth:`drain` checks without waiting. The queue of
    pending batches stays short, because the driver lets a host run only about a thousand launches
    ahead. Events are reused.

    Args:
        book_step: Called with the name of a step and its seconds.
        book_batch: Called with the seconds of a whole batch.
    """

    def __init__(
        self, book_step: Callable[[str, float], None], book_batch: Callable[[float], None]
    ) -> None:
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
        if self._free:
            event = self._free.pop()
        else:
            event = cuda_event()
        event.record()
        self._marks.append((name, event))

    def skip(self) -> None:
        """Leave out the time since the previous mark, which is not of the batch."""
        self.mark(_SKIPPED)

    def batch_end(self) -> None:
        """Mark the end of a batch, and read the times of those that the device has finished."""
        self.mark(None)
        self._pending.append(self._marks)
        self._marks = []
        self.drain()

    def drain(self, wait: bool = False) -> None:
        """Read the times of the batches that the device has finished.

        Args:
            wait: True to wait for all batches. Only for a checkpoint and the end of a run.
        """
        while self._pending:
            marks = self._pending[0]
            # The device passes the events of a stream in order. So after the last event of a batch
            # it has passed all.
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
            # elapsed_time returns milliseconds.
            seconds = before.elapsed_time(event) / 1e3
            batch_s += seconds
            if name is not None:
                self._book_step(name, seconds)
        self._book_batch(batch_s)
