"""The log of a run: files of JSON lines of limited size, written by the supervisor and read by the master.

The first file is ``log.jsonl``. When it is full, ``log.N.jsonl`` follows, where N is the number of its first line. Of
all files, the first one and the latest ones are kept, so the log has the beginning and the end of the run, and line
numbers stay valid. Its imports are light, because the supervisor has to start quickly.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import sys
import threading
from bisect import bisect_right
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from mlbench_core.errors import ConfigurationError
from mlbench_master.launchers.interface import LogLine, LogPage

__all__ = [
    "DEFAULT_LIMIT_MB",
    "LogReader",
    "LogWriter",
    "append_log",
    "last_file",
    "log_limit_bytes",
    "open_at_once",
    "readable",
]

DEFAULT_LIMIT_MB = 64
"""Largest size of a run's log in MiB, unless ``MLBENCH_LOG_LIMIT_MB`` sets another one."""

_FIRST = "log.jsonl"
_LATER = re.compile(r"log\.(\d+)\.jsonl")
# The first file and at most seven later ones.
_FILES = 8
# A reader of a log skips at most this number of lines after a mark of the index.
_INDEX_STEP = 500
# An answer to a request has at most about this size, whatever the length of the lines.
_PAGE_BYTES = 2**20
# The writer's lines are shorter, but a worker may write into the file.
_LONGEST_LINE_BYTES = 2**18
# JSON needs six bytes for each of these characters.
_UNREADABLE = re.compile("[\x00-\x07\x0b\x0e-\x1a\x1c-\x1f\ufffd]+")


def readable(raw: bytes) -> str:
    """Decode output; each sequence of undecodable bytes and control characters becomes one replacement character.

    A worker may write binary data, and the log must not become larger than that.

    Example:
        >>> len(readable(bytes([0, 1, 255, 254]) * 1000))
        1
    """
    return _UNREADABLE.sub("\ufffd", raw.decode("utf-8", "replace"))


def append_log(path: Path, rank: int | None, stream: str, text: str) -> None:
    """Add one line to a file, in one write, so that lines of several processes do not mix."""
    with open(path, "ab", buffering=0, opener=_at_once) as file:
        file.write(_line(rank, stream, text))


def open_at_once(path: Path) -> IO[bytes]:
    """Open a file for reading; a pipe of this name, which a worker can make, must not block the master."""
    return open(path, "rb", opener=_at_once)


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o600)


