"""Gather rows from many blocks with one call.

A batch of shuffled rows comes from tens of blocks, and one call per block costs more than the copying itself. All
blocks of a store lie in one mapping of its file, so a row is identified by its distance from the first byte. The
mapping is viewed as a matrix of bytes whose row i begins at the i-th byte, so rows overlap. One ``index_select`` on
this matrix copies the requested rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlbench_core.errors import DatasetError

__all__ = ["DenseRows"]


class DenseRows:
    """The rows of dense blocks.

    Args:
        load: Returns a block's bytes as a view of a mapping that holds all blocks and outlives this object.
        n_rows: Number of rows.
        n_features: Numbers of a row.
        rows_per_block: Rows of each block but the last.
        dtype: ``"float32"`` or ``"float64"``.
        cache: If True, copy each block to memory at its first use.
    """

    def __init__(
        self,
        load: Callable[[int], memoryview],
        n_rows: int,
        n_features: int,
        rows_per_block: int,
        dtype: str,
        cache: bool,
    ) -> None:
        self._load = load
        self._n_rows, self._n_features, self._rows_per_block = n_rows, n_features, rows_per_block
        self._dtype = np.dtype(dtype)
        # Untouched memory is only reserved: the array takes up physical memory as blocks are read.
        self._cached = np.empty((n_rows, n_features), dtype) if cache else None
        self._row_bytes = n_features * self._dtype.itemsize
        self._firsts = np.zeros(-(-n_rows // rows_per_block), np.int64)  # address of each block; 0: not known yet
        self._low = self._high = 0  # the range of addresses that the matrix covers
        self._matrix = torch.empty(0)

    def take(self, rows: NDArray[np.int64], out: Tensor) -> None:
        """Copy rows.

        Args:
            rows: Their positions, each from 0 to n_rows - 1.
            out: Destination, shape (len(rows), n_features).

        Raises:
            DatasetError: A block has the wrong length.
        """
        if not len(rows):
            return
        blocks = rows // self._rows_per_block
        firsts = self._firsts[blocks]
        if not firsts.all():
            # Address 0 marks a block that was not located yet.
            self._locate(np.unique(blocks[firsts == 0]))
            firsts = self._firsts[blocks]
        begins = firsts - self._low + (rows - blocks * self._rows_per_block) * self._row_bytes
        torch.index_select(self._matrix, 0, torch.from_numpy(begins), out=out.view(torch.uint8))

    def _locate(self, blocks: NDArray[np.int64]) -> None:
        """Find the addresses of blocks, and extend the matrix to them."""
        low, high = self._low or np.iinfo(np.int64).max, self._high
        for number in blocks.tolist():
            array = np.frombuffer(self._load(number), self._dtype)
            start = number * self._rows_per_block
            expected = min(self._rows_per_block, self._n_rows - start) * self._n_features
            if array.size != expected:
                raise DatasetError(f"block {number} has {array.size} numbers and should have {expected}: damaged data")
            if self._cached is not None:
                rows = self._cached[start : start + self._rows_per_block]
                rows[:] = array.reshape(rows.shape)
                array = rows.reshape(-1)
            first = self._firsts[number] = array.ctypes.data
            low, high = min(low, first), max(high, first + array.nbytes)
        # A new range of addresses needs a new view; located addresses stay valid.
        if (low, high) != (self._low, self._high):
            self._low, self._high = low, high
            self._matrix = _overlapping_rows(low, high, self._row_bytes)


def _overlapping_rows(low: int, high: int, row_bytes: int) -> Tensor:
    """Return the bytes from one address to another as a matrix whose row i begins at the i-th byte."""
    memory = (ctypes.c_char * (high - low)).from_address(low)
    # The rows overlap in memory, so the view takes no space; it must never be written to.
    content = torch.from_numpy(np.frombuffer(memoryview(memory), np.uint8))
    return content.as_strided((high - low - row_bytes + 1, row_bytes), (1, 1))
