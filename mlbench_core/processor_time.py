"""Measure a thread's processor time for work, without that of polling for messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["polled", "polling", "work_s"]


class _Polled(threading.local):
    total_s = 0.0


polled = _Polled()
"""The processor seconds that this thread has spent in :func:`polling`: ``polled.total_s``."""


def work_s() -> float:
    """Return this thread's processor seconds since an arbitrary moment, without :func:`polling`.

    Example:
        >>> work_before_s, thread_before_s = work_s(), time.thread_time()
        >>> with polling():
        ...     _ = sum(range(100_000))
        >>> time.thread_time() - thread_before_s > work_s() - work_before_s
        True
    """
    return time.thread_time() - polled.total_s


@contextmanager
def polling() -> Iterator[None]:
    """Count this thread's processor time in the block as waiting: it polls for messages."""
    begin_s = time.thread_time()
    try:
        yield
    finally:
        polled.total_s += time.thread_time() - begin_s
