"""Batches of small images as NumPy arrays, for a framework that has no loader here.

Images, parts of the workers, augmentation and normalization are those of the ``pytorch`` package.
Only the random numbers of order and augmentation come from another generator. This module imports
no framework.

References:
    He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition, arXiv:1512.03385, section
    4.2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mlbench_core.arguments import check_int, check_rank
from mlbench_core.dataset.imagerecognition.published import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    MNIST_MEAN,
    MNIST_STD,
    read_cifar10,
    read_digits,
    read_mnist,
)
from mlbench_core.dataset.parts import part_sizes, stratified_split, uniform_part

__all__ = ["ArrayBatches", "ImageArrays", "cifar10_arrays", "digits_arrays", "mnist_arrays"]

# Purpose of a stream of random numbers; part of its seed, so that no two purposes share one.
_ORDER, _AUGMENTATION = 0, 1


@dataclass(frozen=True)
class ImageArrays:
    """Labeled images of the same size.

    Attributes:
        images: uint8 of shape (N, height, width, channels).
        labels: Class of each image, int64 of shape (N,).
        mean: Mean of each channel, on a scale from 0 (black) to 1 (the byte 255).
        std: Standard deviation of each channel, on the same scale.
        padding: Pixels of zeros on each side, from which training images are cropped.
        flip: True if half of the training images are mirrored left to right.

    Raises:
        ValueError: Shapes or dtypes are not as listed above.
    """

    images: np.ndarray
    labels: np.ndarray
    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int
    flip: bool

    def __post_init__(self) -> None:
        # Other levels than those of bytes would be scaled by 1 / 255 all the same.
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise ValueError(
                f"images must be uint8 (N, H, W, C), not {self.images.dtype} of shape "
                f"{self.images.shape}: convert them"
            )
        if self.labels.dtype.kind not in "iu" or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"labels must be integers of shape ({len(self.images)},), not "
                f"{self.labels.dtype} of shape {self.labels.shape}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def batch(
        self, positions: np.ndarray, generator: np.random.Generator | None = None
    ) -> np.ndarray:
        """Make the normalized images of a batch: (x/255 - mean) / std for each channel.

        Args:
            positions: Positions of the images, int64 of shape (batch,).
            generator: Generator of the augmentation's random numbers; None for no augmentation.

        Returns:
            float32 of shape (batch, height, width, channels).
        """
        images = self.images[positions]
        if generator is not None:
            images = self._augment(images, generator)
        # The two constants are computed in float64 and rounded to float32 once.
        std = np.asarray(self.std)
        scale = (1 / (255 * std)).astype(np.float32)
        shift = (-np.asarray(self.mean) / std).astype(np.float32)
        return images.astype(np.float32) * scale + shift

    def _augment(self, images: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Crop each image at its own offset from the padded one, and mirror half of the crops."""
        count, height, width, _ = images.shape
        margin = (self.padding, self.padding)
        padded = np.pad(images, ((0, 0), margin, margin, (0, 0)))
        # windows[n, i, j] is the crop of image n whose first pixel is (i, j), with the channels
        # first. It is a view.
        windows: np.ndarray = np.lib.stride_tricks.sliding_window_view(
            padded, (height, width), axis=(1, 2)
        )
        tops, lefts = generator.integers(0, 2 * self.padding + 1, (2, count))
        crops = windows[np.arange(count), tops, lefts].transpose(0, 2, 3, 1)
        if not self.flip:
            return crops
        return np.where(generator.random((count, 1, 1, 1)) < 0.5, crops[:, :, ::-1], crops)


