"""Image data sets: CIFAR-10, MNIST, scikit-learn's digits and folders of images such as ImageNet."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from mlbench_core.arguments import check_at_least
from mlbench_core.dataset.download import maybe_download_and_extract_tar_gz, progress_download
from mlbench_core.dataset.imagerecognition.pytorch import readers
from mlbench_core.dataset.imagerecognition.pytorch.augment import Augmentation
from mlbench_core.dataset.imagerecognition.pytorch.images import ImageDataset
from mlbench_core.dataset.local_files import find_file
from mlbench_core.dataset.pytorch import stratified_split
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

__all__ = ["CIFAR10V1", "MNIST", "Digits", "Imagenet"]

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)  # of the 50,000 training images
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
_CIFAR10_RECORDS = 10_000

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081  # of the 60,000 training images, 28x28


class CIFAR10V1(ImageDataset):
    """CIFAR-10 with the augmentation of He et al. 2015.

    Training images get 4 pixels of zero padding, a random 32x32 crop and random mirroring. All images are normalized by
    the training set's mean and standard deviation. Both the "binary version" (``data_batch_1.bin``, also as ``.xz`` or
    ``.gz``) and the "python version" (``data_batch_1``) can be read, from ``root`` or from the folder below it into
    which the archives unpack. The python version is a pickle; none of its code is loaded. Checksums are verified.

    ``targets`` is the list of the labels. ``images`` has the bytes as a tensor (N, 3, 32, 32), and ``data`` as a numpy
    array (N, 32, 32, 3), as in torchvision. Set ``dataset.transform`` to use torchvision's transforms instead of
    augmentation and normalization.

    Args:
        root: Folder with the files.
        train: If True, the 50,000 training images, otherwise the 10,000 test images.
        download: If True, download missing files (162 MB) into ``root``.
        partial: If True, accept some of the files, and for the test set a file of its first 1,000 records
            (``test_batch_first1000.bin``). Results on a part are not comparable with results on CIFAR-10.
        augment: If True, augment; if None, augment training images only.

    Raises:
        DatasetNotFoundError: The folder is missing, or it has none of the files.
        DatasetError: Some files are missing and ``partial`` is False, or a file is damaged.
        DownloadError: The download failed.

    References:
        Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.

        He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition, arXiv:1512.03385.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        train: bool = True,
        download: bool = False,
        *,
        partial: bool = False,
        augment: bool | None = None,
    ) -> None:
        self.root = Path(root)
        self.train = train
        names = CIFAR10_BATCHES[:-1] if train else CIFAR10_BATCHES[-1:]
        # Do not use the network if all files exist.
        if download and any(_find_cifar_batch(self.root, name, False) is None for name in names):
            archive = CIFAR10_URL.rsplit("/", 1)[1]
            maybe_download_and_extract_tar_gz(self.root, archive, CIFAR10_URL, md5=CIFAR10_ARCHIVE_MD5)
        paths = _cifar_files(self.root, names, partial)
        parts = [_read_cifar_batch(path) for path in paths]
        super().__init__(
            torch.cat([images for images, _ in parts]),
            torch.cat([labels for _, labels in parts]),
            CIFAR10_CLASSES,
            CIFAR10_MEAN,
            CIFAR10_STD,
            Augmentation(padding=4, flip=True) if (train if augment is None else augment) else None,
        )


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
    found = {name: _find_cifar_batch(root, name, partial) for name in names}
    paths = [path for path in found.values() if path is not None]
    missing = ", ".join(name for name, path in found.items() if path is None)
    if not paths:
        raise DatasetNotFoundError(
            f"no CIFAR-10 in {root}: missing {missing} (also as .bin, .bin.xz, .bin.gz); {advice}"
        )
    if missing and not partial:
        raise DatasetError(f"CIFAR-10 in {root} is not complete: missing {missing}; {advice}, or pass partial=True")
    return paths


def _read_cifar_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Read and check one file."""
    name = path.name.removesuffix(".xz").removesuffix(".gz")
    content = readers.read_bytes(path, CIFAR10_MD5.get(name))
    parse = readers.parse_cifar_binary if name.endswith(".bin") else readers.parse_cifar_python
    images, labels = parse(path, content)
    # The number of records also detects truncation of a file without a published checksum.
    expected = 1_000 if "first1000" in name else _CIFAR10_RECORDS
    if len(images) != expected:
        raise DatasetError(f"{path} is damaged: it must have {expected} images, not {len(images)}")
    return images, labels


class MNIST(ImageDataset):
    """MNIST: handwritten digits, gray, padded with zeros from 28x28 to 32x32.

    Training images get 4 pixels of zero padding and a random crop. They are not mirrored, because a mirrored digit is
    not a digit. The files in idx format, plain or ``.gz``, must be in ``root``, ``root/raw`` or ``root/MNIST/raw``.
    Checksums are verified.

    Args:
        root: Folder with the files.
        train: If True, the 60,000 training images, otherwise the 10,000 test images.
        download: If True, download missing files (12 MB) into ``root``.
        pad: Pixels of zeros on each side: 2 for images of 32x32, 0 for 28x28.
        channels: 1, or 3 equal channels for networks for color images.
        augment: If True, augment; if None, augment training images only.

    Raises:
        ValueError: ``pad`` or ``channels`` is not as listed above.
        DatasetNotFoundError: A file is missing.
        DatasetError: A file is damaged.
        DownloadError: The download failed.

    References:
        LeCun, Bottou, Bengio and Haffner, Gradient-Based Learning Applied to Document Recognition, 1998.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        train: bool = True,
        download: bool = False,
        *,
        pad: int = 2,
        channels: int = 3,
        augment: bool | None = None,
    ) -> None:
        check_at_least("pad", pad, 0)
        if channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, not {channels}")
        self.root = Path(root)
        self.train = train
        split = "train" if train else "t10k"
        gray = _read_idx(self.root, f"{split}-images-idx3-ubyte", 3, download)
        labels = _read_idx(self.root, f"{split}-labels-idx1-ubyte", 1, download)
        super().__init__(
            F.pad(gray[:, None], (pad,) * 4).expand(-1, channels, -1, -1).contiguous(),
            labels,
            [str(digit) for digit in range(10)],
            (MNIST_MEAN,) * channels,
            (MNIST_STD,) * channels,
            Augmentation(padding=4, flip=False) if (train if augment is None else augment) else None,
        )


