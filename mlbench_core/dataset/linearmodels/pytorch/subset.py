"""Select rows of a data set, and split a data set that has no test part."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mlbench_core.dataset.libsvm_names import KNOWN
from mlbench_core.dataset.linearmodels.pytorch.dataloader import LMDBDataset
from mlbench_core.dataset.parts import stratified_split
from mlbench_core.errors import DatasetNotFoundError

__all__ = ["RowSubset", "train_and_validation"]


class RowSubset(Dataset[tuple[Tensor, Tensor]]):
    """Some rows of an :class:`LMDBDataset`, which can be fetched as whole batches.

    Args:
        dataset: The data set, or some rows of one.
        rows: Positions of the rows in it, from 0 and in increasing order.

    Raises:
        ValueError: ``rows`` is empty, not in increasing order, or outside the data set.
    """

    def __init__(
        self, dataset: LMDBDataset | RowSubset, rows: Sequence[int] | NDArray[np.int64]
    ) -> None:
        self.dataset = dataset
        self.rows = np.asarray(rows, dtype=np.int64)
        if (
            not self.rows.size
            or self.rows[0] < 0
            or self.rows[-1] >= len(dataset)
            or (np.diff(self.rows) <= 0).any()
        ):
            raise ValueError(
                f"rows must be some of 0 to {len(dataset) - 1} in increasing order, not {rows!r}"
            )

    @property
    def n_features(self) -> int:
        """Return the number of columns."""
        return self.dataset.n_features

    @property
    def targets(self) -> Tensor:
        """Return the labels of the rows as they are stored, shape (rows,)."""
        return self.dataset.targets[torch.from_numpy(self.rows)]

    @property
    def row_blocks(self) -> NDArray[np.int64]:
        """Return the first row of each stored block, and the number of rows at the end.

        Blocks without a row in this subset are left out.
        """
        return np.unique(np.searchsorted(self.rows, self.dataset.row_blocks))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """Return one row in the format of the data set."""
        return self.dataset[int(self.rows[index])]

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return several rows as two tensors; see :meth:`LMDBDataset.batch`.

        Args:
            rows: Their positions in this subset.

        Returns:
            Features, shape (rows, n_features), and labels, shape (rows, 1).

        Raises:
            IndexError: The row does not exist.
        """
        return self.dataset.batch(self.rows[np.asarray(rows, dtype=np.int64)])

    def fetch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return rows as :meth:`batch` does, but do not check the positions.

        Args:
            positions: Rows of this subset, each from 0 to ``len(self) - 1``.

        Returns:
            Features and labels.
        """
        return self.dataset.fetch(self.rows[positions])


def train_and_validation(
    name: str, root: str | os.PathLike[str], *, layout: str | None = None
) -> tuple[LMDBDataset | RowSubset, LMDBDataset | RowSubset]:
    """Return the rows for training and the rows for validation.

    The rows for validation are the data set's test part. If the data set has none, they are a fifth
    of each class of the training part, the same in every run
    (:func:`~mlbench_core.dataset.parts.stratified_split`).

    Args:
        name: Name of the data set: one of :mod:`mlbench_core.dataset.linearmodels.pytorch.libsvm`,
            or the name of a user's own data.
        root: Folder with its stores.
        layout: ``"dense"`` or ``"sparse_csr"``, as for :class:`LMDBDataset`; None reads rows as
            they are stored.

    Returns:
        Two data sets without a common row.

    Raises:
        DatasetNotFoundError: The training part or the published test part is missing.
        DatasetError: A file is damaged.
    """
    train = LMDBDataset(name, "train", root)
    if not layout:
        layout = "sparse_csr" if train.stores[0].header.layout == "csr" else "dense"
    # Read both parts in one layout, because the test part may be stored in the other one.
    train.layout = layout
    try:
        return train, LMDBDataset(name, "test", root, layout=layout)
    except DatasetNotFoundError:
        # A test part that is published but not stored here must not be replaced by rows of the
        # training part.
        if name in KNOWN and "test" in KNOWN[name].files:
            raise
    training, validation = stratified_split(train.targets.numpy())
    return RowSubset(train, training), RowSubset(train, validation)
