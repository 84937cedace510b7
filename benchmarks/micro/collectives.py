"""Time Task 0's all-reduce against a bare loop of torch.distributed, and MPI against Gloo.

All variants run in the same worker processes, each with its own process group. They differ in the
code that measures, not in the operation, so Task 0 should report the times of the bare loop.

    python benchmarks/micro/collectives.py [--workers 2 4] [--save]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from _bare_loop import bare_loop
from _bench import Row, Subject, Timed, finish, make_parser, measure, parse, positive
from _workers import Workers, largest, mpirun_command, run_script

from mlbench_core.distributed.pytorch import mpi

# Task 0 is a folder of scripts like this one, not a package.
sys.path.append(str(Path(__file__).resolve().parents[1] / "task0_allreduce"))
from measure_collectives import measure as measure_collective

OURS, BARE, OVER_GLOO = "Task 0", "bare loop", "Task 0 over Gloo"
MPI_TIMEOUT_S = 120
SUBJECT = Subject(
    "collectives",
    "All-reduce: Task 0, a bare loop, and MPI (`collectives.py`)",
    "µs",
    (BARE, OVER_GLOO),
    ("Over Gloo, Task 0 is within 10 % of the bare loop from 1,000,000 elements on; "
     "below, Gloo has two speeds.",
     "Limits over Gloo: within 10 % of the bare loop; MPI: below Gloo for 100 floats."),
)  # fmt: skip


def make_handler(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make the groups of the variants in a worker; a request then times one block of a variant."""
    backend = setup["backend"]
    if backend == "mpi":
        mpi.register(MPI_TIMEOUT_S)
    groups = {name: dist.new_group(backend=backend) for name in (OURS, BARE)}
    groups[OVER_GLOO] = dist.new_group(backend="gloo")
    operations: dict[int, int] = {}

    def ours(elements: int, count: int, repetitions: int, group: dist.ProcessGroup) -> list[float]:
        measurement = measure_collective(
            "all_reduce", elements, group=group, repetitions=repetitions, operations=count
        )
        # A fast all-reduce with wrong sums must not enter the table.
        if measurement.wrong_elements:
            raise RuntimeError(f"{measurement.wrong_elements} wrong elements: {measurement}")
        return list(measurement.seconds)

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        elements = request["elements"]
        # All variants have the same number of operations between two readings of the clock.
        if elements not in operations:
            pilot = measure_collective("all_reduce", elements, repetitions=3)
            operations[elements] = pilot.operations
        run = bare_loop if request["variant"] == BARE else ours
        group = groups[request["variant"]]
        return {
            "seconds": median(run(elements, operations[elements], request["repetitions"], group))
        }

    return handle


def run(
    backend: str, count: int, elements: Sequence[int], repetitions: int, blocks: int
) -> list[Row]:
    """Measure all sizes over one backend with one number of workers."""
    launcher = mpirun_command(count) if backend == "mpi" else None
    rows = []
    with Workers(__file__, count, {"backend": backend}, launcher) as workers:

        def block(name: str, size: int) -> Timed:
            replies = workers.ask(variant=name, elements=size, repetitions=repetitions)
            return Timed(largest(replies)["seconds"])

        names = [BARE, OURS]
        if backend == "mpi":
            names.append(OVER_GLOO)
        for size in elements:
            case = f"{backend}, {count} workers, {size:,} elements"
            variants = {name: partial(block, name, size) for name in names}
            rows += measure(SUBJECT, case, variants, blocks)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = make_parser(__doc__, blocks=40)
    add = parser.add_argument
    add("--workers", nargs="+", type=positive, default=[2, 4], help="numbers of workers")
    add("--elements", nargs="+", type=positive, default=[1, 100, 10**4, 10**5, 10**6, 10**7])
    add("--repetitions", type=positive, default=20, help="repetitions in a block (default: 20)")
    add("--without-mpi", action="store_true", help="compare over Gloo only")
    arguments = parse(parser, argv, workers=[2], elements=[1000], repetitions=2)
    if min(arguments.workers) < 2:
        parser.error(f"argument --workers: must be at least 2, not {min(arguments.workers)}")
    backends = ["gloo"]
    conditions = (
        f"float32, {arguments.blocks} blocks of {arguments.repetitions} repetitions, "
        "one thread per worker."
    )
    if not arguments.without_mpi:
        if mpirun_command(2):
            backends.append("mpi")
        else:
            conditions += " MPI was not compared, because mpi4py or mpirun is missing."
    rows = []
    for count, backend in itertools.product(arguments.workers, backends):
        rows += run(backend, count, arguments.elements, arguments.repetitions, arguments.blocks)
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    run_script(main, make_handler)
