"""Task 0 in the style of mlbench-core 3.0: the mean time of all-reduces of random tensors."""

import os
import time

import numpy as np
import torch
import torch.distributed as dist

from mlbench_core.utils import LogMetrics
from mlbench_core.utils.pytorch import initialize_backends
from mlbench_core.utils.pytorch.distributed import get_backend_tensor
from mlbench_core.utils.task_args import task_main

NUM_SIZES = 3
REPETITIONS = 4


def measure(size, dtype):
    tensor = get_backend_tensor(torch.rand(int(size)).to(dtype))
    dist.barrier()
    start = time.time()
    for _ in range(REPETITIONS):
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return (time.time() - start) / REPETITIONS


def main(
    run_id,
    dataset_dir,
    ckpt_run_dir,
    output_dir,
    rank,
    backend,
    hosts,
    validation_only=False,
    gpu=False,
    light_target=False,
):
    with initialize_backends(
        comm_backend=backend,
        hosts=hosts,
        rank=rank,
        logging_level="INFO",
        logging_file=os.path.join(output_dir, "backend_benchmark.log"),
        use_cuda=gpu,
        seed=42,
        ckpt_run_dir=ckpt_run_dir,
        delete_existing_ckpts=not validation_only,
    ) as (rank, _, graph):
        for dtype in (torch.float32, torch.float16):
            for size in np.logspace(0, 4, num=NUM_SIZES):
                seconds = measure(size, dtype)
                if rank == 0:
                    LogMetrics.log(run_id, rank, 0, "allreduce_time", seconds)
                    print("result", dtype, int(size), seconds > 0, graph.current_device_name)


if __name__ == "__main__":
    task_main(main)
