"""Batches of JPEG images: decoded, cropped and resized as bytes, and normalized once per batch.

The steps of an image, and the process that does each of them::

    loader process 1 ... n                               worker
    ----------------------                               ------
    read -> decode -> crop -> resize -> mirror
    (bytes: a quarter of the memory of float32)    ->    device -> float32 -> normalize

References:
    Szegedy et al., Going Deeper with Convolutions, arXiv:1409.4842, section 6: crops of random size
    and shape.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mlbench_core._optional import torchvision
from mlbench_core.arguments import check_at_least, check_int, check_rank
from mlbench_core.dataset.imagerecognition.pytorch.augment import normalize, send
from mlbench_core.dataset.imagerecognition.pytorch.dataloader import Imagenet
from mlbench_core.dataset.imagerecognition.pytorch.decoding import (
    Box,
    check_encoded,
    to_rgb,
    without_ends,
)
from mlbench_core.dataset.imagerecognition.pytorch.jpeg_files import JpegFiles
from mlbench_core.dataset.pytorch.resumable import ResumablePasses
from mlbench_core.errors import ConfigurationError, DatasetError, require

__all__ = ["CenterCrop", "JpegBatches", "RandomCrop", "decoder_name"]

# Purpose of a stream of random numbers; part of its seed, so that no two purposes share one.
_ORDER, _CROP = 0, 1

_SHAPES = (3 / 4, 4 / 3)
_ATTEMPTS = 10


class _Request(NamedTuple):
    """A batch that a loader process has to make: the epoch, and the positions of its images."""

    epoch: int
    positions: np.ndarray


@dataclass(frozen=True)
class RandomCrop:
    """A crop of random size and shape for training.

    It is resized to a square, and mirrored with probability 1/2. Size and shape are drawn as by
    torchvision's ``RandomResizedCrop``: the area uniformly, the logarithm of width to height
    uniformly between 3/4 and 4/3. If ten draws do not fit, the crop is the largest one in the
    middle with an allowed shape.

    Args:
        size: Height and width of the result, at least 1.
        min_area: Smallest share of the image's area, above 0 and at most 1.

    Raises:
        ValueError: An argument is outside the values listed above.

    Example:
        >>> top, left, height, width = RandomCrop(64).box(50, 80, np.random.default_rng(0))
        >>> 0 <= top <= 50 - height, 0 <= left <= 80 - width
        (True, True)
    """

    size: int = 224
    min_area: float = 0.08

    def __post_init__(self) -> None:
        check_int("size", self.size)
        if not 0 < self.min_area <= 1:
            raise ValueError(f"min_area must be above 0 and at most 1, not {self.min_area}")

    def box(self, height: int, width: int, generator: np.random.Generator) -> Box:
        """Draw the part of an image to keep.

        Args:
            height: Height of the image.
            width: Width of the image.
            generator: Generator of the random numbers.

        Returns:
            Its first row, first column, height and width.
        """
        shortest, longest = _SHAPES
        for _ in range(_ATTEMPTS):
            area = height * width * generator.uniform(self.min_area, 1)
            shape = math.exp(generator.uniform(math.log(shortest), math.log(longest)))
            h, w = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
            if 0 < h <= height and 0 < w <= width:
                top = int(generator.integers(height - h + 1))
                left = int(generator.integers(width - w + 1))
                return top, left, h, w
        h, w = min(height, round(width / shortest)), min(width, round(height * longest))
        return (height - h) // 2, (width - w) // 2, h, w

    def finish(self, part: Tensor, generator: np.random.Generator) -> Tensor:
        """Resize the part, and mirror half of all parts.

        Args:
            part: uint8 of shape (3, height, width).
            generator: Generator of the random numbers.

        Returns:
            uint8 of shape (3, size, size).
        """
        square = _resize(part, self.size, self.size)
        if generator.random() < 0.5:
            return square.flip(2)
        return square


@dataclass(frozen=True)
class CenterCrop:
    """The square in the middle of an image whose shorter side is resized, as for validation.

    Args:
        size: Height and width of the result, at least 1.
        resize: Length of the shorter side before the crop, at least ``size``.

    Raises:
        ValueError: An argument is outside the values listed above.

    Example:
        >>> CenterCrop(64, resize=72).finish(torch.zeros(3, 50, 80, dtype=torch.uint8)).shape
        torch.Size([3, 64, 64])
    """

    size: int = 224
    resize: int = 256

    def __post_init__(self) -> None:
        check_int("size", self.size)
        check_at_least("resize", self.resize, self.size)

    def box(self, height: int, width: int, generator: np.random.Generator | None = None) -> Box:
        """Return the whole image, because torchvision resizes it before the crop.

        A very long image would have gigabytes after that, so only its middle is returned; see
        :func:`~mlbench_core.dataset.imagerecognition.pytorch.decoding.without_ends`.

        Args:
            height: Height of the image.
            width: Width of the image.
            generator: Has no effect: nothing is drawn.

        Returns:
            First row, first column, height and width.
        """
        return without_ends(height, width)

    def finish(self, part: Tensor, generator: np.random.Generator | None = None) -> Tensor:
        """Resize the image, and keep the middle.

        Args:
            part: uint8 of shape (3, height, width).
            generator: Has no effect: nothing is drawn.

        Returns:
            uint8 of shape (3, size, size).
        """
        height, width = part.shape[1:]
        # The longer side is rounded down, as by torchvision.
        shorter = min(height, width)
        large = _resize(part, self.resize * height // shorter, self.resize * width // shorter)
        top = round((large.shape[1] - self.size) / 2)
        left = round((large.shape[2] - self.size) / 2)
        return large[:, top : top + self.size, left : left + self.size]


def _resize(image: Tensor, height: int, width: int) -> Tensor:
    """Resize an image of bytes, bilinearly and with antialiasing."""
    if image.shape[1:] == (height, width):
        return image
    if image.device.type == "cpu":
        return F.interpolate(image[None], (height, width), mode="bilinear", antialias=True)[0]
    # The kernel for bytes exists on CPUs only.
    pixels = F.interpolate(image[None].float(), (height, width), mode="bilinear", antialias=True)
    return pixels[0].round_().clamp_(0, 255).to(torch.uint8)


@functools.cache
def decoder_name() -> str:
    """Return the library that decodes images on this machine: ``"torchvision"`` or ``"Pillow"``.

    torchvision's decoders are compiled for one build of torch. If they do not load, Pillow decodes.
    Both use libjpeg-turbo, and their results may differ by its version.
    """
    return "torchvision" if torchvision.decodes_images() else "Pillow"


def _decode(encoded: bytes, choose: Callable[[int, int], Box]) -> Tensor:
    """Decode the part of a JPEG or PNG image that a function of height and width chooses.

    Some files of ImageNet are gray or CMYK, and one is PNG.

    Returns:
        RGB, uint8 of shape (3, height, width) of the part.
    """
    if decoder_name() == "torchvision":
        torchvision_io: Any = torchvision.load("io")
        # A bytearray, because torch warns of memory that cannot be written to.
        data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        pixels = torchvision_io.decode_image(data, mode=torchvision_io.ImageReadMode.RGB)
        # A PNG image may have 16 bits. Keep the upper 8, as `to_rgb` does.
        if pixels.dtype == torch.uint16:
            pixels = torch.from_numpy((pixels.numpy() >> 8).astype(np.uint8))
        return _part(pixels, choose)
    pictures: Any = require("PIL.Image", "vision")
    try:
        opened = pictures.open(io.BytesIO(encoded), formats=("JPEG", "PNG"))
    except pictures.UnidentifiedImageError:
        # Pillow's message has the address of the buffer, which means nothing to a reader.
        raise ValueError("Pillow finds no JPEG or PNG image in it") from None
    with opened as picture:
        top, left, height, width = choose(picture.height, picture.width)
        part = picture.crop((left, top, left + width, top + height))
        return torch.from_numpy(np.array(to_rgb(part))).permute(2, 0, 1)


def _part(image: Tensor, choose: Callable[[int, int], Box]) -> Tensor:
    """Return a part of a decoded image, without a copy."""
    top, left, height, width = choose(*image.shape[1:])
    return image[:, top : top + height, left : left + width]


class _Reader(Dataset):
    """Make the images of a batch, as a ``DataLoader`` asks for it in its processes.

    Args:
        files: The images.
        crop: The crop.
        seed: Seed of the random numbers.
        decodes: If False, only read the bytes.
    """

    def __init__(
        self, files: JpegFiles, crop: RandomCrop | CenterCrop, seed: int, decodes: bool
    ) -> None:
        self.files, self.crop, self.seed, self.decodes = files, crop, seed, decodes

    def __getitem__(self, request: _Request) -> tuple[Tensor, Tensor]:
        """Return the images of a batch and their labels.

        Without decoding, return the bytes of all files, and the length of each file.

        Returns:
            uint8 of shape (batch, 3, size, size) and int64 of shape (batch,); or uint8 of shape
            (bytes,) and int64 of shape (batch,).
        """
        if not self.decodes:
            contents = list(map(self.files.read, request.positions))
            # One tensor: each one sent between processes needs an open file.
            joined = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
            return joined, torch.tensor(list(map(len, contents)))
        size = self.crop.size
        images = torch.empty(len(request.positions), 3, size, size, dtype=torch.uint8)
        for image, position in zip(images, request.positions, strict=True):
            image.copy_(self.decode(self.files.read(position), request.epoch, position))
        return images, torch.from_numpy(self.files.targets[request.positions])

    def decode(self, encoded: bytes, epoch: int, position: int) -> Tensor:
        """Decode and crop an image with its own random numbers of the epoch."""
        generator = self.generator(epoch, position)
        check_encoded(self.files.name(position), encoded)
        try:
            part = _decode(encoded, functools.partial(self.crop.box, generator=generator))
        # Decoders raise exceptions of many types for a damaged file.
        except Exception as error:
            raise DatasetError(
                f"{self.files.name(position)} is damaged: {error}; delete it and get it again"
            ) from error
        return self.crop.finish(part, generator)

    def generator(self, epoch: int, position: int) -> np.random.Generator:
        """Return the generator of the random numbers that belong to an image and an epoch."""
        return np.random.default_rng([self.seed, _CROP, epoch, position])


class JpegBatches(ResumablePasses):
    """Iterate over JPEG images in batches, which depend only on a seed and which a run can resume.

    The order of an epoch depends on (seed, epoch), and the crop of an image on (seed, epoch,
    position of the image). So neither the number of loader processes nor that of workers changes an
    image. torch's global generator is neither read nor changed.

    * With a :class:`RandomCrop` (training), each epoch has one order for all workers, of which
      worker r takes the r-th b of every kb images, with k workers and batches of b. So all workers
      have the same number of full batches, and the k batches of a step are those of one worker with
      batches of kb. The fewer than kb images that remain are left out of that epoch.
    * With a :class:`CenterCrop` (validation), the images have their own order, and worker r takes
      every k-th one. Each image is in exactly one batch, so workers may differ by one batch.

    Images of different sizes and shapes are resized to squares of bytes. They are converted and
    normalized by ImageNet's mean and standard deviation one batch at a time.

    Args:
        files: The images.
        batch_size: Images per batch of a worker, at least 1.
        crop: A :class:`RandomCrop` or a :class:`CenterCrop`.
        seed: Seed of order and crops, at least 0.
        rank: Rank of the worker.
        world_size: Number of workers that share the images.
        processes: Number of loader processes; 0 decodes in the process of the worker.
        device: Device of the batches.
        gpu_decoding: If True, ``torchvision.io.decode_jpeg`` decodes on the device, which must be a
            CUDA device, and the loader processes only read. Crops then differ by rounding.
        memory_format: Memory format of the batches; ``torch.channels_last`` is faster for
            convolutions.

    Raises:
        ConfigurationError: ``gpu_decoding`` is True and the device or torchvision cannot do it.
        ValueError: Another argument is outside the values listed above, or a batch of all workers
            has more images than there are.
        DatasetError: In the iteration, an image cannot be read or decoded, or has more than
            89,478,485 pixels; the message has its name.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from mlbench_core.dataset.imagerecognition.pytorch.jpeg_files import find_jpegs
        >>> with tempfile.TemporaryDirectory() as root:
        ...     Path(root, "ant").mkdir()
        ...     for name in "abc":
        ...         Image.new("RGB", (50, 40)).save(Path(root, "ant", f"{name}.jpg"))
        ...     batches = JpegBatches(find_jpegs(root), 2, CenterCrop(32, resize=36))
        ...     [tuple(x.shape) for x, y in batches]
        [(2, 3, 32, 32), (1, 3, 32, 32)]
    """

    def __init__(
        self,
        files: JpegFiles,
        batch_size: int,
        crop: RandomCrop | CenterCrop,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        *,
        processes: int = 0,
        device: torch.device | str = "cpu",
        gpu_decoding: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        check_int("batch_size", batch_size)
        check_int("seed", seed, 0)
        check_int("processes", processes, 0)
        check_rank(rank, world_size)
        self.files, self.batch_size, self.crop = files, batch_size, crop
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.device = torch.device(device)
        self.gpu_decoding, self.memory_format = gpu_decoding, memory_format
        self.is_training = isinstance(crop, RandomCrop)
        if self.is_training and batch_size * world_size > len(files):
            raise ValueError(
                f"batch_size must be at most {len(files) // world_size} for {len(files)} images "
                f"and {world_size} workers, not {batch_size}"
            )
        if gpu_decoding and (self.device.type != "cuda" or decoder_name() != "torchvision"):
            raise ConfigurationError(
                "gpu_decoding needs a CUDA device and a torchvision whose compiled operators "
                f"load, not {self.device} and {decoder_name()}: leave it out"
            )
        self._reader = _Reader(files, crop, seed, decodes=not gpu_decoding)
        # The loader reads this list at the start of each pass.
        self._requests: list[_Request] = []
        self._loader = DataLoader(
            self._reader,
            batch_size=None,  # a request is a whole batch
            sampler=self._requests,
            num_workers=processes,
            # Processes that stay need not be started again for each epoch.
            persistent_workers=processes > 0,
            # By default, the loader draws from torch's global generator.
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        """Return the number of batches of an epoch of this worker."""
        if self.is_training:
            return len(self.files) // (self.batch_size * self.world_size)
        return -(-len(range(self.rank, len(self.files), self.world_size)) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first = self._begin()
        return self._generate(self._epoch, first)

    def positions(self, epoch: int) -> list[np.ndarray]:
        """Return the positions of the images of each of this worker's batches in an epoch.

        Args:
            epoch: The epoch, from 0.
        """
        size = self.batch_size
        if self.is_training:
            order = np.random.default_rng([self.seed, _ORDER, epoch]).permutation(len(self.files))
            # Each step of all workers takes the next kb images of the common order.
            first, stride = self.rank * size, self.world_size * size
        else:
            order = np.arange(self.rank, len(self.files), self.world_size)
            first, stride = 0, size
        starts = range(first, first + len(self) * stride, stride)
        return [order[start : start + size] for start in starts]

    def _generate(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch, from the first requested one."""
        requests = [_Request(epoch, positions) for positions in self.positions(epoch)[first:]]
        self._requests[:] = requests
        for number, ((data, numbers), request) in enumerate(
            zip(self._loader, requests, strict=True), first
        ):
            self._mark_yielded(number)
            if self.gpu_decoding:
                images = self._decode_on_gpu(list(data.split(numbers.tolist())), request)
                labels = torch.from_numpy(self.files.targets[request.positions])
            else:
                images, labels = send(data, self.device), numbers
            yield (
                normalize(images, Imagenet.mean, Imagenet.std, self.memory_format),
                send(labels, self.device),
            )

    def _decode_on_gpu(self, encoded: list[Tensor], request: _Request) -> Tensor:
        """Decode and crop the images of a batch on the GPU."""
        torchvision_io: Any = torchvision.load("io")
        for data, position in zip(encoded, request.positions, strict=True):
            check_encoded(self.files.name(position), data.numpy().tobytes())
        crops: list[Tensor] = []
        try:
            images = torchvision_io.decode_jpeg(
                encoded, mode=torchvision_io.ImageReadMode.RGB, device=self.device
            )
        # The GPU cannot decode PNG and CMYK, which a few files of ImageNet are. The CPU then
        # decodes the batch.
        except RuntimeError:
            for data, position in zip(encoded, request.positions, strict=True):
                crops.append(self._reader.decode(data.numpy().tobytes(), request.epoch, position))
            return send(torch.stack(crops), self.device)
        for image, position in zip(images, request.positions, strict=True):
            generator = self._reader.generator(request.epoch, position)
            part = _part(image, functools.partial(self.crop.box, generator=generator))
            crops.append(self.crop.finish(part, generator))
        return torch.stack(crops)

    def _settings(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "rank": self.rank,
            "batch_size": self.batch_size,
            "samples": len(self.files),
            "world_size": self.world_size,
        }
