"""Batches of images that follow from a seed and can be resumed."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlbench_core.arguments import check_int
from mlbench_core.dataset.imagerecognition.pytorch.images import ImageDataset
from mlbench_core.dataset.pytorch.resumable import ResumablePasses

__all__ = ["ImageBatches"]

# Purpose of a stream of random numbers; part of its seed, so that no two purposes share one.
_ORDER, _AUGMENTATION = 0, 1


class ImageBatches(ResumablePasses):
    """Iterate over a data set of images in batches.

    It replaces a ``DataLoader`` for :class:`ImageDataset` and its partitions. The order of an epoch follows from (seed,
    rank, epoch), the augmentation of a batch from (seed, rank, epoch, batch). torch's global generator is neither read
    nor changed. So a run that stops in the middle of an epoch resumes with exactly the same remaining batches, if it
    saves :meth:`state_dict`.

    Each pass is its own epoch: a second pass continues with the next epoch, unless :meth:`set_epoch` sets another one.

    There are two ways to give each worker its own images. On a partition, each worker keeps the same part for the whole
    run. On the whole data set with ``world_size``, the images are distributed again in each epoch. k workers with
    batches of b images follow one common order, and worker r takes the r-th b of every kb. Together they then see, step
    by step, the batches of a single worker with batches of kb. If kb does not divide the number of images, the workers
    share the rest evenly, and at most k - 1 images are left out of that epoch.

    On a :class:`~mlbench_core.dataset.pytorch.Partition`, the number of batches is that of the smallest part. So
    it is the same on every worker even if parts differ by one sample, and no collective waits indefinitely.

    Args:
        dataset: An :class:`ImageDataset`, or a partition of one.
        batch_size: Images in a batch, at least 1.
        augment: If True, augment; by default as the data set does. True needs a data set with an augmentation.
        shuffle: If True, each epoch has its own order; otherwise the data set's order is used.
        seed: Seed of order and augmentation, at least 0.
        drop_last: If True, leave out a last batch that is not full.
        memory_format: Memory format of the images; ``torch.channels_last`` is faster for convolutions.
        rank: Rank of the worker: workers with the same seed draw different augmentations.
        world_size: Number of workers that share the images, one of which is ``rank``; 1 if the data set is already this
            worker's part.

    Raises:
        TypeError: The data set is of another kind.
        ValueError: An argument is outside the values listed above.

    Example:
        >>> import torch
        >>> images = torch.zeros(10, 3, 32, 32, dtype=torch.uint8)
        >>> dataset = ImageDataset(images, torch.arange(10), list("abcdefghij"), (0.5,) * 3, (0.5,) * 3)
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
        if operator.index(seed) < 0 or operator.index(rank) < 0:
            raise ValueError(f"seed is {seed} and rank is {rank}; both must be at least 0")
        if operator.index(world_size) < 1 or (world_size > 1 and rank >= world_size):
            raise ValueError(f"world_size is {world_size} for rank {rank}; it must be 1, or larger than the rank")
        self.dataset = dataset
        self.images, self._positions = _flatten(dataset)
        if augment and self.images.augmentation is None:
            raise ValueError("augment is True, but the data set has no augmentation: set its `augmentation`")
        self.augment = self.images.augmentation is not None if augment is None else bool(augment)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.memory_format = memory_format
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        # The smallest part decides for all workers, so that none waits for a batch that another one does not have.
        smallest = min(getattr(self.dataset, "smallest_part", len(self.dataset)), len(self.dataset)) // self.world_size
        return smallest // self.batch_size if self.drop_last else -(-smallest // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first = self._begin()
        return self._generate(self._epoch, first)

    def _generate(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch, from the first requested one."""
        order = self._order(epoch)
        for number in range(first, len(self)):
            self._hand_out(number)
            yield self._batch(self._share(order, number), epoch, number)

    def _share(self, order: Tensor, number: int) -> Tensor:
        """Return this worker's share of the batch that all workers see together."""
        together = self.world_size * self.batch_size
        batch = order[number * together : (number + 1) * together]
        size = len(batch) // self.world_size
        return batch[self.rank * size : (self.rank + 1) * size] if self.world_size > 1 else batch

    def _batch(self, chosen: Tensor, epoch: int, number: int) -> tuple[Tensor, Tensor]:
        """Make one batch; it depends only on the arguments and the seed."""
        dataset = self.images
        if self.augment:
            return dataset.batch(chosen, self._generator(_AUGMENTATION, epoch, number), self.memory_format)
        return dataset.plain_batch(chosen, self.memory_format)

    def _order(self, epoch: int) -> Tensor:
        """Return positions in the images, in the order of an epoch."""
        if not self.shuffle:
            return self._positions
        rank = self.rank if self.world_size == 1 else 0  # shared images have one order for all workers
        generator = self._generator(_ORDER, epoch, rank=rank)
        return self._positions[torch.randperm(len(self._positions), generator=generator)]

    def _generator(self, *purpose: int, rank: int | None = None) -> torch.Generator:
        """Return a separate generator for each purpose; related seeds give unrelated streams."""
        # SeedSequence mixes the numbers: seeds 0 and 1 do not give related streams.
        sequence = np.random.SeedSequence([self.seed, self.rank if rank is None else rank, *purpose])
        return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load a state; a state without a number of workers was saved by a run that did not share batches."""
        super().load_state_dict({"world_size": 1, **state})

    def _basis(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "rank": self.rank,
            "batch_size": self.batch_size,
            "samples": len(self.dataset),
            "world_size": self.world_size,
        }


def _flatten(dataset: Any) -> tuple[ImageDataset, Tensor]:
    """Return the images behind a data set or a (nested) partition, and the positions that belong to it."""
    if isinstance(dataset, ImageDataset):
        return dataset, torch.arange(len(dataset))
    indices = getattr(dataset, "indices", None)
    inner = getattr(dataset, "data", getattr(dataset, "dataset", None))
    if indices is None or inner is None:
        raise TypeError(f"dataset is a {type(dataset).__name__}; it must be an ImageDataset or a partition of one")
    images, positions = _flatten(inner)
    return images, positions[torch.as_tensor(indices, dtype=torch.int64)]