class LogWriter:
    """The writer of a run's log, which several threads may use.

    An error of the disk does not reach the caller: workers must not die because their log cannot be written. Lines
    are dropped until the disk accepts lines again; then a line says how many are missing.

    Args:
        folder: Folder of the run. While lines are dropped, it has an empty file ``dropping``.
        limit_bytes: Largest size of the log.

    Attributes:
        dropped: Number of lines that could not be written.
        problem: The reason for the last of them.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.dropped = 0
        self.problem = ""
        self._folder = folder
        self._file_bytes = max(limit_bytes // _FILES, 1)
        # The log may have lines: notes of the master, or all that was written before a restart.
        self._path = last_file(folder)
        self._lines = LogReader(folder).end()
        self._descriptor: int | None = None
        self._gap = 0  # lines dropped since the last line that was written
        self._lock = threading.Lock()

    def write(self, rank: int | None, stream: str, text: str) -> None:
        """Add a line, or drop it if the disk does not accept it."""
        with self._lock:
            try:
                line = _line(rank, stream, text)
                if self._gap:
                    # In one piece: a short mark alone would fit again and again into the rest of a block.
                    mark = _line(None, "system", f"{self._gap} lines were dropped here: {self.problem}")
                    self._append(mark + line, 2)
                    self._gap = 0
                    self.dropping_mark.unlink(missing_ok=True)
                else:
                    self._append(line, 1)
            except OSError as error:
                self._gap += 1
                self.dropped += 1
                self.problem = error.strerror or str(error)
                # An empty file needs no block of a full disk.
                with contextlib.suppress(OSError):
                    self.dropping_mark.touch()

    def close(self) -> None:
        """Close the file until the next line; a process with many logs cannot keep all of them open."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    @property
    def dropping_mark(self) -> Path:
        """Return the path of the file that exists while lines are dropped."""
        return self._folder / "dropping"

    def _append(self, content: bytes, lines: int) -> None:
        if self._descriptor is None:
            self._descriptor = _at_once(str(self._path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        size = os.fstat(self._descriptor).st_size
        if size and size + len(content) > self._file_bytes:
            os.close(self._descriptor)
            self._descriptor, size = None, 0
            self._path = self._folder / f"log.{self._lines}.jsonl"
            self._descriptor = _at_once(str(self._path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            for _, path in _files(self._folder)[1 : 1 - _FILES]:
                path.unlink(missing_ok=True)
        if os.write(self._descriptor, content) < len(content):
            # A disk that becomes full takes a part of the line, and the next line would follow on the same line.
            os.ftruncate(self._descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._lines += lines


class LogReader:
    """A reader of a growing log, which reads from any line without a scan of the whole log.

    Args:
        folder: Folder of the run, which may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._marks: dict[str, list[tuple[int, int]]] = {}  # (line number, offset) by file, every few hundred lines

    def read(self, since_line: int, limit: int) -> LogPage:
        """Read at most ``limit`` lines and about 1 MiB, without a line that is still being written.

        Args:
            since_line: Number of the first line wanted. If its file was removed, a line says so, and the next ones
                follow.
            limit: Maximum number of lines.
        """
        lines: list[LogLine] = []
        following, left_bytes = since_line, _PAGE_BYTES
        with self._lock:
            files = _files(self._folder)
            for position, (first, path) in enumerate(files):
                next_first = files[position + 1][0] if position + 1 < len(files) else sys.maxsize
                if next_first <= following:
                    continue
                found, end, left_bytes = self._read_file(path, first, following, limit - len(lines), left_bytes)
                lines += found
                following = max(following, end)
                if len(lines) >= limit or left_bytes <= 0:
                    break
                if following < next_first < sys.maxsize:
                    text = f"lines {following} to {next_first - 1} were removed: the log has reached its limit"
                    lines.append({"rank": None, "stream": "system", "text": text, "date": ""})
                    following = next_first
        return LogPage(lines, following if lines else since_line)

    def end(self) -> int:
        """Return the number of the line after the last one, without decoding lines."""
        with self._lock:
            first, path = _files(self._folder)[-1]
            return self._read_file(path, first, since_line=sys.maxsize, limit=1, left_bytes=1)[1]

    def tail(self, max_bytes: int) -> list[LogLine]:
        """Return the lines in the last ``max_bytes`` bytes, or the last line if it is longer."""
        wanted = max_bytes
        while True:
            content, is_whole = self._last_bytes(wanted)
            # The last piece is empty or an unfinished line, and the first line may have lost its beginning.
            lines = content.split(b"\n")[0 if is_whole else 1 : -1]
            if not lines and not is_whole and wanted > _LONGEST_LINE_BYTES:
                lines = [content[-max_bytes:]]
            if lines or is_whole:
                return [_decode(line) for line in lines]
            wanted *= 2

    def _last_bytes(self, wanted: int) -> tuple[bytes, bool]:
        """Return the end of the log, and whether this is all of it."""
        content = b""
        for _, path in reversed(_files(self._folder)):
            with contextlib.suppress(OSError), open_at_once(path) as file:
                left = wanted - len(content)
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - left))
                content = file.read(left) + content
                if size > left:
                    return content, False
        return content, True

    def _read_file(
        self, path: Path, first: int, since_line: int, limit: int, left_bytes: int
    ) -> tuple[list[LogLine], int, int]:
        """Read lines of one file; return them, the number of the line after them, and the bytes left of the page."""
        marks = self._marks.setdefault(path.name, [(first, 0)])
        number, offset = marks[max(bisect_right(marks, (since_line, sys.maxsize)) - 1, 0)]
        lines: list[LogLine] = []
        with contextlib.suppress(OSError), open_at_once(path) as file:
            file.seek(offset)
            while len(lines) < limit and left_bytes > 0:
                raw = file.readline(_LONGEST_LINE_BYTES)
                if not raw.endswith(b"\n") and len(raw) < _LONGEST_LINE_BYTES:
                    break
                if number >= since_line:
                    lines.append(_decode(raw))
                    left_bytes -= len(raw)
                number, offset = number + 1, offset + len(raw)
                if number - marks[-1][0] >= _INDEX_STEP:
                    marks.append((number, offset))
        return lines, number, left_bytes


def log_limit_bytes() -> int:
    """Return the largest size of a run's log in bytes, from ``MLBENCH_LOG_LIMIT_MB``.

    Raises:
        ConfigurationError: The variable is not a positive number.
    """
    text = os.environ.get("MLBENCH_LOG_LIMIT_MB", "")
    try:
        limit = float(text or DEFAULT_LIMIT_MB)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise ConfigurationError(f"MLBENCH_LOG_LIMIT_MB must be a positive number of MiB, not {text!r}")
    return int(limit * 2**20)


def last_file(folder: Path) -> Path:
    """Return the file to which the next line belongs."""
    return _files(folder)[-1][1]


def _files(folder: Path) -> list[tuple[int, Path]]:
    """Return the files of a log with the numbers of their first lines, in order."""
    found = [(0, folder / _FIRST)]
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            later = _LATER.fullmatch(name)
            if later is not None:
                found.append((int(later[1]), folder / name))
    return sorted(found)


def _line(rank: int | None, stream: str, text: str) -> bytes:
    date = datetime.now(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    content = {"rank": rank, "stream": stream, "text": text, "date": date}
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _decode(raw: bytes) -> LogLine:
    """Read a line of a log; keep a line of another format as text, because workers may write into the file."""
    text = raw.decode("utf-8", "replace")
    try:
        line: Any = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    fields: dict[str, Any] = line if isinstance(line, dict) else {}
    rank = fields.get("rank")
    words = [word for word in map(fields.get, ("stream", "text", "date")) if isinstance(word, str)]
    if len(words) < 3 or not isinstance(rank, int | None):
        return {"rank": None, "stream": "system", "text": text.rstrip(), "date": ""}
    # JSON can escape half of a surrogate pair, which the answer to a request cannot hold.
    stream, said, date = (word.encode("utf-8", "replace").decode() for word in words)
    return {"rank": rank, "stream": stream, "text": said, "date": date}
