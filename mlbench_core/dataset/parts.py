"""Assign samples to workers and to the validation set, by position.

Every worker computes the whole assignment from the seed alone, and no global generator is read.
This module imports no framework, so the parts of a data set are the same in all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlbench_core.arguments import check_at_least, check_rank

_log = logging.getLogger(__name__)

__all__ = ["divide_batch", "part_sizes", "sample_order", "stratified_split", "uniform_part"]


def divide_batch(total: int, most: int, world_size: int) -> tuple[int, int]:
    """Divide the samples of an update among workers that may hold fewer at a time than their share.

    A worker accumulates the gradients of as few batches as possible. Their size is the one with
    which ``world_size * size * frequency`` is nearest to ``total``; it is equal if ``world_size *
    frequency`` divides it.

    Args:
        total: Samples, or tokens, of all workers in an update, at least 1.
        most: Largest batch of a worker, at least 1.
        world_size: Number of workers, at least 1.

    Returns:
        ``(size, frequency)``: the size of a worker's batch, at least 1, and its batches before an
        update.

    Example:
        >>> [divide_batch(2048, 128, world_size) for world_size in (1, 3, 12, 16, 32)]
        [(128, 16), (114, 6), (85, 2), (128, 1), (64, 1)]
    """
    for name, value in (("total", total), ("most", most), ("world_size", world_size)):
        check_at_least(name, value, 1)
    frequency = -(-total // (most * world_size))
    shares = world_size * frequency
    size = max(1, (2 * total + shares) // (2 * shares))
    _log.info(
        "an update has %d: %d workers x %d batches x %d; the definition has %d",
        *(shares * size, world_size, frequency, size, total),
    )
    return size, frequency


def part_sizes(count: int, world_size: int) -> list[int]:
    """Return the number of samples of each worker.

    The sizes differ by at most 1, and the last part is the smallest.

    Example:
        >>> part_sizes(5, 2)
        [3, 2]
    """
    size, n_larger = divmod(count, world_size)
    return [size + 1] * n_larger + [size] * (world_size - n_larger)


def sample_order(count: int, shuffle: bool, seed: int) -> np.ndarray:
    """Return the positions of all samples in the order in which workers receive them."""
    if shuffle:
        return np.random.default_rng(seed).permutation(count)
    return np.arange(count)


def uniform_part(
    count: int, rank: int, world_size: int, *, shuffle: bool = True, seed: int = 0
) -> np.ndarray:
    """Return the positions of the samples of one worker, each equally likely on every worker.

    The parts are disjoint and cover every sample.

    Args:
        count: Number of samples.
        rank: Rank of the worker, from 0 to ``world_size - 1``.
        world_size: Number of workers, at least 1.
        shuffle: If True, the samples are drawn at random and in random order; otherwise the parts
            are contiguous.
        seed: Seed of the draw, at least 0; the same on all workers.

    Returns:
        int64 positions.

    Raises:
        ValueError: ``rank`` is not one of the workers.

    Example:
        >>> [uniform_part(5, rank, 2, shuffle=False).tolist() for rank in range(2)]
        [[0, 1, 2], [3, 4]]
    """
    check_rank(rank, world_size)
    sizes = part_sizes(count, world_size)
    start = sum(sizes[:rank])
    return sample_order(count, shuffle, seed)[start : start + sizes[rank]]


def stratified_split(
    labels: Sequence[Any] | np.ndarray, held_out: float = 0.2, *, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Hold out the same fraction of each class for validation, for data sets without a test part.

    The split depends on the seed alone, so it is the same in every worker and every run.

    Args:
        labels: Class of each sample.
        held_out: Fraction of each class to hold out, above 0 and below 1; rounded to whole samples.
        seed: Seed of the draw, at least 0.

    Returns:
        Positions for training and for validation, both in increasing order.

    Raises:
        ValueError: ``held_out`` is not between 0 and 1.

    Example:
        >>> training, validation = stratified_split([0] * 5 + [1] * 10)
        >>> len(training), len(validation), int((validation < 5).sum())
        (12, 3, 1)
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be a fraction above 0 and below 1, not {held_out}")
    generator = np.random.default_rng(seed)
    classes = np.asarray(labels)
    is_validation = np.zeros(len(classes), dtype=bool)
    for label in np.unique(classes):
        members = generator.permutation(np.flatnonzero(classes == label))
        is_validation[members[: round(len(members) * held_out)]] = True
    return np.flatnonzero(~is_validation), np.flatnonzero(is_validation)
