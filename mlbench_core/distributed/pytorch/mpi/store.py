"""Open a key-value store between MPI's workers.

torch gives the backend ``mpi`` no store. One is needed to find lost workers: a worker that is alive
can write a notice into it while MPI itself is stuck (see
:mod:`mlbench_core.distributed.pytorch.lost_workers`).
"""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mlbench_core.distributed.interfaces import own_addresses
from mlbench_core.distributed.pytorch import private_store, process_groups
from mlbench_core.errors import WorkerError

__all__ = ["connect", "serve"]

_LOOPBACK = "127.0.0.1"
# Time to wait for an answer of one of rank 0's addresses, some of which may lead nowhere.
_PROBE_S = 2.0
_TIMEOUT = datetime.timedelta(seconds=10)


def serve(comm: Any) -> tuple[dist.Store | None, tuple[str, list[str], int]]:
    """Open a store on rank 0 and send its address to a communicator; all workers must call it.

    Args:
        comm: The communicator of mpi4py.

    Returns:
        The store on rank 0, None elsewhere; and rank 0's host, addresses and port. The port is 0 if
        rank 0 could not open one. If all workers run on one machine, every one has the store, which
        is a file, and no port is opened.
    """
    machines = comm.allgather(process_groups.machine())
    if machines[0] and len(set(machines)) == 1:
        return _share_file(comm), ("", [], 0)
    store: dist.TCPStore | None = None
    if comm.Get_rank() == 0:
        with contextlib.suppress(RuntimeError, OSError):
            store = dist.TCPStore(
                _LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT
            )
    port = 0
    if store is not None:
        port = store.port
    return store, comm.bcast((socket.gethostname(), own_addresses(), port), 0)


def _share_file(comm: Any) -> dist.Store | None:
    store, path = None, ""
    if comm.Get_rank() == 0:
        with contextlib.suppress(RuntimeError, OSError):
            store, created = private_store.create(comm.Get_size(), _TIMEOUT)
            path = str(created)
    path = comm.bcast(path, 0)
    if store is None and path:
        with contextlib.suppress(RuntimeError, WorkerError):
            store = private_store.open_existing(Path(path), comm.Get_size(), _TIMEOUT)
    return store


def connect(host: str, addresses: list[str], port: int) -> dist.Store | None:
    """Find rank 0's store.

    Args:
        host: Rank 0's host name.
        addresses: Its IP addresses.
        port: The port on which its store listens.

    Returns:
        The store; None if no address leads to it, as behind a firewall. Lost workers are then not
        named.
    """
    if not port:
        return None
    if host == socket.gethostname():
        addresses = [_LOOPBACK, *addresses]
    for address in _answering(addresses, port):
        with contextlib.suppress(RuntimeError):
            return dist.TCPStore(
                address, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT
            )
    return None


def _answering(addresses: list[str], port: int) -> Iterator[str]:
    # Tried with a plain socket first: a TCPStore would try an address that leads
    # nowhere for its whole timeout.
    for address in addresses:
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), _PROBE_S).close()
            yield address
