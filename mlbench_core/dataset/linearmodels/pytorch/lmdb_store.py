"""Read the rows of a linear model's data from an LMDB file.

A store is one file that holds blocks of raw numbers, and no pickles. It has these values, by key:

* ``header``: a JSON object, see :class:`StoreHeader`.
* ``labels``: the labels of all rows, in the store's dtype.
* ``checksums``: the CRC-32 of each block, unsigned 32-bit integers.
* ``block:0000000000``, ``block:0000000001``, ...: ``rows_per_block`` rows each; the last block may
  have fewer.

A dense block is a matrix (rows, n_features). A sparse block (compressed sparse rows) is ``indptr``
(rows + 1 64-bit integers), then the values, then their columns (32-bit integers). All numbers are
little-endian, without padding. The page "Data of linear models" of the documentation describes the
header too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import stat
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlbench_core.dataset.linearmodels.pytorch.lmdb_pages import check_pages
from mlbench_core.errors import DatasetError, DatasetNotFoundError, require

__all__ = ["FORMAT", "VERSION", "LinearStore", "StoreHeader", "find_stores", "join_csr"]

FORMAT, VERSION = "mlbench-linear", 1
LAYOUTS, DTYPES = ("dense", "csr"), ("float32", "float64")
HEADER_KEY, LABELS_KEY, CHECKSUMS_KEY = b"header", b"labels", b"checksums"
INDPTR, COLUMN, CHECKSUM = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<u4")

_MOST = 1 << 48  # no number of rows or columns reaches it

Rows = NDArray[np.int64]
Csr = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]
"""Compressed sparse rows: ``indptr`` (rows + 1), the columns of the values, the values."""


@dataclass(frozen=True)
class StoreHeader:
    """The description of a store, saved in it as JSON.

    Attributes:
        layout: ``"dense"`` or ``"csr"``.
        dtype: ``"float32"`` or ``"float64"``, of values and labels.
        n_rows: Number of rows.
        n_features: Number of columns.
        rows_per_block: Number of rows in each block except the last.
        label_map: The labels of the text and their new values, for example ``{"-1": 0, "1": 1}``;
            None if the labels were kept.
        shard: Position of this store among the stores of the same data set, and their number.
        source: Names of the files that the store was created from.
        labels_crc32: CRC-32 of the labels.
        extra: Further entries, for example the settings of synthetic data.
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

    def rows_of(self, block: int) -> int:
        """Return the number of rows of a block, which may be smaller for the last one."""
        return min(self.rows_per_block, self.n_rows - block * self.rows_per_block)

    @property
    def number(self) -> np.dtype:
        """Return the dtype of values and labels in the file."""
        return np.dtype(self.dtype).newbyteorder("<")

    def to_json(self) -> bytes:
        """Return the header as the JSON text that is stored."""
        return json.dumps(
            {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=1
        ).encode()

    @classmethod
    def from_json(cls, text: bytes, path: Path) -> StoreHeader:
        """Read a header written by :meth:`to_json`.

        Args:
            text: The value of the key ``header``.
            path: Path of the store, for messages.

        Returns:
            The header.

        Raises:
            DatasetError: The text is not a header, or the header is damaged or has another version.
        """
        try:
            fields = json.loads(text)
            kind, version = fields.pop("format"), fields.pop("version")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise _other_format(path) from error
        # An LMDB of another program may have a key `header` too.
        if kind != FORMAT:
            raise _other_format(path)
        if version != VERSION:
            raise DatasetError(
                f"{path} has version {version} of the format; this library reads version {VERSION}"
            )
        try:
            fields["shard"], fields["source"] = tuple(fields["shard"]), tuple(fields["source"])
            header = cls(**fields)
            is_valid = header._is_valid()
        except (TypeError, KeyError, ValueError, IndexError) as error:
            raise DatasetError(
                f"the header of {path} is damaged: {error}; convert the data again"
            ) from error
        if not is_valid:
            raise DatasetError(
                f"the header of {path} is damaged: {str(header)[:300]}; convert the data again"
            )
        return header

    def _is_valid(self) -> bool:
        """Return True if all fields have possible values; fields of other types may raise."""
        for count in (self.n_rows, self.n_features, self.rows_per_block, self.shard[1]):
            if not isinstance(count, int) or not 0 < count < _MOST:
                return False
        if not isinstance(self.shard[0], int) or not isinstance(self.labels_crc32, int):
            return False
        if self.label_map is not None and not all(map(math.isfinite, map(float, self.label_map))):
            return False
        return self.layout in LAYOUTS and self.dtype in DTYPES


def _other_format(path: Path) -> DatasetError:
    """Return the error for an LMDB that another program made."""
    return DatasetError(
        f"{path} is an LMDB, but not of this format. An LMDB of version 3.0 holds pickled rows. "
        "They are never loaded, because a pickle can run any code: convert the text again, "
        "python -m mlbench_core.dataset.util.pytorch.libsvm NAME [train|test] DEST_DIR "
        "[--file TEXT]"
    )


class LinearStore:
    """Read rows of one store from the pages of its file.

    Each process opens the file at its first use. Therefore an object can be pickled, sent to worker
    processes, and used on both sides of a ``fork``. All objects of a process on the same file share
    the open file.

    Args:
        path: The file (or the folder of an LMDB that is a folder).
        cache: If True, keep each block in memory after its first read.

    Raises:
        DatasetNotFoundError: The file does not exist.
        DatasetError: The file is not a store, or it is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], *, cache: bool = False) -> None:
        self.path = Path(path)
        self._cache = cache
        self._opened: _ReadEnvironment | None = None
        self._dense: _DenseRows | None = None  # belongs to the opened file
        self._copies: dict[int, bytes] = {}  # sparse blocks that were read, with `cache`
        self._checked: set[int] = set()  # sparse blocks whose structure was checked
        text = self._open().get(HEADER_KEY)
        if text is None:
            raise _other_format(self.path)
        self.header = StoreHeader.from_json(bytes(text), self.path)
        # Labels are small compared with features, so read all of them at the start.
        labels = _get(self._open(), LABELS_KEY, self.path)
        if len(labels) != self.header.n_rows * self.header.number.itemsize:
            raise DatasetError(
                f"{self.path} is damaged: its labels are not complete; convert the data again"
            )
        if zlib.crc32(labels) != self.header.labels_crc32:
            raise DatasetError(
                f"the labels of {self.path} have another checksum than when written; "
                "convert the data again, or copy it again"
            )
        # A wrong number of columns would make a batch of any size, before the first block shows it.
        if self.header.layout == "dense":
            _get_dense(self._open(), 0, self.header, self.path)
        stored: NDArray[Any] = np.frombuffer(labels, self.header.number)
        self.labels = stored.astype(self.header.dtype)

    def __len__(self) -> int:
        return self.header.n_rows

    def __getstate__(self) -> dict[str, Any]:
        # The open file and its views belong to this process. Another process opens the file again.
        return {**self.__dict__, "_opened": None, "_dense": None, "_copies": {}}

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        self._opened = self._dense = None

    def take(self, rows: Rows, out: Tensor) -> None:
        """Copy rows into a dense matrix.

        Fetch many rows in one call for speed. Sorted rows are faster than unsorted ones.

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

    def take_csr(self, rows: Rows) -> Csr:
        """Copy rows as compressed sparse rows.

        Args:
            rows: Positions in the store, each from 0 to ``len(self) - 1``.

        Returns:
            ``indptr`` (len(rows) + 1), the columns of the values, the values.
        """
        if self.header.layout == "csr":
            # Select neighboring rows of the same block together, so that the block is decoded once
            # for all of them.
            parts = []
            for number, start, stop in self._runs(rows):
                local = rows[start:stop] - number * self.header.rows_per_block
                parts.append(self._take_sparse(number, local))
            return join_csr(parts, np.dtype(self.header.dtype))
        out = torch.from_numpy(np.empty((len(rows), self.header.n_features), self.header.dtype))
        self.take(rows, out)
        matrix = out.numpy()
        # `nonzero` returns positions row by row, which is the order of compressed rows.
        row_numbers, columns = np.nonzero(matrix)
        indptr = np.searchsorted(row_numbers, np.arange(len(matrix) + 1))
        return indptr.astype(np.int64), columns.astype(np.int64), matrix[row_numbers, columns]

    def verify(self) -> None:
        """Read everything and compare the checksums.

        Raises:
            DatasetError: The checksum of a block is wrong; the message gives its number.
        """
        # Only this method compares the checksums of blocks; those of the labels were compared at
        # the start.
        advice = "convert the data again, or copy it again"
        opened = self._open()
        stored = _get(opened, CHECKSUMS_KEY, self.path)
        if len(stored) != self.header.n_blocks * CHECKSUM.itemsize:
            raise DatasetError(
                f"{self.path} has {len(stored) / CHECKSUM.itemsize:g} checksums for "
                f"{self.header.n_blocks} blocks; {advice}"
            )
        sums = np.frombuffer(stored, CHECKSUM)
        for number, expected in enumerate(sums.tolist()):
            if zlib.crc32(_get(opened, block_key(number), self.path)) != expected:
                raise DatasetError(
                    f"block {number} of {self.path} has another checksum than when written; "
                    f"{advice}"
                )

    def _open(self) -> _ReadEnvironment:
        """Return the file as this process has opened it; its views are valid while it is open."""
        if self._opened is None or self._opened.pid != os.getpid():
            self._opened, self._dense = _open_for_reading(self.path), None
        return self._opened

    def _dense_rows(self) -> _DenseRows:
        """Return the rows of a dense store, from the file that this process opened."""
        opened = self._open()
        if self._dense is None:
            header, path = self.header, self.path

            # The function has no reference to self: a reference cycle would keep the file open.
            def load(number: int) -> memoryview:
                return _get_dense(opened, number, header, path)

            self._dense = _DenseRows(load, self.header, self._cache)
        return self._dense

    def _runs(self, rows: Rows) -> Iterator[tuple[int, int, int]]:
        """Yield runs of neighbors in one block: the block's number, start and stop in ``rows``."""
        blocks = rows // self.header.rows_per_block
        # A run starts at each change of the block's number; -1 starts the first run.
        starts = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()
        # Not strict: without rows, the second list has one element and the first none.
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=False):
            yield int(blocks[start]), start, stop

    def _take_sparse(self, number: int, rows: Rows) -> Csr:
        """Return copies of rows of a sparse block, by their positions in the block."""
        block: Any = self._copies.get(number)
        if block is None:
            block = _get(self._open(), block_key(number), self.path)
            if self._cache:
                block = self._copies[number] = bytes(block)
        # The three arrays follow one another, as the docstring of the module describes.
        try:
            indptr = np.frombuffer(block, INDPTR, self.header.rows_of(number) + 1)
            values = np.frombuffer(block, self.header.number, int(indptr[-1]), indptr.nbytes)
            columns = np.frombuffer(block, COLUMN, int(indptr[-1]), indptr.nbytes + values.nbytes)
            is_valid = number in self._checked or _is_csr(indptr, columns, self.header.n_features)
        except (ValueError, OverflowError):
            is_valid = False
        # torch does not check columns, so a wrong one would read or write any memory.
        if not is_valid:
            raise DatasetError(
                f"block {number} of {self.path} is damaged; convert the data again, or copy it "
                "again"
            )
        self._checked.add(number)
        lengths = indptr[rows + 1] - indptr[rows]
        chosen = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        # Compute the positions of the values of all rows, row by row, without a Python loop.
        positions = np.arange(chosen[-1]) + np.repeat(indptr[rows] - chosen[:-1], lengths)
        return chosen, columns[positions].astype(np.int64), values[positions]


