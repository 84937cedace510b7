"""Recognize, find and end processes, without trust in the clock or in process ids alone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable, Iterator

import psutil

from mlbench_core.client.masters import boot_id, start_mark

__all__ = ["end_processes", "place", "processes_with", "start_mark"]


def place() -> str:
    """Return a text for the set of processes that this one can see.

    The set is that of a machine since its boot, or of a container on it.
    """
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot_id() or socket.gethostname()} {namespace}".strip()


def processes_with(variable: str, value: str) -> Iterator[psutil.Process]:
    """Yield the other processes that have a variable with this value in their environment."""
    for process in psutil.process_iter():
        # A process of another user, or one that has ended in the meantime, is not readable.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                yield process


def end_processes(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """End processes with SIGTERM, or SIGKILL after ``grace_s`` seconds, and wait for their end."""
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
