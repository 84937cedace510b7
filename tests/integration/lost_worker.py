"""A worker of tests/integration/test_lost_worker.py: trains, and the worker to be lost ends in
mid-reduction.

Usage: lost_worker.py RANK WORLD_SIZE STORE LOST HOW
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch import AllReduceAggregation
from mlbench_core.distributed.pytorch import lost_workers
from mlbench_core.optim.pytorch import CentralizedSGD

# Of a worker that hangs: how long the others wait for it, and look for a sign of life. The end of a
# worker is noticed at once, so there the limits are only for a busy machine.
TIMEOUT_S = 5
SILENCE_S = 2.5
PATIENCE_S = 60


def main() -> None:
    rank, world_size, store, lost, how = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        int(sys.argv[4]),
        sys.argv[5],
    )
    torch.set_num_threads(1)
    lost_workers.SILENCE_S = SILENCE_S if how == "stop" else PATIENCE_S
    timeout = datetime.timedelta(seconds=TIMEOUT_S if how == "stop" else PATIENCE_S)
    patience = datetime.timedelta(seconds=PATIENCE_S)
    if store.startswith("tcp:"):
        shared = dist.TCPStore(
            "127.0.0.1", int(store[4:]), world_size, is_master=rank == 0, timeout=patience
        )
    else:
        shared = dist.FileStore(store, world_size)
    # A worker may start long after another one.
    shared.set(f"started {rank}", "")
    shared.wait([f"started {other}" for other in range(world_size)], patience)
    shared.set_timeout(timeout)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=world_size, timeout=timeout)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    exchange = AllReduceAggregation(
        overlap=how != "plain", bucket_size_bytes=0, shared_memory=how == "shared"
    )
    optimizer = CentralizedSGD(world_size, model, lr=0.01, aggregation=exchange)
    step = 0

    def end(gradient: Tensor) -> None:
        """Runs before the first layer's gradient, when those of later layers are on their way."""
        if rank == lost and step == 3:
            if how == "stop":
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)

    model[0].weight.register_hook(end)
    try:
        for step in range(6):  # noqa: B007 (the hook reads it)
            optimizer.zero_grad()
            model(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
    finally:
        print(f"step {step}", flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
