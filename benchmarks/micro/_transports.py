"""Time of a training step by the way in which gradients travel on one machine: Gloo, MPI and shared memory.

All variants live in the same two processes and run interleaved, so that a change of the machine's load meets all of
them. The processor time counts all threads of a worker. It depends less on the load than the time of a step does.

    mpirun -n 2 python benchmarks/micro/_transports.py --models mlp resnet18
"""

from __future__ import annotations

import argparse
import copy
import datetime
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _variants import LR, MOMENTUM, WORKLOADS
from torch import nn

from mlbench_core.aggregation.pytorch import AllReduceAggregation
from mlbench_core.distributed.pytorch import mpi
from mlbench_core.optim.pytorch import CentralizedSGD

TIMEOUT_S = 600.0
WARM_UP_STEPS = 2


def make_steps(model: str, rank: int, group: Any) -> dict[str, Callable[[], None]]:
    """Return a function that takes a training step, by the name of the variant."""
    torch.manual_seed(0)
    first = WORKLOADS[model].make()
    inputs, targets = WORKLOADS[model].batch(rank)
    exchanges = {"Gloo": {}, "MPI": {"process_group": group}, "shared memory": {"shared_memory": True}}

    def step_of(exchange: AllReduceAggregation) -> Callable[[], None]:
        network = copy.deepcopy(first)
        optimizer = CentralizedSGD(model=network, lr=LR, momentum=MOMENTUM, aggregation=exchange)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(inputs), targets).backward()
            optimizer.step()

        return step

    return {
        f"{name}{', overlap' if overlap else ''}": step_of(AllReduceAggregation(overlap=overlap, **settings))
        for overlap in (False, True)
        for name, settings in exchanges.items()
    }


def measure(steps: dict[str, Callable[[], None]], blocks: int, count: int) -> dict[str, list[list[float]]]:
    """Return the seconds and the processor seconds of a step, by variant and block."""
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    measured: dict[str, list[list[float]]] = {name: [] for name in steps}
    for block in range(blocks):
        # A variant that always followed the same one would always meet the state in which that one left memory.
        first = block % len(steps)
        order = [*steps][first:] + [*steps][:first]
        for name in reversed(order) if block % 2 else order:
            dist.barrier()
            start_s, cpu_s = time.perf_counter(), time.process_time()
            for _ in range(count):
                steps[name]()
            measured[name].append([(time.perf_counter() - start_s) / count, (time.process_time() - cpu_s) / count])
    return measured


def table(workers: Sequence[dict[str, list[list[float]]]]) -> str:
    """Return the medians over blocks: of the slowest worker's time, and of the workers' mean processor time."""
    seconds = {name: [max(block[0] for block in blocks) for blocks in zip(*(w[name] for w in workers), strict=True)]
               for name in workers[0]}  # fmt: skip
    lines = ["| variant | ms/step | x shared memory | quartiles | CPU ms/step |", "|---|---|---|---|---|"]
    for name, own in seconds.items():
        reference = seconds["shared memory, overlap" if name.endswith("overlap") else "shared memory"]
        ratios = [a / b for a, b in zip(own, reference, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cpu_s = statistics.median(statistics.mean(block[1] for block in blocks)
                                  for blocks in zip(*(w[name] for w in workers), strict=True))  # fmt: skip
        lines.append(
            f"| {name} | {1000 * statistics.median(own):.1f} | {middle:.2f} | {low:.2f} to {high:.2f} "
            f"| {1000 * cpu_s:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure in each worker; rank 0 prints a table per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=["mlp", "resnet18", "resnet20"])
    parser.add_argument("--blocks", type=int, default=24, help="at least 2 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="steps in a block (default: %(default)s)")
    args = parser.parse_args()
    from mpi4py import MPI  # starts MPI, so not while a test reads this module

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    rank, world_size = world.Get_rank(), world.Get_size()
    folder = world.bcast(tempfile.mkdtemp(prefix="transports-") if rank == 0 else None)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    mpi.register(TIMEOUT_S)
    group = dist.new_group(backend="mpi")
    for model in args.models:
        measured = measure(make_steps(model, rank, group), args.blocks, args.steps)
        workers: list[Any] = [None] * world_size
        dist.all_gather_object(workers, measured)
        if rank == 0:
            print(f"{WORKLOADS[model].title}, {world_size} workers\n\n{table(workers)}\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
