"""Disturbances of a running network: outages of hosts, and stragglers.

The links of hosts are cut and repaired, their processes are killed or stopped, and hosts join, at
given or random times. A straggler is a host whose workers run only for a part of each period::

    |<------- period ------->|
    run ......| stopped .....| run ......| stopped ...

The workers are stopped and continued by the signals SIGSTOP and SIGCONT, which need no rights. (The
control groups of Linux would need root, and are left over if their owner is killed.)
"""

from __future__ import annotations

import contextlib
import heapq
import operator
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from subprocess import Popen
from typing import Any

import psutil

from mlbench_core.errors import ConfigurationError
from mlbench_core.network.description import Cut, HostSettings, Kill, Network, Outage, Pause

__all__ = ["Disturbances"]

# Short in comparison with a training step, and long in comparison with the time slices of the
# scheduler.
_PERIOD_S = 0.05
# Workers may start further processes, and to look for them takes a millisecond.
_SEARCH_S = 0.5
_CONTINUE_SIGNALS = 3
_CONTINUE_PAUSE_S = 0.01
# Time, whether an outage begins, its kind, the host, and whether the outage has an end.
_Event = tuple[float, bool, type[Outage], int, bool]
_SAYINGS: dict[tuple[type[Outage], bool], str] = {
    (Cut, True): "is cut off",
    (Cut, False): "is connected again",
    (Kill, True): "is lost",
    (Kill, False): "is up",
    (Pause, True): "is stopped",
    (Pause, False): "goes on",
}


class Disturbances:
    """The threads that cut links, kill and stop workers at their times.

    Args:
        network: The network.
        hosts: Number of its hosts.
        cut: Called with a host to cut its link.
        restore: Called with a host to repair its link.
        processes: Called with a host; returns the processes started on it.
        kill: Called with a host to kill all of its processes.
        say: Called with a line about each beginning and end of an outage.
    """

    def __init__(
        self,
        network: Network,
        hosts: int,
        cut: Callable[[int], None],
        restore: Callable[[int], None],
        processes: Callable[[int], Sequence[Popen[Any]]],
        kill: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._cut, self._restore = cut, restore
        self._processes, self._kill, self._say = processes, kill, say
        self._hosts = hosts
        self._gone: set[int] = set()
        # By host and kind of outage: those that last.
        self._out: Counter[tuple[int, type[Outage]]] = Counter()
        for host, settings in network.hosts.items():
            if settings.join_s:
                self._out[host, Kill] += 1
            if settings.cpu < 1:
                self._add(self._slow_down, settings.cpu, host)
        events: list[Iterator[_Event]] = []
        for host in range(hosts):
            events += _events(network, host)
        if events:
            self._add(self._play, heapq.merge(*events, key=operator.itemgetter(0)))

    def _add(self, work: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))

    def start(self) -> None:
        """Start the threads; the times of outages count from here."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads, and continue the workers that are stopped."""
        self._ended.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._threads.clear()
        for host in range(self._hosts):
            self._let_run(host)

    def is_up(self, host: int) -> bool:
        """Return True if no outage of a host lasts, so that it can start a process."""
        return not any(self._out[host, kind] for kind in (Cut, Kill, Pause))

    def is_gone(self, host: int) -> bool:
        """Return True if an outage of a host has begun that has no end."""
        return host in self._gone

    def apply(self, host: int) -> None:
        """Kill or stop the processes of a host that is lost or stopped, also one just started."""
        if self._out[host, Kill]:
            self._kill(host)
        elif self._out[host, Pause]:
            _send(_family(self._processes(host)), signal.SIGSTOP)

    def _play(self, events: Iterator[_Event]) -> None:
        """Begin and end outages at their times."""
        start = time.monotonic()
        for time_s, begins, kind, host, has_end in events:
            if self._ended.wait(max(0.0, start + time_s - time.monotonic())):
                return
            # Outages of one kind may overlap: one at a given time, and one at a random time. Only
            # the first beginning and the last end change the host.
            if begins:
                self._out[host, kind] += 1
                changes_host = self._out[host, kind] == 1
            else:
                self._out[host, kind] -= 1
                changes_host = self._out[host, kind] == 0
            if not has_end:
                self._gone.add(host)
            if not changes_host:
                continue
            self._say(f"host {host} {_SAYINGS[kind, begins]}")
            try:
                self._change(kind, host, begins)
            except ConfigurationError as error:
                # The other outages go on.
                self._say(f"host {host}: {error}")

    def _change(self, kind: type[Outage], host: int, begins: bool) -> None:
        """Let an outage begin or end."""
        if kind is Cut and begins:
            self._cut(host)
        elif kind is Cut:
            self._restore(host)
        elif begins:
            self.apply(host)
        elif kind is Pause:
            self._let_run(host)
        # A host that is not lost any more has no processes to wake up.

    def _let_run(self, host: int) -> None:
        """Continue the processes of a host."""
        # In a user namespace, each has a helper that stops itself a moment after its child has
        # stopped, perhaps after the first signal.
        for _ in range(_CONTINUE_SIGNALS):
            family = _family(self._processes(host))
            if not family:
                return
            _send(family, signal.SIGCONT)
            time.sleep(_CONTINUE_PAUSE_S)

    def _slow_down(self, share: float, host: int) -> None:
        """Let the workers of a host run for a share of each period."""
        workers: list[psutil.Process] = []
        searched = -_SEARCH_S
        start = time.monotonic()
        while not self._ended.is_set():
            if time.monotonic() - searched >= _SEARCH_S:
                workers, searched = _family(self._processes(host)), time.monotonic()
            _send(workers, signal.SIGSTOP)
            try:
                # From the planned start of the period, so that late wake-ups do not add up.
                self._ended.wait(max(0.0, start + (1 - share) * _PERIOD_S - time.monotonic()))
            finally:
                if not self._out[host, Pause]:
                    _send(workers, signal.SIGCONT)
            start += _PERIOD_S
            self._ended.wait(max(0.0, start - time.monotonic()))
            # After a long delay of this thread, the missed periods are not made up for.
            start = max(start, time.monotonic() - _PERIOD_S)


def _events(network: Network, host: int) -> Iterator[Iterator[_Event]]:
    """Yield streams of the beginnings and ends of a host's outages, each in the order of time."""

    def stream(kind: type[Outage], times: Iterable[tuple[float, float | None]]) -> Iterator[_Event]:
        for start_s, end_s in times:
            yield start_s, True, kind, host, end_s is not None
            if end_s is not None:
                yield end_s, False, kind, host, True

    settings = network.hosts.get(host, HostSettings())
    for kind, outages in ((Cut, settings.cuts), (Kill, settings.kills), (Pause, settings.pauses)):
        if outages:
            yield stream(kind, [(outage.start_s, outage.end_s) for outage in outages])
    for kind, random in ((Kill, network.kills), (Pause, network.pauses)):
        if random is not None:
            yield stream(kind, random.times(kind, host))
    if settings.join_s:
        yield iter([(settings.join_s, False, Kill, host, True)])


def _family(roots: Sequence[Popen[Any]]) -> list[psutil.Process]:
    """Return the processes that have not ended, with all of their descendants before them."""
    family: list[psutil.Process] = []
    for root in roots:
        if root.returncode is not None:
            continue  # its number may be that of another process by now
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(root.pid)
            family += [*process.children(recursive=True), process]
    return family


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
