"""The workers of an elastic run: who lives, who is replaced, and when the run has failed.

The supervisor starts the workers, and holds the store in which they meet::

    listen on a port of the loopback interface
    -> start the first workers, which may connect already
    -> become the store
    -> start others until MAX live, now and after every death
    -> when a worker has finished the run, wait for the end of the others

A run fails if several workers in a row die before their first round, because the next one would
probably die, too. It also fails if no living worker has the shared state. Its replacements would
start again from the first state, and the rounds before would be lost without a notice.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlbench_core.distributed.pytorch.elastic import Rounds
    from mlbench_core.run_terms import PaidSamples

__all__ = ["ElasticWorkers"]

_MOST_EARLY_DEATHS = 3
# The record of the run has them, and its file is limited.
_MOST_CHANGES = 50
_LONGEST_CHANGE = 150
# All workers may connect before the process accepts.
_BACKLOG = 4096
_ACCEPT_PAUSE_S = 0.1


class ElasticWorkers:
    """The living workers of an elastic run.

    Args:
        facts: ``least`` and ``most`` of the range, and ``argv``: the words of a worker's command,
            with ``{rank}`` for its number.
        first_workers: Number of workers that start together.

    Attributes:
        least: Smallest number of workers of a round.
        most: Largest number of workers that live at the same time.
        living: Numbers of the workers that have not ended.
        changes: Lines about the workers that died or joined, the latest ones.
        failure: Why the run cannot go on; empty if it can.
        last_death: Number and exit status of the last worker that died.
    """

    def __init__(self, facts: Mapping[str, Any], first_workers: int) -> None:
        self.living: set[int] = set()
        self.changes: deque[str] = deque(maxlen=_MOST_CHANGES)
        self.failure = ""
        self.last_death: tuple[int, int] | None = None
        self._argv: list[str] = facts["argv"]
        self._env: dict[str, str] = facts.get("env", {})
        self.least, self.most = int(facts["least"]), int(facts["most"])
        self._first_workers = self._next = first_workers
        self._is_over = False
        self._early_deaths = 0
        # torch's store would listen on all interfaces, and it asks for no password.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self._port = self._listener.getsockname()[1]
        self._address = f"127.0.0.1:{self._port}"
        self._listener_for_hosts: socket.socket | None = None
        self._store: Any = None
        self._rounds: Rounds | None = None

    def meet_at(self, listener: socket.socket) -> None:
        """Let workers on emulated hosts reach the store through a listening socket of the network.

        Call it before :meth:`variables`.
        """
        self._listener_for_hosts = listener
        host, port = listener.getsockname()
        self._address = f"{host}:{port}"

    def variables(self, worker: int) -> dict[str, str]:
        """Return the variables of a worker, which count it as living."""
        self.living.add(worker)
        return {
            "MLBENCH_ELASTIC_STORE": self._address,
            "MLBENCH_ELASTIC_WORKER": str(worker),
            "MLBENCH_ELASTIC_FIRST_WORKERS": str(self._first_workers),
            "MLBENCH_ELASTIC_LEAST": str(self.least),
        }

    def hold_store(self) -> None:
        """Answer the workers, from now on.

        Raises:
            Exception: torch cannot be imported, or it refuses the port.
        """
        # Imported here, because it takes seconds, in which the workers start.
        import torch.distributed as dist

        from mlbench_core.distributed.pytorch.elastic import Rounds

        self._store = dist.TCPStore(
            "127.0.0.1",
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        self._rounds = Rounds(self._store)
        if self._listener_for_hosts is not None:
            # A store cannot use the socket itself: its own connection to it would fail.
            threading.Thread(
                target=_forward, args=(self._listener_for_hosts, self._port), daemon=True
            ).start()

    def missing(self, places: int | None = None) -> list[dict[str, Any]]:
        """Return the commands of the workers to start now.

        Args:
            places: Number of hosts that can get one; None for no limit.
        """
        if self.failure or self.is_finished:
            return []
        wanted = self.most - len(self.living)
        if places is not None:
            wanted = min(wanted, places)
        commands = []
        for _ in range(wanted):
            argv = [word.replace("{rank}", str(self._next)) for word in self._argv]
            commands.append({"argv": argv, "env": self._env, "rank": self._next})
            self._next += 1
        return commands

    def look(self) -> list[str]:
        """Read the rounds that have ended, and return a line for each worker that joined."""
        assert self._rounds is not None
        lines = []
        for worker, commits in sorted(self._rounds.update().items()):
            self._early_deaths = 0
            if worker >= self._first_workers:
                lines.append(f"worker {worker} joined after round {commits}")
        self.changes.extend(lines)
        members = self._rounds.members
        is_lost = bool(members) and not self.living & (members | self._rounds.pending())
        # An agreement of workers without the state may come before the notice of the last death.
        if (is_lost or self._rounds.restarted) and not self.is_finished:
            self.failure = "the shared weights are lost, because no worker that had them is left"
        return lines

    def end(self, worker: int, returncode: int, reason: str, *, by_network: bool) -> list[str]:
        """Note the end of a worker.

        Args:
            worker: Its number.
            returncode: Its exit status, negative for a signal.
            reason: How it ended.
            by_network: True if the description of the network ended it, so that the next worker
                need not have the same end.

        Returns:
            Lines for the log.
        """
        assert self._rounds is not None
        self.living.discard(worker)
        lines = []
        if returncode:
            self.last_death = worker, returncode
            self.changes.append(reason[:_LONGEST_CHANGE])
            lines.append(reason)
        else:
            # A script may leave out this call, and a worker that starts now would wait for others.
            self._rounds.finish()
            self._is_over = True
        lines += self.look()
        if not returncode or self.is_finished:
            return lines
        if worker not in self._rounds.members and not by_network:
            self._early_deaths += 1
        if self._early_deaths >= _MOST_EARLY_DEATHS:
            self.failure = f"{self._early_deaths} workers in a row died before their first round"
        return lines

    def result(self) -> str:
        """Return why the run has failed, when all workers have ended; empty if it has not."""
        if not self.failure and not self._is_over:
            self.failure = "every worker died"
        return self.failure

    def samples(self) -> PaidSamples | None:
        """Return the samples that the workers have counted; None without any."""
        if self._rounds is None:
            return None
        self._rounds.update()
        return self._rounds.samples()

    @property
    def is_finished(self) -> bool:
        """Return True if a worker has ended the run."""
        assert self._rounds is not None
        return self._is_over or self._rounds.is_finished


def _forward(listener: socket.socket, port: int) -> None:
    """Connect every worker that reaches a listening socket to a port of this machine."""
    while True:
        try:
            worker, _ = listener.accept()
        except OSError:  # for example, too many open files; or the worker is gone again
            time.sleep(_ACCEPT_PAUSE_S)
            continue
        try:
            store = socket.create_connection(("127.0.0.1", port))
        except OSError:
            worker.close()
            continue
        for source, target in ((worker, store), (store, worker)):
            # Each message waits for an answer, so none may wait for more data.
            target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Send what arrives at one socket through another one, until its end."""
    with contextlib.suppress(OSError):
        while content := source.recv(65536):
            target.sendall(content)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
