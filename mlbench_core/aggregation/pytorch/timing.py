"""How long communication took, measured without waiting for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CommunicationClock"]


@dataclass
class _Interval:
    """One stretch of communication: seconds if the host saw it, else two events on the device."""

    size_bytes: int = 0
    total_s: float = 0.0
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def is_over(self) -> bool:
        return self.events is None or self.events[1].query()

    def seconds(self) -> float:
        return self.total_s if self.events is None else self.events[0].elapsed_time(self.events[1]) / 1000


class CommunicationClock:
    """Times communication that nothing overlaps, on the host or with CUDA events.

    A GPU's intervals are handed out once the device has passed them, usually a step later, so that reading them waits
    for nothing. Where the reader falls behind, at most ``limit`` intervals are kept.

    Args:
        limit: Number of intervals kept.

    Example:
        >>> clock = CommunicationClock()
        >>> with clock.measure(torch.device("cpu")) as interval:
        ...     interval.size_bytes = 8
        >>> [(seconds < 1, size_bytes) for seconds, size_bytes in clock.finished()]
        [(True, 8)]
    """

    def __init__(self, limit: int = 64) -> None:
        self._intervals: deque[_Interval] = deque(maxlen=limit)

    @contextmanager
    def measure(self, device: torch.device) -> Iterator[_Interval]:
        """Time what runs inside; the caller writes the bytes into the interval's ``size_bytes``."""
        interval = _Interval()
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            yield interval
            end.record(stream)
            interval.events = (begin, end)
        else:
            start = time.perf_counter()
            yield interval
            interval.total_s = time.perf_counter() - start
        self._intervals.append(interval)

    def finished(self) -> Iterator[tuple[float, int]]:
        """Yield seconds and bytes of the intervals that are over, oldest first, each once."""
        while self._intervals and self._intervals[0].is_over():
            interval = self._intervals.popleft()
            yield interval.seconds(), interval.size_bytes

    def __getstate__(self) -> dict[str, Any]:
        """Leave the intervals out: events belong to this process."""
        return {"limit": self._intervals.maxlen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._intervals = deque(maxlen=state["limit"])
