"""Image data sets: CIFAR-10, MNIST, scikit-learn's digits, and folders such as ImageNet."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from mlbench_core.arguments import check_at_least
from mlbench_core.dataset.imagerecognition.published import (
    CIFAR10_CLASSES,
    CIFAR10_MEAN,
    CIFAR10_STD,
    MNIST_MEAN,
    MNIST_STD,
    read_cifar10,
    read_digits,
    read_mnist,
)
from mlbench_core.dataset.imagerecognition.pytorch.augment import Augmentation
from mlbench_core.dataset.imagerecognition.pytorch.decoding import (
    MOST_BYTES,
    check_pixels,
    to_rgb,
    without_ends,
)
from mlbench_core.dataset.imagerecognition.pytorch.images import ImageDataset
from mlbench_core.dataset.parts import stratified_split
from mlbench_core.errors import DatasetError, DatasetNotFoundError, require
from mlbench_core.files import read_bytes

__all__ = ["CIFAR10V1", "MNIST", "Digits", "Imagenet"]


def _augmentation(
    train: bool, augment: bool | None, padding: int, flip: bool = False
) -> Augmentation | None:
    """Return the augmentation of a part; by default, only training images have one."""
    if augment is None:
        augment = train
    if not augment:
        return None
    return Augmentation(padding, flip)


class CIFAR10V1(ImageDataset):
    """CIFAR-10 with the augmentation of He et al. 2015.

    Training images get 4 pixels of zero padding, a random 32x32 crop and random mirroring. All
    images are normalized by the training set's mean and standard deviation. Both the "binary
    version" (``data_batch_1.bin``, also as ``.xz`` or ``.gz``) and the "python version"
    (``data_batch_1``) can be read, from ``root`` or from the folder below it into which the
    archives unpack. The python version is a pickle; none of its code is loaded. Checksums are
    verified.

    ``targets`` is the list of the labels. ``images`` has the bytes as a tensor (N, 3, 32, 32), and
    ``data`` as a numpy array (N, 32, 32, 3), as in torchvision. Set ``dataset.transform`` to use
    torchvision's transforms instead of augmentation and normalization.

    Args:
        root: Folder with the files.
        train: If True, the 50,000 training images, otherwise the 10,000 test images.
        download: If True, download missing files (162 MB) into ``root``.
        partial: If True, accept some of the files, and for the test set a file of its first 1,000
            records (``test_batch_first1000.bin``). Results on a part are not comparable with
            results on CIFAR-10.
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
        images, labels = read_cifar10(root, train, download, partial)
        super().__init__(
            torch.from_numpy(images),
            torch.from_numpy(labels),
            CIFAR10_CLASSES,
            CIFAR10_MEAN,
            CIFAR10_STD,
            _augmentation(train, augment, padding=4, flip=True),
        )


