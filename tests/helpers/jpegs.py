"""Small JPEG images for tests, in one folder for each class."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np


def write_jpegs(folder: Path, classes: int, per_class: int, seed: int = 0, side: int = 24) -> None:
    """Write ``folder/n00/n00_0.JPEG`` and so on: noise around the color of the class, of different
    shapes."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    for number in range(classes):
        (folder / f"n{number:02d}").mkdir(parents=True)
        color = np.array(
            [30 + 200 * number // classes, 220 - 180 * number // classes, 60 + 50 * (number % 3)]
        )
        for index in range(per_class):
            height, width = draw.integers(side, 2 * side, 2)
            pixels = np.clip(color + draw.normal(0, 20, (height, width, 3)), 0, 255).astype(
                np.uint8
            )
            Image.fromarray(pixels).save(
                folder / f"n{number:02d}" / f"n{number:02d}_{index}.JPEG", quality=90
            )


def write_tar(path: Path, folder: Path, names: list[str] | None = None) -> None:
    """Write a tar file of the files of a folder, with their paths in it as names; in the given
    order, if any."""
    found = (
        names
        if names is not None
        else sorted(str(each.relative_to(folder)) for each in folder.rglob("*.*"))
    )
    with tarfile.open(path, "w") as archive:
        for name in found:
            archive.add(folder / name, name)
