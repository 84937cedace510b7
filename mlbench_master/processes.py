"""Recognize, find and end processes, without trust in the clock or in process ids alone."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

__all__ = ["end_processes", "place", "processes_with", "start_mark"]


def start_mark(pid: int) -> str | None:
    """Return a text that no other process with this id has, before or after; None if the process has ended.

    It does not change when the clock is set. A start time in seconds would: Linux has only the time since boot, and
    the time of the boot moves with the clock.

    Args:
        pid: The process id.
    """
    try:
        if sys.platform.startswith("linux"):
            # The name in parentheses may contain blanks and parentheses. Field 3 is the state, 22 the start in ticks.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            return None if fields[0] in (b"Z", b"X") else f"{_boot_id()}-{int(fields[19])}"
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else repr(process.create_time())
    except (OSError, IndexError, psutil.Error):
        return None


@functools.cache
def _boot_id() -> str:
    # Ticks count from the boot, so another boot may give the same id and the same ticks.
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def place() -> str:
    """Return a text for the set of processes that this one can see: a machine since its boot, or a container on it."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{_boot_id() or socket.gethostname()} {namespace}".strip()


def processes_with(variable: str, value: str) -> Iterator[psutil.Process]:
    """Yield the other processes that have a variable with this value in their environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # of another user, or ended in the meantime
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                yield process


def end_processes(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """End processes with SIGTERM, or SIGKILL after ``grace_s`` seconds, and wait until they are gone."""
    alive = list(processes)
    for process in alive:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(alive, timeout=grace_s)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=5)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):  # the process may have ended in the meantime
        process.send_signal(number)
