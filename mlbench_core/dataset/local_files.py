"""Find the files of a data set on the disk, read them, compressed or not, and name the files derived from them."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import html
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from mlbench_core import files
from mlbench_core.errors import DatasetError

__all__ = ["COMPRESSIONS", "count_lines", "digest_texts", "find_file", "open_file", "read_lines"]

_SEGMENT = re.compile(r"<seg\b[^>]*>(.*)</seg>")

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

COMPRESSIONS = ("", *_OPENERS)
"""The endings of files that :func:`open_file` reads, no compression first."""


def find_file(folders: Iterable[Path], names: Iterable[str]) -> Path | None:
    """Return the first existing file, plain or compressed.

    Args:
        folders: Folders to search, the first choice first.
        names: Names that the file may have without the ending of a compression, the first choice first.

    Returns:
        Its path, or None.
    """
    candidates = (folder / (name + ending) for folder, name, ending in itertools.product(folders, names, COMPRESSIONS))
    return next((path for path in candidates if path.is_file()), None)


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading in binary mode, decompressed if its name ends in ``.gz``, ``.bz2`` or ``.xz``.

    Args:
        path: The file.

    Yields:
        The open file.

    Raises:
        DatasetError: It cannot be decompressed or read. Damage is often found only in the middle of a file.
    """
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield file
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        # Only an error of the system has a number; the decompressors raise plain OSErrors for damaged data.
        if isinstance(error, OSError) and error.errno is not None:
            raise DatasetError(f"{path} cannot be read: {error}") from error
        raise DatasetError(f"{path} is damaged: {error}; delete it and get it again") from error


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text without their ends; for an ``.sgm`` file, its segments.

    Only a line feed ends a line. Texts from the web contain other characters that might end one; they would shift all
    following lines against the other language.

    Raises:
        DatasetError: The file cannot be decompressed or is not valid UTF-8.
    """
    try:
        with open_file(path) as file:
            # Decoded line by line after splitting at line feeds: text mode would end lines at carriage returns too.
            lines = (line.decode("utf-8").removesuffix("\n") for line in file)
            if path.name.removesuffix(".gz").endswith(".sgm"):
                lines = (html.unescape(match[1]).strip() for line in lines if (match := _SEGMENT.search(line)))
            yield from lines
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8 text: {error}") from error


def count_lines(path: Path) -> int:
    """Return the number of lines, or of segments, of a text."""
    return sum(1 for _ in read_lines(path))


def digest_texts(paths: Iterable[Path], settings: list[Any]) -> str:
    """Return a name for files derived from texts: a digest of the settings, and of path, size and mtime of each text.

    Args:
        paths: The texts.
        settings: All settings that determine the derived files; JSON must be able to represent them.

    Returns:
        24 hexadecimal digits.
    """
    content = list(settings)
    for path in paths:
        status = path.stat()
        # The modification time and size detect a changed text without reading it.
        content.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
    return files.digest(json.dumps(content, sort_keys=True).encode())[:24]
