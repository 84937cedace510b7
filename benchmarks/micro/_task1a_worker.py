"""One worker of `task1a_epoch.py`: a way to train, a block of steps for each line on standard input.

Run as ``python _task1a_worker.py FOLDER WAY`` with RANK and WORLD_SIZE in the environment. After each block it prints
the seconds that the block took.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

TIMEOUT_S = 1800  # others compute, or compile, before it is this worker's turn


def task_1a(
    images: np.ndarray, labels: np.ndarray, rank: int, workers: int, batch_size: int, flags: list[str]
) -> Callable[[int], None]:
    """Task 1a's training round, put together as its main.py does."""
    import argparse

    from torch import channels_last, contiguous_format, nn

    from mlbench_core.controlflow.pytorch import train_round
    from mlbench_core.dataset.imagerecognition.pytorch import Augmentation, ImageBatches, ImageDataset
    from mlbench_core.dataset.imagerecognition.pytorch.dataloader import CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD
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
    keep_freed_memory()
    torch.manual_seed(42)
    planes = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    dataset = ImageDataset(planes, torch.from_numpy(labels), CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD, Augmentation())
    batches = ImageBatches(
        partition_dataset_by_rank(dataset, rank, workers),
        batch_size,
        seed=42,
        rank=rank,
        memory_format=channels_last if args.channels_last else contiguous_format,
    )
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


def make(way: str, plan: dict[str, Any], folder: Path, rank: int) -> Callable[[int], None]:
    """The way to train; the plain one is a loop without a line of this project."""
    images, labels = np.load(folder / "images.npy"), np.load(folder / "labels.npy")
    if way == "plain":
        from mlbench_core import _torchvision

        _torchvision.load("transforms")  # imports it also where its compiled part is for another build of torch
        import _plain_loop

        return _plain_loop.make(images, labels, rank, plan["workers"], plan["batch_size"], plan["loader_processes"])
    return task_1a(images, labels, rank, plan["workers"], plan["batch_size"], plan["ways"][way])


def main() -> None:
    """Join the workers of the same way, then train block by block."""
    folder, way = Path(sys.argv[1]), sys.argv[2]
    plan = json.loads((folder / "plan.json").read_text())
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / f"store-{way}"), plan["workers"]),
        rank=rank,
        world_size=plan["workers"],
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    train = make(way, plan, folder, rank)
    print("ready", flush=True)
    for line in sys.stdin:
        dist.barrier()
        start = time.perf_counter()
        train(int(line))
        print(time.perf_counter() - start, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
