"""Seconds that task 1a trains, beside a plain PyTorch loop on the same images.

Each way has worker processes of its own, with one thread each, that meet over Gloo and wait while it is not their turn.
Blocks of the ways alternate, in an order that changes, so a change of the machine's load meets all of them; the slowest
worker's time of a block counts, and the ratio of a block to the plain loop's in the same round.

    python benchmarks/micro/task1a_epoch.py --data FOLDER
    python benchmarks/micro/task1a_epoch.py --ways plain task --steps 2 --blocks 3
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from _turns import Party

from mlbench_core.dataset.imagerecognition.pytorch import CIFAR10V1

PLAIN = "plain"
FLAGS = ["--channels-last", "--autocast", "bf16"]
WAYS: dict[str, list[str]] = {
    PLAIN: [],
    "task": [],
    "flags": FLAGS,
    "compiled": [*FLAGS, "--compile"],
}
TITLES = {PLAIN: "plain PyTorch loop", "task": "task 1a, no flags"}
RESULTS = Path(__file__).with_name("RESULTS.md")
HEADING = "## `task1a_epoch.py`: task 1a beside a plain PyTorch loop"
INTRODUCTION = """\
ResNet-20, batches of {batch_size} for each of {workers} Gloo workers of one thread, training steps only; {source}.
The plain loop has torchvision's transforms image by image, `DataLoader` (`num_workers={loader_processes}`), DDP,
`torch.optim.SGD`, float32, contiguous tensors. Medians of {blocks} interleaved blocks of {steps} steps; ratios are
those of blocks in the same round. Limits: at least 1.05 times as fast without flags, 2 times with them."""


def load(folder: Path | None) -> tuple[np.ndarray, np.ndarray, str]:
    """Images, labels, and what they are."""
    if folder is not None:
        dataset = CIFAR10V1(folder, partial=True)
        return dataset.data, np.array(dataset.targets), f"{len(dataset):,} images of CIFAR-10"
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (10_000, 32, 32, 3), dtype=np.uint8)
    return images, generator.integers(0, 10, 10_000), "10,000 images of random bytes"


def order(names: Sequence[str], block: int) -> Iterator[str]:
    """The ways of a round; the first one changes, and every other round runs backwards."""
    start = block % len(names)
    turned = [*names[start:], *names[:start]]
    return iter(turned[::-1] if block % 2 else turned)


def train(way: Party, steps: int) -> float:
    """Let a way train for a block; gives the seconds of its slowest worker."""
    return max(float(line) for line in way.take_turn(str(steps)))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each block of each way."""
    images, labels, source = load(arguments.data)
    steps = arguments.steps or max(1, len(images) // arguments.workers // arguments.batch_size)
    plan = {
        "workers": arguments.workers,
        "batch_size": arguments.batch_size,
        "loader_processes": arguments.loader_processes,
        "ways": {name: WAYS[name] for name in arguments.ways},
    }
    with tempfile.TemporaryDirectory(prefix="task1a-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        np.save(folder / "images.npy", np.ascontiguousarray(images))
        np.save(folder / "labels.npy", labels)
        (folder / "plan.json").write_text(json.dumps(plan))
        worker = Path(__file__).with_name("_task1a_worker.py")
        ways = {name: Party(name, worker, [str(folder), name], arguments.workers, stack) for name in arguments.ways}
        for way in ways.values():
            way.wait()
            train(way, min(steps, 3))  # warm up, and compile
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for block in range(arguments.blocks):
            for name in order(arguments.ways, block):
                seconds[name].append(train(ways[name], steps))
    return {**plan, "source": source, "steps": steps, "blocks": arguments.blocks, "seconds": seconds}


def table(result: dict[str, Any]) -> str:
    """A Markdown table."""
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    lines = [
        INTRODUCTION.format(**result),
        "",
        f"{machine}, torch {torch.__version__}; {datetime.date.today().isoformat()}.",
        "",
        "| way | seconds | range | images/s | times the plain loop | range |",
        "|---" * 6 + "|",
    ]
    images = result["steps"] * result["workers"] * result["batch_size"]
    for name, seconds in result["seconds"].items():
        ratios = [plain / own for plain, own in zip(result["seconds"][PLAIN], seconds, strict=True)]
        title = TITLES.get(name, f"task 1a, `{' '.join(WAYS[name])}`")
        lines.append(
            f"| {title} | {median(seconds):.2f} | {min(seconds):.2f} to {max(seconds):.2f} "
            f"| {images / median(seconds):,.0f} | {median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
        )
    return "\n".join(lines) + "\n"


def update_section(path: Path, text: str) -> None:
    """Write the section of the results file, in place of the one there or at the end."""
    content = path.read_text()
    section = f"{HEADING}\n\n{text}\n"
    pattern = re.compile(re.escape(HEADING) + r"\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    if pattern.search(content):
        content = pattern.sub(lambda _: section, content).rstrip() + "\n"
    else:
        content = f"{content.rstrip()}\n\n{section.rstrip()}\n"
    path.write_text(content)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with batches of CIFAR-10; random bytes without it")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help=f"{PLAIN} is always there")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128, help="images a worker")
    parser.add_argument("--steps", type=int, help="steps of a block (default: an epoch's full batches)")
    parser.add_argument("--blocks", type=int, default=7, help="blocks of each way; the median counts")
    parser.add_argument("--loader-processes", type=int, default=0, help="num_workers of the plain loop's DataLoader")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--append-results", action="store_true", help=f"update the section in {RESULTS.name}")
    arguments = parser.parse_args(argv)
    for name in ("workers", "batch_size", "blocks"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps must be at least 1, not {arguments.steps}")
    arguments.ways = [PLAIN, *(name for name in dict.fromkeys(arguments.ways) if name != PLAIN)]
    return arguments


def main() -> None:
    """Measure, print, write."""
    arguments = parse()
    result = measure(arguments)
    text = table(result)
    print(text, end="")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    if arguments.append_results:
        update_section(RESULTS, text)


if __name__ == "__main__":
    main()
