"""One worker of `optimizers.py`: run all variants interleaved and write down how long each block took.

Run by `optimizers.py` as ``python _worker.py FOLDER`` with RANK and WORLD_SIZE in the environment.
With ``by_turns`` in the plan the parent says when each block begins.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _variants import VARIANTS, WORKLOADS, Context, Trainee
from torch import Tensor

MAKING, WARM_UP = -2, -1  # what comes before block 0
WARM_UP_STEPS = 4
TIMEOUT_S = 120
TURNS_TIMEOUT_S = 1800  # others compute before it is this worker's turn


@dataclass
class Plan:
    """What the workers of one launch do: written as JSON by the parent, read by every worker."""

    model: str
    workers: int
    variants: list[str]
    blocks: int
    steps: int
    by_turns: bool = False  # each block waits for a line on standard input, and its end is told on standard output


@dataclass
class Listener:
    """As much of a Tracker as an optimizer's step needs; adds up what it hears."""

    exposed_s: float = 0.0
    size_bytes: int = 0

    def record_batch_agg(self) -> None:
        """Nothing to add."""

    def record_batch_opt_step(self) -> None:
        """Nothing to add."""

    def record_communication(self, total_s: float, exposed_s: float, size_bytes: int) -> None:
        """Add a message."""
        self.exposed_s += exposed_s
        self.size_bytes += size_bytes


@dataclass
class Findings:
    """What a worker saw of a variant; times by block."""

    seconds: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    bytes_per_step: float = 0.0


@dataclass
class Progress:
    """Where a worker is, in a file, so that the parent can tell what a worker that died was doing."""

    path: Path

    def at(self, block: int, place: int, variant: str, error: str | None = None) -> None:
        """Write it down."""
        self.path.write_text(json.dumps({"block": block, "place": place, "variant": variant, "error": error}))


def rotated(names: list[str], block: int) -> Iterator[tuple[int, str]]:
    """The variants of a block with their places; the first one changes, and every other block runs backwards."""
    start = block % len(names)
    order = names[start:] + names[:start]
    return enumerate(reversed(order) if block % 2 else order)


def measure(trainee: Trainee, batch: tuple[Tensor, Tensor], steps: int, findings: Findings) -> None:
    """Time a block of one variant."""
    listener = Listener()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        trainee.step(*batch, listener)
    findings.seconds.append(time.perf_counter() - start)
    findings.exposed_s.append(listener.exposed_s)
    findings.bytes_per_step = listener.size_bytes / steps if trainee.is_tracked else trainee.bytes_per_step()


def make_trainees(plan: Plan, rank: int, progress: Progress) -> tuple[dict[str, Trainee], dict[str, str]]:
    """The variants that can be made, and the errors of the others, which are the same on all workers."""
    torch.manual_seed(0)
    model = WORKLOADS[plan.model].make()
    trainees, errors = {}, {}
    for place, name in enumerate(plan.variants):
        progress.at(MAKING, place, name)
        try:
            trainees[name] = VARIANTS[name].make(Context(copy.deepcopy(model), plan.workers, rank, plan.steps))
        except Exception as error:
            errors[name] = describe(error)
    return trainees, errors


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def run(plan: Plan, rank: int, progress: Progress) -> dict[str, Any]:
    """Warm up, then measure."""
    batch = WORKLOADS[plan.model].batch(rank)
    trainees, errors = make_trainees(plan, rank, progress)
    findings = {name: Findings() for name in trainees}
    names = list(trainees)
    say = print if plan.by_turns else lambda *_, **__: None
    say("ready", flush=True)
    for block in range(WARM_UP, plan.blocks):
        for place, name in enumerate(names) if block == WARM_UP else rotated(names, block):
            progress.at(block, place, name)
            if plan.by_turns:
                sys.stdin.readline()
            try:
                if block == WARM_UP:
                    for _ in range(max(WARM_UP_STEPS, plan.steps)):
                        trainees[name].step(*batch, Listener())
                else:
                    measure(trainees[name], batch, plan.steps, findings[name])
            except Exception as error:
                progress.at(block, place, name, describe(error))
                raise
            say("done", flush=True)
    return {"findings": {name: asdict(found) for name, found in findings.items()}, "errors": errors}


def main() -> None:
    """Join the others, run, write the result."""
    folder = Path(sys.argv[1])
    rank, plan = int(os.environ["RANK"]), Plan(**json.loads((folder / "plan.json").read_text()))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), plan.workers),
        rank=rank,
        world_size=plan.workers,
        timeout=datetime.timedelta(seconds=TURNS_TIMEOUT_S if plan.by_turns else TIMEOUT_S),
    )
    result = run(plan, rank, Progress(folder / f"progress{rank}.json"))
    (folder / f"result{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
