"""Count the samples and tokens of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["count_data", "find_samples"]


def count_data(batch: Any, dimension: int = 0) -> tuple[int, int]:
    """Return the samples and the tokens of a batch.

    Args:
        batch: A tensor, or a sequence or mapping that has one; the first tensor counts. Integers
            of shape (samples, length) are tokens.
        dimension: The dimension of the samples, see :func:`find_samples`.

    Example:
        >>> count_data((torch.zeros(8, 3), torch.zeros(8)))
        (8, 0)
        >>> count_data({"ids": torch.zeros(4, 16, dtype=torch.long)})
        (4, 64)
        >>> count_data(torch.zeros(16, 4, dtype=torch.long), dimension=1)
        (4, 64)
        >>> count_data(([torch.zeros(3, 5, 7), torch.zeros(3, 6, 7)], ["a", "b"]), dimension=-2)
        (2, 0)
    """
    if dimension < 0:
        path = _path(batch)
        if len(path) < -dimension:
            return 0, 0
        return len(path[-dimension - 1]), 0
    # Mostly the first part of a pair is a tensor, and a call in each step is saved.
    first = batch
    if type(batch) in (list, tuple) and batch:
        first = batch[0]
    if not isinstance(first, Tensor):
        path = _path(batch)
        if not path:
            return 0, 0
        first = path[-1]
    dimensions = first.dim()
    if dimensions == 0:
        return 0, 0
    is_text = dimensions == 2 and first.dtype in (torch.int64, torch.int32, torch.int16)
    if dimension >= dimensions:
        dimension = 0
    tokens = 0
    if is_text:
        tokens = first.numel()
    return first.shape[dimension], tokens


def find_samples(batch: Any, batch_size: int) -> int | None:
    """Return the dimension of the samples in a batch, None if it cannot be told.

    Translation models often have batches of shape (length, samples). Models that detect objects
    have lists of images, each of its own size.

    Args:
        batch: A full batch.
        batch_size: Number of samples that the DataLoader puts into it.

    Returns:
        -1 if the batch itself is a list of samples, -2 if its first part is one, and so on.

    Example:
        >>> find_samples(torch.zeros(16, 4), 4)
        1
        >>> find_samples(torch.zeros(4, 4), 4) is None
        True
        >>> find_samples(([torch.zeros(3, 5, 7), torch.zeros(3, 6, 7)], ["a", "b"]), 2)
        -2
    """
    path = _path(batch)
    if not path:
        return None
    first = path[-1]
    # From the inside, because a batch of two samples may be a pair of lists.
    for depth in reversed(range(len(path) - 1)):
        if _is_list_of_samples(path[depth], batch_size):
            return -depth - 1
    if first.dim() < 2 or first.shape[0] == first.shape[1]:
        return None
    # With another size, such as that of a collate function's own, the first dimension is usual.
    return int(first.shape[0] != batch_size and first.shape[1] == batch_size)


def _is_list_of_samples(part: Any, batch_size: int) -> bool:
    """Return True if each entry is a sample, and none has the samples in one of its dimensions."""
    if not isinstance(part, (tuple, list)) or len(part) != batch_size:
        return False
    shapes = [path[-1].shape for path in map(_path, part) if path]
    for dimension in (0, 1):
        if all(shape[dimension : dimension + 1] == (batch_size,) for shape in shapes):
            return False
    return True


def _path(batch: Any) -> list[Any]:
    """Return the first tensor of a batch, after the sequences and mappings around it."""
    if isinstance(batch, Tensor):
        return [batch]
    parts: Iterable[Any] = ()
    # The test for a mapping takes longer.
    if isinstance(batch, (tuple, list)):
        parts = batch
    elif isinstance(batch, Mapping):
        parts = batch.values()
    for part in parts:
        path = _path(part)
        if path:
            return [batch, *path]
    return []
