"""Rows of a linear model's data as a PyTorch data set."""

from __future__ import annotations

import operator
import os
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mlbench_core.dataset.linearmodels.pytorch.lmdb_store import LinearStore, find_stores, join_csr
from mlbench_core.errors import DatasetError

__all__ = ["LMDBDataset", "Rows", "collate_rows"]


class Rows(Sequence[tuple[Tensor, Tensor]]):
    """Several rows that were fetched at once: a sequence of (features, label), and two tensors.

    Attributes:
        features: Features of all rows, shape (rows, n_features).
        labels: Labels of all rows, shape (rows, 1).
    """

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features = features
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> Any:
        return self.features[index], self.labels[index]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.features.layout == torch.strided:
            return zip(self.features.unbind(), self.labels.unbind(), strict=True)
        return map(self.__getitem__, range(len(self)))


def collate_rows(rows: Any) -> tuple[Tensor, Tensor]:
    """Make a batch from the result of :meth:`LMDBDataset.__getitems__` without another copy.

    Pass it to a ``DataLoader`` as ``collate_fn``. torch's default function makes the same batch
    from dense rows, but it is slower and does not support sparse rows.

    Args:
        rows: The fetched rows.

    Returns:
        Features, shape (rows, n_features), and labels, shape (rows, 1).
    """
    if isinstance(rows, Rows):
        return rows.features, rows.labels
    features, labels = zip(*rows, strict=True)
    return torch.stack(features), torch.stack(labels)


