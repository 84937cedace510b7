"""Iterate over batches of images that depend only on a seed and can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlbench_core.arguments import check_int, check_rank
from mlbench_core.dataset.imagerecognition.pytorch.images import ImageDataset
from mlbench_core.dataset.pytorch.resumable import ResumablePasses

__all__ = ["ImageBatches"]

# Purposes of random numbers. The seed of a stream contains its purpose, so no two share a stream.
_ORDER, _AUGMENTATION = 0, 1


class ImageBatches(ResumablePasses):
    """Iterate over a data set of images in batches.

    It replaces a ``DataLoader`` for :class:`ImageDataset` and its partitions. The order of an epoch
    depends only on (seed, rank, epoch), or on (seed, epoch) if ``world_size`` divides the images.
    The augmentation of a batch depends only on (seed, rank, epoch, batch). torch's global generator
    is neither read nor changed. A run that stops in the middle of an epoch and saves
    :meth:`state_dict` resumes with exactly the same remaining batches.

    Each pass over the batches is one epoch. The next pass is the next epoch, unless
    :meth:`set_epoch` selects another one.

    There are two ways to divide the images among the workers. If ``dataset`` is a partition, each
    worker keeps the same images for the whole run. If it is the whole data set, ``world_size``
    divides the images again in each epoch. All workers then use the same order. In each step, k
    workers with batches of b images take the next kb images of this order, and worker r takes the
    r-th group of b images. Together, their k batches are the batch of a single worker with batches
    of kb images. If kb does not divide the number of images, the workers divide the remaining
    images evenly, and at most k - 1 images are left out of that epoch.

    The number of batches of a :class:`~mlbench_core.dataset.pytorch.Partition` follows from the
    size of its smallest part. So it is the same on every worker, even if parts differ by one
    sample, and no collective waits indefinitely.

    Args:
        dataset: An :class:`ImageDataset`, or a partition of one.
        batch_size: Images in a batch, at least 1.
        augment: If True, augment the images; the data set must have an augmentation. If None,
            augment them if it has one.
        shuffle: If True, each epoch has its own order; otherwise the data set's order is used.
        seed: Seed of order and augmentation, at least 0.
        drop_last: If True, leave out a last batch that is not full.
        memory_format: Memory format of the images; ``torch.channels_last`` is faster for
            convolutions.
        rank: Rank of the worker. Different ranks draw different augmentations from the same seed.
        world_size: Number of workers that share the data set; 1 if the data set is already this
            worker's part.

    Raises:
        TypeError: ``dataset`` is neither an :class:`ImageDataset` nor a partition of one.
        ValueError: An argument is outside the values listed above.

    Example:
        >>> import torch
        >>> images = torch.zeros(10, 3, 32, 32, dtype=torch.uint8)
        >>> mean, std = (0.5,) * 3, (0.5,) * 3
        >>> dataset = ImageDataset(images, torch.arange(10), list("abcdefghij"), mean, std)
        >>> batches = ImageBatches(dataset, batch_size=4)
        >>> [tuple(x.shape) for x, y in batches]
        [(4, 3, 32, 32), (4, 3, 32, 32), (2, 3, 32, 32)]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        augment: bool | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        rank: int = 0,
        *,
        world_size: int = 1,
    ) -> None:
        check_int("batch_size", batch_size)
        check_int("seed", seed, 0)
        check_int("rank", rank, 0)
        # With world_size 1 the data set is already this worker's part, and the rank may be any
        # number.
        if world_size != 1:
            check_rank(rank, world_size)
        self.dataset = dataset
        self.images, self._positions = _flatten(dataset)
        if augment and self.images.augmentation is None:
            raise ValueError(
                "augment must be False for a data set without augmentation, not True: set "
                "`augmentation`"
            )
        if augment is None:
            augment = self.images.augmentation is not None
        self.augment = bool(augment)
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.memory_format = memory_format

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        # The smallest part determines the number for all workers: otherwise some would wait in a
        # collective.
        images = min(getattr(self.dataset, "smallest_part", len(self.dataset)), len(self.dataset))
        images //= self.world_size
        if self.drop_last:
            return images // self.batch_size
        return -(-images // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first = self._begin()
        return self._generate(self._epoch, first)

    def _generate(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch, starting with batch number ``first``."""
        order, together = self._positions, self.world_size * self.batch_size
        if self.shuffle:
            # Shared images have one order for all workers; a worker with its own part has its own
            # order.
            rank = self.rank if self.world_size == 1 else 0
            permutation = torch.randperm(len(order), generator=self._generator(rank, _ORDER, epoch))
            order = order[permutation]
        for number in range(first, len(self)):
            self._mark_yielded(number)
            chosen = order[number * together : (number + 1) * together]
            if self.world_size > 1:
                # The workers divide each group of kb images. If the last group is smaller,
                # they divide it evenly.
                share = len(chosen) // self.world_size
                chosen = chosen[self.rank * share : (self.rank + 1) * share]
            generator = None
            if self.augment:
                generator = self._generator(self.rank, _AUGMENTATION, epoch, number)
            yield self.images.batch(chosen, generator, self.memory_format, augment=self.augment)

    def _generator(self, rank: int, *purpose: int) -> torch.Generator:
        """Return a separate generator for each rank and purpose."""
        # SeedSequence mixes the numbers, so that seeds 0 and 1 give unrelated streams.
        sequence = np.random.SeedSequence([self.seed, rank, *purpose])
        seed = sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)
        return torch.Generator().manual_seed(int(seed))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at the position that ``state`` contains."""
        # A state without ``world_size`` was saved with ``world_size=1``.
        super().load_state_dict({"world_size": 1, **state})

    def _settings(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "rank": self.rank,
            "batch_size": self.batch_size,
            "samples": len(self.dataset),
            "world_size": self.world_size,
        }


def _flatten(dataset: Any) -> tuple[ImageDataset, Tensor]:
    """Return the image data set of a (nested) partition, and the partition's positions in it."""
    if isinstance(dataset, ImageDataset):
        return dataset, torch.arange(len(dataset))
    indices = getattr(dataset, "indices", None)
    # Our Partition calls the whole data set `data`; torch's Subset calls it `dataset`.
    whole = getattr(dataset, "data", getattr(dataset, "dataset", None))
    if indices is None or whole is None:
        raise TypeError(
            f"dataset must be an ImageDataset or a partition of one, not a {type(dataset).__name__}"
        )
    images, positions = _flatten(whole)
    return images, positions[torch.as_tensor(indices, dtype=torch.int64)]
