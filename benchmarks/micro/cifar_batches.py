"""Time the training batches of CIFAR-10: crop, mirror, normalize, batches of 128.

The variants are whole batches as tensor operations (``ImageBatches``), the same data set behind a
torch ``DataLoader``, and torchvision's transforms image by image behind a ``DataLoader``; all in
one process.

    python benchmarks/micro/cifar_batches.py --data FOLDER [--save]
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _bench import Subject, finish, make_parser, measure, parse, positive
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from mlbench_core._optional import torchvision
from mlbench_core.dataset.imagerecognition.published import (
    CIFAR10_CLASSES,
    CIFAR10_MEAN,
    CIFAR10_STD,
)
from mlbench_core.dataset.imagerecognition.pytorch import (
    CIFAR10V1,
    Augmentation,
    ImageBatches,
    ImageDataset,
)

PLAIN, OURS = "torchvision transforms, DataLoader", "CIFAR10V1, ImageBatches"
SUBJECT = Subject(
    "cifar_batches",
    "Training batches of CIFAR-10 (`cifar_batches.py`)",
    "images/s",
    (PLAIN,),
    ("Augmenting whole batches is more than 11 times as fast "
     "as torchvision's transforms image by image.",
     "Limit: at least 10 times."),
)  # fmt: skip


class PerImage(Dataset):
    """The usual data set: an array and torchvision's transforms, one image at a time."""

    def __init__(self, dataset: ImageDataset) -> None:
        transforms = torchvision.load("transforms")
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
        return self.transform(Image.fromarray(self.data[index])), self.targets[index]


def load(folder: Path | None) -> tuple[ImageDataset, str]:
    """Load the images, and describe them."""
    if folder is not None and folder.is_dir():
        return CIFAR10V1(folder, partial=True), "images of CIFAR-10"
    images = torch.randint(0, 256, (10_000, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(0, 10, (10_000,))
    dataset = ImageDataset(
        images, labels, CIFAR10_CLASSES, CIFAR10_MEAN, CIFAR10_STD, Augmentation()
    )
    return dataset, "random bytes (no --data folder)"


def draw(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]], count: int
) -> tuple[torch.Size, torch.dtype]:
    """Draw ``count`` batches, and return shape and type of the images.

    Augmentation is random, so nothing else can be compared.
    """
    # Only the last batch is kept: memory that earlier ones free is used again, as in training.
    ((images, _),) = deque(itertools.islice(batches, count), maxlen=1)
    return images.shape, images.dtype


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    default = os.environ.get("MLBENCH_TEST_DATA")
    parser = make_parser(__doc__, blocks=9)
    parser.add_argument("--data", type=Path, default=Path(default) / "cifar10" if default else None)
    parser.add_argument("--batch-size", type=positive, default=128)
    parser.add_argument("--batches", type=positive, default=30, help="batches of a block")
    arguments = parse(parser, argv, batches=3)
    torch.set_num_threads(1)
    dataset, source = load(arguments.data)
    size = arguments.batch_size
    variants: dict[str, Iterable[Any]] = {
        PLAIN: DataLoader(PerImage(dataset), size, shuffle=True, num_workers=0),
        "CIFAR10V1, DataLoader": DataLoader(dataset, size, shuffle=True, num_workers=0),
        OURS: ImageBatches(dataset, size),
        f"{OURS}, channels_last": ImageBatches(dataset, size, memory_format=torch.channels_last),
    }
    # An epoch may have fewer batches, and the rate must count those that are drawn.
    count = min(arguments.batches, len(dataset) // size)
    rows = measure(
        SUBJECT,
        f"batches of {size}",
        {name: partial(draw, batches, count) for name, batches in variants.items()},
        arguments.blocks,
        amount=count * size,
    )
    conditions = f"{arguments.blocks} blocks of {count * size:,} {source}, one process, one thread."
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    main()