def _is_csr(indptr: NDArray[np.int64], columns: NDArray[np.int32], n_features: int) -> bool:
    """Return True if starts of rows and columns are those of compressed sparse rows."""
    if indptr[0] != 0 or (np.diff(indptr) < 0).any():
        return False
    return not columns.size or bool(0 <= columns.min() <= columns.max() < n_features)


def _get(opened: _ReadEnvironment, key: bytes, path: Path) -> memoryview:
    """Return a required value."""
    value = opened.get(key)
    if value is None:
        raise DatasetError(
            f"{path} is damaged: it has no {key.decode()}; convert the data again, or copy it again"
        )
    return value


def _get_dense(
    opened: _ReadEnvironment, number: int, header: StoreHeader, path: Path
) -> memoryview:
    """Return a dense block."""
    block = _get(opened, block_key(number), path)
    expected = header.rows_of(number) * header.n_features * header.number.itemsize
    if len(block) != expected:
        raise DatasetError(
            f"block {number} of {path} is damaged: it has {len(block)} bytes, not {expected}; "
            "convert the data again, or copy it again"
        )
    return block


def block_key(number: int) -> bytes:
    """Return the key of a block; leading zeros keep the blocks in order in the file."""
    return b"block:%010d" % number


def join_csr(parts: Sequence[Csr], dtype: np.dtype) -> Csr:
    """Concatenate compressed sparse rows.

    Args:
        parts: ``indptr``, columns and values of each part.
        dtype: Dtype of the values.

    Returns:
        ``indptr``, columns and values of all parts together.
    """
    # The first elements keep the concatenations valid without parts.
    lengths: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    columns: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    values: list[NDArray[Any]] = [np.empty(0, dtype)]
    for part_indptr, part_columns, part_values in parts:
        lengths.append(np.diff(part_indptr))
        columns.append(part_columns)
        values.append(part_values)
    indptr = np.cumsum(np.concatenate(lengths))
    return indptr, np.concatenate(columns), np.concatenate(values).astype(dtype, copy=False)


