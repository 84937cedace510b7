"""Images per second of CIFAR-10's training input pipeline: crop, mirror, normalise, batches of 128.

Three ways, in one process each: whole batches as tensor operations (``ImageBatches``), the same data set behind a torch
``DataLoader``, and torchvision's transforms image by image behind a ``DataLoader``. Blocks of the ways alternate, so a
change of the machine's load meets all of them; the median of the blocks counts.

    python benchmarks/micro/cifar_batches.py --data FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from mlbench_core import _torchvision
from mlbench_core.dataset.imagerecognition.pytorch import CIFAR10V1, Augmentation, ImageBatches, ImageDataset
from mlbench_core.dataset.imagerecognition.pytorch.dataloader import CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD

PLAIN, LOADER, OURS = "torchvision transforms, DataLoader", "CIFAR10V1, DataLoader", "CIFAR10V1, ImageBatches"
OURS_LAST = "CIFAR10V1, ImageBatches, channels_last"


class PerImage(Dataset):
    """The usual way: an array and torchvision's transforms, one image at a time."""

    def __init__(self, dataset: ImageDataset) -> None:
        from PIL import Image

        transforms = _torchvision.load("transforms")
        self.to_image: Callable[[Any], Any] = Image.fromarray
        self.data, self.targets = dataset.data, dataset.targets
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(CIFAR10_MEAN, CIFAR10_STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.to_image(self.data[index])), self.targets[index]


def load(folder: Path | None) -> tuple[ImageDataset, str]:
    """The data, and what it is."""
    if folder is not None and folder.is_dir():
        return CIFAR10V1(folder, partial=True), f"CIFAR-10 in {folder}"
    images = torch.randint(0, 256, (10_000, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(0, 10, (10_000,))
    dataset = ImageDataset(images, labels, CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD, Augmentation())
    return dataset, "random bytes (no --data folder)"


def images_per_second(batches: Iterable[tuple[torch.Tensor, torch.Tensor]], limit: int) -> float:
    """Draw batches until ``limit`` images have come."""
    done = 0
    start = time.perf_counter()
    for images, _ in batches:
        done += len(images)
        if done >= limit:
            break
    return done / (time.perf_counter() - start)


def main() -> None:
    """Measure and report."""
    default = os.environ.get("MLBENCH_TEST_DATA")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(default) / "cifar10" if default else None)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=9, help="blocks of each way; the median counts")
    parser.add_argument("--images", type=int, default=3840, help="images of a block")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    dataset, source = load(arguments.data)
    size = arguments.batch_size
    ways: dict[str, Iterable[Any]] = {
        PLAIN: DataLoader(PerImage(dataset), size, shuffle=True, num_workers=0),
        LOADER: DataLoader(dataset, size, shuffle=True, num_workers=0),
        OURS: ImageBatches(dataset, size),
        OURS_LAST: ImageBatches(dataset, size, memory_format=torch.channels_last),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(arguments.blocks + 1):
        for name, batches in ways.items():
            speed = images_per_second(batches, arguments.images)
            if block:  # the first block warms up
                speeds[name].append(speed)

    medians = {name: statistics.median(found) for name, found in speeds.items()}
    print(f"data: {source}; batches of {size}; torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    print(f"median of {arguments.blocks} alternating blocks of {arguments.images} images")
    for name, median in medians.items():
        spread = f"{min(speeds[name]):>9,.0f} to {max(speeds[name]):>9,.0f}"
        print(f"{name:<40} {median:>9,.0f} images/s  ({spread})  {median / medians[PLAIN]:6.1f} x")
    if arguments.json:
        arguments.json.write_text(json.dumps({"source": source, "images_per_second": medians}, indent=2))


if __name__ == "__main__":
    main()
