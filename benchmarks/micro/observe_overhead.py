"""Time steps of a small network with and without the observation of ``mlbench run SCRIPT``.

The workers train with a DataLoader, and with DDP if there are several. Blocks with and
without observation alternate in the same processes, so that both meet the same disturbances. A
block takes about a second, so that it contains the work that the observer does once a second. The
processor time is that of the slowest worker's whole process, with the threads of Gloo.

    python benchmarks/micro/observe_overhead.py [--workers 2] [--save]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from _bench import Subject, Timed, finish, make_parser, measure, parse, positive
from _workers import Workers, largest, run_script
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

PLAIN, OBSERVED = "not observed", "observed"
SUBJECT = Subject(
    "observe_overhead",
    "Steps of an observed script (`observe_overhead.py`)",
    "ms",
    (PLAIN,),
    (
        "The limit is 0.1 ms a step, which is 1 % of a step of 10 ms. The steps here are shorter, "
        "because the times of longer ones differ by more than that from block to block. "
        "The added time is the median of the differences between each observed block and the "
        "unobserved one right before it.",
    ),
)


def trainer(workers: int, width: int, batch: int) -> Callable[[int], None]:
    """Return a function that takes a number of steps."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers)
    if workers > 1:
        model = DistributedDataParallel(model)
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


def make_handler(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what a worker does for a request: train a new network for some steps."""
    from mlbench_core.observe.observer import Observer
    from mlbench_core.tracking.tracker import Tracker

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        observation: Any = nullcontext()
        if request["observed"]:
            observation = Observer(Tracker([], "overhead", dist.get_rank(), progress=False))
        # An observer sees only models of its own time, and nothing after it was closed.
        with observation:
            train = trainer(dist.get_world_size(), setup["width"], setup["batch"])
            train(12)
            dist.barrier()
            begin_s, cpu_s = time.perf_counter(), time.process_time()
            train(setup["steps"])
            return {"seconds": time.perf_counter() - begin_s, "cpu_s": time.process_time() - cpu_s}

    return handle


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = make_parser(__doc__, blocks=41)
    add = parser.add_argument
    add("--workers", type=positive, nargs="+", default=[1, 2])
    add("--steps", type=positive, default=1000, help="steps of a block, a multiple of 4")
    add("--width", type=positive, default=16, help="width of the four layers")
    add("--batch", type=positive, default=8, help="samples of a step")
    arguments = parse(parser, argv, steps=4)
    rows = []
    for count in arguments.workers:
        setup = {name: getattr(arguments, name) for name in ("steps", "width", "batch")}
        with Workers(__file__, count, setup) as workers:
            before_ms: list[float] = []

            def block(
                observed: bool, workers: Workers = workers, before_ms: list[float] = before_ms
            ) -> Timed:
                slowest = largest(workers.ask(observed=observed))
                ms = 1e3 * slowest["seconds"] / arguments.steps
                extra = {"processor ms": 1e3 * slowest["cpu_s"] / arguments.steps}
                if observed:
                    extra["added ms"] = ms - before_ms[-1]
                else:
                    before_ms.append(ms)
                return Timed(slowest["seconds"], extra)

            rows += measure(
                SUBJECT,
                f"{count} workers, 4 layers of {arguments.width}, batch {arguments.batch}",
                {
                    PLAIN: lambda block=block: block(False),
                    OBSERVED: lambda block=block: block(True),
                },
                arguments.blocks,
                amount=arguments.steps,
            )
    conditions = f"{arguments.blocks} blocks of {arguments.steps} steps, one thread per worker."
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    run_script(main, make_handler)
