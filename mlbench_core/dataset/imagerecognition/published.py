"""Read the published image data sets from their files, as arrays of bytes.

The ``pytorch`` and the ``tensorflow`` package make their data sets of these arrays. This module
imports no framework.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlbench_core.dataset.download import maybe_download_and_extract_tar_gz, progress_download
from mlbench_core.dataset.imagerecognition import readers
from mlbench_core.dataset.local_files import find_file
from mlbench_core.dataset.registry import (
    CIFAR10_ARCHIVE_MD5,
    CIFAR10_BATCHES,
    CIFAR10_FOLDERS,
    CIFAR10_MD5,
    CIFAR10_URL,
    MNIST_ARCHIVE_MD5,
    MNIST_FOLDERS,
    MNIST_MD5,
    MNIST_URL,
)
from mlbench_core.errors import DatasetError, DatasetNotFoundError, require

__all__ = ["read_cifar10", "read_digits", "read_mnist"]

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)  # of the 50,000 training images
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
_CIFAR10_RECORDS = 10_000

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081  # of the 60,000 training images, 28x28


def read_cifar10(
    root: str | os.PathLike[str], train: bool, download: bool = False, partial: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Read the images of CIFAR-10 and their classes, from the binary or the python version.

    Args:
        root: Folder with the files.
        train: If True, the 50,000 training images, otherwise the 10,000 test images.
        download: If True, download missing files (162 MB) into ``root``.
        partial: If True, accept some of the files, and for the test set a file of its first 1,000
            records.

    Returns:
        Images, uint8 of shape (N, 3, 32, 32), and classes, int64 of shape (N,).

    Raises:
        DatasetNotFoundError: The folder is missing, or it has none of the files.
        DatasetError: Some files are missing and ``partial`` is False, or a file is damaged.
        DownloadError: The download failed.
    """
    folder = Path(root)
    names = CIFAR10_BATCHES[-1:]
    if train:
        names = CIFAR10_BATCHES[:-1]
    # Do not use the network if all files exist. A file of the first 1,000 records is not enough.
    if download and not all(_find_cifar_batch(folder, name, False) for name in names):
        archive = CIFAR10_URL.rsplit("/", 1)[1]
        maybe_download_and_extract_tar_gz(folder, archive, CIFAR10_URL, md5=CIFAR10_ARCHIVE_MD5)
    paths = _cifar_files(folder, names, partial)
    images, labels = zip(*map(_read_cifar_batch, paths), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _find_cifar_batch(root: Path, name: str, partial: bool) -> Path | None:
    """Return the path of a batch, in either version."""
    names = [f"{name}.bin", name]
    if partial and name == "test_batch":
        names.append("test_batch_first1000.bin")
    return find_file([root / folder for folder in CIFAR10_FOLDERS], names)


def _cifar_files(root: Path, names: Sequence[str], partial: bool) -> list[Path]:
    """Return the files of a split, after a check that all exist."""
    advice = f"pass download=True, or unpack {CIFAR10_URL} there"
    if not root.is_dir():
        raise DatasetNotFoundError(f"no CIFAR-10 here: the folder {root} does not exist; {advice}")
    paths: list[Path] = []
    missing: list[str] = []
    for name in names:
        if path := _find_cifar_batch(root, name, partial):
            paths.append(path)
        else:
            missing.append(name)
    if not paths:
        raise DatasetNotFoundError(
            f"no CIFAR-10 in {root}: missing {', '.join(missing)} (also as .bin, .bin.xz, "
            f".bin.gz); {advice}"
        )
    if missing and not partial:
        raise DatasetError(
            f"CIFAR-10 in {root} is not complete: missing {', '.join(missing)}; {advice}, or pass "
            "partial=True"
        )
    return paths


def _read_cifar_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read and check one file."""
    name = path.name.removesuffix(".xz").removesuffix(".gz")
    content = readers.read_bytes(path, CIFAR10_MD5.get(name))
    if name.endswith(".bin"):
        images, labels = readers.parse_cifar_binary(path, content)
    else:
        images, labels = readers.parse_cifar_python(path, content)
    # The number of records also detects truncation of a file without a published checksum.
    expected = _CIFAR10_RECORDS
    if "first1000" in name:
        expected = 1_000
    if len(images) != expected:
        raise DatasetError(f"{path} is damaged: it has {len(images)} images, not {expected}")
    return images, labels


def read_mnist(
    root: str | os.PathLike[str], train: bool, download: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Read the images of MNIST and their classes.

    Args:
        root: Folder with the files in idx format.
        train: If True, the 60,000 training images, otherwise the 10,000 test images.
        download: If True, download missing files (12 MB) into ``root``.

    Returns:
        Images, uint8 of shape (N, 28, 28), and classes, uint8 of shape (N,).

    Raises:
        DatasetNotFoundError: A file is missing.
        DatasetError: A file is damaged.
        DownloadError: The download failed.
    """
    split = "t10k"
    if train:
        split = "train"
    images = _read_idx(Path(root), f"{split}-images-idx3-ubyte", 3, download)
    return images, _read_idx(Path(root), f"{split}-labels-idx1-ubyte", 1, download)


def _read_idx(root: Path, name: str, dimensions: int, download: bool) -> np.ndarray:
    """Read one of MNIST's files; download it if requested."""
    url = f"{MNIST_URL}{name}.gz"
    path = find_file([root / folder for folder in MNIST_FOLDERS], [name])
    if path is None and download:
        path = progress_download(url, root / f"{name}.gz", md5=MNIST_ARCHIVE_MD5[name])
    if path is None:
        raise DatasetNotFoundError(
            f"no MNIST in {root}: missing {name} (also as .gz); pass download=True, or get it "
            f"from {url}"
        )
    return readers.parse_idx(path, readers.read_bytes(path, MNIST_MD5[name]), dimensions)


def read_digits(extra: str = "vision") -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits and their classes.

    The file is read without an import of scikit-learn, which takes a second, if it is at its usual
    path.

    Args:
        extra: The extra that installs scikit-learn, for the error message.

    Returns:
        1,797 images of 8x8 pixels with gray levels from 0 to 16, float64, and classes, int64 of
        shape (1797,).

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            table = np.loadtxt(path, delimiter=",")
            return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(int)
    # Another version may keep the file elsewhere.
    source: Any = require("sklearn.datasets", extra)
    digits = source.load_digits()
    return digits.images, digits.target
