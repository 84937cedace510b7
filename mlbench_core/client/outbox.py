"""Metrics on disk: what could not be delivered yet and must outlive the process.

A client that cannot reach its master has one folder below ``spool/<endpoint>/``. In it lie *chunks*: files of JSON
lines, numbered in the order in which they were logged, each small enough to be one request. The owner holds a file
lock for as long as it lives, so a folder whose lock is free was left by a process that ended or was killed, and the
next client for that endpoint adopts it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from pathlib import Path

try:
    import fcntl
except ImportError:  # no file locks on this platform: ids alone keep a second delivery harmless
    fcntl = None  # type: ignore[assignment]

__all__ = ["ChunkFile", "SpoolFolder", "adopt", "spool_root"]

logger = logging.getLogger(__name__)

_LOCK_NAME = "owner.lock"


def spool_root(folder: Path, endpoint: str) -> Path:
    """The folder that holds all clients' chunks for one endpoint.

    Args:
        folder: The user's spool folder.
        endpoint: Address of the master's REST interface.

    Returns:
        The path; nothing is created.

    Example:
        >>> spool_root(Path("spool"), "http://127.0.0.1:5080/api/").name
        'http_127.0.0.1_5080_api'
    """
    return folder / re.sub(r"[^A-Za-z0-9.-]+", "_", endpoint).strip("_")


class ChunkFile:
    """A file of JSON lines, appended to one line at a time.

    Every line is a single write, so that a killed process leaves whole lines and at most one torn one at the end.

    Args:
        path: Where it lies.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, lines: list[str]) -> None:
        """Write lines at the end.

        Args:
            lines: JSON texts without line breaks.

        Raises:
            OSError: The disk is full or not writable; the file is as it was before.
        """
        data = "".join(line + "\n" for line in lines).encode()
        with open(self.path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                written = file.write(data)
                if written != len(data):
                    raise OSError(f"{self.path}: wrote {written} of {len(data)} bytes, is the disk full?")
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise

    def read(self) -> list[str]:
        """All whole lines; a torn or damaged one is left out with a warning."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:  # somebody else delivered it
            return []
        lines = data.decode(errors="replace").split("\n")
        good = [line for line in lines if line and _is_object(line)]
        damaged = sum(1 for line in lines if line) - len(good)
        if damaged:
            logger.warning("%s: left out %d damaged line(s)", self.path, damaged)
        return good

    def replace(self, lines: list[str]) -> None:
        """Put these lines in the place of all others, at once.

        Args:
            lines: JSON texts without line breaks.

        Raises:
            OSError: The disk is full or not writable; the file is as it was before.
        """
        part = self.path.with_suffix(".part")
        part.write_text("".join(line + "\n" for line in lines))
        part.replace(self.path)

    def delete(self) -> None:
        """Remove the file, if it is still there."""
        self.path.unlink(missing_ok=True)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


class SpoolFolder:
    """One client's folder of chunks, owned through a lock.

    Args:
        path: The folder.
        lock: Descriptor of its lock file, locked.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def create(cls, root: Path) -> SpoolFolder:
        """Make a new folder below ``root`` and lock it.

        It is made under a hidden name, locked, and renamed, so that nobody adopts it in between.

        Args:
            root: See :func:`spool_root`.

        Raises:
            OSError: The folder cannot be made.
        """
        name = f"{time.time_ns():020d}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        hidden = root / f".{name}"
        hidden.mkdir(mode=0o700, parents=True)
        lock = _lock(hidden / _LOCK_NAME)
        if lock is None:
            raise OSError(f"{hidden}: somebody else locked a folder that was just made")
        hidden.rename(root / name)
        return cls(root / name, lock)

    def chunk(self, index: int) -> ChunkFile:
        """The file of a chunk.

        Args:
            index: Its place in the order, from 0.
        """
        return ChunkFile(self.path / f"{index:010d}.jsonl")

    def chunks(self) -> list[ChunkFile]:
        """The chunks that are there, oldest first."""
        return [ChunkFile(path) for path in sorted(self.path.glob("*.jsonl"))]

    def close(self) -> None:
        """Give the lock back; the folder goes when nothing is left in it. Closing again does nothing."""
        if self._lock is None:
            return
        if not self.chunks():
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


def adopt(root: Path) -> list[SpoolFolder]:
    """Take over the folders of clients that are gone.

    Args:
        root: See :func:`spool_root`.

    Returns:
        Folders that now belong to the caller, oldest first.
    """
    folders = []
    for path in sorted(root.glob("[0-9]*")) if root.is_dir() else []:
        try:
            lock = _lock(path / _LOCK_NAME)
        except OSError:  # removed while we looked, or not ours to read
            continue
        if lock is not None:
            folders.append(SpoolFolder(path, lock))
    return folders


def _lock(path: Path) -> int | None:
    """Lock a file without waiting; None where another open client holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
    return descriptor