def find_stores(root: Path, name: str, data_type: str) -> list[Path]:
    """Return the stores of a data set in a folder, sorted by name.

    Args:
        root: The folder, or a store itself.
        name: Name of the data set.
        data_type: ``"train"`` or ``"test"``.

    Returns:
        At least one path.

    Raises:
        DatasetNotFoundError: The folder has no such store.
    """
    if root.is_file() or (root / "data.mdb").is_file():
        return [root]
    stem = f"{name}_{data_type}"
    single = root / f"{stem}.lmdb"
    if single.exists():
        return [single]
    stores = sorted(root.glob(f"{stem}-*.lmdb"))
    if not stores:
        existing = sorted(path.name for path in root.glob("*.lmdb")) or ["no *.lmdb"]
        raise DatasetNotFoundError(
            f"{root} has no {stem}.lmdb and no {stem}-*.lmdb (it has {', '.join(existing)}); "
            f"create it: python -m mlbench_core.dataset.util.pytorch.libsvm {name} {data_type} "
            f"{root}"
        )
    return stores


class _ReadEnvironment:
    """An LMDB environment that this process opened for reading.

    It is closed when its last user is deleted.
    """

    def __init__(self, environment: Any, path: Path, failure: type[Exception]) -> None:
        self._path, self._failure = path, failure
        # A process that `fork` creates inherits the object, but must open the file again.
        self.pid = os.getpid()
        self._environment = environment
        self._transaction = environment.begin(buffers=True)
        self._lock = threading.Lock()  # two threads must not use a transaction at the same time

    def get(self, key: bytes) -> memoryview | None:
        """Return a view of the file's pages, valid while this object lives; None without a key."""
        try:
            with self._lock:
                return self._transaction.get(key)
        except self._failure as error:
            raise DatasetError(
                f"{self._path} is damaged: {error}; convert the data again, or copy it again"
            ) from error

    def close(self) -> None:
        """Close the file; every view of it becomes invalid."""
        self._transaction.abort()
        self._environment.close()


