"""Store the rows of a linear model's data in an LMDB file, in blocks of raw numbers read without copies or pickle.

A store is one file. Its values, by key:

* ``header``: a JSON object, see :class:`StoreHeader`.
* ``labels``: the labels of all rows, in the store's dtype.
* ``checksums``: the CRC-32 of each block, unsigned 32-bit integers.
* ``block:0000000000``, ``block:0000000001``, ...: ``rows_per_block`` rows each, the last one may have fewer.

A dense block is a matrix (rows, n_features). A sparse one (compressed sparse rows) is ``indptr`` (rows + 1 64-bit
integers), then the values, then their columns (32-bit integers). All numbers are little-endian, none are padded. The
page "Data of linear models" of the documentation says more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlbench_core import files
from mlbench_core.dataset.linearmodels.pytorch._dense_rows import DenseRows
from mlbench_core.dataset.linearmodels.pytorch._lmdb_environment import ReadEnvironment, open_for_reading
from mlbench_core.errors import DatasetError, DatasetNotFoundError, require

__all__ = ["FORMAT", "VERSION", "LinearStore", "StoreHeader", "StoreWriter", "find_stores", "join_csr"]

FORMAT, VERSION = "mlbench-linear", 1
LAYOUTS, DTYPES = ("dense", "csr"), ("float32", "float64")
BLOCK_BYTES = 1 << 19  # target size: tens of rows of 2,000 features, and still efficient to read
_HEADER, _LABELS, _CHECKSUMS = b"header", b"labels", b"checksums"
_INDPTR, _COLUMN, _CHECKSUM = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<u4")
_FIRST_MAP_BYTES = 1 << 26


@dataclass(frozen=True)
class StoreHeader:
    """The description of a store, saved in it as JSON.

    Attributes:
        layout: ``"dense"`` or ``"csr"``.
        dtype: ``"float32"`` or ``"float64"``, of values and labels.
        n_rows: Number of rows.
        n_features: Number of columns.
        rows_per_block: Rows of each block but the last.
        label_map: The text's labels and their new values, for example ``{"-1": 0, "1": 1}``; None if they were kept.
        shard: Position of this store among the stores of the same data set, and their number.
        source: Names of the files it was made from.
        labels_crc32: CRC-32 of the labels.
        extra: Further facts, for example how synthetic data was made.
    """

    layout: str
    dtype: str
    n_rows: int
    n_features: int
    rows_per_block: int
    label_map: Mapping[str, int] | None = None
    shard: tuple[int, int] = (0, 1)
    source: tuple[str, ...] = ()
    labels_crc32: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_blocks(self) -> int:
        """Return the number of blocks."""
        return -(-self.n_rows // self.rows_per_block)

    @property
    def number(self) -> np.dtype:
        """Return the dtype of values and labels in the file."""
        return np.dtype(self.dtype).newbyteorder("<")

    def to_json(self) -> bytes:
        """Return the header as the JSON text that is stored."""
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes, path: Path) -> StoreHeader:
        """Read a header written by :meth:`to_json`.

        Args:
            text: The value of the key ``header``.
            path: Path of the store, for messages.

        Returns:
            The header.

        Raises:
            DatasetError: It is not a header, or it is of another version.
        """
        try:
            found = json.loads(text)
            kind, version = found.pop("format"), found.pop("version")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise _foreign(path) from error
        if kind != FORMAT:
            raise _foreign(path)
        if version != VERSION:
            raise DatasetError(f"{path} has version {version} of the format; this library reads version {VERSION}")
        try:
            header = cls(**{**found, "shard": tuple(found["shard"]), "source": tuple(found["source"])})
            sound = header.n_rows > 0 and header.n_features > 0 and header.rows_per_block > 0
        except (TypeError, KeyError) as error:
            raise DatasetError(f"the header of {path} is damaged: {error}; convert the data again") from error
        if not sound or header.layout not in LAYOUTS or header.dtype not in DTYPES:
            raise DatasetError(f"the header of {path} is damaged: {header}; convert the data again")
        return header


def _foreign(path: Path) -> DatasetError:
    """Return the error for an LMDB that another program made."""
    return DatasetError(
        f"{path} is an LMDB, but not of this format. One of version 3.0 holds pickled rows, which are never loaded, "
        "because a pickle can run any code: convert the text again, "
        "python -m mlbench_core.dataset.util.pytorch.libsvm NAME [train|test] DEST_DIR [--file TEXT]"
    )


class LinearStore:
    """Read rows of one store from the pages of its file.

    The file is opened at the first use in each process. All stores of a process on the same file share the open file.
    So an object can be pickled, sent to worker processes and used on both sides of a ``fork``.

    Args:
        path: The file (or the folder of an LMDB that is a folder).
        cache: If True, keep each block in memory after its first read.

    Raises:
        DatasetNotFoundError: The file does not exist.
        DatasetError: It is not a store, or it is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], *, cache: bool = False) -> None:
        self.path = Path(path)
        self._cache = cache
        self._opened: ReadEnvironment | None = None
        self._dense: DenseRows | None = None  # belongs to the opened file
        self._copies: dict[int, bytes] = {}  # sparse blocks that were read, with `cache`
        text = self._open().get(_HEADER)
        if text is None:
            raise _foreign(self.path)
        self.header = StoreHeader.from_json(bytes(text), self.path)
        labels = _get(self._open(), _LABELS, self.path)
        if len(labels) != self.header.n_rows * self.header.number.itemsize:
            raise DatasetError(f"{self.path} is damaged: its labels are not complete; convert the data again")
        self.labels: NDArray[Any] = np.frombuffer(labels, self.header.number).astype(self.header.dtype)

    def __len__(self) -> int:
        return self.header.n_rows

    def __getstate__(self) -> dict[str, Any]:
        # The file handle and its views belong to this process; another one opens the file itself.
        return {**self.__dict__, "_opened": None, "_dense": None, "_copies": {}}

    def close(self) -> None:
        """Close the file; it is opened again when needed."""
        self._opened = self._dense = None

    def take(self, rows: NDArray[np.int64], out: Tensor) -> None:
        """Copy rows into a dense matrix.

        Fetching many rows in one call is fastest, and sorted rows are faster than unsorted ones.

        Args:
            rows: Positions in the store, each from 0 to ``len(self) - 1``.
            out: Destination, of the store's dtype and shape (len(rows), n_features).
        """
        if self.header.layout == "dense":
            self._dense_rows().take(rows, out)
            return
        indptr, columns, values = self.take_csr(rows)
        array = out.numpy()
        array.fill(0)
        array[np.repeat(np.arange(len(rows)), np.diff(indptr)), columns] = values

    def take_csr(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
        """Copy rows as compressed sparse rows.

        Args:
            rows: Positions in the store, each from 0 to ``len(self) - 1``.

        Returns:
            ``indptr`` (len(rows) + 1), the columns of the values, the values.
        """
        if self.header.layout == "dense":
            out = torch.from_numpy(np.empty((len(rows), self.header.n_features), self.header.dtype))
            self.take(rows, out)
            return _compress(out.numpy())
        parts = []
        for number, start, stop in self._runs(rows):
            # Rows of one block are selected together, so that a block is decoded once per run.
            local = rows[start:stop] - number * self.header.rows_per_block
            parts.append(_select(*self._sparse(number), local))
        return join_csr(parts, np.dtype(self.header.dtype))

    def verify(self) -> None:
        """Read everything and compare the checksums.

        Raises:
            DatasetError: Something is damaged; the message says which block.
        """
        # Only this method compares checksums; other reads do not.
        again = "convert the data again, or copy it again"
        opened = self._open()
        sums = np.frombuffer(_get(opened, _CHECKSUMS, self.path), _CHECKSUM)
        if len(sums) != self.header.n_blocks:
            raise DatasetError(f"{self.path} has {len(sums)} checksums for {self.header.n_blocks} blocks; {again}")
        if zlib.crc32(_get(opened, _LABELS, self.path)) != self.header.labels_crc32:
            raise DatasetError(f"the labels of {self.path} have another checksum than when written; {again}")
        for number, expected in enumerate(sums.tolist()):
            if zlib.crc32(_get(opened, _block_key(number), self.path)) != expected:
                raise DatasetError(f"block {number} of {self.path} has another checksum than when written; {again}")

    def _open(self) -> ReadEnvironment:
        """Return the file, opened by this process; the views it returns are valid while it is open."""
        if self._opened is None or self._opened.pid != os.getpid():
            self._opened, self._dense = open_for_reading(self.path), None
        return self._opened

    def _dense_rows(self) -> DenseRows:
        """Return the rows of a dense store, from the file that this process opened."""
        opened = self._open()
        if self._dense is None:
            header, path = self.header, self.path

            def load(number: int) -> memoryview:  # no reference to self: a cycle would keep it open
                return _get(opened, _block_key(number), path)

            self._dense = DenseRows(
                load, header.n_rows, header.n_features, header.rows_per_block, header.dtype, self._cache
            )
        return self._dense

    def _runs(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Yield runs of rows in the same block: number of the block, start and stop in ``rows``."""
        blocks = rows // self.header.rows_per_block
        # A run starts where the block number changes; -1 starts the first one.
        starts = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=False):  # no rows, no runs
            yield int(blocks[start]), start, stop

    def _sparse(self, number: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return a sparse block: indptr, columns, values."""
        block: Any = self._copies.get(number)
        if block is None:
            block = _get(self._open(), _block_key(number), self.path)
            if self._cache:
                block = self._copies[number] = bytes(block)
        rows = min(self.header.rows_per_block, self.header.n_rows - number * self.header.rows_per_block)
        # The three arrays follow one another; see the docstring of the module.
        indptr = np.frombuffer(block, _INDPTR, rows + 1)
        values = np.frombuffer(block, self.header.number, int(indptr[-1]), indptr.nbytes)
        columns = np.frombuffer(block, _COLUMN, int(indptr[-1]), indptr.nbytes + values.nbytes)
        return indptr, columns, values


def _get(opened: ReadEnvironment, key: bytes, path: Path) -> memoryview:
    """Return a required value."""
    value = opened.get(key)
    if value is None:
        raise DatasetError(f"{path} is damaged: it has no {key.decode()}; convert the data again, or copy it again")
    return value


def _block_key(number: int) -> bytes:
    return b"block:%010d" % number


def _select(
    indptr: NDArray[Any], columns: NDArray[Any], values: NDArray[Any], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
    """Return copies of some compressed sparse rows."""
    lengths = indptr[rows + 1] - indptr[rows]
    chosen = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    where = np.arange(chosen[-1]) + np.repeat(indptr[rows] - chosen[:-1], lengths)
    return chosen, columns[where].astype(np.int64), values[where]


def join_csr(
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]], dtype: np.dtype
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
    """Concatenate compressed sparse rows.

    Args:
        parts: ``indptr``, columns and values of each part.
        dtype: Dtype of the values.

    Returns:
        ``indptr``, columns and values of all.
    """
    lengths = [np.zeros(1, np.int64), *(np.diff(indptr) for indptr, _, _ in parts)]
    columns = np.concatenate([np.empty(0, np.int64), *(columns for _, columns, _ in parts)])
    values = np.concatenate([np.empty(0, dtype), *(values for _, _, values in parts)])
    return np.cumsum(np.concatenate(lengths)), columns, values.astype(dtype, copy=False)


def _compress(matrix: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
    """Convert a dense matrix to compressed sparse rows."""
    # `nonzero` returns positions row by row, the order that compressed rows need.
    rows, columns = np.nonzero(matrix)
    indptr = np.searchsorted(rows, np.arange(len(matrix) + 1))
    return indptr.astype(np.int64), columns.astype(np.int64), matrix[rows, columns]


def find_stores(root: Path, name: str, data_type: str) -> list[Path]:
    """Return the stores of a data set in a folder, sorted by name.

    Args:
        root: The folder, or a store itself.
        name: Name of the data set.
        data_type: ``"train"`` or ``"test"``.

    Returns:
        At least one path.

    Raises:
        DatasetNotFoundError: There is none.
    """
    if root.is_file() or (root / "data.mdb").is_file():
        return [root]
    stem = f"{name}_{data_type}"
    found = [root / f"{stem}.lmdb"] if (root / f"{stem}.lmdb").exists() else sorted(root.glob(f"{stem}-*.lmdb"))
    if not found:
        there = sorted(path.name for path in root.glob("*.lmdb")) if root.is_dir() else []
        raise DatasetNotFoundError(
            f"there is no {stem}.lmdb and no {stem}-*.lmdb in {root} ({', '.join(there) or 'no *.lmdb is there'}); "
            f"make it: python -m mlbench_core.dataset.util.pytorch.libsvm {name} {data_type} {root}"
        )
    return found


class StoreWriter:
    """Write a store; it gets its name only when it is complete.

    Rows go to a hidden file next to the final one, which :meth:`finish` renames. An unfinished file is deleted at the
    end of the ``with`` block. A file left by a killed process is overwritten by the next writer of the same store. Two
    processes that write the same store do so one after the other.

    Args:
        path: The store's final name.
        n_features: Number of columns, at least 1.
        layout: ``"dense"`` or ``"csr"``.
        dtype: ``"float32"`` or ``"float64"``.
        rows_per_block: Rows in a block; by default chosen so that a block has about half a megabyte.

    Raises:
        ValueError: An argument is outside the values listed above.

    Example:
        >>> import tempfile, pathlib
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
        if n_features < 1 or (rows_per_block is not None and rows_per_block < 1):
            raise ValueError(f"n_features is {n_features} and rows_per_block {rows_per_block}; both must be at least 1")
        if layout not in LAYOUTS or dtype not in DTYPES:
            raise ValueError(f"layout is {layout!r} and dtype {dtype!r}; allowed: {LAYOUTS} and {DTYPES}")
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
        lmdb: Any = require("lmdb", "linear")
        with contextlib.ExitStack() as stack:
            # The lock comes first: a second writer waits here instead of deleting the file that the first one writes.
            stack.enter_context(files.lock(self.path.with_name(f".{self.path.name}.lock")))
            self._part.unlink(missing_ok=True)
            stack.callback(self._part.unlink, missing_ok=True)
            with _disk_errors(self.path):
                # `sync=False` makes writing fast; `finish` syncs once before the store gets its name.
                self._environment = lmdb.open(
                    str(self._part), subdir=False, lock=False, sync=False, map_size=_FIRST_MAP_BYTES
                )
            stack.callback(self._environment.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def append(self, features: Any, labels: NDArray[Any]) -> None:
        """Add rows.

        Args:
            features: Matrix (rows, n_features): an array or a scipy sparse matrix.
            labels: The rows' labels.

        Raises:
            ValueError: The shapes do not fit.
            DatasetError: The disk is full.
        """
        if features.shape != (len(labels), self.n_features):
            raise ValueError(f"features has shape {features.shape}; it must be ({len(labels)}, {self.n_features})")
        self._labels.append(np.asarray(labels, dtype=np.float64))
        self._pending.append(self._convert(features))
        self._pending_rows += len(labels)
        self.n_rows += len(labels)
        if self._rows_per_block is None:
            self._rows_per_block = self._choose_rows(self._pending[0])
        # Blocks are written as soon as they are full, so only labels and pending rows stay in memory.
        if self._pending_rows >= self._rows_per_block:
            self._write_blocks(self._rows_per_block)

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
        """Write the remaining rows, the labels and the header, and rename the store to its final name.

        Args:
            label_map: The text's labels and their new values; None keeps them.
            shard: Position among the stores of the data set, and their number.
            source: Names of the files the rows came from.
            extra: Further header entries that JSON can represent.

        Returns:
            The header.

        Raises:
            DatasetError: The input has no rows, a label is not in the map, or the disk is full.
        """
        if not self.n_rows or self._rows_per_block is None:
            raise DatasetError(f"{self.path} would have no rows: {', '.join(source) or 'the source'} holds none")
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
        self._put(
            (_LABELS, labels), (_CHECKSUMS, np.array(self._checksums, _CHECKSUM).tobytes()), (_HEADER, header.to_json())
        )
        with _disk_errors(self.path):
            # Without this, a crash after the renaming could leave a complete name with incomplete content.
            self._environment.sync(True)
        self._environment.close()
        files.move_into_place(self._part, self.path)
        return header

    def _convert(self, features: Any) -> Any:
        """Return a copy of rows in the dtype of the store; sparse rows become dense later, block by block."""
        if isinstance(features, np.ndarray) and self.layout == "dense":
            return features.astype(self.dtype)
        return _scipy_sparse().csr_matrix(features, dtype=self.dtype, copy=True)

    def _choose_rows(self, rows: Any) -> int:
        """Choose the number of rows in a block from the size of the first rows."""
        if self.layout == "dense":
            row_bytes = self.n_features * np.dtype(self.dtype).itemsize
        else:
            # The first rows decide: later rows of sparse data may be longer, which only makes blocks larger.
            per_value = np.dtype(self.dtype).itemsize + _COLUMN.itemsize
            row_bytes = _INDPTR.itemsize + per_value * rows.nnz // max(1, rows.shape[0])
        return max(1, BLOCK_BYTES // max(1, row_bytes))

    def _write_blocks(self, at_least: int) -> None:
        """Write pending rows as blocks while at least ``at_least`` rows are left."""
        assert self._rows_per_block is not None
        if len(self._pending) == 1:
            rows = self._pending[0]
        elif all(isinstance(part, np.ndarray) for part in self._pending):
            rows = np.concatenate(self._pending)
        else:
            sparse = _scipy_sparse()
            rows = sparse.vstack([sparse.csr_matrix(part) for part in self._pending], "csr")
        start = 0
        while rows.shape[0] - start >= at_least:
            stop = min(start + self._rows_per_block, rows.shape[0])
            self._write_block(rows[start:stop])
            start = stop
        self._pending = [rows[start:]] if start < rows.shape[0] else []
        self._pending_rows = rows.shape[0] - start

    def _write_block(self, rows: Any) -> None:
        """Write one block."""
        number = np.dtype(self.dtype).newbyteorder("<")
        if self.layout == "dense":
            dense = rows if isinstance(rows, np.ndarray) else rows.toarray()
            value = np.ascontiguousarray(dense, number).tobytes()
        else:
            indptr, columns = rows.indptr.astype(_INDPTR), rows.indices.astype(_COLUMN)
            value = indptr.tobytes() + rows.data.astype(number).tobytes() + columns.tobytes()
        self._put((_block_key(len(self._checksums)), value))
        self._checksums.append(zlib.crc32(value))

    def _put(self, *items: tuple[bytes, bytes]) -> None:
        """Write values, and double the memory map if they do not fit."""
        lmdb: Any = require("lmdb", "linear")
        with _disk_errors(self.path):
            while True:
                try:
                    with self._environment.begin(write=True) as transaction:
                        for key, value in items:
                            transaction.put(key, value)
                    return
                except lmdb.MapFullError:
                    # A transaction that failed has no effect, so all its items are written again with the larger map.
                    self._environment.set_mapsize(2 * self._environment.info()["map_size"])

    def _mapped(self, label_map: Mapping[str, int] | None) -> NDArray[np.float64]:
        """Return the labels of all rows as they are stored."""
        labels = np.concatenate(self._labels)
        if label_map is None:
            return labels
        mapped = np.full(len(labels), np.nan)
        for label, target in label_map.items():
            mapped[labels == float(label)] = target
        # A label outside the map would otherwise be stored as NaN.
        if (wrong := np.flatnonzero(np.isnan(mapped))).size:
            raise DatasetError(f"row {wrong[0]} has the label {labels[wrong[0]]:g}; the labels are {list(label_map)}")
        return mapped


def _scipy_sparse() -> Any:
    return require("scipy.sparse", "linear")


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Translate write errors of LMDB into messages about the disk."""
    lmdb: Any = require("lmdb", "linear")
    try:
        yield
    except lmdb.MapFullError:
        raise
    except (lmdb.Error, OSError) as error:
        text = str(error)
        # LMDB reports an incomplete write, such as on a full disk, as an input/output error.
        if any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)):
            raise DatasetError(
                f"the disk is full: {path} could not be written; free some space and start again"
            ) from error
        raise DatasetError(f"{path} could not be written: {error}") from error
