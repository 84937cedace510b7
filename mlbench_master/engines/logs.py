"""The log of a run: files of JSON lines of limited size.

The supervisor writes them, and the master reads them.

The first file is ``log.jsonl``. When it is full, ``log.N.jsonl`` follows, where N is the number of
its first line. Of all files, the first one and the latest ones are kept, so the log has the
beginning and the end of the run, and line numbers stay valid. Its imports are light, because the
supervisor has to start quickly.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from datetime import datetime, timezone
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from mlbench_core.errors import ConfigurationError
from mlbench_master.engines.interface import EVERY_LINE, LogFilter, LogLine, LogPage, NumberedLine

__all__ = [
    "DEFAULT_LIMIT_MB",
    "DROPPING",
    "LogReader",
    "LogWriter",
    "append_log",
    "dropping_problem",
    "last_file",
    "log_limit_bytes",
    "open_at_once",
    "readable",
    "readable_line",
]

DEFAULT_LIMIT_MB = 64
"""Largest size of a run's log in MiB, unless ``MLBENCH_LOG_LIMIT_MB`` sets another one."""

DROPPING = "lines of output are dropped, because the log cannot be written: is the disk full?"
"""A sentence for the status of a run while lines of its log are dropped."""

_FIRST = "log.jsonl"
_LATER = re.compile(r"log\.(\d+)\.jsonl")
_DROPPING_MARK = "dropping"
# The first file and at most seven later ones.
_FILES = 8
# An answer to a request has at most about this size, whatever the length of the lines.
_PAGE_BYTES = 2**20
# A search ends after this time, and its reader continues it.
_SEARCH_S = 1.0
# The writer's lines are shorter, but a worker may write into the file.
_CHUNK_BYTES = 2**18
# The beginning of a line as the writer writes it.
_HEAD = re.compile(rb'\{"rank": (null|[0-9]{1,9}), "stream": "([a-z]+)", ')
_USUAL_LINE = re.compile(
    _HEAD.pattern + rb'"text": "([^"\\\x00-\x1f]*)", "date": "([0-9T:.Z-]*)"\}'
)
# Colors and the like, titles of windows (the bell at their end is unreadable, see below), and short
# sequences.
_ESCAPES = re.compile(
    "\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b\ufffd]*(?:[\x07\ufffd]|\x1b\\\\)|[ -/]*[0-Z\\\\^-~])"
)
# Control characters but tabs, separators of lines, and marks that turn the direction of text.
_UNSEEN = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")
# JSON needs six bytes for each of these characters.
_UNREADABLE = re.compile("[\x00-\x07\x0b\x0e-\x1a\x1c-\x1f\ufffd]+")


def readable(raw: bytes) -> str:
    """Decode output without control characters.

    Each sequence of them and of undecodable bytes becomes one replacement character. A worker may
    write binary data, and the log must not become larger than that.

    Example:
        >>> len(readable(bytes([0, 1, 255, 254]) * 1000))
        1
    """
    return _UNREADABLE.sub("\ufffd", raw.decode("utf-8", "replace"))


def readable_line(raw: bytes) -> str:
    r"""Decode a line of output as a terminal would show it.

    Example:
        >>> readable_line(b"10%\r20%\r\n")
        '20%'
    """
    # A progress bar overwrites itself with carriage returns: log only its last state.
    return readable(raw.rstrip(b"\r\n").rpartition(b"\r")[2])


def dropping_problem(folder: Path) -> str:
    """Return :data:`DROPPING` while lines of a run's log are dropped; empty otherwise."""
    if not (folder / _DROPPING_MARK).exists():
        return ""
    return DROPPING


def append_log(path: Path, rank: int | None, stream: str, text: str) -> None:
    """Add one line to a file, in one write, so that lines of several processes do not mix."""
    with open(path, "ab", buffering=0, opener=_at_once) as file:
        file.write(_line(rank, stream, text))


def open_at_once(path: Path) -> IO[bytes]:
    """Open a file for reading, without waiting if it is a pipe."""
    # A worker can make a pipe of this name, which must not block the master.
    return open(path, "rb", opener=_at_once)


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o600)