# LMDB allows a process to open a file only once, so all users share it. The keys are device and
# inode.
_environments: weakref.WeakValueDictionary[tuple[int, int], _ReadEnvironment] = (
    weakref.WeakValueDictionary()
)
_opening = threading.Lock()  # two threads must not open one file at the same time


def _open_for_reading(path: Path) -> _ReadEnvironment:
    """Return an LMDB, a file or a folder with a ``data.mdb``, that this process opens once."""
    lmdb: Any = require("lmdb", "linear")
    file = path / "data.mdb" if path.is_dir() else path
    try:
        status = file.stat()
    except FileNotFoundError:
        raise DatasetNotFoundError(f"the LMDB {path} does not exist") from None
    with _opening:
        shared = _environments.get((status.st_dev, status.st_ino))
        if shared is not None and shared.pid == os.getpid():
            return shared
        # Inherited through fork: close this process's copy. The parent's stays open.
        if shared is not None:
            shared.close()
        if not stat.S_ISREG(status.st_mode):
            raise DatasetError(f"{file} is a folder, a pipe or a device, not a regular file")
        # A damaged page number could end the process with a bus error.
        check_pages(file)
        try:
            # Without a lock and without writing, read-only file systems and any number of processes
            # work.
            environment = lmdb.open(
                str(path), subdir=path.is_dir(), readonly=True, lock=False, create=False
            )
            opened = _ReadEnvironment(environment, file, lmdb.Error)
        except lmdb.Error as error:
            raise DatasetError(f"{path} cannot be read as an LMDB: {error}") from error
        _environments[status.st_dev, status.st_ino] = opened
        return opened


