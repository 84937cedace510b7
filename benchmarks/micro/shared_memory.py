"""Sums of gradients by Gloo and through shared memory: milliseconds, and processor time of a worker.

Each round sums by both ways the bytes of ResNet-18's gradient, or as many as 256 messages have, in messages of one size
that are all on their way at a time, after a barrier and with nothing beside it. The slowest worker's time counts;
processor time is that of all threads of a worker, the mean over the workers.

    torchrun --nproc-per-node 2 benchmarks/micro/shared_memory.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _sections import machine
from torch import Tensor

from mlbench_core.aggregation.pytorch.shared_memory import SharedMemorySum
from mlbench_core.distributed.pytorch.initialize import initialize_backends

TOTAL_BYTES = 44_695_848  # the gradient of ResNet-18
MESSAGE_BYTES = (4096, 1 << 16, 1 << 20, 8 << 20, TOTAL_BYTES)
MOST_MESSAGES = 256


def measure(start: Callable[[Tensor], Any], messages: list[Tensor]) -> tuple[float, float]:
    """Milliseconds of the slowest worker, and processor milliseconds of the mean one."""
    dist.barrier()
    begin, busy = time.perf_counter(), time.process_time()
    for exchange in [start(message) for message in messages]:
        exchange.wait()
    times = torch.tensor([time.perf_counter() - begin, time.process_time() - busy], dtype=torch.float64)
    slowest = times.clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(times)
    return 1000 * slowest[0].item(), 1000 * times[1].item() / dist.get_world_size()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="of which the median counts (default: 15)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with initialize_backends("gloo") as (rank, world_size, _):
        shared = SharedMemorySum()
        ways: dict[str, Callable[[Tensor], Any]] = {
            "gloo": lambda message: dist.all_reduce(message, async_op=True),
            "shared": shared.start,
        }
        lines = []
        for size_bytes in MESSAGE_BYTES:
            count = min(MOST_MESSAGES, -(-TOTAL_BYTES // size_bytes))
            messages = [torch.rand(size_bytes // 4) for _ in range(count)]
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for number in range(rounds + 1):
                for way in sorted(ways, reverse=number % 2 == 1):
                    times = measure(ways[way], messages)
                    found[way] += [times] if number else []  # the first round warms up
            (gloo, gloo_cpu), (ours, our_cpu) = (
                [statistics.median(column) for column in zip(*found[way], strict=True)] for way in ways
            )
            ratio = statistics.median(g / s for (g, _), (s, _) in zip(found["gloo"], found["shared"], strict=True))
            lines.append(
                f"| {count} x {size_bytes:,} | {gloo:.2f} | {ours:.2f} | {ratio:.1f} | {gloo_cpu:.2f} | {our_cpu:.2f} |"
            )
        if rank == 0:
            print(f"{world_size} workers, medians of {rounds} rounds. {machine()}; {datetime.date.today()}.\n")
            print("| messages x bytes | Gloo, ms | shared, ms | times as fast | Gloo, CPU ms | shared, CPU ms |")
            print("|---|---|---|---|---|---|")
            print("\n".join(lines))


if __name__ == "__main__":
    main()
