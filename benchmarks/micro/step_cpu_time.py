"""Compare the processor time of a training step under load with its wall time alone.

The Tracker measures both in this process, with one thread: `compute_cpu_s` while ten other
processes spin, and the time inside batches (`train_s`) without them. `mlbench_core.prediction`
takes the one for the other. Run it on a machine without other work.

    python benchmarks/micro/step_cpu_time.py [--processes 10] [--save]
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from _bench import Row, Subject, Timed, finish, make_parser, measure, parse, positive
from torch import Tensor, nn

from mlbench_core.models.pytorch.resnet import ResNetCIFAR
from mlbench_core.tracking import Tracker

ALONE = "wall time, alone"
SUBJECT = Subject(
    "step_cpu_time",
    "Processor time of a training step under load (`step_cpu_time.py`)",
    "ms",
    (ALONE,),
    ("Limit: under load, the processor time is within 5 % of the wall time alone.",
     "Processes that share a core also share its caches, and a core may be one of two threads of "
     "the same physical core."),
)  # fmt: skip
# Seconds in which a load settles, or ends.
SETTLE_S = 0.5
Step = Callable[[], Tensor]


def make_resnet() -> tuple[nn.Module, Step]:
    """Make the model of task 1a, for images of 16x16 pixels."""
    model = ResNetCIFAR(20, bottleneck=False, num_classes=10).to(memory_format=torch.channels_last)
    inputs = torch.randn(32, 3, 16, 16).to(memory_format=torch.channels_last)
    return model, lambda: model(inputs).square().mean()


def make_mlp() -> tuple[nn.Module, Step]:
    """Make a model that multiplies matrices which do not fit into the caches of a core."""
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
    inputs = torch.randn(32, 1024)
    return model, lambda: model(inputs).square().mean()


def make_wide() -> tuple[nn.Module, Step]:
    """Make a model that mostly moves memory: 40 MB of weights, each used once."""
    model = nn.Linear(10_000, 1_000)
    inputs = torch.randn(1, 10_000)
    return model, lambda: model(inputs).square().mean()


MODELS = {
    "ResNet-20, 32 images of 16x16": make_resnet,
    "MLP, 4 million weights": make_mlp,
    "one layer of 10 million weights, 1 sample": make_wide,
}


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Let processes spin during the block."""
    command = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(command) for _ in range(processes)]
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def train(model: nn.Module, step: Step, steps: int, processes: int, uses_cpu: bool) -> Timed:
    """Train, and return the seconds of all steps by one of the two clocks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    tracker = Tracker([], run_id="micro", rank=0, progress=False)
    with load(processes):
        for _ in range(steps):
            tracker.batch_start()
            optimizer.zero_grad()
            step().backward()
            optimizer.step()
            tracker.batch_end()
    summary = tracker.summary()
    seconds = summary.compute_cpu_s if uses_cpu else summary.train_s
    assert seconds is not None
    return Timed(seconds, {"wall ms": 1e3 * summary.train_s / steps})


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = make_parser(__doc__, blocks=7)
    add = parser.add_argument
    add("--processes", type=positive, default=10, help="processes that spin (default: 10)")
    add("--steps", type=positive, default=30, help="steps in a block (default: 30)")
    arguments = parse(parser, argv, processes=2, steps=2)
    torch.set_num_threads(1)
    steps, processes = arguments.steps, arguments.processes
    rows: list[Row] = []
    for case, make in MODELS.items():
        torch.manual_seed(0)
        run = partial(train, *make(), steps)
        variants = {
            ALONE: partial(run, 0, False),
            "processor time, alone": partial(run, 0, True),
            f"processor time, {processes} processes spin": partial(run, processes, True),
        }
        rows += measure(SUBJECT, case, variants, arguments.blocks, amount=steps)
    finish(SUBJECT, rows, arguments, f"{arguments.blocks} blocks of {steps} steps, one thread.")


if __name__ == "__main__":
    main()
