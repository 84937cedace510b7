"""Disturbances of a running network: cuts and repairs at given times, and stragglers.

A straggler is a host whose workers run only for a part of each period::

    |<------- period ------->|
    run ......| stopped .....| run ......| stopped ...

The workers are stopped and continued by the signals SIGSTOP and SIGCONT, which need no rights. (The
control groups of Linux would need root, and are left over if their owner is killed.)
"""

from __future__ import annotations

import contextlib
import operator
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from subprocess import Popen
from typing import Any

import psutil

from mlbench_core.network.description import HostSettings

__all__ = ["Disturbances"]

# Short in comparison with a training step, and long in comparison with the time slices of the
# scheduler.
_PERIOD_S = 0.05
# Workers may start further processes, and to look for them takes a millisecond.
_SEARCH_S = 0.5


class Disturbances:
    """The threads that cut links and stop workers at their times.

    Args:
        hosts: The settings of each host.
        cut: Called with a host to cut its link.
        restore: Called with a host to repair its link.
        processes: Called with a host; returns the processes started on it.
    """

    def __init__(
        self,
        hosts: Mapping[int, HostSettings],
        cut: Callable[[int], None],
        restore: Callable[[int], None],
        processes: Callable[[int], Sequence[Popen[Any]]],
    ) -> None:
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        events: list[tuple[float, Callable[[int], None], int]] = []
        for host, settings in hosts.items():
            for each in settings.cuts:
                events.append((each.start_s, cut, host))
                if each.end_s is not None:
                    events.append((each.end_s, restore, host))
            if settings.cpu < 1:
                self._add(self._slow_down, settings.cpu, host, processes)
        if events:
            self._add(self._play, sorted(events, key=operator.itemgetter(0)))

    def _add(self, work: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))

    def start(self) -> None:
        """Start the threads; the times of cuts count from here."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads, and continue the workers that are stopped."""
        self._ended.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._threads.clear()

    def _play(self, events: list[tuple[float, Callable[[int], None], int]]) -> None:
        """Cut and repair links at their times."""
        start = time.monotonic()
        for time_s, action, host in events:
            if self._ended.wait(max(0.0, start + time_s - time.monotonic())):
                return
            action(host)

    def _slow_down(
        self, share: float, host: int, processes: Callable[[int], Sequence[Popen[Any]]]
    ) -> None:
        """Let the workers of a host run for a share of each period."""
        workers: list[psutil.Process] = []
        searched = -_SEARCH_S
        start = time.monotonic()
        while not self._ended.is_set():
            if time.monotonic() - searched >= _SEARCH_S:
                workers, searched = _family(processes(host)), time.monotonic()
            _send(workers, signal.SIGSTOP)
            try:
                # From the planned start of the period, so that late wake-ups do not add up.
                self._ended.wait(max(0.0, start + (1 - share) * _PERIOD_S - time.monotonic()))
            finally:
                _send(workers, signal.SIGCONT)
            start += _PERIOD_S
            self._ended.wait(max(0.0, start - time.monotonic()))
            # After a long delay of this thread, the missed periods are not made up for.
            start = max(start, time.monotonic() - _PERIOD_S)


def _family(roots: Sequence[Popen[Any]]) -> list[psutil.Process]:
    """Return processes with all of their descendants."""
    family: list[psutil.Process] = []
    for root in roots:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(root.pid)
            family += [process, *process.children(recursive=True)]
    return family


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
