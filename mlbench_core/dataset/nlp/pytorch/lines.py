"""Read lines of text files, compressed or not, and name what is derived from them."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mlbench_core import files
from mlbench_core.dataset.local_files import open_file
from mlbench_core.errors import DatasetError

__all__ = ["count_lines", "digest_texts", "read_lines"]

_SEGMENT = re.compile(r"<seg\b[^>]*>(.*)</seg>")


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
