"""Batches of rows that depend only on a seed, and that a run can resume.

The rows are shuffled by blocks and within them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from mlbench_core.arguments import check_int, check_rank
from mlbench_core.dataset.linearmodels.pytorch.dataloader import LMDBDataset
from mlbench_core.dataset.linearmodels.pytorch.subset import RowSubset
from mlbench_core.dataset.parts import part_sizes
from mlbench_core.dataset.pytorch.resumable import ResumablePasses

__all__ = ["BlockBatchSampler", "LinearBatches"]

# Purpose of a stream of random numbers; part of its seed, so that no two purposes share one.
_CUT, _ORDER = 0, 1
# Below 32 MiB, up to which glibc adapts its threshold; see LinearBatches.__iter__.
_LARGE_BYTES = 32_000_000


class _BlockOrder(ResumablePasses):
    """The rows of one worker in batches, in the order that :class:`BlockBatchSampler` describes."""

    def __init__(
        self,
        dataset: LMDBDataset | RowSubset,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        window_blocks: int = 16,
        repartition: bool = False,
        min_pieces: int = 512,
    ) -> None:
        check_int("batch_size", batch_size)
        check_int("window_blocks", window_blocks)
        check_int("seed", seed, 0)
        check_int("rank", rank, 0)
        # With world_size 1 the rows are already this worker's part, and the rank may be any number.
        if world_size != 1:
            check_rank(rank, world_size)
        if len(dataset) < world_size:
            raise ValueError(
                f"world_size must be at most {len(dataset)}, the rows of the data set, not "
                f"{world_size}: each worker needs at least one row"
            )
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.rank, self.world_size = rank, world_size
        self.drop_last, self.window_blocks, self.repartition = drop_last, window_blocks, repartition
        self._bounds, self._pieces_per_block = _cut_blocks(dataset.row_blocks, min_pieces)
        self._rows = len(dataset)

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same on every worker."""
        rows = self._rows // self.world_size
        if self.drop_last:
            return rows // self.batch_size
        return -(-rows // self.batch_size)

    def row_batches(self) -> Iterator[NDArray[np.int64]]:
        """Begin a pass.

        Yields:
            The positions of each batch's rows.
        """
        # This is a generator, so a pass begins at the first `next`: a DataLoader creates iterators
        # that it never uses.
        first = self._begin()
        order, count = self.rows(self._epoch), len(self)
        for number in range(first, count):
            self._mark_yielded(number)
            start, stop = number * self.batch_size, (number + 1) * self.batch_size
            # Workers' parts may differ by one row. It belongs to the last batch, so that every
            # worker has the same number of batches.
            if number == count - 1 and not self.drop_last:
                stop = len(order)
            yield np.sort(order[start:stop])

    def rows(self, epoch: int) -> NDArray[np.int64]:
        """Return this worker's rows in the order of an epoch.

        The rows of a batch are sorted later.

        Args:
            epoch: From 0.

        Returns:
            Positions in the data set.
        """
        pieces = self._part(epoch)
        if not self.shuffle:
            return _positions(pieces)
        # The rank is part of the seed here, so that each worker has its own order.
        generator = self._generator(_ORDER, self.rank, epoch)
        pieces = pieces[generator.permutation(len(pieces))]
        window = self.window_blocks * self._pieces_per_block
        windows = []
        for start in range(0, len(pieces), window):
            rows = _positions(pieces[start : start + window])
            windows.append(generator.permutation(rows))
        return np.concatenate(windows)

    def _part(self, epoch: int) -> NDArray[np.int64]:
        """Return the first rows and the ends of this worker's pieces, shape (pieces, 2)."""
        pieces = np.stack([self._bounds[:-1], self._bounds[1:]], axis=1)
        if self.shuffle:
            # The rank is not part of the seed here: all workers must cut the same order into
            # disjoint parts.
            generator = self._generator(_CUT, epoch if self.repartition else 0)
            pieces = pieces[generator.permutation(len(pieces))]
        sizes = part_sizes(self._rows, self.world_size)
        part = self.rank if self.world_size > 1 else 0
        first = sum(sizes[:part])
        last = first + sizes[part]
        ends = np.cumsum(pieces[:, 1] - pieces[:, 0])
        begins = ends - (pieces[:, 1] - pieces[:, 0])
        # A worker's share may begin or end inside a piece, which is then cut there.
        starts = pieces[:, 0] + np.maximum(first - begins, 0)
        stops = pieces[:, 1] - np.maximum(ends - last, 0)
        cut = np.stack([starts, stops], axis=1)
        return cut[(begins < last) & (ends > first)]

    def _generator(self, *purpose: int) -> np.random.Generator:
        """Return a separate generator for each purpose; related seeds give unrelated streams."""
        return np.random.default_rng(np.random.SeedSequence([self.seed, *purpose]))

    def _settings(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "rank": self.rank,
            "world_size": self.world_size,
            "batch_size": self.batch_size,
            "window_blocks": self.window_blocks,
            "rows": self._rows,
            "pieces": len(self._bounds) - 1,
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
            "repartition": int(self.repartition),
        }


class BlockBatchSampler(_BlockOrder, Sampler[list[int]]):
    r"""A sampler of row batches for one worker, shuffled by blocks and within windows of blocks.

    The sampler reads rows together that are stored together, which is efficient for disk and page
    cache. The order is still random enough for training:

    1. The blocks of the data set are put in a random order, the same on all workers. Their rows are
       cut into ``world_size`` parts whose sizes differ by at most 1. The parts are disjoint and
       cover every row.
    2. In each epoch a worker puts its blocks in its own random order.
    3. The rows of ``window_blocks`` consecutive blocks are mixed: every order of a window is
       equally likely. Batches are cut from the mixed rows. The order within a batch does not affect
       a sum of gradients, so the rows of a batch are sorted and read in the order of the file.

    If a small file has fewer than ``min_pieces`` blocks, steps 1 and 2 shuffle pieces of blocks
    instead. Workers then get similar parts even if the file is sorted.

    Thus a batch is drawn without replacement from the rows of W = ``window_blocks`` random blocks,
    and not from all rows. Let :math:`S` be the variance of a quantity over single rows, and
    :math:`S_b` the variance of its block means. The mean of a batch of B rows is unbiased and has a
    variance of at most :math:`S / B + S_b / W`. A plain shuffle has :math:`S / B`. If the rows of a
    file are in random order, its blocks are alike (:math:`S_b \approx S / \text{rows of a block}`),
    and the second term is negligible. The worst case is a file sorted by label (:math:`S_b \approx
    S`): with W = B, the variance at most doubles. A window of all blocks is a plain shuffle of the
    worker's part.

    Every worker has the same number of batches. Without ``drop_last``, every row occurs once per
    epoch: if parts differ by a row, the last batch of a larger part may have one row more than
    ``batch_size``.

    Each pass is its own epoch: a second pass continues with the next epoch, unless
    :meth:`set_epoch` sets another one. Pass it to a ``DataLoader`` as ``batch_sampler``. The worker
    processes of a ``DataLoader`` read ahead, so a saved position within an epoch is exact only with
    :class:`LinearBatches`.

    Args:
        dataset: The rows.
        batch_size: Rows in a batch of one worker, at least 1.
        shuffle: If True, shuffle; otherwise a worker's part is contiguous, in the order of the
            files.
        seed: Seed of every draw, at least 0; the same on all workers.
        rank: Rank of this worker, which is part of the seed of its own order.
        world_size: Number of workers that share the rows, one of which is ``rank``; 1 if the data
            set is already this worker's part.
        drop_last: If True, leave out a last batch that is not full.
        window_blocks: Blocks whose rows are mixed, at least 1.
        repartition: If True, workers get other parts in each epoch. Otherwise a worker always reads
            the same part, which may then be the only one on its disk or in its cache.
        min_pieces: Minimum number of pieces to shuffle, if the data set has enough rows.

    Raises:
        ValueError: An argument is outside the values listed above, or the data set has fewer rows
            than workers.
    """

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.row_batches():
            yield rows.tolist()


class LinearBatches(_BlockOrder):
    """Iterate over whole batches of rows, in place of a ``DataLoader``.

    One call fetches each batch, in this process. :class:`BlockBatchSampler` describes the batches
    and epochs. A run that stops in the middle of an epoch and saves :meth:`state_dict` resumes with
    exactly the same remaining batches.

    Other arguments: see :class:`BlockBatchSampler`.

    Example:
        >>> import pathlib, tempfile
        >>> from mlbench_core.dataset.linearmodels.pytorch.lmdb_writer import StoreWriter
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> with StoreWriter(folder / "tiny_train.lmdb", n_features=3) as writer:
        ...     writer.append(np.ones((10, 3)), np.arange(10) % 2)
        ...     _ = writer.finish()
        >>> batches = LinearBatches(LMDBDataset("tiny", "train", folder), batch_size=4)
        >>> [tuple(x.shape) for x, y in batches]
        [(4, 3), (4, 3), (2, 3)]
    """

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Outside of initialize_backends, glibc keeps freed memory up to twice the size of the
        # largest mapped block that was ever freed, and returns the rest to the system. It would
        # return a batch of a megabyte each time, and creating the pages again costs as much as
        # filling them. After this large block is freed, glibc keeps the memory of one batch for the
        # next.
        torch.empty(_LARGE_BYTES, dtype=torch.uint8)
        return map(self.dataset.fetch, self.row_batches())


def _cut_blocks(bounds: NDArray[np.int64], min_pieces: int) -> tuple[NDArray[np.int64], int]:
    """Cut blocks into enough pieces, and return the pieces' bounds and their number per block."""
    count = -(-min_pieces // (len(bounds) - 1))
    if count <= 1:
        return bounds, 1
    parts = np.arange(count)
    # Integer arithmetic spreads the rows of a block evenly over its pieces.
    firsts = bounds[:-1, None] + np.diff(bounds)[:, None] * parts // count
    return np.unique(np.append(firsts, bounds[-1])), count


def _positions(pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of all rows of some pieces, piece by piece."""
    lengths = pieces[:, 1] - pieces[:, 0]
    return np.repeat(pieces[:, 1] - np.cumsum(lengths), lengths) + np.arange(lengths.sum())