def _read_idx(root: Path, name: str, dimensions: int, download: bool) -> Tensor:
    """Read one of MNIST's files; download it if requested."""
    folders = [root / folder for folder in MNIST_FOLDERS]
    path = find_file(folders, [name])
    if path is None and download:
        path = progress_download(f"{MNIST_URL}{name}.gz", root / f"{name}.gz", md5=MNIST_ARCHIVE_MD5[name])
    if path is None:
        raise DatasetNotFoundError(
            f"no MNIST in {root}: missing {name} (also as .gz); pass download=True, or get it from {MNIST_URL}{name}.gz"
        )
    return readers.parse_idx(path, readers.read_bytes(path, MNIST_MD5[name]), dimensions)


def _read_digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return scikit-learn's digits and their labels, if possible without its import, which takes a second."""
    spec = importlib.util.find_spec("sklearn")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            table = np.loadtxt(path, delimiter=",")
            return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(int)
    # Another version may keep the file elsewhere.
    source: Any = require("sklearn.datasets", "vision")
    digits = source.load_digits()
    return digits.images, digits.target


class Digits(ImageDataset):
    """scikit-learn's handwritten digits, enlarged: a data set that needs no download.

    The 1,797 gray images of 8x8 pixels are enlarged bilinearly and have three equal channels. A fifth of each class,
    the same on every machine, is the validation set. Training images get 2 pixels of zero padding and a random crop.
    They are not mirrored.

    Args:
        root: Has no effect: the images come with scikit-learn.
        train: If True, the 1,438 training images, otherwise the 359 validation images.
        channels: 1 or 3.
        size: Height and width of the enlarged images, at least 8. A network needs a quarter of the time for 16.
        augment: If True, augment; if None, augment training images only.

    Raises:
        ValueError: ``channels`` or ``size`` is not as listed above.
        MissingDependencyError: scikit-learn is not installed.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        train: bool = True,
        *,
        channels: int = 3,
        size: int = 32,
        augment: bool | None = None,
    ) -> None:
        if channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, not {channels}")
        if size < 8:
            raise ValueError(f"size must be at least 8, the size of the digits themselves, not {size}")
        gray, labels = _read_digits()
        self.train = train
        small = torch.from_numpy(gray).float()[:, None] / 16  # gray levels from 0 to 16
        large = F.interpolate(small, size=(size, size), mode="bilinear", align_corners=False)
        images = large.mul(255).round().to(torch.uint8)
        training, validation = stratified_split(labels)
        # Compute mean and deviation from the training images alone: validation images must not influence the inputs.
        reference = images[training].double() / 255
        chosen = training if train else validation
        super().__init__(
            images[chosen].expand(-1, channels, -1, -1).contiguous(),
            torch.from_numpy(labels.astype(np.int64))[chosen],
            [str(digit) for digit in range(10)],
            (reference.mean().item(),) * channels,
            (reference.std().item(),) * channels,
            Augmentation(padding=2, flip=False) if (train if augment is None else augment) else None,
        )


class Imagenet(Dataset):
    """ImageNet, or any images in one folder for each class.

    The images are in ``root/train/<class>/`` and ``root/val/<class>/``. Training images get a random crop of 224x224
    pixels at a random scale, and random mirroring. Validation images are resized to 256 pixels at their shorter side
    and cropped to 224x224 in the middle. All are normalized by ImageNet's mean and standard deviation.

    Args:
        root: Folder that contains ``train`` and ``val``.
        train: True for ``train``, False for ``val``.

    Attributes:
        classes: Names of the classes, sorted.
        class_to_idx: Number of each class.
        samples: Path and class of each image.
        targets: Class of each image.
        transform: Function that is applied to an image; may be set.

    Raises:
        DatasetNotFoundError: The folder is missing or has no images.
        MissingDependencyError: torchvision is not installed.

    References:
        Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, arXiv:1409.0575.
    """

    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def __init__(self, root: str | os.PathLike[str], train: bool = True) -> None:
        from mlbench_core import _torchvision

        self.root = Path(root)
        self.train = train
        folder = self.root / ("train" if train else "val")
        if not folder.is_dir():
            raise DatasetNotFoundError(
                f"no ImageNet here: the folder {folder} does not exist; it must have one folder of images for each "
                "class (https://image-net.org/download)"
            )
        try:
            self._images = _torchvision.load("datasets").ImageFolder(str(folder))
        except FileNotFoundError as error:
            raise DatasetNotFoundError(f"no ImageNet in {folder}: {error}") from error
        transforms: Any = _torchvision.load("transforms")
        if train:
            steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
        else:
            steps = [transforms.Resize(256), transforms.CenterCrop(224)]
        self.transform = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(self.mean, self.std)])
        self.classes: list[str] = self._images.classes
        self.class_to_idx: dict[str, int] = self._images.class_to_idx
        self.samples: list[tuple[str, int]] = self._images.samples
        self.targets: list[int] = self._images.targets

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            image, label = self._images[index]
        except OSError as error:
            raise DatasetError(f"{self.samples[index][0]} is damaged: {error}") from error
        return self.transform(image), label
