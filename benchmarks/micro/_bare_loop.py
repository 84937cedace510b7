"""Time all-reduce without any import of this project, for comparison with `collectives.py`."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

WARM_UP = 10


def bare_loop(
    elements: int, operations: int, repetitions: int, group: dist.ProcessGroup
) -> list[float]:
    """Return the seconds of one float32 all-reduce by repetition.

    Each is the slowest worker's mean over several operations.
    """
    tensor = torch.ones(elements)
    for _ in range(WARM_UP):
        dist.all_reduce(tensor, group=group)
    seconds = torch.zeros(repetitions, dtype=torch.float64)
    for repetition in range(repetitions):
        # Otherwise the sums overflow, and operations on inf may have another speed.
        tensor.fill_(1.0)
        dist.barrier(group=group)
        start = time.perf_counter()
        for _ in range(operations):
            dist.all_reduce(tensor, group=group)
        seconds[repetition] = (time.perf_counter() - start) / operations
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return seconds.tolist()