class ArrayBatches:
    """The batches of one worker.

    Training batches are augmented. Their order depends only on (seed, rank, epoch), and their
    augmentation on (seed, rank, epoch, batch). A worker keeps its part of the images for the whole
    run: for training a part that is drawn at random, the same for every seed, and otherwise a
    contiguous part. Every worker has the same number of batches, so no collective waits
    indefinitely.

    Args:
        arrays: The whole data set.
        batch_size: Images in a batch, at least 1.
        train: True for training batches, False for batches that are neither shuffled nor augmented.
        rank: Rank of this worker.
        world_size: Number of workers.
        seed: Seed of order and augmentation, at least 0.

    Raises:
        ValueError: An argument is outside the values listed above.

    Example:
        >>> images = np.zeros((10, 8, 8, 3), dtype=np.uint8)
        >>> mean, std = (0.5,) * 3, (0.5,) * 3
        >>> arrays = ImageArrays(images, np.arange(10), mean, std, padding=1, flip=True)
        >>> [x.shape for x, y in ArrayBatches(arrays, 4, train=True).epoch(0)]
        [(4, 8, 8, 3), (4, 8, 8, 3), (2, 8, 8, 3)]
    """

    def __init__(
        self,
        arrays: ImageArrays,
        batch_size: int,
        *,
        train: bool,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        check_int("batch_size", batch_size)
        check_int("seed", seed, 0)
        check_rank(rank, world_size)
        self.arrays, self.batch_size, self.train = arrays, batch_size, train
        self.rank, self.seed = rank, seed
        self.positions = uniform_part(len(arrays), rank, world_size, shuffle=train)
        self._smallest_part = part_sizes(len(arrays), world_size)[-1]

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return -(-self._smallest_part // self.batch_size)

    def epoch(self, number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the batches of an epoch.

        Args:
            number: Number of the epoch, from 0.

        Yields:
            Images, float32 of shape (batch, height, width, channels), and their classes, int64 of
            shape (batch,).
        """
        order = self.positions
        if self.train:
            order = self._generator(_ORDER, number).permutation(order)
        for index in range(len(self)):
            chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
            generator = None
            if self.train:
                generator = self._generator(_AUGMENTATION, number, index)
            yield self.arrays.batch(chosen, generator), self.arrays.labels[chosen]

    def _generator(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.rank, *purpose])


def cifar10_arrays(
    root: str | os.PathLike[str], train: bool, download: bool = False, partial: bool = False
) -> ImageArrays:
    """Read CIFAR-10; the arguments and errors are those of :func:`~.published.read_cifar10`."""
    images, labels = read_cifar10(root, train, download, partial)
    channels_last = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    return ImageArrays(channels_last, labels, CIFAR10_MEAN, CIFAR10_STD, padding=4, flip=True)


def mnist_arrays(root: str | os.PathLike[str], train: bool, download: bool = False) -> ImageArrays:
    """Read MNIST, padded with zeros to 32x32 pixels and with three equal channels.

    The arguments and errors are those of :func:`~.published.read_mnist`.
    """
    gray, labels = read_mnist(root, train, download)
    images = _three_channels(np.pad(gray, ((0, 0), (2, 2), (2, 2))))
    mean, std = (MNIST_MEAN,) * 3, (MNIST_STD,) * 3
    # A mirrored digit is not a digit.
    return ImageArrays(images, labels.astype(np.int64), mean, std, padding=4, flip=False)


def digits_arrays(train: bool, size: int = 32, extra: str = "vision") -> ImageArrays:
    """Read scikit-learn's digits, enlarged bilinearly and with three equal channels.

    A fifth of each class, the same on every machine, is the validation set.

    Args:
        train: If True, the 1,438 training images, otherwise the 359 validation images.
        size: Height and width of the enlarged images, at least 8.
        extra: The extra that installs scikit-learn, for the error message.

    Raises:
        ValueError: ``size`` is below 8.
        MissingDependencyError: scikit-learn is not installed.
    """
    if size < 8:
        raise ValueError(f"size must be at least 8, the size of the digits themselves, not {size}")
    gray, labels = read_digits(extra)
    images = np.rint(_enlarge(gray / 16, size) * 255).astype(np.uint8)
    training, validation = stratified_split(labels)
    # From the training images alone: validation images must not influence the inputs.
    reference = images[training] / 255
    mean, std = (float(reference.mean()),) * 3, (float(reference.std(ddof=1)),) * 3
    chosen = training if train else validation
    digits, classes = _three_channels(images[chosen]), labels[chosen].astype(np.int64)
    return ImageArrays(digits, classes, mean, std, padding=2, flip=False)


def _three_channels(gray: np.ndarray) -> np.ndarray:
    return np.repeat(gray[..., None], 3, axis=3)


def _enlarge(images: np.ndarray, size: int) -> np.ndarray:
    """Enlarge square images of shape (N, n, n) bilinearly."""
    count = images.shape[-1]
    # Pixels are squares, so a position is that of a center. Positions outside take the edge.
    position = np.maximum((np.arange(size) + 0.5) * count / size - 0.5, 0)
    low = position.astype(int)
    high, weight = np.minimum(low + 1, count - 1), position - low
    rows = images[:, low] * (1 - weight)[:, None] + images[:, high] * weight[:, None]
    return rows[:, :, low] * (1 - weight) + rows[:, :, high] * weight