class LogWriter:
    """The writer of a run's log, which several threads may use.

    An error of the disk does not reach the caller: workers must not die because their log cannot be
    written. Lines are dropped until the disk accepts lines again; then a line says how many are
    missing.

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
        # The number of the first line of the current file. The log of a run that goes on may have
        # several files.
        self._first, self._path = _files(folder)[-1]
        self._descriptor: int | None = None
        self._gap = 0  # lines dropped since the last line that was written
        self._dropping_mark = folder / _DROPPING_MARK
        self._lock = threading.Lock()

    def write(self, rank: int | None, stream: str, text: str, date: str | None = None) -> None:
        """Add a line, or drop it if the disk does not accept it.

        Without a date, the line gets the present one.
        """
        with self._lock:
            try:
                line = _line(rank, stream, text, date)
                if self._gap:
                    lost = f"{self._gap} lines were dropped here: {self.problem}"
                    # In one piece: a short mark alone would fit again and again into the rest of a
                    # block.
                    self._append(_line(None, "system", lost) + line)
                    self._gap = 0
                    self._dropping_mark.unlink(missing_ok=True)
                else:
                    self._append(line)
            except OSError as error:
                self._gap += 1
                self.dropped += 1
                self.problem = f"{error.strerror or error}: {self._path}"
                # An empty file needs no block of a full disk.
                with contextlib.suppress(OSError):
                    self._dropping_mark.touch()

    def close(self) -> None:
        """Close the file until the next line."""
        # A process with many logs cannot keep all of them open.
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _append(self, content: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        if self._descriptor is None:
            self._descriptor = _at_once(str(self._path), flags)
        # Asked each time, because the master may have added a note to the same file.
        size = os.fstat(self._descriptor).st_size
        # An empty file takes a line of any length.
        if size and size + len(content) > self._file_bytes:
            os.close(self._descriptor)
            self._descriptor, size = None, 0
            # The file is counted, because the master adds notes to it, too.
            lines = 0
            with open_at_once(self._path) as file:
                while block := file.read(_PAGE_BYTES):
                    lines += block.count(b"\n")
            self._first += lines
            self._path = self._folder / f"log.{self._first}.jsonl"
            self._descriptor = _at_once(str(self._path), flags)
            # The first file has the beginning of the run, and stays. Of the others, the newest
            # stay.
            for _, path in _files(self._folder)[1 : 1 - _FILES]:
                path.unlink(missing_ok=True)
        if os.write(self._descriptor, content) < len(content):
            # A disk that becomes full takes a part of the line, and the next line would follow on
            # the same line.
            os.ftruncate(self._descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Chunk(NamedTuple):
    """Whole lines of one file that are read at once.

    Attributes:
        first: Number of the first line.
        end: Number of the line after the last one.
        path: The file; None for lines that were removed.
        offset: Place in the file.
        size: Number of bytes.
    """

    first: int
    end: int
    path: Path | None
    offset: int = 0
    size: int = 0


class LogReader:
    """A reader of a growing log, which reads from any line in both directions.

    No read scans the whole log. Lines are found through an index of chunks of 256 KiB. To build it,
    newlines are counted and no line is decoded.

    Args:
        folder: Folder of the run, which may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        # By the name of the file; the chunk that still grows is not among them.
        self._full: dict[str, list[_Chunk]] = {}

    def read(
        self,
        since_line: int,
        limit: int,
        before_line: int | None = None,
        wanted: LogFilter = EVERY_LINE,
    ) -> LogPage:
        """Read lines, without one that is still being written.

        The arguments are those of :class:`LogRange`. A page has at most about 1 MiB of lines, and
        the search for them ends after about a second. For lines whose file was removed, one line of
        the master says so.
        """
        chunks = self._chunks()
        before = max(_end(chunks), since_line)
        position = since_line
        # A page before a line is read from its end, because it has the last lines of the range.
        backwards = before_line is not None
        if before_line is not None:
            before = position = max(min(before_line, before), since_line)
        select = _Selection(wanted)
        selected: list[NumberedLine] = []
        matches, left_bytes = 0, _PAGE_BYTES
        deadline = time.monotonic() + _SEARCH_S
        for chunk in _overlapping(chunks, since_line, before, backwards):
            for number, end, raw in select.candidates(chunk, since_line, before, backwards):
                line = select.decode(raw)
                if line is None:
                    continue
                matches += 1
                if limit:
                    selected.append({"line": number, **line})
                    left_bytes -= len(raw)
                    position = end
                    if backwards:
                        position = number
                    if len(selected) >= limit or left_bytes <= 0:
                        return _page(selected, since_line, before, position, matches, backwards)
            # No other line of this chunk is wanted, so the next read begins behind it.
            if backwards:
                position = max(chunk.first, since_line)
            else:
                position = min(chunk.end, before)
            if time.monotonic() > deadline:
                break
        return _page(selected, since_line, before, position, matches, backwards)

    def end(self) -> int:
        """Return the number of the line after the last one, without decoding lines."""
        return _end(self._chunks())

    def _chunks(self) -> list[_Chunk]:
        """Return the chunks of all files in order, and one for each range of removed lines."""
        chunks: list[_Chunk] = []
        with self._lock:
            files = _files(self._folder)
            # Also forgets the files that the writer has removed.
            self._full = {path.name: self._full.get(path.name, []) for _, path in files}
            for position, (first, path) in enumerate(files):
                end = _end(chunks)
                if end < first:
                    chunks.append(_Chunk(end, first, None))
                chunks += self._chunks_of(path, first, position + 1 < len(files))
        return chunks

    def _chunks_of(self, path: Path, first: int, is_complete: bool) -> list[_Chunk]:
        full = self._full[path.name]
        number, offset = first, 0
        if full:
            number, offset = full[-1].end, full[-1].offset + full[-1].size
        with contextlib.suppress(OSError), open_at_once(path) as file:
            while True:
                file.seek(offset)
                content = file.read(_CHUNK_BYTES)
                size = content.rfind(b"\n") + 1
                if not size and len(content) < _CHUNK_BYTES:
                    break
                # A line that is longer than a chunk counts as several lines.
                end = number + max(content.count(b"\n"), 1)
                chunk = _Chunk(number, end, path, offset, size or len(content))
                if len(content) < _CHUNK_BYTES and not is_complete:
                    return [*full, chunk]
                full.append(chunk)
                number, offset = chunk.end, offset + chunk.size
        return full[:]

    def tail(self, max_bytes: int) -> list[LogLine]:
        """Return the lines in the last ``max_bytes`` bytes, or the last line if it is longer."""
        wanted = max_bytes
        while True:
            content, is_whole = self._last_bytes(wanted)
            # The last piece is empty or an unfinished line.
            lines = content.split(b"\n")[:-1]
            if not is_whole:
                # The first line may have lost its beginning.
                del lines[:1]
                if not lines and wanted > _CHUNK_BYTES:
                    lines = [content[-max_bytes:]]
            if lines or is_whole:
                return list(map(_decode, lines))
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


