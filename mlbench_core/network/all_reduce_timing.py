"""Time all-reduces over Gloo in an emulated network.

Run ``python all_reduce_timing.py BYTES SECONDS`` once on every host. The process of rank 0 writes
one line of JSON: the median seconds of an all-reduce of 4 bytes and of BYTES bytes.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time

_WARM_UP = 2
_LEAST = 3
_MOST = 20
_TIMEOUT_S = 120


def _seconds(num_bytes: int, limit_s: float) -> float:
    """Return the median of the slowest rank's time of an all-reduce."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(num_bytes // 4)
    times: list[float] = []
    begin = time.perf_counter()
    for index in range(_WARM_UP + _MOST):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        # The slowest rank counts, and all ranks must agree when to end.
        slowest = torch.tensor([time.perf_counter() - start, time.perf_counter() - begin])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if index >= _WARM_UP:
            times.append(float(slowest[0]))
        if len(times) >= _LEAST and float(slowest[1]) > limit_s:
            break
    return statistics.median(times)


def _main(num_bytes: int, limit_s: float) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=_TIMEOUT_S))
    result = {"small_s": _seconds(4, limit_s), "large_s": _seconds(num_bytes, limit_s)}
    if dist.get_rank() == 0:
        sys.stdout.write(f"{json.dumps(result)}\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]))
