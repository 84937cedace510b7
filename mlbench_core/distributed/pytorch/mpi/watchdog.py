"""Set a time limit for MPI's blocking calls, which have none and cannot be interrupted.

A collective's data moves in a blocking call. If a link breaks in the middle of it, the call never
returns, and no exception can reach the thread inside. So another thread watches these calls, as the
watchdog of NCCL's process groups does: it reports the failure and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from mlbench_core.distributed.pytorch.lost_workers import explained

__all__ = ["Watchdog", "end_process", "end_process_after"]

# Seconds between two checks of the watchdog: it notices a call past its
# limit this much late at most.
_PAUSE_S = 0.25
# Time to write the error message: a pipe that nobody reads must not keep the process alive.
_REPORT_S = 2.0


class Watchdog:
    """A thread that ends the process if a blocking call takes too long.

    It runs from the first call to :meth:`close`.

    Args:
        end: Called with the message about a call that did not return; by default
            :func:`end_process`.

    Example:
        >>> messages = []
        >>> dog = Watchdog(messages.append)
        >>> dog.start("all_reduce, rank 0 of 2", limit_s=60.0)  # before the call
        >>> dog.stop()  # after it
        >>> dog.close()
        >>> messages
        []
    """

    def __init__(self, end: Callable[[str], None] | None = None) -> None:
        if end is None:
            end = end_process
        self._end = end
        # Name, limit in seconds and deadline of the call under way.
        self._call: tuple[str, float, float] | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def start(self, name: str, limit_s: float) -> None:
        """Start to watch a blocking call; one call at a time is watched.

        Args:
            name: The operation and its worker, for the message.
            limit_s: Seconds from now after which the process ends.
        """
        self._call = name, limit_s, time.perf_counter() + limit_s
        if self._thread is None:
            # Each thread has its own event: a thread that is ending looks at the old one.
            self._ended = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._ended,), name="mpi-watchdog", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop watching the call, which has returned."""
        self._call = None

    def close(self) -> None:
        """End the thread, which starts again with the next call."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(_PAUSE_S):
            call = self._call
            if call is None or time.perf_counter() <= call[2]:
                continue
            name, limit_s, _ = call
            stuck = dist.DistBackendError(
                f"MPI: {name}: timed out, all workers came but the data "
                f"did not get through within {limit_s:g} s"
            )
            # Finding the lost worker takes seconds, in which the call may
            # return after all: so look again.
            message = str(explained(stuck))
            if self._call is call:
                self._end(message)
                return


def end_process(message: str) -> None:
    """End this process at once with status 1 and one line on standard error.

    MPI's own clean-up does not run.
    """
    program = os.path.basename(sys.argv[0]) or "python"

    def report() -> None:
        line = f"{program}: error: {' '.join(message.split())}\n"

        def write_line() -> None:
            sys.stderr.write(line)

        # logging.shutdown writes the records that handlers have buffered.
        for write in (sys.stdout.flush, write_line, sys.stderr.flush, logging.shutdown):
            with contextlib.suppress(OSError, ValueError):
                write()

    reporting = threading.Thread(target=report, name="mpi-error-report", daemon=True)
    reporting.start()
    reporting.join(_REPORT_S)
    # A normal exit would run MPI's clean-up, which waits for the worker that was lost.
    os._exit(1)


def end_process_after(seconds: float) -> None:
    """End this process with status 1 if it runs on for some seconds, even if it hangs at exit.

    The timer is a thread in C. It needs neither the interpreter nor new Python threads, which may
    not start any more when a process ends.
    """
    # The file stays open, because the timer writes Python's stack to it. The stack
    # would hide the error message.
    sink = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(seconds, exit=True, file=sink)