class MNIST(ImageDataset):
    """MNIST: handwritten digits, gray, padded with zeros from 28x28 to 32x32.

    Training images get 4 pixels of zero padding and a random crop. They are not mirrored, because a
    mirrored digit is not a digit. The files in idx format, plain or ``.gz``, must be in ``root``,
    ``root/raw`` or ``root/MNIST/raw``. Checksums are verified.

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
        LeCun, Bottou, Bengio and Haffner, Gradient-Based Learning Applied to Document Recognition,
        1998.
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
        gray, labels = read_mnist(root, train, download)
        padded = F.pad(torch.from_numpy(gray)[:, None], (pad,) * 4)
        super().__init__(
            padded.expand(-1, channels, -1, -1).contiguous(),
            torch.from_numpy(labels),
            list("0123456789"),
            (MNIST_MEAN,) * channels,
            (MNIST_STD,) * channels,
            _augmentation(train, augment, padding=4),
        )


class Digits(ImageDataset):
    """scikit-learn's handwritten digits, enlarged: a data set that needs no download.

    The 1,797 gray images of 8x8 pixels are enlarged bilinearly and have three equal channels. A
    fifth of each class, the same on every machine, is the validation set. Training images get 2
    pixels of zero padding and a random crop. They are not mirrored.

    Args:
        root: Has no effect: the images come with scikit-learn.
        train: If True, the 1,438 training images, otherwise the 359 validation images.
        channels: 1 or 3.
        size: Height and width of the enlarged images, at least 8. A network needs a quarter of the
            time for 16.
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
            raise ValueError(
                f"size must be at least 8, the size of the digits themselves, not {size}"
            )
        gray, labels = read_digits()
        self.train = train
        small = torch.from_numpy(gray).float()[:, None] / 16  # gray levels from 0 to 16
        large = F.interpolate(small, size=(size, size), mode="bilinear", align_corners=False)
        images = large.mul(255).round().to(torch.uint8)
        training, validation = stratified_split(labels)
        # Compute mean and deviation from the training images alone: validation images must not
        # influence the inputs.
        reference = images[training].double() / 255
        chosen = validation
        if train:
            chosen = training
        super().__init__(
            images[chosen].expand(-1, channels, -1, -1).contiguous(),
            torch.from_numpy(labels.astype(np.int64))[chosen],
            list("0123456789"),
            (reference.mean().item(),) * channels,
            (reference.std().item(),) * channels,
            _augmentation(train, augment, padding=2),
        )


class Imagenet(Dataset):
    """ImageNet, or any images in one folder for each class.

    The images are in ``root/train/<class>/`` and ``root/val/<class>/``, of at most 89,478,485
    pixels each. Training images get a random crop of 224x224 pixels at a random scale, and random
    mirroring. Validation images are resized to 256 pixels at their shorter side and cropped to
    224x224 in the middle. All are normalized by ImageNet's mean and standard deviation.

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
        from mlbench_core._optional import torchvision

        self.root = Path(root)
        self.train = train
        folder = self.root / "val"
        if train:
            folder = self.root / "train"
        if not folder.is_dir():
            raise DatasetNotFoundError(
                f"{folder} does not exist: get ImageNet (https://image-net.org/download) and put "
                "one folder of images for each class there"
            )
        try:
            self._images = torchvision.load("datasets").ImageFolder(str(folder), loader=_load_rgb)
        except FileNotFoundError as error:
            raise DatasetNotFoundError(f"no ImageNet in {folder}: {error}") from error
        transforms: Any = torchvision.load("transforms")
        if train:
            steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
        else:
            steps = [_cut_ends, transforms.Resize(256), transforms.CenterCrop(224)]
        self.transform = transforms.Compose(
            [*steps, transforms.ToTensor(), transforms.Normalize(self.mean, self.std)]
        )
        self.classes: list[str] = self._images.classes
        self.class_to_idx: dict[str, int] = self._images.class_to_idx
        self.samples: list[tuple[str, int]] = self._images.samples
        self.targets: list[int] = self._images.targets

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self._images[index]
        return self.transform(image), label


def _load_rgb(path: str) -> Any:
    """Read an image as a picture of Pillow with 8 bits of red, green and blue."""
    pictures: Any = require("PIL.Image", "vision")
    try:
        with pictures.open(io.BytesIO(read_bytes(Path(path), MOST_BYTES))) as picture:
            # Before the pixels are decoded: a small file may have a huge picture.
            check_pixels(path, picture.height, picture.width)
            # It may be the picture itself, which is closed at the end of this block.
            return to_rgb(picture).copy()
    except DatasetError:
        raise
    except pictures.UnidentifiedImageError as error:
        # Pillow's message has the address of the buffer instead of the path.
        raise DatasetError(f"{path} is damaged: it is not an image that Pillow knows") from error
    # Decoders raise exceptions of many types for a damaged file.
    except Exception as error:
        raise DatasetError(f"{path} is damaged: {error}") from error


def _cut_ends(picture: Any) -> Any:
    """Cut the ends of a very long picture, as ``CenterCrop`` does, before it is resized."""
    top, left, height, width = without_ends(picture.height, picture.width)
    return picture.crop((left, top, left + width, top + height))
