"""Time the training of task 1a against a plain PyTorch loop on the same images.

Each variant has its own worker processes, with one thread each, so none meets the memory or the
compiled code that another one left.

    python benchmarks/micro/task1a_epoch.py --data FOLDER [--save]
    python benchmarks/micro/task1a_epoch.py --variants task --steps 2 --blocks 3
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _bench import Subject, Timed, finish, make_parser, measure, parse, positive
from _workers import Workers, largest, run_script

PLAIN, TASK = "plain PyTorch loop", "task 1a"
FLAGS = ["--channels-last", "--autocast", "bf16"]
VARIANTS: dict[str, list[str]] = {"task": [], "flags": FLAGS, "compiled": [*FLAGS, "--compile"]}
WARM_UP_STEPS = 3
SUBJECT = Subject(
    "task1a_epoch",
    "Task 1a against a plain PyTorch loop (`task1a_epoch.py`)",
    "images/s",
    (PLAIN,),
    ("Task 1a is 1.22 times as fast as a plain loop, "
     "and 2.44 times with channels_last and bfloat16.",
     "Limits: at least 1.05 times without flags, 2 times with them."),
)  # fmt: skip


def load(folder: Path | None) -> tuple[np.ndarray, np.ndarray, str]:
    """Load images and labels, and describe them."""
    from mlbench_core.dataset.imagerecognition.pytorch import CIFAR10V1

    if folder is not None:
        dataset = CIFAR10V1(folder, partial=True)
        return dataset.data, np.array(dataset.targets), f"{len(dataset):,} images of CIFAR-10"
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (10_000, 32, 32, 3), dtype=np.uint8)
    return images, generator.integers(0, 10, 10_000), "10,000 images of random bytes"


def make_handler(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make one variant in a worker; a request then trains for some steps."""
    folder, size, flags = Path(setup["folder"]), setup["batch_size"], setup["flags"]
    images, labels = np.load(folder / "images.npy"), np.load(folder / "labels.npy")
    make = make_plain if flags is None else partial(make_task, flags)
    train = make(images, labels, size, setup["loader_processes"])
    # The warm-up also compiles.
    train(min(setup["steps"], WARM_UP_STEPS))

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        dist.barrier()
        start = time.perf_counter()
        train(setup["steps"])
        return {"seconds": time.perf_counter() - start}

    return handle


def make_plain(
    images: np.ndarray, labels: np.ndarray, batch_size: int, loader_processes: int
) -> Callable[[int], None]:
    """Make the loop without a line of this project."""
    from mlbench_core._optional import torchvision

    # Needed if torchvision's compiled part is for another build of torch.
    torchvision.load("transforms")
    import _plain_loop

    return _plain_loop.make(
        images, labels, dist.get_rank(), dist.get_world_size(), batch_size, loader_processes
    )


def make_task(
    flags: list[str], images: np.ndarray, labels: np.ndarray, batch_size: int, loader_processes: int
) -> Callable[[int], None]:
    """Make task 1a's training round from the same parts as its main.py."""
    from torch import channels_last, contiguous_format, nn

    from mlbench_core.controlflow.pytorch import train_round
    from mlbench_core.dataset.imagerecognition.published import (
        CIFAR10_CLASSES,
        CIFAR10_MEAN,
        CIFAR10_STD,
    )
    from mlbench_core.dataset.imagerecognition.pytorch import (
        Augmentation,
        ImageBatches,
        ImageDataset,
    )
    from mlbench_core.dataset.pytorch import partition_dataset_by_rank
    from mlbench_core.distributed.pytorch.memory import keep_freed_memory
    from mlbench_core.evaluation.pytorch.metrics import TopKAccuracy
    from mlbench_core.models.pytorch.resnet import get_resnet_model
    from mlbench_core.tasks import get_task
    from mlbench_core.tracking.tracker import Tracker

    sys.path.insert(0, str(get_task("1a").script.parent))
    import variants

    parser = argparse.ArgumentParser()
    variants.add_arguments(parser, "centralized_sgd")
    args = parser.parse_args(flags)
    keep_freed_memory()  # as initialize_backends does
    torch.manual_seed(42)
    rank, workers = dist.get_rank(), dist.get_world_size()
    # The task stores images as planes, while the plain loop needs them as PIL does.
    planes = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    dataset = ImageDataset(
        planes, torch.from_numpy(labels), CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD, Augmentation()
    )
    part = partition_dataset_by_rank(dataset, rank, workers)
    memory_format = channels_last if args.channels_last else contiguous_format
    batches = ImageBatches(part, batch_size, seed=42, rank=rank, memory_format=memory_format)
    model = get_resnet_model("resnet20", 1, args.precision, num_classes=10)
    variants.prepare_model(model, args)
    network, _ = variants.make_network(model, 0.02, args)
    optimizer = variants.make_optimizer(model, 0.02 * workers, args, gpu=False)
    metrics = [TopKAccuracy(topk=1)]
    tracker = Tracker(metrics, "1", rank, progress=False)
    tracker.start()

    def train(steps: int) -> None:
        train_round(
            batches, network, optimizer, nn.CrossEntropyLoss(), metrics, None, args.precision,
            schedule_per="batch", max_batch_per_epoch=steps, tracker=tracker,
        )  # fmt: skip

    return train


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    default = os.environ.get("MLBENCH_TEST_DATA")
    parser = make_parser(__doc__, blocks=7)
    add = parser.add_argument
    add("--data", type=Path, default=Path(default) / "cifar10" if default else None)
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS),
        help="next to the plain loop")  # fmt: skip
    add("--workers", type=positive, default=2)
    add("--batch-size", type=positive, default=128, help="images per worker")
    add("--steps", type=positive, help="steps of a block (default: an epoch's full batches)")
    add("--loader-processes", type=int, default=0,
        help="num_workers of the plain loop's DataLoader")  # fmt: skip
    arguments = parse(parser, argv, variants=["task"], steps=1)
    images, labels, source = load(arguments.data)
    steps = arguments.steps or max(1, len(images) // arguments.workers // arguments.batch_size)
    setup = {
        "steps": steps,
        "batch_size": arguments.batch_size,
        "loader_processes": arguments.loader_processes,
    }
    with tempfile.TemporaryDirectory(prefix="task1a-") as folder, contextlib.ExitStack() as stack:
        np.save(Path(folder, "images.npy"), np.ascontiguousarray(images))
        np.save(Path(folder, "labels.npy"), labels)

        def start(flags: list[str] | None) -> Callable[[], Timed]:
            own = {**setup, "folder": folder, "flags": flags}
            workers = stack.enter_context(Workers(__file__, arguments.workers, own))
            return lambda: Timed(largest(workers.ask())["seconds"])

        variants = {PLAIN: start(None)}
        for name in arguments.variants:
            flags = VARIANTS[name]
            variants[" ".join([TASK, *flags])] = start(flags)
        rows = measure(
            SUBJECT,
            f"ResNet-20, {arguments.workers} workers",
            variants,
            arguments.blocks,
            amount=steps * arguments.workers * arguments.batch_size,
        )
    conditions = (
        f"{arguments.blocks} blocks of {steps} training steps, "
        f"batches of {arguments.batch_size} per worker, {source}, "
        f"one thread per worker, num_workers={arguments.loader_processes} in the plain loop."
    )
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    run_script(main, make_handler)
