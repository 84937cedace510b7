"""MPI as a backend of ``torch.distributed``, for a torch that was built without it.

The wheels of torch have no MPI. This package gives them one: :func:`register` makes ``"mpi"`` a
backend whose process groups work over mpi4py (``pip install 'mlbench-core[mpi]'``). As with an MPI
built into torch, ``mpirun`` gives ranks and world size.
:func:`~mlbench_core.distributed.pytorch.initialize_backends` registers it automatically::

    mpirun -n 2 python main.py

with these lines in ``main.py``::

    with initialize_backends("mpi") as (rank, world_size, graph):
        ...

or, without ``initialize_backends``::

    mpi.register()
    torch.distributed.init_process_group("mpi")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from mlbench_core import torch_private
from mlbench_core.distributed.pytorch.mpi.group import MPIProcessGroup
from mlbench_core.distributed.pytorch.mpi.queue import Test, Work
from mlbench_core.distributed.pytorch.mpi.store import connect, serve
from mlbench_core.distributed.pytorch.mpi.world import (
    check_launch,
    check_variables,
    fail_at_exit,
    why_not,
    world,
)
from mlbench_core.errors import BackendError, MissingDependencyError

__all__ = [
    "MPIProcessGroup",
    "check_launch",
    "check_variables",
    "fail_at_exit",
    "is_available",
    "is_registered",
    "register",
    "why_not",
    "world",
]

DEFAULT_TIMEOUT_S = 1800.0
"""Time limit of operations if none is given; torch's default too."""


def is_available() -> bool:
    """Return True if this process can use the backend ``mpi``.

    Torch was built with it, or mpi4py is installed.

    Example:
        >>> is_available() == (why_not() is None)
        True
    """
    return why_not() is None


def is_registered() -> bool:
    """Return True if ``mpi`` is the backend of this package."""
    return torch_private.mpi_class() is _Maker


def register(timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
    """Make ``mpi`` a backend of ``torch.distributed``; MPI starts with the first process group.

    Afterwards ``torch.distributed.is_mpi_available()`` is true. Calling it again only changes the
    time limit. A torch that was built with MPI keeps its own.

    torch gives an MPI backend neither a time limit nor a store, because an MPI built into torch has
    no use for them. So the limit is given here. Groups made by ``new_group`` have it too.

    Args:
        timeout_s: Seconds after which an operation fails that other workers do not join.

    Returns:
        True if ``mpi`` is the backend of this package, False if it is one that was built into
        torch.

    Raises:
        MissingDependencyError: mpi4py is not installed.
        BackendError: MPI cannot be used here for another reason.
        ValueError: ``timeout_s`` is not positive.

    Example:
        >>> register()  # doctest: +SKIP
        True
        >>> dist.init_process_group("mpi")  # doctest: +SKIP
    """
    # Infinity is allowed here: operations then have no time limit.
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, not {timeout_s}")
    if dist.is_available() and dist.is_mpi_available() and not is_registered():
        return False
    reason = why_not()
    if reason is not None:
        if "pip install" in reason:
            raise MissingDependencyError(reason)
        raise BackendError(reason)
    _Maker.timeout_s = timeout_s
    if not is_registered():
        dist.Backend.register_backend(
            "mpi", _make_by_plugin, extended_api=True, devices=["cpu", "cuda"]
        )
        # Before version 2.14, torch does not look among the registered backends for this one name:
        # it uses the class that an MPI build would contain, which is this one from now on.
        torch_private.set_mpi_class(_Maker)
    return True


class _Maker:
    """A replacement for the process group class that torch expects of an MPI build."""

    timeout_s = DEFAULT_TIMEOUT_S

    @classmethod
    def create(cls, ranks: Sequence[int]) -> MPIProcessGroup:
        """Create the group of workers with these ranks in MPI's world; of all for an empty list."""
        mpi_world = world()
        check_variables(mpi_world, os.environ)
        made: list[Any] = []

        def make() -> None:
            if ranks:
                members = mpi_world.mpi.COMM_WORLD.Get_group().Incl(list(ranks))
                made.append(mpi_world.mpi.COMM_WORLD.Create_group(members))
                members.Free()
                return
            comm = mpi_world.mpi.COMM_WORLD.Dup()
            made.append(comm)
            if mpi_world.size > 1:
                made.extend(serve(comm))

        def post() -> list[Test]:
            # The workers of a smaller group have no communicator yet, so they
            # cannot meet in a barrier before.
            if ranks:
                return []
            return [mpi_world.mpi.COMM_WORLD.Ibarrier().Test]

        # Making a communicator blocks until all workers do it: as a work it has a time limit.
        name = f"making a process group, rank {mpi_world.rank} of {mpi_world.size}"
        work = Work(mpi_world.works, cls, name, post, make, [], cls.timeout_s, in_order=True)
        mpi_world.works.submit(work, background=False)
        work.wait()
        fail_at_exit("")
        comm, *served = made
        store = None
        if served:
            store, address = served
            if store is None:
                store = connect(*address)
        return MPIProcessGroup(mpi_world, comm, cls.timeout_s, store)


def _make_by_plugin(options: Any, backend_options: Any) -> MPIProcessGroup:
    """Create a group for torch 2.14 and later, whose own MPI is a registered backend too."""
    return _Maker.create(options.global_ranks_in_group)