class _Selection:
    """The lines that pass a filter, most others without being decoded."""

    def __init__(self, wanted: LogFilter) -> None:
        self._wanted = wanted
        # As they stand in the bytes of a line.
        self._rank: bytes | None = None
        if wanted.rank is not None:
            self._rank = str(wanted.rank).replace("master", "null").encode()
        self._stream: bytes | None = None
        if wanted.stream is not None:
            self._stream = wanted.stream.encode()
        self._search = b""
        search = wanted.search
        # Other texts may look different in JSON.
        if search.isascii() and search.isprintable() and not {'"', "\\"} & set(search):
            self._search = search.lower().encode()

    def candidates(
        self, chunk: _Chunk, since_line: int, before_line: int, backwards: bool
    ) -> Iterator[tuple[int, int, bytes]]:
        """Yield lines of a chunk that may pass: number, number of the next line, and bytes."""
        first, end = max(chunk.first, since_line), min(chunk.end, before_line)
        if chunk.path is None:
            text = f"lines {first} to {end - 1} were removed: the log has reached its limit"
            yield first, end, _line(None, "system", text, date="")
            return
        content = _content(chunk)
        if not self._may_have(content):
            return
        texts = content.split(b"\n")[first - chunk.first : end - chunk.first]
        lines = list(enumerate(texts, first))
        if backwards:
            lines.reverse()
        for number, raw in lines:
            if self._may_pass(raw):
                yield number, number + 1, raw

    def decode(self, raw: bytes) -> LogLine | None:
        """Decode a line; return None if it does not pass."""
        line = _decode(raw)
        # The bytes may look right although the line is not: a field may have the searched text.
        if not self._wanted.matches(line):
            return None
        return line

    def _may_have(self, content: bytes) -> bool:
        # An escape of JSON may mean any character, or an escape sequence in the middle of the text.
        return not self._search or self._search in content.lower() or b"\\u" in content

    def _may_pass(self, raw: bytes) -> bool:
        if not self._may_have(raw):
            return False
        if self._rank is None and self._stream is None:
            return True
        head = _HEAD.match(raw)
        return head is None or (self._rank in (None, head[1]) and self._stream in (None, head[2]))


