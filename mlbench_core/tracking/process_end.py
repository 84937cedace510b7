"""Notify services how this process ends: normally, by an exception, or because it is stopped.

A service keeps a run until it is notified of the end. A script may not close its sinks, and
SIGTERM, with which launchers and job queues stop a process, ends Python without any handler.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["call_at_end", "delay_sigterm", "forget", "state_after", "uncaught_error"]

logger = logging.getLogger(__name__)

_functions: list[Callable[[str], None]] = []


def state_after(error: BaseException | None) -> str:
    """Return how a run ended: ``"finished"``, ``"failed"``, or ``"stopped"`` by Ctrl-C.

    Args:
        error: The exception that ended it. ``sys.exit()`` and ``sys.exit(0)`` are a normal end.

    Example:
        >>> state_after(None), state_after(SystemExit(0)), state_after(SystemExit("no data"))
        ('finished', 'finished', 'failed')
    """
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "finished"
    if isinstance(error, KeyboardInterrupt):
        return "stopped"
    return "failed"


def uncaught_error() -> BaseException | None:
    """Return the exception with which the interpreter is ending.

    It is only for handlers of :mod:`atexit`. The status of a ``sys.exit(1)`` outside the ``with``
    block of a tracker is not known.
    """
    # In an interactive session, this is the latest error of many, and the session went on after it.
    if hasattr(sys, "ps1"):
        return None
    return getattr(sys, "last_value", None)


def call_at_end(function: Callable[[str], None]) -> None:
    """Call a function with the state of the run when the interpreter exits or SIGTERM arrives.

    A handler that the program has for SIGTERM stays. Only the process that calls this counts, not
    its forks.

    Args:
        function: Called ``(state)``, see :func:`state_after`. Its exceptions are logged.
    """
    _functions.append(function)
    # Registered again, because the handler that was registered last runs first: the functions must
    # run before the handlers of the packages that they use, such as those of wandb.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    _watch_sigterm()


def forget(function: Callable[[str], None]) -> None:
    """Do not call the function any more."""
    if function in _functions:
        _functions.remove(function)


@contextlib.contextmanager
def delay_sigterm() -> Iterator[None]:
    """Let SIGTERM act only after the block.

    A launcher sends it to all workers as soon as one has failed. The others then write the result
    of the failed run, perhaps. In threads other than the main one, the block is as any other.
    """
    arrived = []
    handler = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    # None is a handler that was not set by Python.
    if not is_main or handler is None:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: arrived.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        if arrived:
            os.kill(os.getpid(), signal.SIGTERM)


def _call_all(state: str) -> None:
    # A copy, because a function that is called forgets itself.
    for function in _functions[::-1]:
        try:
            function(state)
        except Exception as error:
            logger.warning("a sink could not be closed: %s: %s", type(error).__name__, error)
    _functions.clear()


def _at_exit() -> None:
    _call_all(state_after(uncaught_error()))


def _at_sigterm(*_: Any) -> None:
    _call_all("stopped")
    # The process then ends as it would have without this handler.
    _release_sigterm()
    os.kill(os.getpid(), signal.SIGTERM)


def _watch_sigterm() -> None:
    if _functions:
        _replace_handler(signal.SIG_DFL, _at_sigterm)


def _release_sigterm() -> None:
    _replace_handler(_at_sigterm, signal.SIG_DFL)


def _replace_handler(old: Any, new: Any) -> None:
    # Python allows it in the main thread only.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is old:
        signal.signal(signal.SIGTERM, new)


def _after_fork_in_child() -> None:
    _functions.clear()
    _release_sigterm()


# A loader process that is forked, and ended with SIGTERM, is not the end of the run. The handler is
# removed before the fork: Python forgets a signal that reaches the child before it has finished its
# fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_release_sigterm, after_in_parent=_watch_sigterm, after_in_child=_after_fork_in_child
    )
