"""Time the sum of gradients over Gloo and through shared memory.

Each block sums messages of one size, all in flight at a time, after a barrier and with no other
work. Their bytes together are those of ResNet-18's gradient, or of 256 messages if these are fewer.
The slowest worker's time counts. Processor time is that of all threads of a worker, as the mean
over the workers.

    python benchmarks/micro/shared_memory.py [--workers 2 4] [--save]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _bench import Row, Subject, Timed, finish, make_parser, measure, parse, positive
from _workers import Workers, largest, run_script

from mlbench_core.aggregation.pytorch.transport.shared_memory import SharedMemorySum

TOTAL_BYTES = 44_695_848  # the gradient of ResNet-18
MESSAGE_BYTES = (4096, 1 << 16, 1 << 20, 8 << 20, TOTAL_BYTES)
MOST_MESSAGES = 256
GLOO, SHARED = "Gloo", "shared memory"
SUBJECT = Subject(
    "shared_memory",
    "Sums over Gloo and through shared memory (`shared_memory.py`)",
    "ms",
    (GLOO,),
    ("Shared memory is 2.2 to 8.6 times as fast as Gloo over the loopback interface,",
     "and needs about half of the processor time or less. No limit is set."),
)  # fmt: skip


def make_handler(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make both ways of summing in a worker; a request then sums messages of one size in one."""
    shared = SharedMemorySum()
    starts: dict[str, Callable[..., Any]] = {
        GLOO: partial(dist.all_reduce, async_op=True),
        SHARED: shared.start,
    }

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        size = (request["bytes"] // 4,)
        own_value = dist.get_rank() + 1.0
        messages = [torch.full(size, own_value) for _ in range(request["count"])]
        dist.barrier()
        begin, busy = time.perf_counter(), time.process_time()
        # All messages are started before the first is awaited, as buckets of a backward pass are.
        for exchange in list(map(starts[request["variant"]], messages)):
            exchange.wait()
        seconds, busy = time.perf_counter() - begin, time.process_time() - busy
        # Both ways sum in place, so the messages show whether every element is right.
        total = sum(range(1, dist.get_world_size() + 1))
        wrong = sum(int((message != total).sum()) for message in messages)
        if wrong:
            raise RuntimeError(f"{wrong} wrong elements")
        return {"seconds": seconds, "busy": busy}

    return handle


def run(count: int, blocks: int, sizes: Sequence[int]) -> list[Row]:
    """Measure all sizes with one number of workers."""
    rows = []
    with Workers(__file__, count, {}) as workers:

        def block(variant: str, size: int, messages: int) -> Timed:
            replies = workers.ask(variant=variant, bytes=size, count=messages)
            busy_ms = 1000 * sum(reply["busy"] for reply in replies) / count
            return Timed(largest(replies)["seconds"], {"CPU ms": busy_ms})

        for size in sizes:
            messages = min(MOST_MESSAGES, -(-TOTAL_BYTES // size))
            case = f"{count} workers, {messages} x {size:,} bytes"
            variants = {name: partial(block, name, size, messages) for name in (GLOO, SHARED)}
            rows += measure(SUBJECT, case, variants, blocks)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = make_parser(__doc__, blocks=15)
    add = parser.add_argument
    add("--workers", nargs="+", type=positive, default=[2, 4], help="numbers of workers")
    add("--bytes", nargs="+", type=positive, default=MESSAGE_BYTES, help="sizes of a message")
    arguments = parse(parser, argv, workers=[2], bytes=[4096])
    rows = []
    for count in arguments.workers:
        rows += run(count, arguments.blocks, arguments.bytes)
    finish(SUBJECT, rows, arguments, f"float32, {arguments.blocks} blocks, one thread per worker.")


if __name__ == "__main__":
    run_script(main, make_handler)
