"""Find the files of a data set on the disk, and read them, compressed or not."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import itertools
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from mlbench_core.errors import DatasetError

__all__ = ["COMPRESSIONS", "find_file", "open_file"]

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
