"""Measure the cost of observing a script: blocks of steps with and without observation alternate.

Each worker trains a small network with a DataLoader, and with DDP if there are several workers.
The printed ratio is the median of the ratios of adjacent blocks; the processor time is that of the
whole process, with the threads of Gloo.

    python benchmarks/micro/observe_overhead.py [--workers 1 2] [--blocks 21] [--steps 40]

With ``--width 16 --batch 8`` the steps are short, and the processor time is less noisy.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from mlbench_core.observe.observer import Observer
from mlbench_core.tracking.tracker import Tracker


def trainer(workers: int, width: int, batch: int) -> Callable[[int], None]:
    """Return a function that takes a number of steps."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers)
    if workers > 1:
        # Three buckets with the default width, as many as those of a model of 50 MB by default.
        model = DistributedDataParallel(model, bucket_cap_mb=0.7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(4 * batch, width), torch.randn(4 * batch, width))
    loader = DataLoader(data, batch_sampler=[range(k * batch, (k + 1) * batch) for k in range(4)])

    def train(steps: int) -> None:
        for _ in range(steps // 4):
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()

    return train


def measure(rank: int, workers: int, args: argparse.Namespace, file: str) -> None:
    """Print the overhead; run by each worker."""
    blocks, steps = args.blocks, args.steps
    torch.set_num_threads(1)
    if workers > 1:
        dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=workers)
    observer = Observer(Tracker([], "overhead", rank, progress=False))
    plain = trainer(workers, args.width, args.batch)
    with observer:
        observed = trainer(workers, args.width, args.batch)
        observed(8)
    plain(8)
    ratios, extra_s, steps_s = [], [], []
    for block in range(blocks):
        times: dict[bool, tuple[float, float]] = {}
        # The order alternates, too, because the second one finds a warmer cache.
        for is_observed in (block % 2 == 0, block % 2 == 1):
            if workers > 1:
                dist.barrier()
            if is_observed:
                observer.__enter__()
            begin_s, cpu_s = time.perf_counter(), time.process_time()
            (observed if is_observed else plain)(steps)
            times[is_observed] = time.perf_counter() - begin_s, time.process_time() - cpu_s
            if is_observed:
                observer.__exit__()
        ratios.append(times[True][0] / times[False][0])
        extra_s.append((times[True][1] - times[False][1]) / steps)
        steps_s.append(times[False][0] / steps)
    if rank == 0:
        print(
            f"{workers} worker(s): step {median(steps_s) * 1e3:.2f} ms, "
            f"with observation {100 * (median(ratios) - 1):+.2f} %, "
            f"processor time {median(extra_s) * 1e3:+.4f} ms a step",
            flush=True,
        )
    if workers > 1:
        dist.destroy_process_group()


def main() -> None:
    """Measure with each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--blocks", type=int, default=21)
    parser.add_argument("--steps", type=int, default=40, help="steps of a block, a multiple of 4")
    parser.add_argument("--width", type=int, default=400, help="width of the four layers")
    parser.add_argument("--batch", type=int, default=200, help="samples of a step")
    args = parser.parse_args()
    for workers in args.workers:
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "store")
            mp.spawn(measure, (workers, args, file), nprocs=workers)


if __name__ == "__main__":
    main()