def _overlapping(
    chunks: list[_Chunk], since_line: int, before_line: int, backwards: bool
) -> Iterator[_Chunk]:
    """Yield the chunks with lines of a range, the last one first if ``backwards`` is true."""
    overlapping = chunks[bisect_right(chunks, since_line, key=attrgetter("end")) :]
    if backwards:
        overlapping.reverse()
    for chunk in overlapping:
        if chunk.first < before_line:
            yield chunk


def _end(chunks: list[_Chunk]) -> int:
    if not chunks:
        return 0
    return chunks[-1].end


def _content(chunk: _Chunk) -> bytes:
    """Return the bytes of a chunk; none if its file was removed in the meantime."""
    assert chunk.path is not None
    with contextlib.suppress(OSError), open_at_once(chunk.path) as file:
        file.seek(chunk.offset)
        return file.read(chunk.size)
    return b""


def _page(
    lines: list[NumberedLine],
    since_line: int,
    before_line: int,
    position: int,
    matches: int,
    backwards: bool,
) -> LogPage:
    if backwards:
        return LogPage(lines[::-1], before_line, position, matches)
    return LogPage(lines, position, since_line, matches)


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
        raise ConfigurationError(
            f"MLBENCH_LOG_LIMIT_MB must be a positive number of MiB, not {text!r}"
        )
    return int(limit * 2**20)


def last_file(folder: Path) -> Path:
    """Return the file to which the next line belongs."""
    return _files(folder)[-1][1]


def _files(folder: Path) -> list[tuple[int, Path]]:
    """Return the files of a log with the numbers of their first lines, in order."""
    files = [(0, folder / _FIRST)]
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            later = _LATER.fullmatch(name)
            if later is not None:
                files.append((int(later[1]), folder / name))
    return sorted(files)


def _line(rank: int | None, stream: str, text: str, date: str | None = None) -> bytes:
    if date is None:
        now = datetime.now(timezone.utc).replace(tzinfo=None)
        date = f"{now.isoformat(timespec='microseconds')}Z"
    content = {"rank": rank, "stream": stream, "text": text, "date": date}
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _decode(raw: bytes) -> LogLine:
    """Read a line of a log; keep a line of another format as text."""
    usual = _USUAL_LINE.fullmatch(raw)
    if usual is not None:  # several times as fast as JSON
        number, name, content, time_of_line = usual.groups()
        worker = None
        if number != b"null":
            worker = int(number)
        return {
            "rank": worker,
            "stream": name.decode(),
            "text": _plain(content.decode("utf-8", "replace")),
            "date": time_of_line.decode(),
        }
    # Workers may write into the file.
    text = raw.decode("utf-8", "replace")
    try:
        line: Any = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    fields: dict[str, Any] = {}
    if isinstance(line, dict):
        fields = line
    rank = fields.get("rank")
    words = []
    for key in ("stream", "text", "date"):
        if isinstance(fields.get(key), str):
            words.append(fields[key])
    if len(words) < 3 or not isinstance(rank, int | None):
        return {"rank": None, "stream": "system", "text": _plain(text.rstrip()), "date": ""}
    stream, text, date = map(_plain, words)
    return {"rank": rank, "stream": stream, "text": text, "date": date}


def _plain(text: str) -> str:
    """Remove escape sequences of terminals, and replace control characters but tabs."""
    if text.isprintable():
        return text
    # JSON can escape half of a surrogate pair, which the answer to a request cannot hold.
    text = text.encode("utf-8", "replace").decode()
    return _UNSEEN.sub("\ufffd", _ESCAPES.sub("", text))