class LMDBDataset(Dataset[tuple[Tensor, Tensor]]):
    """Labeled rows in LMDB files.

    :mod:`mlbench_core.dataset.linearmodels.pytorch.libsvm` creates the files. A sample is a row of
    ``n_features`` numbers and its label, of shape (1,), so a batch of labels has the shape of a
    linear model's output. Each process opens the files at its first use, read-only and without
    locks. Therefore objects can be sent to the worker processes of a ``DataLoader``, forked or
    spawned, and data may be on a read-only file system.

    A ``DataLoader`` fetches a whole batch with one call through ``__getitems__``. Use it with
    :func:`collate_rows` and :class:`~mlbench_core.dataset.linearmodels.pytorch.BlockBatchSampler`
    for best speed. :class:`~mlbench_core.dataset.linearmodels.pytorch.LinearBatches` is faster
    still.

    Args:
        name: Name of the data set, for example ``"epsilon"``.
        data_type: ``"train"`` or ``"test"``.
        root: Folder with ``NAME_TYPE.lmdb``, or with several ``NAME_TYPE-....lmdb``, whose rows
            follow one another in the order of the files' names; or the path of a single store.
        target_transform: Function that is applied to each label, a tensor of shape (1,).
        layout: ``"dense"``, or ``"sparse_csr"`` for batches in ``torch.sparse_csr`` layout. Data of
            either storage layout can be read as either; dense batches of many features are large.
        cache: If True, keep data in memory after the first read, separately in each process.

    Raises:
        ValueError: ``data_type`` or ``layout`` is not one of the above.
        DatasetNotFoundError: The data does not exist in ``root``.
        DatasetError: A file is damaged or has another format, or the files do not belong together.
            Files of version 3.0 are refused, because they contain pickles, which can run any code.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> from mlbench_core.dataset.linearmodels.pytorch.lmdb_writer import StoreWriter
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> with StoreWriter(folder / "tiny_train.lmdb", n_features=2) as writer:
        ...     writer.append(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([0.0, 1.0]))
        ...     _ = writer.finish()
        >>> dataset = LMDBDataset("tiny", "train", folder)
        >>> dataset[-1]
        (tensor([3., 4.]), tensor([1.]))
    """

    def __init__(
        self,
        name: str,
        data_type: str,
        root: str | os.PathLike[str],
        target_transform: Callable[[Any], Any] | None = None,
        *,
        layout: str = "dense",
        cache: bool = False,
    ) -> None:
        if data_type not in ("train", "test"):
            raise ValueError(f"data_type must be 'train' or 'test', not {data_type!r}")
        if layout not in ("dense", "sparse_csr"):
            raise ValueError(f"layout must be 'dense' or 'sparse_csr', not {layout!r}")
        self.name, self.data_type, self.root = name, data_type, Path(root)
        self.target_transform = target_transform
        self.layout = layout
        paths = find_stores(self.root, name, data_type)
        self.stores = [LinearStore(path, cache=cache) for path in paths]
        # Files of different conversions may differ in columns or labels. A run would silently train
        # on wrong data.
        _check_together(self.stores)
        self._ends = list(accumulate(map(len, self.stores)))
        self._labels = torch.from_numpy(np.concatenate([store.labels for store in self.stores]))

    @property
    def n_features(self) -> int:
        """Return the number of columns."""
        return self.stores[0].header.n_features

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of features and labels: ``torch.float32`` or ``torch.float64``."""
        return self._labels.dtype

    @property
    def targets(self) -> Tensor:
        """Return the labels of all rows as they are stored, shape (rows,).

        ``target_transform`` has not been applied to them.
        """
        return self._labels

    @property
    def row_blocks(self) -> NDArray[np.int64]:
        """Return the first row of each stored block, and the number of rows at the end."""
        firsts = []
        for store, end in zip(self.stores, self._ends, strict=True):
            firsts.append(np.arange(0, len(store), store.header.rows_per_block) + end - len(store))
        return np.concatenate([*firsts, [len(self)]]).astype(np.int64)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """Return one row.

        Args:
            index: Its position; negative ones count from the end.

        Returns:
            Features, shape (n_features,), and the label: without ``target_transform`` of shape
            (1,).

        Raises:
            IndexError: The row does not exist.
        """
        features, labels = self.batch([operator.index(index)])
        # torch's CSR layout has no vectors, so a sparse row stays a matrix of one row.
        if self.layout == "dense":
            features = features[0]
        return features, labels[0]

    def __getitems__(self, indices: Sequence[int]) -> Rows:
        """Return several rows at once, as a ``DataLoader`` requests them.

        Args:
            indices: Their positions.

        Returns:
            The rows, a sequence of (features, label) that :func:`collate_rows` turns into a batch.

        Raises:
            IndexError: The row does not exist.
        """
        return Rows(*self.batch(indices))

    def batch(self, rows: Sequence[int] | NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return several rows as two tensors, which are copies of the stored numbers.

        Args:
            rows: Their positions; negative ones count from the end. Sorted positions are fastest.

        Returns:
            Features, shape (rows, n_features), dense or sparse as ``layout`` says, and labels,
            shape (rows, 1).

        Raises:
            IndexError: The row does not exist.
        """
        wanted = np.asarray(rows, dtype=np.int64)
        outside = (wanted < -len(self)) | (wanted >= len(self))
        if outside.any():
            raise IndexError(
                f"rows of {self.name} {self.data_type} must be from {-len(self)} to "
                f"{len(self) - 1}, not {wanted[outside][0]}"
            )
        return self.fetch(np.where(wanted < 0, wanted + len(self), wanted))

    def fetch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return rows as :meth:`batch` does, but do not check the positions.

        Loaders call this method with correct positions.

        Args:
            positions: Rows, each from 0 to ``len(self) - 1``. The result for other values is
                undefined.

        Returns:
            Features and labels.
        """
        # Labels are in memory, only features are read from the file.
        labels = self._labels.index_select(0, torch.from_numpy(positions)).unsqueeze(1)
        if self.target_transform is not None:
            transformed = map(self.target_transform, labels)
            labels = torch.stack(list(map(torch.as_tensor, transformed)))
        if self.layout == "dense":
            return self._dense(positions), labels
        return self._sparse(positions), labels

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        for store in self.stores:
            store.close()

    def _runs(
        self, rows: NDArray[np.int64]
    ) -> Iterator[tuple[LinearStore, NDArray[np.int64], slice]]:
        """Yield runs of neighbors in one store: the store, rows in it, the slice of ``rows``."""
        if len(self.stores) == 1:
            yield self.stores[0], rows, slice(0, len(rows))
            return
        start = 0
        while start < len(rows):
            # One call fetches all neighboring rows of the same file.
            number = bisect_right(self._ends, rows[start])
            first = self._ends[number] - len(self.stores[number])
            outside = (rows[start:] < first) | (rows[start:] >= self._ends[number])
            stop = len(rows)
            if outside.any():
                stop = start + int(outside.argmax())
            yield self.stores[number], rows[start:stop] - first, slice(start, stop)
            start = stop

    def _dense(self, rows: NDArray[np.int64]) -> Tensor:
        features = torch.empty(len(rows), self.n_features, dtype=self.dtype)
        for store, local, where in self._runs(rows):
            store.take(local, features[where])
        return features

    def _sparse(self, rows: NDArray[np.int64]) -> Tensor:
        parts = [store.take_csr(local) for store, local, _ in self._runs(rows)]
        indptr, columns, values = map(torch.from_numpy, join_csr(parts, self._labels.numpy().dtype))
        with warnings.catch_warnings():
            # torch warns once per process that its sparse layout is in beta, in the middle of a
            # training's output.
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(
                indptr, columns, values, (len(rows), self.n_features), check_invariants=False
            )


def _check_together(stores: list[LinearStore]) -> None:
    """Refuse files that are not the complete parts of one data set."""
    first = stores[0]
    # Only fields that change the meaning of rows must agree.
    for store in stores[1:]:
        for field in ("n_features", "dtype", "label_map"):
            mine, other = getattr(store.header, field), getattr(first.header, field)
            if mine != other:
                raise DatasetError(
                    f"{store.path} has {field} {mine}, but {first.path} has {other}: convert "
                    "them again together"
                )
    count = first.header.shard[1]
    numbers = [store.header.shard[0] for store in stores]
    if count > 1 and numbers != list(range(count)):
        raise DatasetError(
            f"{first.path.parent} has the parts {numbers} of the data set, not 0 to "
            f"{count - 1}: convert it again"
        )