class _DenseRows:
    """The rows of dense blocks, gathered from many blocks with one call.

    A batch of shuffled rows comes from tens of blocks, and one call per block costs more than the
    copying itself. All blocks of a store are in one mapping of its file, so the distance from the
    first byte identifies a row. This class views the mapping as a matrix of bytes whose row i
    begins at the i-th byte, so rows overlap. One ``index_select`` on this matrix copies all
    requested rows.

    Args:
        load: Function that returns a block's bytes: a view of a mapping that holds all blocks and
            outlives this object.
        header: Description of the store.
        cache: If True, copy each block to memory at its first use.
    """

    def __init__(self, load: Callable[[int], memoryview], header: StoreHeader, cache: bool) -> None:
        self._load, self._header = load, header
        # The system only reserves this memory: the array takes up physical memory when blocks are
        # written to it.
        self._cached = np.empty((header.n_rows, header.n_features), header.dtype) if cache else None
        self._row_bytes = header.n_features * header.number.itemsize
        # The address of each block; 0 if it is not known yet.
        self._firsts = np.zeros(header.n_blocks, np.int64)
        self._low = self._high = 0  # the range of addresses that the matrix covers
        self._matrix = torch.empty(0)

    def take(self, rows: Rows, out: Tensor) -> None:
        """Copy rows to ``out``, shape (len(rows), n_features)."""
        if not len(rows):
            return
        blocks = rows // self._header.rows_per_block
        firsts = self._firsts[blocks]
        if not firsts.all():
            self._locate(np.unique(blocks[firsts == 0]))
            firsts = self._firsts[blocks]
        local = rows - blocks * self._header.rows_per_block
        begins = firsts - self._low + local * self._row_bytes
        torch.index_select(self._matrix, 0, torch.from_numpy(begins), out=out.view(torch.uint8))

    def _locate(self, blocks: Rows) -> None:
        """Find the addresses of blocks, and extend the matrix to them."""
        low, high = self._low or np.iinfo(np.int64).max, self._high
        for number in blocks.tolist():
            array = np.frombuffer(self._load(number), self._header.dtype)
            if self._cached is not None:
                start = number * self._header.rows_per_block
                rows = self._cached[start : start + self._header.rows_per_block]
                rows[:] = array.reshape(rows.shape)
                array = rows.reshape(-1)
            first = self._firsts[number] = array.ctypes.data
            low, high = min(low, first), max(high, first + array.nbytes)
        # A new range of addresses needs a new view; located addresses stay valid.
        if (low, high) != (self._low, self._high):
            self._low, self._high = low, high
            memory = (ctypes.c_char * (high - low)).from_address(low)
            content = torch.from_numpy(np.frombuffer(memoryview(memory), np.uint8))
            # The rows overlap in memory, so the view takes no space; it must never be written to.
            self._matrix = content.as_strided(
                (high - low - self._row_bytes + 1, self._row_bytes), (1, 1)
            )
