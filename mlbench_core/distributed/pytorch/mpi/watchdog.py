"""A time limit for MPI's blocking calls, which have none and cannot be interrupted.

A collective's data moves in a blocking call. Should a link break in the middle of it, the call never returns, and no
exception can reach the thread inside. So a thread of its own watches these calls, as the watchdog of NCCL's process
groups does: it says what went wrong and ends the process.
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
from dataclasses import dataclass

import torch.distributed as dist

from mlbench_core.distributed.pytorch.lost_workers import explained

__all__ = ["Watchdog", "end_process", "end_process_after"]

_PAUSE_S = 0.25
"""How often the watchdog looks; a limit is noticed this much late at most."""
_LAST_WORDS_S = 2.0
"""How long saying what went wrong may take: a pipe that nobody reads must not keep the process."""


@dataclass(slots=True)  # not frozen, which would take thrice as long to make
class _Call:
    """A blocking call that is under way."""

    name: str
    limit_s: float
    deadline: float


class Watchdog:
    """Ends the process where a blocking call takes too long; its thread runs from the first call to :meth:`close`.

    Args:
        end: What to do with the message of a call that did not return.

    Example:
        >>> messages = []
        >>> dog = Watchdog(messages.append)
        >>> dog.watch("all_reduce, rank 0 of 2", limit_s=60.0)  # before the call
        >>> dog.rest()  # after it
        >>> dog.close()
        >>> messages
        []
    """

    def __init__(self, end: Callable[[str], None] | None = None) -> None:
        self._end = end_process if end is None else end
        self._call: _Call | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def watch(self, name: str, limit_s: float) -> None:
        """A blocking call begins. There is one at a time.

        Args:
            name: The operation and its place, for the message.
            limit_s: Seconds from now after which the process ends.
        """
        self._call = _Call(name, limit_s, time.perf_counter() + limit_s)
        if self._thread is None:
            self._stop = threading.Event()  # its own: a thread that is ending looks at the old one
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name="mpi-watchdog", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """The call has returned."""
        self._call = None

    def close(self) -> None:
        """End the thread, which starts again with the next call."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(_PAUSE_S):
            call = self._call
            if call is not None and time.perf_counter() > call.deadline:
                message = str(explained(_stuck(call)))  # takes seconds, in which the call may return after all
                if self._call is call:
                    self._end(message)
                    return


def _stuck(call: _Call) -> dist.DistBackendError:
    return dist.DistBackendError(
        f"MPI: {call.name}: timed out, all workers came but the data did not get through within {call.limit_s:g} s"
    )


def end_process(message: str) -> None:
    """End this process at once with status 1 and one line on standard error; nothing of MPI gets to run any more."""
    speaking = threading.Thread(target=_say, args=(message,), name="last-words", daemon=True)
    speaking.start()
    speaking.join(_LAST_WORDS_S)
    os._exit(1)


def _say(message: str) -> None:
    program = os.path.basename(sys.argv[0]) or "python"
    for write in (
        sys.stdout.flush,
        lambda: sys.stderr.write(f"{program}: error: {' '.join(message.split())}\n"),
        sys.stderr.flush,
        logging.shutdown,  # writes what handlers hold back
    ):
        with contextlib.suppress(OSError, ValueError):
            write()


def end_process_after(seconds: float) -> None:
    """End this process with status 1 if it is still there then, whatever it hangs in; also at its end.

    The timer is a thread of C's, which needs neither the interpreter nor new threads of Python's, that may not start
    any more when a process ends.
    """
    sink = os.open(os.devnull, os.O_WRONLY)  # stays open: where the timer would write where Python is
    faulthandler.dump_traceback_later(seconds, exit=True, file=sink)
