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

import socket
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlbench_core.distributed.pytorch.elastic import Rounds

__all__ = ["ElasticWorkers"]

_MOST_EARLY_DEATHS = 3
# The record of the run has them, and its file is limited.
_MOST_CHANGES = 50
_LONGEST_CHANGE = 150
# All workers may connect before the process accepts.
_BACKLOG = 4096


class ElasticWorkers:
    """The living workers of an elastic run.

    Args:
        facts: ``least`` and ``most`` of the range, and ``argv``: the words of a worker's command,
            with ``{rank}`` for its number.
        first_workers: Number of workers that start together.

    Attributes:
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
        self._least, self._most = int(facts["least"]), int(facts["most"])
        self._first_workers = self._next = first_workers
        self._is_over = False
        self._early_deaths = 0
        # torch's store would listen on all interfaces, and it asks for no password.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self._port = self._listener.getsockname()[1]
        self._store: Any = None
        self._rounds: Rounds | None = None

    def variables(self, worker: int) -> dict[str, str]:
        """Return the variables of a worker, which count it as living."""
        self.living.add(worker)
        return {
            "MLBENCH_ELASTIC_STORE": f"127.0.0.1:{self._port}",
            "MLBENCH_ELASTIC_WORKER": str(worker),
            "MLBENCH_ELASTIC_FIRST_WORKERS": str(self._first_workers),
            "MLBENCH_ELASTIC_LEAST": str(self._least),
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

    def missing(self) -> list[dict[str, Any]]:
        """Return the commands of the workers to start now."""
        if self.failure or self._has_finished():
            return []
        commands = []
        for _ in range(self._most - len(self.living)):
            argv = [word.replace("{rank}", str(self._next)) for word in self._argv]
            commands.append({"argv": argv, "env": {}, "rank": self._next})
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
        if (is_lost or self._rounds.restarted) and not self._has_finished():
            self.failure = "the shared weights are lost, because no worker that had them is left"
        return lines

    def end(self, worker: int, returncode: int, reason: str) -> list[str]:
        """Note the end of a worker.

        Args:
            worker: Its number.
            returncode: Its exit status, negative for a signal.
            reason: How it ended.

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
        if not returncode or self._has_finished():
            return lines
        if worker not in self._rounds.members:
            self._early_deaths += 1
        if self._early_deaths >= _MOST_EARLY_DEATHS:
            self.failure = f"{self._early_deaths} workers in a row died before their first round"
        return lines

    def result(self) -> str:
        """Return why the run has failed, when all workers have ended; empty if it has not."""
        if not self.failure and not self._is_over:
            self.failure = "every worker died"
        return self.failure

    def _has_finished(self) -> bool:
        assert self._rounds is not None
        return self._is_over or self._rounds.is_finished
