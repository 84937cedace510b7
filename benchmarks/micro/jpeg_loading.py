"""Time the training batches of JPEG images: decode, crop at random to 224x224, mirror, normalize.

The peer is torchvision's ``ImageFolder`` with the usual transforms behind a ``DataLoader``. Ours is
``JpegBatches``, from the same files and from a tar file of them. All have the same number of loader
processes, and end with normalized float32 batches in the calling process. The images are generated:
smooth colors with noise, about as large as those of ImageNet.

    python benchmarks/micro/jpeg_loading.py [--save]
"""

from __future__ import annotations

import tarfile
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import Subject, finish, make_parser, measure, parse, positive
from PIL import Image
from torch.utils.data import DataLoader

from mlbench_core._optional import torchvision
from mlbench_core.dataset.imagerecognition.pytorch import (
    Imagenet,
    JpegBatches,
    RandomCrop,
    decoder_name,
    find_jpegs,
)
from mlbench_core.distributed.pytorch.memory import keep_freed_memory

PLAIN, OURS = "ImageFolder, DataLoader", "JpegBatches"
SUBJECT = Subject(
    "jpeg_loading",
    "Training batches of JPEG images (`jpeg_loading.py`)",
    "images/s",
    (PLAIN,),
    ("Pillow decodes for `ImageFolder`, "
     "and for `JpegBatches` if torchvision's compiled operators do not load.",
     "Limit: at least 1.3 times as many images/s as `ImageFolder` "
     "with two processes on two cores."),
)  # fmt: skip


def write_images(folder: Path, archive: Path, count: int, side: int) -> int:
    """Write images of two classes and a tar file of them, and return the mean size of a file."""
    draw = np.random.default_rng(0)
    for number in range(count):
        # The shapes are about 4:3, or 3:4 for three images in ten.
        width, height = int(side * draw.uniform(0.9, 1.1)), int(side * draw.uniform(0.65, 0.85))
        if draw.random() >= 0.7:
            width, height = height, width
        colors = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        smooth = np.asarray(colors.resize((width, height)))
        pixels = smooth + draw.normal(0, 10, (height, width, 3))
        path = folder / "train" / f"class{number % 2}" / f"{number:05d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=94)
    with tarfile.open(archive, "w") as file:
        for path in sorted(folder.rglob("*.JPEG")):
            file.add(path, f"{path.parent.name}/{path.name}")
    return sum(path.stat().st_size for path in folder.rglob("*.JPEG")) // count


def draw(batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Size, torch.dtype]:
    """Draw an epoch; crops are random, so only shape and type of the images can be compared."""
    # Only the last batch is kept: memory that earlier ones free is used again, as in training.
    ((images, _),) = deque(batches, maxlen=1)
    return images.shape, images.dtype


def image_folder(folder: Path) -> Any:
    """Make torchvision's data set with the transforms of its ImageNet examples."""
    transforms = torchvision.load("transforms")
    steps = [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(Imagenet.mean, Imagenet.std),
    ]
    return torchvision.load("datasets").ImageFolder(str(folder), transforms.Compose(steps))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = make_parser(__doc__, blocks=9)
    add = parser.add_argument
    add("--images", type=positive, default=512, help="images of a block")
    add("--side", type=positive, default=500,
        help="about the longer side of an image, in pixels")  # fmt: skip
    add("--batch-size", type=positive, default=32)
    add("--processes", type=positive, default=2, help="loader processes of each variant")
    arguments = parse(parser, argv, images=8, batch_size=4, processes=1)
    torch.set_num_threads(1)
    keep_freed_memory()  # as initialize_backends does
    count = arguments.images // arguments.batch_size * arguments.batch_size
    with tempfile.TemporaryDirectory(prefix="jpegs-") as folder:
        path, archive = Path(folder, "files"), Path(folder, "tar", "train.tar")
        archive.parent.mkdir()
        size = write_images(path, archive, count, arguments.side)
        peer = DataLoader(
            image_folder(path / "train"), arguments.batch_size, shuffle=True,
            num_workers=arguments.processes, persistent_workers=True,
        )  # fmt: skip
        variants = {PLAIN: partial(draw, peer)}
        for name, root in ((f"{OURS}, files", path), (f"{OURS}, tar file", archive.parent)):
            batches = JpegBatches(
                find_jpegs(root, "train"), arguments.batch_size, RandomCrop(),
                processes=arguments.processes,
            )  # fmt: skip
            variants[name] = partial(draw, batches)
        pixels = f"{arguments.side}x{arguments.side * 3 // 4} pixels"
        case = f"{arguments.processes} processes, about {pixels}"
        rows = measure(SUBJECT, case, variants, arguments.blocks, amount=count)
    conditions = (
        f"{arguments.blocks} blocks of {count:,} generated images "
        f"of {size // 1000} kB on average in the page cache. "
        f"JpegBatches decoded with {decoder_name()}, ImageFolder with Pillow. "
        "One thread in the calling process."
    )
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    main()
