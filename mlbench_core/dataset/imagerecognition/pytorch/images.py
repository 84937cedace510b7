"""Small images held in memory, and the creation of batches from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mlbench_core.dataset.imagerecognition.pytorch.augment import Augmentation, normalize, send
from mlbench_core.errors import require

__all__ = ["ImageDataset"]


class ImageDataset(Dataset):
    """Labeled images of the same size, in one tensor of bytes.

    A sample is ``(image, label)``. The image is float32 of shape (channels, height, width),
    normalized, and augmented if the data set has an augmentation. The label is an int. Random
    numbers come from torch's global generator, which a ``DataLoader`` seeds in each of its
    processes. A ``DataLoader`` fetches a whole batch with one call of ``__getitems__``.
    :class:`~mlbench_core.dataset.imagerecognition.pytorch.batches.ImageBatches` is faster and can
    resume within an epoch.

    Args:
        images: uint8 of shape (N, channels, height, width).
        targets: Class of each image, whole numbers of shape (N,).
        classes: Names of the classes.
        mean: Mean of each channel, on a scale from 0 (black) to 1 (the byte 255).
        std: Standard deviation of each channel, on the same scale.
        augmentation: Augmentation that is applied before the normalization; None for none.

    Attributes:
        images: As given.
        targets: Class of each image, a list of int as in torchvision. It may be changed until the
            data set is moved to another device.
        classes: As given, a list.
        mean: As given, a tuple.
        std: As given, a tuple.
        augmentation: As given; may be set.
        transform: Function that converts an image to a sample, instead of augmentation and
            normalization; None at first. It gets one PIL image at a time, as torchvision's
            transforms expect, and draws its own random numbers.
        target_transform: Function that converts a class, an int, to a label; None at first.

    Raises:
        ValueError: Shapes or dtypes are not as listed above.

    Example:
        >>> import torch
        >>> images = torch.zeros(6, 1, 8, 8, dtype=torch.uint8)
        >>> dataset = ImageDataset(images, torch.arange(6) % 2, ["a", "b"], mean=(0.5,), std=(0.5,))
        >>> image, label = dataset[1]
        >>> image.shape, image.max().item(), label
        (torch.Size([1, 8, 8]), -1.0, 1)
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        classes: Sequence[str],
        mean: Sequence[float],
        std: Sequence[float],
        augmentation: Augmentation | None = None,
    ) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise ValueError(
                f"images must be uint8 (N, C, H, W), not {images.dtype} of shape "
                f"{tuple(images.shape)}"
            )
        if targets.shape != images.shape[:1]:
            raise ValueError(
                f"targets must have shape ({len(images)},) as images, not {tuple(targets.shape)}"
            )
        if targets.dtype.is_complex or (targets.double().trunc() != targets).any():
            raise ValueError(
                f"targets must be whole numbers, not {targets.tolist()[:8]}: give the number "
                "of each class"
            )
        if not len(mean) == len(std) == images.shape[1]:
            raise ValueError(
                f"mean and std must have {images.shape[1]} values, one per channel, not "
                f"{len(mean)} and {len(std)}"
            )
        self.images = images
        # A list as in torchvision; its labels may be changed.
        self.targets: list[int] = targets.to(torch.int64).tolist()
        self._moved_labels: Tensor | None = None
        self.classes = list(classes)
        self.mean = tuple(map(float, mean))
        self.std = tuple(map(float, std))
        self.augmentation = augmentation
        self.transform: Callable[[Any], Any] | None = None
        self.target_transform: Callable[[int], Any] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        # `range` raises IndexError if the image does not exist, and converts a negative position.
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return several samples, created together; a DataLoader calls this for each batch."""
        samples: Any
        if self.transform is None:
            samples, _ = self.batch(indices)
        else:
            samples = self._transformed(indices)
        return list(zip(samples, self._targets(indices), strict=True))

    def batch(
        self,
        indices: Sequence[int] | Tensor,
        generator: torch.Generator | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        *,
        augment: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Create a batch, by operations on whole tensors.

        Args:
            indices: Positions of the samples, int64 of shape (batch,) if it is a tensor.
            generator: Generator of the augmentation's random numbers; torch's global generator if
                None.
            memory_format: Memory format of the images, for example ``torch.channels_last``.
            augment: If False, leave out the augmentation.

        Returns:
            Images, float32 of shape (batch, channels, height, width), and classes, int64 of shape
            (batch,); with ``transform`` and ``target_transform`` their stacked results.

        Raises:
            TypeError: ``transform`` does not return tensors.
        """
        chosen = send(torch.as_tensor(indices, dtype=torch.int64), self.images.device)
        if self.transform is None:
            images = self.images[chosen]
            if augment and self.augmentation is not None:
                images = self.augmentation(images, generator)
            return normalize(images, self.mean, self.std, memory_format), self._labels(chosen)
        samples = self._transformed(chosen.tolist())
        if not all(isinstance(sample, Tensor) for sample in samples):
            raise TypeError(
                f"transform must return tensors, not {type(samples[0]).__name__}: end it with "
                "ToTensor()"
            )
        images = torch.stack(samples).to(self.images.device)
        return images.contiguous(memory_format=memory_format), self._labels(chosen)

    def _transformed(self, indices: Sequence[int]) -> list[Any]:
        """Return the results of ``transform`` for some images."""
        assert self.transform is not None
        pictures: Any = require("PIL.Image", "vision")
        pixels = self.data
        # PIL takes gray images as (height, width), without a channel.
        if pixels.shape[-1] == 1:
            pixels = pixels[..., 0]
        return [self.transform(pictures.fromarray(pixels[index])) for index in indices]

    def _targets(self, indices: Sequence[int]) -> list[Any]:
        """Return the labels of some samples, one by one."""
        labels = [self.targets[index] for index in indices]
        if self.target_transform is None:
            return labels
        return list(map(self.target_transform, labels))

    def _labels(self, chosen: Tensor) -> Tensor:
        """Return the labels of some samples as a tensor, on the device of the images."""
        if self._moved_labels is not None and self.target_transform is None:
            return self._moved_labels[chosen]
        # Read the labels again for each batch, because `targets` may have been changed.
        labels = self._targets(chosen.tolist())
        if self.target_transform is None:
            return torch.tensor(labels, dtype=torch.int64)
        return torch.stack(list(map(torch.as_tensor, labels))).to(self.images.device)

    def to(self, device: torch.device | str) -> ImageDataset:
        """Move images and labels to a device, so that batches are created there without copies.

        Args:
            device: For example ``"cuda"``.

        Returns:
            The data set itself.
        """
        self.images = self.images.to(device)
        self._moved_labels = None
        # The CPU uses the list, because it may be changed. On another device, a tensor avoids a
        # copy for each batch.
        if self.images.device.type != "cpu":
            self._moved_labels = torch.tensor(self.targets, dtype=torch.int64, device=device)
        return self

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes that images and labels take on a device."""
        return self.images.nbytes + 8 * len(self.targets)

    @property
    def data(self) -> np.ndarray:
        """Return the images as in torchvision: uint8 of shape (N, height, width, channels).

        On the CPU, the array is a view of the images.
        """
        # torchvision's users expect the channels last.
        return self.images.cpu().permute(0, 2, 3, 1).numpy()

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Return the number of each class."""
        return {name: index for index, name in enumerate(self.classes)}

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.images.shape[1:]))
        return (
            f"{type(self).__name__}({len(self)} images of {shape}, "
            f"augmentation={self.augmentation})"
        )
