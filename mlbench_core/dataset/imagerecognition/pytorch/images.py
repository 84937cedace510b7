"""Small images held in memory, and how a batch of them is made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mlbench_core.dataset.imagerecognition.pytorch.augment import Augmentation, normalize

__all__ = ["ImageDataset"]


class ImageDataset(Dataset):
    """Labelled images of one size, all in one tensor of bytes.

    A sample is ``(image, label)``: the image augmented, where the data set has an augmentation, and normalised, float32
    of shape (channels, height, width); the label an int. Random numbers come from torch's global generator, which a
    ``DataLoader`` seeds in each of its processes. A loader fetches a whole batch at once through ``__getitems__``;
    :class:`~mlbench_core.dataset.imagerecognition.pytorch.batches.ImageBatches` is faster still and resumes exactly.

    Args:
        images: uint8 of shape (N, channels, height, width).
        targets: Class of each image, int64 of shape (N,).
        classes: Names of the classes.
        mean: Mean of each channel, where 0 is black and 1 is full.
        std: Standard deviation of each channel, likewise.
        augmentation: What is done to an image before it is normalised; None for nothing.

    Attributes:
        images: As given.
        targets: As given.
        classes: As given, a list.
        mean: As given, a tuple.
        std: As given, a tuple.
        augmentation: As given; may be set.

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
            raise ValueError(f"images is {images.dtype} of shape {tuple(images.shape)}; it must be uint8 (N, C, H, W)")
        if targets.shape != images.shape[:1]:
            raise ValueError(f"targets has shape {tuple(targets.shape)}; for these images it must be ({len(images)},)")
        if not len(mean) == len(std) == images.shape[1]:
            raise ValueError(f"mean and std have {len(mean)} and {len(std)} values for {images.shape[1]} channels")
        self.images = images
        self.targets = targets.to(torch.int64)
        self.classes = list(classes)
        self.mean = tuple(float(value) for value in mean)
        self.std = tuple(float(value) for value in std)
        self.augmentation = augmentation

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        position = range(len(self))[index]  # an IndexError where there is no such image
        images, targets = self.batch([position])
        return images[0], int(targets[0])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Several samples, made together; what torch's DataLoader calls for each batch."""
        images, targets = self.batch(indices)
        return list(zip(images, targets.tolist(), strict=True))

    def batch(
        self,
        indices: Sequence[int] | Tensor,
        generator: torch.Generator | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> tuple[Tensor, Tensor]:
        """Make a batch as whole-tensor operations.

        Args:
            indices: Positions of the samples, int64 of shape (batch,) where it is a tensor.
            generator: Where the augmentation's random numbers come from; torch's global generator by default.
            memory_format: Memory format of the images, for example ``torch.channels_last``.

        Returns:
            Images, float32 of shape (batch, channels, height, width), and classes, int64 of shape (batch,).
        """
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.images.device)
        if self.augmentation is None:
            return self.plain_batch(chosen, memory_format)
        images = self.augmentation(self.images[chosen], generator)
        return normalize(images, self.mean, self.std, memory_format), self.targets[chosen]

    def plain_batch(
        self, indices: Sequence[int] | Tensor, memory_format: torch.memory_format = torch.contiguous_format
    ) -> tuple[Tensor, Tensor]:
        """Make a batch without augmentation.

        Args:
            indices: Positions of the samples, int64 of shape (batch,) where it is a tensor.
            memory_format: Memory format of the images.

        Returns:
            As :meth:`batch`.
        """
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.images.device)
        return normalize(self.images[chosen], self.mean, self.std, memory_format), self.targets[chosen]

    def to(self, device: torch.device | str) -> ImageDataset:
        """Move images and labels to a device, where batches are then made: nothing is copied to it any more.

        Args:
            device: For example ``"cuda"``.

        Returns:
            The data set itself.
        """
        self.images = self.images.to(device)
        self.targets = self.targets.to(device)
        return self

    @property
    def size_bytes(self) -> int:
        """Bytes that images and labels take."""
        return self.images.nbytes + self.targets.nbytes

    @property
    def data(self) -> np.ndarray:
        """The images as torchvision keeps them: uint8 of shape (N, height, width, channels). A view on the CPU."""
        return self.images.cpu().permute(0, 2, 3, 1).numpy()

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Number of each class."""
        return {name: index for index, name in enumerate(self.classes)}

    def __repr__(self) -> str:
        shape = "x".join(str(size) for size in self.images.shape[1:])
        return f"{type(self).__name__}({len(self)} images of {shape}, augmentation={self.augmentation})"
