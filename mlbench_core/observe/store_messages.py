"""Messages between observed workers that leave the script's process group alone."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mlbench_core.controlflow.run_results import Workers
from mlbench_core.distributed.environment import ClusterEnvironment
from mlbench_core.distributed.pytorch import private_store
from mlbench_core.distributed.pytorch.initialize import private_place, rendezvous_store
from mlbench_core.errors import WorkerError

__all__ = ["StoreWorkers"]

_MEET = timedelta(seconds=300)
_MESSAGE_S = 60.0
_POLL_S = 0.005


class StoreWorkers(Workers):
    """The messages of all workers through a store of their own.

    The workers meet at the launcher's rendezvous before the script starts, and agree on a second
    store there: a file that only their user can read, or, on several machines, a port of rank 0,
    where all keys begin with a secret. The rendezvous is then free for the script.

    Args:
        environment: The way in which the workers were started.

    Raises:
        WorkerError: In a message, another worker has ended or does not answer.
    """

    def __init__(self, environment: ClusterEnvironment) -> None:
        place = environment.place()
        self._rank, self._size = place.rank, place.world_size
        self._messages = 0
        self._path: Path | None = None
        meeting = rendezvous_store(private_place(environment, place), _MEET)
        # torchrun's agent keeps its store when it starts the workers again.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        named = dist.PrefixStore(f"mlbench_observe/{attempt}", meeting)
        if environment.is_on_one_machine(place):
            self._store, self._path = private_store.meet(named, self._rank, self._size, _MEET)
        else:
            self._store = _meet(named, str(place.master_address), self._rank, self._size)
        # Closes the rendezvous, unless the agent keeps it.
        del named, meeting
        # Until rank 0 has closed it, the script of another worker could still reach it.
        if self._rank == 0:
            self._store.set("met", "1")
        else:
            self._store.wait(["met"], _MEET)

    @property
    def size(self) -> int:
        """Return the number of workers."""
        return self._size

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums over all workers."""
        name = self._next_name()
        self._store.set(f"{name}/{self._rank}", ",".join(map(str, numbers)))
        totals = [0] * len(numbers)
        for rank in range(self._size):
            words = self._get(f"{name}/{rank}", rank).decode().split(",")
            for position, word in enumerate(words):
                totals[position] += int(word)
        return totals

    def broadcast(self, content: bytes, sender: int) -> bytes:
        """Return the content that the sender passed."""
        name = self._next_name()
        if self._rank == sender:
            self._store.set(name, content)  # type: ignore[arg-type]
            return content
        return self._get(name, sender)

    def announce(self, text: str) -> None:
        """Leave a text for the others, who may look for it or not."""
        self._store.set("announced", text)

    def announced(self) -> str | None:
        """Return the text of :meth:`announce`, None before."""
        if not self._store.check(["announced"]):
            return None
        return bytes(self._store.get("announced")).decode()

    def leave(self) -> None:
        """Say that this worker sends nothing more; rank 0, which keeps the store, waits briefly."""
        # The store is gone if rank 0 has ended before.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "1")
            if self._rank == 0:
                others = [f"left/{rank}" for rank in range(1, self._size)]
                self._store.wait(others, timedelta(seconds=5))
        if self._path is not None:
            private_store.leave(self._path, self._size)

    def _next_name(self) -> str:
        self._messages += 1
        return str(self._messages)

    def _get(self, name: str, sender: int) -> bytes:
        """Return a message of another worker, and do not wait for a worker that has left."""
        end_s = time.monotonic() + _MESSAGE_S
        while not self._store.check([name]):
            has_left = self._store.check([f"left/{sender}"])
            # It may have sent the message in between, before it left.
            if has_left and not self._store.check([name]):
                raise WorkerError(f"worker {sender} has ended early")
            if time.monotonic() > end_s:
                raise WorkerError(f"worker {sender} does not answer for {_MESSAGE_S:g} s")
            time.sleep(_POLL_S)
        return bytes(self._store.get(name))


def _meet(meeting: dist.Store, host: str, rank: int, size: int) -> dist.Store:
    """Return a store on a port of rank 0, of which the meeting passes port and secret."""
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        secret = secrets.token_hex(16)
        meeting.set("port", f"{store.port} {secret}")
        meeting.wait([f"read/{other}" for other in range(1, size)])
    else:
        port, secret = meeting.get("port").decode().split()
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        meeting.set(f"read/{rank}", "1")
    return dist.PrefixStore(secret, store)
