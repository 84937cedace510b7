"""Write stores of a linear model's rows.

:mod:`mlbench_core.dataset.linearmodels.pytorch.lmdb_store` describes their format and reads them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlbench_core import files
from mlbench_core.dataset.linearmodels.pytorch.lmdb_store import (
    CHECKSUM,
    CHECKSUMS_KEY,
    COLUMN,
    DTYPES,
    HEADER_KEY,
    INDPTR,
    LABELS_KEY,
    LAYOUTS,
    StoreHeader,
    block_key,
)
from mlbench_core.errors import DatasetError, require

__all__ = ["StoreWriter", "describe_inexact", "inexact_labels"]

_BLOCK_BYTES = 1 << 19  # target size of a block: 65 rows of 2,000 float32 features
_FIRST_MAP_BYTES = 1 << 26
_MOST_FEATURES = 1 << 31  # columns are signed 32-bit integers from 0
_FLOAT64_WHOLE = 1 << 53  # below it, float64 holds every whole number


def inexact_labels(labels: NDArray[np.float64], dtype: str) -> NDArray[np.int64]:
    """Return the positions of the labels that a store cannot hold.

    A whole number must be stored exactly, because it may be a class or an id: two of them must not
    become one. A fraction is rounded to the nearest number of the dtype, but must not overflow or
    become 0.

    Args:
        labels: The labels.
        dtype: ``"float32"`` or ``"float64"``.

    Returns:
        Positions in increasing order.

    Example:
        >>> inexact_labels(np.array([0.1, 16777216, 16777217, 1e39, 1e-50]), "float32").tolist()
        [2, 3, 4]
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        error = np.abs(labels.astype(dtype).astype(np.float64) - labels)
        # From 2^53, neighboring whole numbers were already one float64 when they were read.
        is_whole = (labels == np.rint(labels)) | (np.abs(labels) >= _FLOAT64_WHOLE)
        allowed = np.where(is_whole, 0.0, np.abs(labels) * float(np.finfo(dtype).eps) / 2)
        is_exact = (error <= allowed) & (np.abs(labels) < _FLOAT64_WHOLE)  # False for NaN
    return np.flatnonzero(~is_exact)


def describe_inexact(label: float, dtype: str) -> str:
    """Describe a label of :func:`inexact_labels`, as the end of a sentence about its row."""
    advice = "number the classes from 0"
    if dtype != "float64":
        advice = f"store it as float64, or {advice}"
    return f"has the label {label:.17g}, which {dtype} cannot hold: {advice}"


