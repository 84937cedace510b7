"""Let the workers of one machine meet in a file that only their user can read.

torch's store for workers listens on a port, without authentication: whoever reaches the port can
read and write its keys, among them the addresses at which workers connect to one another. So
workers of one machine use a file instead::

    rank 0                                       rank r
    listen on 127.0.0.1:MASTER_PORT              connect there
    create a file in a new folder of mode 0700
    send its path through the port         --->  open it, if its folder is private to this user
    wait for all in the file               <---  write a notice into the file
    close the port                               use only the file from here on

Another user of the machine can disturb the first step, and the run then ends with an error. It
cannot read or change anything that the workers exchange after that.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

import torch.distributed as dist

from mlbench_core.errors import WorkerError

__all__ = ["create", "leave", "meet", "open_existing"]

_KEY = "mlbench/meeting"
# Each worker that has let go of the store leaves a file with this beginning.
_LEFT = "left-"


def meet(
    port_store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta
) -> tuple[dist.Store, Path]:
    """Move from a store on a port to a private file; all workers call it.

    Args:
        port_store: The store on the port. Nobody needs it afterwards.
        rank: This worker's rank.
        world_size: Number of workers.
        timeout: Time to wait for the other workers, here and in the new store.

    Returns:
        The new store and its path.

    Raises:
        WorkerError: The path that arrived is not private to this user.
        RuntimeError: Another worker did not arrive in time.
    """
    if rank == 0:
        store, path = create(world_size, timeout)
        port_store.set(_KEY, str(path))
        store.wait([f"{_KEY}/{other}" for other in range(1, world_size)], timeout)
        # An agent of torchrun keeps its store: workers that meet there
        # again must not find this path.
        port_store.delete_key(_KEY)
    else:
        path = Path(os.fsdecode(port_store.get(_KEY)))
        store = open_existing(path, world_size, timeout)
        store.set(f"{_KEY}/{rank}", "1")
    return store, path


def create(world_size: int, timeout: datetime.timedelta) -> tuple[dist.Store, Path]:
    """Create a store in a new folder that only this user can read.

    Args:
        world_size: Number of workers that will open it. The last one that lets go of it removes the
            file.
        timeout: Time that a worker waits for a key.
    """
    # Workers in containers share the run's folder, but not the folder of temporary files.
    shared = os.environ.get("MLBENCH_SPOOL") or None
    if shared is not None:
        with contextlib.suppress(OSError):
            Path(shared).mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(shared, os.W_OK):
            shared = None
    folder = Path(tempfile.mkdtemp(prefix="mlbench-store-", dir=shared)).absolute()
    path = folder / secrets.token_hex(16)
    return _open(path, world_size, timeout), path


def open_existing(path: Path, world_size: int, timeout: datetime.timedelta) -> dist.Store:
    """Open the store of rank 0.

    Args:
        path: Its path, as it arrived from rank 0.
        world_size: As for :func:`create`.
        timeout: As for :func:`create`.

    Raises:
        WorkerError: The file is not in a folder that is private to this user.
    """
    try:
        # A link of another user could lead elsewhere at the next look.
        real = path.resolve(strict=True)
        folder, file = os.lstat(real.parent), os.lstat(real)
    except (OSError, ValueError, RuntimeError) as error:
        raise WorkerError(
            f"this worker cannot open {path}, where the workers of this machine meet ({error}): "
            "set TMPDIR of rank 0 to a folder that all workers see"
        ) from error
    private = stat.S_ISDIR(folder.st_mode) and not stat.S_IMODE(folder.st_mode) & 0o077
    own = folder.st_uid == file.st_uid == os.geteuid()
    if not (private and own and stat.S_ISREG(file.st_mode)):
        raise WorkerError(
            f"the workers of this machine cannot meet in {path}, which is not "
            "private to their user: another program has answered on the port of "
            "rank 0, or the workers run as different users"
        )
    return _open(real, world_size, timeout)


def leave(path: Path, world_size: int) -> None:
    """Let go of a store that nothing uses here; the last worker to do so removes the folder.

    torch's store removes its file, but not if two workers release it at the same moment: each of
    them then takes the other one for the last.

    Args:
        path: The path of the store.
        world_size: As for :func:`create`.
    """
    with contextlib.suppress(OSError):
        (path.parent / f"{_LEFT}{secrets.token_hex(8)}").touch()
        if len(list(path.parent.glob(f"{_LEFT}*"))) >= world_size:
            shutil.rmtree(path.parent)


def _open(path: Path, world_size: int, timeout: datetime.timedelta) -> dist.Store:
    store = dist.FileStore(str(path), world_size)
    store.set_timeout(timeout)
    return store
