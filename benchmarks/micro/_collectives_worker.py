"""One worker of `collectives.py`: time all contestants interleaved and write down what each block gave.

Run by `collectives.py` as ``python _collectives_worker.py FOLDER``, with RANK in the environment or under mpirun.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from _bare_loop import bare_loop

from mlbench_core.distributed.pytorch import mpi
from mlbench_core.evaluation.pytorch.collectives import measure

OURS, BARE, MPI, BARE_MPI = "ours", "bare", "mpi", "bare_mpi"
TIMEOUT_S = 120
Contestant = Callable[[int, int, int], list[float]]
"""Takes elements, operations and repetitions; gives the seconds of one operation by repetition."""


@dataclass
class Plan:
    """What the workers do: written as JSON by the parent, read by every worker."""

    workers: int
    elements: list[int]
    blocks: int
    repetitions: int
    with_mpi: bool = False


def ours(group: dist.ProcessGroup) -> Contestant:
    """The library's measurement over a group."""

    def run(elements: int, operations: int, repetitions: int) -> list[float]:
        measured = measure("all_reduce", elements, group=group, repetitions=repetitions, operations=operations)
        if measured.wrong_elements:
            raise RuntimeError(f"{measured.wrong_elements} wrong elements: {measured}")
        return list(measured.seconds)

    return run


def bare(group: dist.ProcessGroup) -> Contestant:
    """The loop written apart over a group."""

    def run(elements: int, operations: int, repetitions: int) -> list[float]:
        return bare_loop(elements, operations, repetitions, group)

    return run


def contestants(with_mpi: bool) -> dict[str, Contestant]:
    """All that are compared, each with a process group of its own among the same processes."""
    found = {OURS: ours(dist.new_group(backend="gloo")), BARE: bare(dist.new_group(backend="gloo"))}
    if with_mpi:
        mpi.register(TIMEOUT_S)
        found |= {MPI: ours(dist.new_group(backend="mpi")), BARE_MPI: bare(dist.new_group(backend="mpi"))}
    return found


def run(plan: Plan) -> dict[str, dict[int, list[list[float]]]]:
    """The seconds by contestant, size and block; in every block all take a turn, in an order that changes."""
    compared = contestants(plan.with_mpi)
    names = list(compared)
    seconds: dict[str, dict[int, list[list[float]]]] = {name: {n: [] for n in plan.elements} for name in names}
    for elements in plan.elements:
        operations = measure("all_reduce", elements, repetitions=3).operations
        for block in range(-1, plan.blocks):  # the first one warms up
            start = block % len(names)
            for name in names[start:] + names[:start]:
                times = compared[name](elements, operations, plan.repetitions)
                if block >= 0:
                    seconds[name][elements].append(times)
    return seconds


def main() -> None:
    """Join the others, run; worker 0 writes the result."""
    folder = Path(sys.argv[1])
    plan = Plan(**json.loads((folder / "plan.json").read_text()))
    rank = int(os.environ["OMPI_COMM_WORLD_RANK" if plan.with_mpi else "RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), plan.workers),
        rank=rank,
        world_size=plan.workers,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    result = run(plan)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