class StoreWriter:
    """Write a store, which gets its name only when it is complete.

    Rows go to a hidden file in the same folder, which :meth:`finish` renames. The end of the
    ``with`` block deletes an unfinished file. The next writer of the same store overwrites a file
    that a killed process left. Two processes that write the same store do so one after the other.

    Args:
        path: The store's final name.
        n_features: Number of columns, from 1 to 2^31.
        layout: ``"dense"`` or ``"csr"``.
        dtype: ``"float32"`` or ``"float64"``.
        rows_per_block: Rows in a block; if None, a number that makes blocks of about half a
            megabyte.

    Raises:
        ValueError: An argument is outside the values listed above.

    Example:
        >>> import tempfile, pathlib
        >>> from mlbench_core.dataset.linearmodels.pytorch.lmdb_store import LinearStore
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> with StoreWriter(folder / "tiny.lmdb", n_features=2) as writer:
        ...     writer.append(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([-1.0, 1.0]))
        ...     _ = writer.finish(label_map={"-1": 0, "1": 1})
        >>> store = LinearStore(folder / "tiny.lmdb")
        >>> store.labels.tolist()
        [0.0, 1.0]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        n_features: int,
        *,
        layout: str = "dense",
        dtype: str = "float32",
        rows_per_block: int | None = None,
    ) -> None:
        self._lmdb: Any = require("lmdb", "linear")
        self._sparse: Any = require("scipy.sparse", "linear")
        if n_features < 1 or (rows_per_block is not None and rows_per_block < 1):
            raise ValueError(
                f"n_features and rows_per_block must be at least 1, not {n_features} and "
                f"{rows_per_block}"
            )
        if n_features > _MOST_FEATURES:
            raise ValueError(f"n_features must be at most {_MOST_FEATURES}, not {n_features}")
        if layout not in LAYOUTS or dtype not in DTYPES:
            raise ValueError(
                f"layout and dtype must be in {LAYOUTS} and {DTYPES}, not {layout!r} and {dtype!r}"
            )
        self.path = Path(path)
        self.n_features, self.layout, self.dtype = n_features, layout, dtype
        self.n_rows = 0
        self._rows_per_block = rows_per_block
        self._part = self.path.with_name(f".{self.path.name}.part")
        self._pending: list[Any] = []
        self._pending_rows = 0
        self._labels: list[NDArray[Any]] = []
        self._checksums: list[int] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> StoreWriter:
        with contextlib.ExitStack() as stack:
            # Take the lock first: a second writer must wait here, and not delete the file that the
            # first one writes.
            stack.enter_context(files.lock(self.path.with_name(f".{self.path.name}.lock")))
            self._part.unlink(missing_ok=True)
            stack.callback(self._part.unlink, missing_ok=True)
            with self._disk_errors():
                # `sync=False` makes writing fast; `finish` syncs once before the store gets its
                # name.
                self._environment = self._lmdb.open(
                    str(self._part), subdir=False, lock=False, sync=False, map_size=_FIRST_MAP_BYTES
                )
            stack.callback(self._environment.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def append(self, features: Any, labels: NDArray[Any]) -> None:
        """Add rows. Values are rounded to the nearest number of the store's dtype.

        Args:
            features: Matrix (rows, n_features): an array or a scipy sparse matrix, of real numbers.
            labels: The rows' labels, real numbers.

        Raises:
            ValueError: The shapes do not fit, a number is not real, or it is not finite in the
                store's dtype.
            DatasetError: The disk is full.
        """
        if features.shape != (len(labels), self.n_features):
            raise ValueError(
                f"features must have shape ({len(labels)}, {self.n_features}), not {features.shape}"
            )
        raw_labels = np.asarray(labels)
        for name, dtype in (("features", features.dtype), ("labels", raw_labels.dtype)):
            if dtype.kind not in "biuf":
                raise ValueError(f"{name} must be real numbers, not {dtype}")
        as_float64 = raw_labels.astype(np.float64)
        # Large integers are rounded; in the other direction they would be equal only by chance.
        with np.errstate(invalid="ignore"):
            wrong = np.flatnonzero(as_float64.astype(raw_labels.dtype) != raw_labels)
        if wrong.size:
            row = wrong[0]
            raise ValueError(
                f"labels must be numbers that float64 holds, not {raw_labels[row]} in row "
                f"{self.n_rows + row}"
            )
        # Copy the rows, because the caller may change its array. Sparse rows become dense later,
        # block by block.
        with np.errstate(over="ignore"):  # the check below reports an overflow
            if isinstance(features, np.ndarray) and self.layout == "dense":
                rows = features.astype(self.dtype)
            else:
                rows = self._sparse.csr_matrix(features, dtype=self.dtype, copy=True)
        self._check_finite(rows, features)
        self._labels.append(as_float64)
        self._pending.append(rows)
        self._pending_rows += len(labels)
        self.n_rows += len(labels)
        if self._rows_per_block is None:
            self._rows_per_block = self._choose_rows(self._pending[0])
        # Write blocks as soon as they are full, so that only labels and pending rows stay in
        # memory.
        if self._pending_rows >= self._rows_per_block:
            self._write_blocks(self._rows_per_block)

    def _check_finite(self, rows: Any, features: Any) -> None:
        """Refuse values that are not finite in the store's dtype."""
        values = rows if isinstance(rows, np.ndarray) else rows.data
        if np.isfinite(values).all():
            return
        first = np.argwhere(~np.isfinite(values))[0]
        if isinstance(rows, np.ndarray):
            row, column = first.tolist()
        else:
            row = int(np.searchsorted(rows.indptr, first[0], "right")) - 1
            column = int(rows.indices[first[0]])
        if not isinstance(features, np.ndarray):
            features = features.tocsr()
        raise ValueError(
            f"features must be finite in {self.dtype}, not {features[row, column]} in row "
            f"{self.n_rows + row}, column {column}"
        )

    def labels_found(self) -> NDArray[np.float64]:
        """Return the distinct labels of the rows so far, sorted."""
        return np.unique(np.concatenate([np.empty(0), *self._labels]))

    def finish(
        self,
        *,
        label_map: Mapping[str, int] | None = None,
        shard: tuple[int, int] = (0, 1),
        source: tuple[str, ...] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> StoreHeader:
        """Write the remaining rows, the labels and the header, and give the store its final name.

        Args:
            label_map: The labels of the text and their new values; None keeps the labels.
            shard: Position of this store among the stores of the data set, and their number.
            source: Names of the files that the rows come from.
            extra: Further header entries that JSON can represent.

        Returns:
            The header.

        Raises:
            DatasetError: The input has no rows, a label is not in the map, the store's dtype cannot
                hold a label (see :func:`inexact_labels`), or the disk is full.
        """
        if not self.n_rows or self._rows_per_block is None:
            raise DatasetError(
                f"{self.path} would have no rows: {', '.join(source) or 'the source'} holds none"
            )
        if self._pending_rows:
            self._write_blocks(1)
        labels = self._mapped(label_map).astype(np.dtype(self.dtype).newbyteorder("<")).tobytes()
        header = StoreHeader(
            self.layout,
            self.dtype,
            self.n_rows,
            self.n_features,
            self._rows_per_block,
            label_map,
            shard,
            source,
            zlib.crc32(labels),
            extra or {},
        )
        checksums = np.array(self._checksums, CHECKSUM).tobytes()
        self._put((LABELS_KEY, labels), (CHECKSUMS_KEY, checksums), (HEADER_KEY, header.to_json()))
        with self._disk_errors():
            # Without this, a crash after the renaming could leave a complete name with incomplete
            # content.
            self._environment.sync(True)
        self._environment.close()
        files.move_into_place(self._part, self.path)
        return header

    def _choose_rows(self, rows: Any) -> int:
        """Choose the number of rows in a block from the size of the first rows."""
        if self.layout == "dense":
            row_bytes = self.n_features * np.dtype(self.dtype).itemsize
        else:
            # Only the first rows are known here. If later rows of sparse data are longer, blocks
            # become larger.
            per_value = np.dtype(self.dtype).itemsize + COLUMN.itemsize
            row_bytes = INDPTR.itemsize + per_value * rows.nnz // max(1, rows.shape[0])
        return max(1, _BLOCK_BYTES // max(1, row_bytes))

    def _write_blocks(self, at_least: int) -> None:
        """Write pending rows as blocks while at least ``at_least`` rows are left."""
        assert self._rows_per_block is not None
        # Arrays are stacked as arrays; a mixture of arrays and sparse rows becomes sparse.
        if all(isinstance(part, np.ndarray) for part in self._pending):
            rows = np.concatenate(self._pending)
        else:
            rows = self._sparse.vstack(list(map(self._sparse.csr_matrix, self._pending)), "csr")
        start = 0
        while rows.shape[0] - start >= at_least:
            stop = min(start + self._rows_per_block, rows.shape[0])
            self._write_block(rows[start:stop])
            start = stop
        self._pending_rows = rows.shape[0] - start
        self._pending = [rows[start:]] if self._pending_rows else []

    def _write_block(self, rows: Any) -> None:
        """Write one block."""
        number = np.dtype(self.dtype).newbyteorder("<")
        if self.layout == "dense":
            if not isinstance(rows, np.ndarray):
                rows = rows.toarray()
            value = np.ascontiguousarray(rows, number).tobytes()
        else:
            indptr, columns = rows.indptr.astype(INDPTR), rows.indices.astype(COLUMN)
            value = indptr.tobytes() + rows.data.astype(number).tobytes() + columns.tobytes()
        self._put((block_key(len(self._checksums)), value))
        self._checksums.append(zlib.crc32(value))

    def _put(self, *items: tuple[bytes, bytes]) -> None:
        """Write values, and double the memory map if they do not fit."""
        with self._disk_errors():
            while True:
                try:
                    with self._environment.begin(write=True) as transaction:
                        for key, value in items:
                            transaction.put(key, value)
                    return
                except self._lmdb.MapFullError:
                    # A failed transaction has no effect, so the next round writes all of its items
                    # again.
                    self._environment.set_mapsize(2 * self._environment.info()["map_size"])

    def _mapped(self, label_map: Mapping[str, int] | None) -> NDArray[np.float64]:
        """Return the labels of all rows as they are stored."""
        labels = np.concatenate(self._labels)
        if label_map is None:
            if (wrong := inexact_labels(labels, self.dtype)).size:
                raise DatasetError(
                    f"row {wrong[0]} {describe_inexact(labels[wrong[0]], self.dtype)}"
                )
            return labels
        mapped = np.full(len(labels), np.nan)
        for label, target in label_map.items():
            mapped[labels == float(label)] = target
        # A label outside the map would otherwise be stored as NaN.
        if (wrong := np.flatnonzero(np.isnan(mapped))).size:
            raise DatasetError(
                f"row {wrong[0]} has the label {labels[wrong[0]]:g}; "
                f"the labels are {list(label_map)}"
            )
        return mapped

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Translate write errors of LMDB into messages about the disk."""
        try:
            yield
        except self._lmdb.MapFullError:
            raise  # the disk is not full; `_put` enlarges the map
        except (self._lmdb.Error, OSError) as error:
            # LMDB reports an incomplete write, such as on a full disk, as an input/output error.
            if any(
                os.strerror(code) in str(error)
                for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
            ):
                raise DatasetError(
                    f"the disk is full: {self.path} could not be written; free some space and "
                    "start again"
                ) from error
            raise DatasetError(f"{self.path} could not be written: {error}") from error
