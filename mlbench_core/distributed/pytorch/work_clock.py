"""Measure the processor time for which a thread works, without the time for which it polls for messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["polling", "work_s"]

_of_thread = threading.local()


def work_s() -> float:
    """Return the processor seconds of this thread since an arbitrary moment, without those in :func:`polling`.

    Example:
        >>> work_before_s, thread_before_s = work_s(), time.thread_time()
        >>> with polling():
        ...     _ = sum(range(100_000))
        >>> time.thread_time() - thread_before_s > work_s() - work_before_s
        True
    """
    return time.thread_time() - getattr(_of_thread, "polled_s", 0.0)


@contextmanager
def polling() -> Iterator[None]:
    """Count the processor time of this thread in the block as waiting, because it polls for messages there."""
    begin_s = time.thread_time()
    try:
        yield
    finally:
        _of_thread.polled_s = getattr(_of_thread, "polled_s", 0.0) + time.thread_time() - begin_s
