"""Some rows of a data set, and the split of a data set that has no test part."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mlbench_core.dataset.linearmodels.pytorch.dataloader import LMDBDataset
from mlbench_core.dataset.util.pytorch.libsvm_names import KNOWN
from mlbench_core.dataset.util.pytorch.partition import stratified_split
from mlbench_core.errors import DatasetNotFoundError

__all__ = ["RowSubset", "train_and_validation"]


class RowSubset(Dataset[tuple[Tensor, Tensor]]):
    """Some rows of an :class:`LMDBDataset`, fetched as whole batches too.

    Args:
        dataset: The data set.
        rows: Positions of the rows in it, from 0 and in increasing order.

    Raises:
        ValueError: There are no rows, they are not in order, or the data set does not have them.
    """

    def __init__(self, dataset: LMDBDataset, rows: Sequence[int] | NDArray[np.int64]) -> None:
        self.dataset = dataset
        self.rows = np.asarray(rows, dtype=np.int64)
        if not self.rows.size or self.rows[0] < 0 or self.rows[-1] >= len(dataset) or (np.diff(self.rows) <= 0).any():
            raise ValueError(f"rows must be some of 0 to {len(dataset) - 1} in increasing order, not {rows!r}")

    @property
    def n_features(self) -> int:
        """Number of columns."""
        return self.dataset.n_features

    @property
    def targets(self) -> Tensor:
        """Labels of the rows as they are stored, shape (rows,)."""
        return self.dataset.targets[torch.from_numpy(self.rows)]

    @property
    def row_blocks(self) -> NDArray[np.int64]:
        """First row of each stored block that has rows here, and the number of rows at the end."""
        return np.unique(np.searchsorted(self.rows, self.dataset.row_blocks))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """One row, as the data set gives it."""
        return self.dataset[int(self.rows[index])]

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Several rows as two tensors; see :meth:`LMDBDataset.batch`.

        Args:
            rows: Their positions in this subset.

        Returns:
            Features, shape (rows, n_features), and labels, shape (rows, 1).

        Raises:
            IndexError: There is no such row.
        """
        return self.dataset.batch(self.rows[np.asarray(rows, dtype=np.int64)])

    def fetch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """As :meth:`batch`, for loaders that make the positions; see :meth:`LMDBDataset.fetch`.

        Args:
            positions: Rows of this subset, each from 0 to ``len(self) - 1``.

        Returns:
            Features and labels.
        """
        return self.dataset.fetch(self.rows[positions])


def train_and_validation(
    name: str, root: str | os.PathLike[str], *, layout: str | None = None
) -> tuple[LMDBDataset | RowSubset, LMDBDataset | RowSubset]:
    """The rows to train on and those to validate on.

    Validation rows are the data set's test part. Where none is published, or a data set of the user's own is stored
    without one, they are a fifth of each class, the same in every run
    (:func:`~mlbench_core.dataset.util.pytorch.stratified_split`).

    Args:
        name: Name of the data set, known to :mod:`mlbench_core.dataset.util.pytorch.libsvm` or not.
        root: Folder with its stores.
        layout: ``"dense"`` or ``"sparse_csr"``, as for :class:`LMDBDataset`; None reads rows as they are stored.

    Returns:
        Two data sets without a common row.

    Raises:
        DatasetNotFoundError: There is no training part, or not the test part that is published.
        DatasetError: A file is damaged.
    """
    train = LMDBDataset(name, "train", root)
    train.layout = layout = layout or ("sparse_csr" if train.stores[0].header.layout == "csr" else "dense")
    try:
        return train, LMDBDataset(name, "test", root, layout=layout)
    except DatasetNotFoundError:
        if name in KNOWN and "test" in KNOWN[name].files:
            raise
    training, validation = stratified_split(train.targets.numpy())
    return RowSubset(train, training), RowSubset(train, validation)
