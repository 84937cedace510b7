"""Find the files of a data set, plain or compressed, and read them.

The module also creates names for files that are derived from them.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import html
import itertools
import json
import lzma
import re
import tokenize
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from mlbench_core import files
from mlbench_core.errors import DatasetError

__all__ = [
    "COMPRESSIONS",
    "MOST_LINE_BYTES",
    "count_lines",
    "digest_texts",
    "find_file",
    "load_array",
    "open_file",
    "read_lines",
]

_SEGMENT = re.compile(r"<seg\b[^>]*>(.*)</seg>")

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

MOST_LINE_BYTES = 64 << 20
"""Longest line of a text. A small compressed file can expand to a line that fills the memory."""

COMPRESSIONS = ("", *_OPENERS)
"""The endings of files that :func:`open_file` reads; the first one is that of plain files."""


def find_file(folders: Iterable[Path], names: Iterable[str]) -> Path | None:
    """Return the path of the first file that exists, plain or compressed.

    Args:
        folders: Folders to search, in this order.
        names: Names to look for in each folder, in this order, without the ending of a compression.

    Returns:
        Its path, or None.
    """
    for folder, name, ending in itertools.product(folders, names, COMPRESSIONS):
        path = folder / (name + ending)
        if path.is_file():
            return path
    return None


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading in binary mode.

    The content is decompressed if the name ends in ``.gz``, ``.bz2`` or ``.xz``.

    Args:
        path: The file.

    Yields:
        The open file.

    Raises:
        DatasetError: The file cannot be read or decompressed. Damage in the middle of a file is
            found only when it is read.
    """
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield file
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        # Errors of the system have a number. For damaged data, the decompressors raise OSErrors
        # without one.
        if isinstance(error, OSError) and error.errno is not None:
            raise DatasetError(f"{path} cannot be read: {error}") from error
        raise DatasetError(f"{path} is damaged: {error}; delete it and get it again") from error


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text without their ends; for an ``.sgm`` file, its segments.

    Only a line feed ends a line, with or without one carriage return before it. Texts from the web
    contain other characters that Python treats as line ends. If they ended a line, all following
    lines would no longer match those of the other language. A byte order mark at the start of the
    file is ignored.

    Args:
        path: The file, plain or compressed.

    Yields:
        The lines, or the texts of the segments.

    Raises:
        DatasetError: The file cannot be decompressed, or a line is not valid UTF-8 or too long.
    """
    with open_file(path) as file:
        lines = _decoded(path, file)
        if ".sgm" not in path.suffixes[-2:]:
            yield from lines
            return
        for line in lines:
            if match := _SEGMENT.search(line):
                yield html.unescape(match[1]).strip()


def _decoded(path: Path, file: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a file that is open in binary mode, which splits at line feeds only."""
    for number, line in enumerate(iter(partial(file.readline, MOST_LINE_BYTES), b""), 1):
        if len(line) == MOST_LINE_BYTES:
            raise DatasetError(
                f"{path}: line {number} is longer than {MOST_LINE_BYTES >> 20} MiB: it is not text"
            )
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            yield line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise DatasetError(f"{path} is not UTF-8 text: line {number}: {error}") from error


def load_array(path: Path, *, mapped: bool) -> np.ndarray:
    """Read an array of NumPy's format ``.npy``.

    Args:
        path: The file.
        mapped: If True, map the file into memory, read-only, instead of reading it.

    Returns:
        The array.

    Raises:
        DatasetError: The file is damaged or cannot be read.
    """
    try:
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error
    # The header is parsed as Python text, and its shape may promise any size. The messages of NumPy
    # do not help.
    except MemoryError as error:
        raise DatasetError(
            f"{path} is damaged, or too large for the memory of this machine"
        ) from error
    except (ValueError, EOFError, SyntaxError, TypeError, tokenize.TokenError) as error:
        raise DatasetError(f"{path} is damaged: it cannot be read as an array") from error


def count_lines(path: Path) -> int:
    """Return the number of lines, or of segments, of a text."""
    return sum(1 for _ in read_lines(path))


def digest_texts(paths: Iterable[Path], settings: list[Any]) -> str:
    """Return a digest of settings and texts, as a name for files derived from them.

    Args:
        paths: The texts.
        settings: All settings that determine the derived files, as values that JSON can represent.

    Returns:
        24 hexadecimal digits.
    """
    content = list(settings)
    for path in paths:
        status = path.stat()
        # Size and modification time show that a text has changed, without reading it.
        content.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
    return files.digest(json.dumps(content, sort_keys=True).encode())[:24]
