"""All-reduce timed without this project: what a measurement with it is held against. Imports nothing of it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

WARM_UP = 10


def bare_loop(elements: int, operations: int, repetitions: int, group: dist.ProcessGroup) -> list[float]:
    """Seconds of one all-reduce of float32 by repetition, the slowest worker's; the mean of several operations."""
    tensor = torch.ones(elements)
    for _ in range(WARM_UP):
        dist.all_reduce(tensor, group=group)
    seconds = torch.zeros(repetitions, dtype=torch.float64)
    for repetition in range(repetitions):
        tensor.fill_(1.0)
        dist.barrier(group=group)
        start = time.perf_counter()
        for _ in range(operations):
            dist.all_reduce(tensor, group=group)
        seconds[repetition] = (time.perf_counter() - start) / operations
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return [float(value) for value in seconds]
