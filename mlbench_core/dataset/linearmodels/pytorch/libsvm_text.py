"""Read LIBSVM text, ``label index:value index:value ...``, in chunks, and write it."""

from __future__ import annotations

import codecs
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlbench_core.dataset.local_files import MOST_LINE_BYTES, open_file
from mlbench_core.errors import DatasetError, DatasetNotFoundError, require

__all__ = ["Chunk", "TextShape", "format_rows", "line_of_row", "read_chunks", "scan"]

CHUNK_BYTES = 1 << 25  # decompressed text; the parsed rows take several times as much memory
_SHOWN_BYTES = 60  # of a wrong line


@dataclass(frozen=True)
class Chunk:
    """Some lines of a text, parsed.

    Attributes:
        features: ``scipy.sparse.csr_matrix`` of shape (rows, n_features).
        labels: Labels as they are in the text, float64.
        text_bytes: Length of the lines in bytes, decompressed.
    """

    features: Any
    labels: NDArray[np.float64]
    text_bytes: int


@dataclass(frozen=True)
class TextShape:
    """The size of a whole text.

    Attributes:
        n_rows: Number of rows.
        n_features: Largest index.
        n_values: Number of values in the text, without the zeros that it leaves out.
    """

    n_rows: int
    n_features: int
    n_values: int


def read_chunks(
    path: Path, *, n_features: int | None = None, dtype: str = "float32", zero_based: bool = False
) -> Iterator[Chunk]:
    """Parse a text with scikit-learn's reader in chunks, so that it may be larger than the memory.

    A line ends with a line feed, which a carriage return may precede. A byte order mark at the
    start is ignored. Values are rounded to the nearest number of the dtype.

    Args:
        path: The file, plain or compressed: ``.gz``, ``.bz2`` or ``.xz``.
        n_features: Number of columns; None takes the largest index of each chunk.
        dtype: Dtype of the values.
        zero_based: If True, indices count from 0; LIBSVM's count from 1.

    Yields:
        The chunks in the text's order.

    Raises:
        DatasetNotFoundError: The file does not exist.
        DatasetError: A line is wrong (the message gives its number, counted by line feeds), or the
            compressed file is damaged.
    """
    reader: Any = require("sklearn.datasets", "linear")

    def parse(text: bytes) -> tuple[Any, NDArray[np.float64]]:
        # The check below reports a number that overflows the dtype.
        with np.errstate(over="ignore"):
            features, labels = reader.load_svmlight_file(
                io.BytesIO(text), n_features=n_features, dtype=dtype, zero_based=zero_based
            )
        if not (np.isfinite(features.data).all() and np.isfinite(labels).all()):
            raise ValueError(f"a number is not finite in {dtype}")
        return features, labels.astype(np.float64)

    line = 1
    if not path.is_file():
        raise DatasetNotFoundError(f"the file {path} does not exist")
    with open_file(path) as file:
        # A read may end inside a line. Read the rest of this line too, because the parser needs
        # whole lines.
        while text := file.read(CHUNK_BYTES) + (rest := file.readline(MOST_LINE_BYTES)):
            if len(rest) == MOST_LINE_BYTES:
                raise DatasetError(
                    f"{path} has a line of more than {MOST_LINE_BYTES >> 20} MiB: it is not "
                    "LIBSVM text"
                )
            if line == 1:
                text = text.removeprefix(codecs.BOM_UTF8)
            try:
                features, labels = parse(text)
            except (ValueError, OverflowError):
                raise _wrong_line(path, line, text, parse) from None
            line += text.count(b"\n")
            if len(labels):
                yield Chunk(features, labels, len(text))


def _wrong_line(
    path: Path, first_line: int, text: bytes, parse: Callable[[bytes], Any]
) -> DatasetError:
    """Find the first line that cannot be parsed, by bisection, and describe its error."""
    # Split at line feeds only, as the parser does: `splitlines` would also split at lone carriage
    # returns.
    lines = text.split(b"\n")

    def failure(start: int, stop: int) -> Exception | None:
        try:
            parse(b"\n".join(lines[start:stop]))
        except (ValueError, OverflowError) as error:
            return error
        return None

    # Bisection needs few parses, even for a chunk with a wrong line at its end.
    low, high = 0, len(lines)
    while high - low > 1:
        middle = (low + high) // 2
        if failure(low, middle):
            high = middle
        else:
            low = middle
    shown = lines[low][:_SHOWN_BYTES].decode(errors="replace").strip()
    reason = str(failure(low, high))
    if b"\r" in lines[low].rstrip(b"\r"):
        reason = (
            f"it has a carriage return without a line feed, which does not end a line ({reason})"
        )
    return DatasetError(
        f"{path}, line {first_line + low}: {shown!r} is not "
        f"'label index:value index:value ...': {reason}"
    )


def line_of_row(path: Path, row: int) -> int:
    """Return the line of a row, for messages. Lines without a row are empty or comments.

    Args:
        path: The text.
        row: Position of the row, from 0.

    Returns:
        The number of its line, from 1.
    """
    with open_file(path) as file:
        numbers = (number for number, line in enumerate(file, 1) if line.partition(b"#")[0].split())
        return next(itertools.islice(numbers, row, None))


def scan(path: Path, *, zero_based: bool = False) -> TextShape:
    """Read a text once to determine its size.

    Args:
        path: The file.
        zero_based: As in :func:`read_chunks`.

    Returns:
        Its rows, columns and values.

    Raises:
        DatasetNotFoundError: The file does not exist.
        DatasetError: A line is wrong, or the file is damaged.
    """
    # Without `n_features`, the number of columns of a chunk is its own largest index.
    rows = features = values = 0
    for chunk in read_chunks(path, zero_based=zero_based):
        rows += chunk.features.shape[0]
        features = max(features, chunk.features.shape[1])
        values += chunk.features.nnz
    return TextShape(rows, features, values)


def format_rows(
    indptr: NDArray[Any], columns: NDArray[Any], values: NDArray[Any], labels: NDArray[Any]
) -> str:
    """Format compressed sparse rows as text.

    The text has enough digits to read back exactly the same numbers.

    Args:
        indptr: Start of each row, (rows + 1).
        columns: Columns, from 0; the text's indices are one more.
        values: The values, float32 or float64.
        labels: The rows' labels, float32 or float64.

    Returns:
        Lines, each ended by a newline.

    Example:
        >>> indptr, columns = np.array([0, 2]), np.array([0, 3])
        >>> format_rows(indptr, columns, np.array([0.5, 2.0], np.float32), np.array([-1.0]))
        '-1 1:0.5 4:2\\n'
    """
    digits, label_digits = _digits(values.dtype), _digits(labels.dtype)
    bounds, indices, numbers = indptr.tolist(), (columns + 1).tolist(), values.tolist()
    lines = []
    for row, label in enumerate(labels.tolist()):
        start, stop = bounds[row], bounds[row + 1]
        pairs = zip(indices[start:stop], numbers[start:stop], strict=True)
        words = [f"{index}:{number:.{digits}g}" for index, number in pairs]
        lines.append(" ".join([f"{label:.{label_digits}g}", *words]) + "\n")
    return "".join(lines)


def _digits(dtype: np.dtype) -> int:
    """Return the number of significant digits that restore every number of a dtype."""
    return 9 if dtype == np.float32 else 17
