"""Open LMDB files for reading, once per process, however the process was started."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any

from mlbench_core.errors import DatasetError, DatasetNotFoundError, require

__all__ = ["ReadEnvironment", "open_for_reading"]


class ReadEnvironment:
    """One LMDB environment opened for reading by this process, closed together with its last user.

    Args:
        environment: The ``lmdb.Environment``.

    Attributes:
        pid: The process that opened it. A process made by ``fork`` inherits the object, but opens a file of its own.
    """

    def __init__(self, environment: Any) -> None:
        self.pid = os.getpid()
        self._environment = environment
        self._transaction = environment.begin(buffers=True)
        self._one_at_a_time = threading.Lock()  # a transaction must not be used by two threads at once

    def get(self, key: bytes) -> memoryview | None:
        """Look up a value.

        Args:
            key: Its key.

        Returns:
            A view of the file's pages, valid as long as this object lives; None if the key does not exist.
        """
        with self._one_at_a_time:
            return self._transaction.get(key)

    def close(self) -> None:
        """Close the file; every view of it becomes invalid."""
        self._transaction.abort()
        self._environment.close()


# LMDB allows a file to be open once in a process, so its users share it. Keyed by device and inode.
_open: weakref.WeakValueDictionary[tuple[int, int], ReadEnvironment] = weakref.WeakValueDictionary()
_guard = threading.Lock()


def open_for_reading(path: Path) -> ReadEnvironment:
    """Open an LMDB for reading, or share the one that is open in this process already.

    Nothing is written and no lock is taken, so read-only file systems and any number of processes are fine.

    Args:
        path: A single file, or a folder with a ``data.mdb``.

    Returns:
        The environment, which stays open as long as the object is referred to.

    Raises:
        DatasetNotFoundError: The file does not exist.
        DatasetError: The file is not an LMDB, or it is truncated.
    """
    lmdb: Any = require("lmdb", "linear")
    file = path / "data.mdb" if path.is_dir() else path
    try:
        status = file.stat()
    except FileNotFoundError:
        raise DatasetNotFoundError(f"there is no LMDB at {path}") from None
    with _guard:
        found = _open.get((status.st_dev, status.st_ino))
        if found is not None and found.pid == os.getpid():
            return found
        if found is not None:  # inherited through fork: close the copy; the parent's stays open
            found.close()
        try:
            environment = lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, create=False)
        except lmdb.Error as error:
            raise DatasetError(f"{path} cannot be read as an LMDB: {error}") from error
        _check_length(environment, file, status.st_size)
        _open[status.st_dev, status.st_ino] = opened = ReadEnvironment(environment)
        return opened


def _check_length(environment: Any, file: Path, size_bytes: int) -> None:
    """Refuse a file that is shorter than its pages, because reading it would end the process with a bus error."""
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if size_bytes < needed:
        environment.close()
        raise DatasetError(f"{file} is cut off: it has {size_bytes} of {needed} bytes; convert or copy it again")
