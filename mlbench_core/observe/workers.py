"""Messages between observed workers that leave the script's process group alone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from mlbench_core.controlflow.run_results import Workers
from mlbench_core.distributed.environment import DEFAULT_PORT, Place
from mlbench_core.errors import WorkerError

__all__ = ["StoreWorkers"]

_MEET_S = 300.0
_MESSAGE_S = 60.0
_POLL_S = 0.005
_LOOPBACK = "127.0.0.1"


class StoreWorkers(Workers):
    """The messages of all workers through a store of their own.

    The workers meet at the launcher's rendezvous before the script starts, and rank 0 names the
    port of a second store there. The rendezvous is then free for the script.

    Args:
        place: This worker among the others.

    Raises:
        WorkerError: In a message, another worker has ended or does not answer.
    """

    def __init__(self, place: Place) -> None:
        self._rank, self._size = place.rank, place.world_size
        self._messages = 0
        host = place.master_address or _LOOPBACK
        is_first = self._rank == 0
        if is_first:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            _meet(place, self._store.port)
            self._store.set("met", "1")
        else:
            port = _meet(place, 0)
            self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
            # Earlier, the script could still reach the rendezvous of rank 0 that ends now.
            self._store.wait(["met"], timedelta(seconds=_MEET_S))

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

    def leave(self) -> None:
        """Say that this worker sends nothing more; rank 0, which keeps the store, waits briefly."""
        # The store is gone if rank 0 has ended before.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "1")
            if self._rank == 0:
                others = [f"left/{rank}" for rank in range(1, self._size)]
                self._store.wait(others, timedelta(seconds=5))

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


def _meet(place: Place, port: int) -> int:
    """Return the port that rank 0 passes, through the launcher's rendezvous.

    The store of the rendezvous is closed when the function returns.
    """
    # torchrun's agent keeps the store; otherwise rank 0 does.
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        place.master_address or _LOOPBACK,
        place.master_port or DEFAULT_PORT,
        is_master=place.rank == 0 and not has_agent,
        timeout=timedelta(seconds=_MEET_S),
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"mlbench_observe/{attempt}"
    if place.rank == 0:
        store.set(f"{prefix}/port", str(port))
        store.wait([f"{prefix}/read/{rank}" for rank in range(1, place.world_size)])
    else:
        port = int(store.get(f"{prefix}/port"))
        store.set(f"{prefix}/read/{place.rank}", "1")
    return port
