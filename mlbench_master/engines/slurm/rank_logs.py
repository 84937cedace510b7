"""Merge the files with the output of each worker into the log of a run.

Slurm writes two files per worker, ``logs/<rank>.out`` and ``logs/<rank>.err``, and its own messages
to ``logs/job.out``. The master reads them from time to time, and each line
gets the date at which it was read. ``merged.json`` has the place up to which each file has been
read, so that the next master goes on there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from mlbench_master.engines.error_search import ErrorSearch
from mlbench_master.engines.logs import LogWriter, open_at_once, readable, readable_line
from mlbench_master.engines.supervisor.supervise import write_json

__all__ = ["RankLogs"]

_OFFSETS = "merged.json"
# Longer lines are divided, as by the supervisor of local runs.
_MAX_LINE_BYTES = 16_384
# Of each file. The rest waits, so that much output does not keep the master from its other work.
_BYTES_PER_CALL = 2**20
_TAIL_BYTES = 65_536
_OFFSETS_BYTES = 2**20


class RankLogs:
    """The output of the workers of one run.

    Args:
        folder: The run's folder.
        limit_bytes: Largest size of the merged log.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._writer: LogWriter | None = None
        self._offsets: dict[str, int] | None = None
        self._lock = threading.Lock()  # a request that stops the run also collects its last lines

    def note(self, text: str) -> None:
        """Add a line of the master."""
        with self._lock:
            writer = self._open()
            writer.write(None, "system", text)
            writer.close()

    def collect(self, *, at_end: bool = False) -> None:
        """Move new lines to the merged log.

        Args:
            at_end: True to read all of it, with last lines that do not end with a line break.
        """
        with self._lock:
            offsets = self._read_offsets()
            writer = self._open()
            while self._collect_once(offsets, writer, at_end):
                if not at_end:
                    break
            writer.close()

    def said(self, rank: int, returncode: int) -> str:
        """Return the line in which a worker says why it ended, see :meth:`ErrorSearch.said`."""
        search = ErrorSearch()
        for line in self._tail(f"{rank}.err"):
            search.add(line)
        return search.said(returncode)

    def job_lines(self) -> list[str]:
        """Return the last messages of the engine and of the job's script."""
        return self._tail("job.out")

    def _tail(self, name: str) -> list[str]:
        with contextlib.suppress(OSError), open_at_once(self._folder / "logs" / name) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = readable(file.read(_TAIL_BYTES)).splitlines()
            return list(filter(str.strip, lines))
        return []

    def _collect_once(self, offsets: dict[str, int], writer: LogWriter, at_end: bool) -> bool:
        """Read a part of each file that has grown; return whether there was one."""
        grown = False
        for name, size in self._files():
            rank, stream = _source(name)
            offset = offsets.get(name, 0)
            if stream is None or size <= offset:
                continue
            with contextlib.suppress(OSError), open_at_once(self._folder / "logs" / name) as file:
                file.seek(offset)
                content = file.read(_BYTES_PER_CALL)
                # Otherwise the rest of the last line follows in the next part.
                is_last_part = at_end and len(content) < _BYTES_PER_CALL
                for line in _lines(content, keep_rest=is_last_part):
                    writer.write(rank, stream, readable_line(line))
                    offset += len(line)
            grown = grown or offset > offsets.get(name, 0)
            offsets[name] = offset
        if grown:
            # A full disk repeats lines after a restart of the master, which is better than to lose
            # them.
            with contextlib.suppress(OSError):
                write_json(self._folder / _OFFSETS, offsets)
        return grown

    def _files(self) -> list[tuple[str, int]]:
        """Return the names and the sizes of the files, in order."""
        with contextlib.suppress(OSError), os.scandir(self._folder / "logs") as entries:
            files = []
            for entry in entries:
                # A worker can make a link or a pipe there.
                if entry.is_file(follow_symlinks=False):
                    files.append((entry.name, entry.stat().st_size))
            return sorted(files)
        return []

    def _open(self) -> LogWriter:
        if self._writer is None:
            self._writer = LogWriter(self._folder, self._limit_bytes)
        return self._writer

    def _read_offsets(self) -> dict[str, int]:
        if self._offsets is None:
            self._offsets = {}
            with (
                contextlib.suppress(OSError, ValueError, RecursionError),
                open_at_once(self._folder / _OFFSETS) as file,
            ):
                content = json.loads(file.read(_OFFSETS_BYTES))
                # A worker can write this file, too.
                if isinstance(content, dict):
                    for name, offset in content.items():
                        if type(offset) is int and offset >= 0:
                            self._offsets[name] = offset
        return self._offsets


def _source(name: str) -> tuple[int | None, str | None]:
    """Return the rank and the stream of a file; without a stream, it does not hold output.

    Example:
        >>> _source("12.err"), _source("job.out"), _source("x.out")
        ((12, 'stderr'), (None, 'system'), (None, None))
    """
    stem, _, ending = name.rpartition(".")
    if name == "job.out":
        return None, "system"
    if not (stem.isascii() and stem.isdecimal()) or ending not in ("out", "err"):
        return None, None
    return int(stem), f"std{ending}"


def _lines(content: bytes, keep_rest: bool) -> Iterator[bytes]:
    """Divide bytes into lines.

    A rest without a line break is left out, unless ``keep_rest`` is true or it is long.
    """
    # Not splitlines(), which also divides at a carriage return.
    for line in io.BytesIO(content):
        while len(line) > _MAX_LINE_BYTES:
            yield line[:_MAX_LINE_BYTES]
            line = line[_MAX_LINE_BYTES:]
        if line.endswith(b"\n") or (line and keep_rest):
            yield line
