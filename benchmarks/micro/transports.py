"""Time a training step whose gradients travel on one machine over Gloo, MPI or shared memory.

All variants run in the same worker processes, which mpirun starts. The slowest worker's time
counts. Processor time is that of all threads of a worker, as the mean over the workers; it depends
less on other programs than the time does.

    python benchmarks/micro/transports.py [--models mlp resnet18] [--workers 2] [--save]
"""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _bench import Row, Subject, Timed, finish, make_parser, measure, parse, positive
from _variants import LR, MOMENTUM, WORKLOADS
from _workers import Workers, largest, mpirun_command, run_script
from torch import nn

from mlbench_core.aggregation.pytorch import AllReduceAggregation
from mlbench_core.distributed.pytorch import mpi
from mlbench_core.optim.pytorch import CentralizedSGD

WARM_UP_STEPS = 4
MPI_TIMEOUT_S = 600
SHARED, SHARED_OVERLAP = "shared memory", "shared memory, overlap"
VARIANTS = (SHARED, "Gloo", "MPI", SHARED_OVERLAP, "Gloo, overlap", "MPI, overlap")
SUBJECT = Subject(
    "transports",
    "Steps per second over Gloo, MPI and shared memory (`transports.py`)",
    "steps/s",
    (SHARED, SHARED_OVERLAP),
    ("With overlap and 2 workers, "
     "MPI takes 0.82 (MLP) and 0.80 (ResNet-18) of the steps per second of shared memory.",
     "Limit: the code for shared memory stays unless MPI is within 15 % of it in every case."),
)  # fmt: skip


def make_handler(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make the network in a worker; a request then takes some steps with one variant."""
    workload, steps = WORKLOADS[setup["model"]], setup["steps"]
    mpi.register(MPI_TIMEOUT_S)
    over_mpi = dist.new_group(backend="mpi")
    torch.manual_seed(0)
    model = workload.make()
    inputs, targets = workload.batch(dist.get_rank())
    trainees: dict[str, tuple[nn.Module, CentralizedSGD]] = {}

    def step(network: nn.Module, optimizer: CentralizedSGD) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), targets).backward()
        optimizer.step()

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        name = request["variant"]
        if name not in trainees:
            exchange = AllReduceAggregation(
                overlap=name.endswith("overlap"),
                shared_memory=name.startswith(SHARED),
                process_group=over_mpi if name.startswith("MPI") else None,
            )
            network = copy.deepcopy(model)
            optimizer = CentralizedSGD(
                model=network, lr=LR, momentum=MOMENTUM, aggregation=exchange
            )
            trainees[name] = network, optimizer
            for _ in range(WARM_UP_STEPS):
                step(*trainees[name])
        dist.barrier()
        begin, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step(*trainees[name])
        return {"seconds": time.perf_counter() - begin, "busy": time.process_time() - busy}

    return handle


def run(model: str, count: int, steps: int, blocks: int) -> list[Row]:
    """Measure all variants of one network with one number of workers."""
    setup = {"model": model, "steps": steps}
    with Workers(__file__, count, setup, mpirun_command(count)) as workers:

        def block(variant: str) -> Timed:
            replies = workers.ask(variant=variant)
            busy_ms = 1000 * sum(reply["busy"] for reply in replies) / count / steps
            return Timed(largest(replies)["seconds"], {"CPU ms/step": busy_ms})

        case = f"{WORKLOADS[model].title}, {count} workers"
        variants = {name: partial(block, name) for name in VARIANTS}
        return measure(SUBJECT, case, variants, blocks, amount=steps)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = make_parser(__doc__, blocks=16)
    add = parser.add_argument
    add("--models", nargs="+", choices=WORKLOADS, default=["mlp", "resnet18", "resnet20"])
    add("--workers", nargs="+", type=positive, default=[2], help="numbers of workers")
    add("--steps", type=positive, default=2, help="steps of a block (default: 2)")
    arguments = parse(parser, argv, models=["mlp"], steps=1)
    if mpirun_command(2) is None:
        sys.exit(
            "mpi4py or mpirun was not found: "
            "pip install 'mlbench-core[mpi]', and see docs/howto/mpi.md"
        )
    rows = []
    for model, count in itertools.product(arguments.models, arguments.workers):
        rows += run(model, count, arguments.steps, arguments.blocks)
    conditions = f"{arguments.blocks} blocks of {arguments.steps} steps, one thread per worker."
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    run_script(main, make_handler)
