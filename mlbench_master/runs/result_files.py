"""Read the result files of a run, which its workers wrote.

The folder belongs to the workers, so the master trusts nothing in it. A name may be a link to
another user's file, a pipe that blocks its reader, or a device, and it may change at any moment.
So every folder and file is opened by its name in the open folder above it. The operating system
refuses links, and the size is limited.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import pydantic_core

__all__ = ["FILES", "RESULT_FILE", "RESULT_METRIC", "RefusedFileError", "ResultFolder", "is_result"]

RESULT_FILE = "result.json"
RESULT_METRIC = "result @ 0"
"""The metric with the content of ``result.json``, which the first worker sends at its end."""

FILES: dict[str, int] = {
    RESULT_FILE: 2**22,
    "metrics.jsonl": 2 * 10**9,
    "environment.json": 2**24,
    "official_result.txt": 2**20,
    "mlperf.log": 2**28,
}
"""The result files that the master passes on, each with its maximum size in bytes."""

# During the run, and after it is stopped, each worker's raw lines are in a separate file.
_LINES_OF_WORKER = re.compile(r"metrics\.rank-\d{1,5}\.jsonl", re.ASCII)
# A job has one result folder unless its command starts several programs. A worker can make any
# number of folders, so only these are looked at.
_MOST_FOLDERS = 100
# Systems without these flags (Windows) cannot open a file by its name in an open folder either,
# see ResultFolder.find.
_AS_IT_IS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
)
_FOLDER = _AS_IT_IS | getattr(os, "O_DIRECTORY", 0)


class RefusedFileError(Exception):
    """A result file exists, but the master does not pass it on; the message has the reason."""


class ResultFolder:
    """The result folder of a run, held open.

    Use it as a context manager, which closes the folder.

    Args:
        path: The folder, for messages.
        descriptor: The open folder.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> (root / "task1a" / "7").mkdir(parents=True)
        >>> _ = (root / "task1a" / "7" / "result.json").write_text("{}")
        >>> with ResultFolder.find(root) as folder:
        ...     folder.path.relative_to(root).as_posix(), folder.read("result.json")
        ('task1a/7', b'{}')
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def find(cls, root: Path | None) -> ResultFolder | None:
        """Find and open the result folder of a run, ``<root>/<task>/<run>``.

        Args:
            root: The folder of :meth:`~mlbench_master.engines.Engine.results`.

        Returns:
            The folder with the newest ``result.json``. If no folder has one, the folder with the
            newest of :data:`FILES`. None if no folder has any of these files.
        """
        if root is None or os.open not in os.supports_dir_fd:
            return None
        try:
            with _opened(root) as top:
                dated = []
                for task in _names(top):
                    for age, run in _dated_runs(top, task):
                        dated.append((age, task, run))
                if not dated:
                    return None
                _, task, run = max(dated)
                with _opened(task, top) as middle:
                    return cls(root / task / run, os.open(run, _FOLDER, dir_fd=middle))
        except OSError:  # deleted or replaced in the meantime
            return None

    def open(self, name: str) -> tuple[BinaryIO, int]:
        """Open one of :data:`FILES`, or one of the files of :meth:`lines_of_workers`.

        Returns:
            The file, and the number of bytes to read. Read no more, because the file of a running
            run may grow.

        Raises:
            FileNotFoundError: It does not exist.
            RefusedFileError: The file is not a regular file of this folder, is too large, or cannot
                be read.
        """
        try:
            descriptor = os.open(name, _AS_IT_IS, dir_fd=self._descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:  # a link, a socket, or a file that the master may not read
            reason = f"it cannot be read as a regular file ({error.strerror})"
            raise RefusedFileError(reason) from error
        file = os.fdopen(descriptor, "rb")
        status = os.fstat(descriptor)
        most = FILES.get(name, FILES["metrics.jsonl"])
        reason = ""
        # A hard link can lead outside the folder, as a symbolic link does.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            reason = "it is not a regular file without hard links"
        elif status.st_size > most:
            reason = f"it has {status.st_size} bytes, and at most {most} are passed on"
        if reason:
            file.close()
            raise RefusedFileError(reason)
        return file, status.st_size

    def lines_of_workers(self) -> list[str]:
        """Return the names of the workers' files of raw lines, for a run without a result."""
        with contextlib.suppress(OSError), os.scandir(self._descriptor) as entries:
            # A job may have thousands of workers, so all names are read.
            return sorted(filter(_LINES_OF_WORKER.fullmatch, map(attrgetter("name"), entries)))
        return []

    def read(self, name: str) -> bytes | None:
        """Return the content of one of :data:`FILES`; None if it does not exist or is refused."""
        try:
            file, size = self.open(name)
            with file:
                return file.read(size)
        except (OSError, RefusedFileError):
            return None

    def __enter__(self) -> ResultFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)


def is_result(content: str | bytes | None) -> bool:
    """Return True if a text or the content of a file is a JSON object, as a result is.

    Example:
        >>> is_result('{"schema_version": 1}'), is_result("[1]"), is_result('{"value": NaN}')
        (True, False, False)
    """
    if content is None:
        return False
    try:
        return isinstance(pydantic_core.from_json(content, allow_inf_nan=False), dict)
    except ValueError:
        return False


@contextlib.contextmanager
def _opened(name: Path | str, above: int | None = None) -> Iterator[int]:
    descriptor = os.open(name, _FOLDER, dir_fd=above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, _MOST_FOLDERS)]


def _dated_runs(top: int, task: str) -> Iterator[tuple[tuple[bool, int], str]]:
    """Yield a sort key and the name of each folder of a task with results; newer ones sort last."""
    with contextlib.suppress(OSError), _opened(task, top) as middle:
        for run in _names(middle):
            with contextlib.suppress(OSError), _opened(run, middle) as folder:
                dates = {name: _date(folder, name) for name in FILES}
                newest = dates[RESULT_FILE] or max(dates.values())
                if newest:
                    # A folder with a result counts as newer than those without one.
                    yield (dates[RESULT_FILE] > 0, newest), run


def _date(folder: int, name: str) -> int:
    """Return the time of the last change of a regular file in nanoseconds since 1970, or 0."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return 0
    return max(status.st_mtime_ns, 1) if stat.S_ISREG(status.st_mode) else 0
