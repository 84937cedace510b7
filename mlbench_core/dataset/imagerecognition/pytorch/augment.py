"""Augmentation and normalization of whole batches of small images.

The method is that of He et al. 2015: pad with zeros, take a random crop of the original size, and
mirror half of the images. Each image gets its own offset and mirroring, as with torchvision's
``RandomCrop`` and ``RandomHorizontalFlip``, but the whole batch is processed at once.
:func:`crop_and_flip_reference` is the plain form, one image at a time.

References:
    He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition, arXiv:1512.03385, section
    4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbench_core.arguments import check_at_least

__all__ = ["Augmentation", "Draws", "crop_and_flip", "crop_and_flip_reference", "normalize", "send"]

_CACHED_VALUES = 1 << 17  # half a megabyte of float32


@dataclass(frozen=True)
class Draws:
    """The random draws for each image of a batch.

    Attributes:
        tops: First row of the crop in the padded image, int64 of shape (batch,), from 0 to 2 *
            padding.
        lefts: First column of the crop, of the same dtype, shape and range.
        flips: bool of shape (batch,), True if the crop is mirrored.
    """

    tops: Tensor
    lefts: Tensor
    flips: Tensor


@dataclass(frozen=True)
class Augmentation:
    """Random crop of the zero-padded image, and random mirroring.

    Args:
        padding: Pixels of zeros on each side, at least 0.
        flip: If True, mirror half of the images left to right. Do not use it for digits: a mirrored
            digit is not a digit.

    Example:
        >>> import torch
        >>> images = torch.zeros(5, 3, 32, 32, dtype=torch.uint8)
        >>> Augmentation()(images, torch.Generator().manual_seed(1)).shape
        torch.Size([5, 3, 32, 32])
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        check_at_least("padding", self.padding, 0)

    def draw(self, batch_size: int, generator: torch.Generator | None = None) -> Draws:
        """Draw crops and mirrorings, uniformly and independently.

        Args:
            batch_size: Number of images.
            generator: Generator of the random numbers; torch's global generator if None.

        Returns:
            The draws, on the CPU.
        """
        # Draw on the CPU, so that a seed gives the same augmentation on every device.
        offsets = torch.randint(0, 2 * self.padding + 1, (2, batch_size), generator=generator)
        if self.flip:
            flips = torch.rand(batch_size, generator=generator) < 0.5
        else:
            flips = torch.zeros(batch_size, dtype=torch.bool)
        return Draws(offsets[0], offsets[1], flips)

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Augment a batch.

        Args:
            images: Shape (batch, channels, height, width), any dtype.
            generator: Generator of the random numbers; torch's global generator if None.

        Returns:
            New images of the same shape and dtype.
        """
        return crop_and_flip(images, self.draw(len(images), generator), self.padding)


def crop_and_flip(images: Tensor, draws: Draws, padding: int) -> Tensor:
    """Crop each image of a batch at its own offset and mirror some, without a loop over images.

    Args:
        images: Shape (batch, channels, height, width), any dtype.
        draws: Offsets and mirrorings.
        padding: Pixels of zeros on each side.

    Returns:
        New images of the same shape and dtype.
    """
    height, width = images.shape[-2:]
    padded = F.pad(images, (padding,) * 4)
    # windows[n, c, i, j] is the crop of image n, channel c whose first pixel is (i, j). It is a
    # view without a copy.
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    # One transfer for all draws.
    stacked = torch.stack([draws.tops, draws.lefts, draws.flips.to(draws.tops.dtype)])
    tops, lefts, flips = send(stacked, images.device)
    crops = windows[torch.arange(len(images), device=images.device), :, tops, lefts]
    return torch.where(flips.bool()[:, None, None, None], crops.flip(3), crops)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device; on a GPU the host does not wait for the transfer.

    Args:
        tensor: A tensor on the CPU, or on the device.
        device: The device.

    Returns:
        The tensor on the device.
    """
    # A copy from other memory than pinned memory waits for all work that the GPU still has to do.
    # torch keeps the pinned memory until the copy has ended.
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def crop_and_flip_reference(images: Tensor, draws: Draws, padding: int) -> Tensor:
    """Crop and mirror one image after another: the plain form of :func:`crop_and_flip`.

    Args:
        images: Shape (batch, channels, height, width), any dtype.
        draws: Offsets and mirrorings.
        padding: Pixels of zeros on each side.

    Returns:
        New images of the same shape and dtype.
    """
    height, width = images.shape[-2:]
    results = []
    for image, top, left, flip in zip(images, draws.tops, draws.lefts, draws.flips, strict=True):
        crop = F.pad(image, (padding,) * 4)[:, top : top + height, left : left + width]
        if flip:
            crop = crop.flip(2)
        results.append(crop)
    return torch.stack(results)


def normalize(
    images: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Convert bytes to numbers of mean 0 and standard deviation 1.

    The result is (x/255 - mean) / std for each channel.

    Args:
        images: uint8 of shape (batch, channels, height, width).
        mean: Mean of each channel, on a scale from 0 (black) to 1 (the byte 255).
        std: Standard deviation of each channel, on the same scale.
        memory_format: Memory format of the result.

    Returns:
        float32 of the same shape.
    """
    # Compute the two constants in float64, and round them to float32 once, at the end.
    deviation = torch.tensor(std, dtype=torch.float64)
    constants = torch.stack(
        [1 / (255 * deviation), -torch.tensor(mean, dtype=torch.float64) / deviation]
    ).float()
    scale, shift = send(constants, images.device)[:, :, None, None]
    result = torch.empty(images.shape, dtype=torch.float32, device=images.device)
    count = len(images)
    # On a CPU, one part after the other: its values are still in the cache for the next operation.
    if images.device.type != "cuda":
        count = _CACHED_VALUES // max(1, images[:1].numel())
    count = max(1, count)
    for values, pixels in zip(result.split(count), images.split(count), strict=True):
        values.copy_(pixels).mul_(scale).add_(shift)
    # Change the memory format last: arithmetic is several times faster on contiguous planes than on
    # interleaved channels.
    return result.contiguous(memory_format=memory_format)
