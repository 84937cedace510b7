"""Read the file formats of published image data sets, without loading pickled code."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from mlbench_core import files
from mlbench_core.dataset.local_files import open_file
from mlbench_core.errors import DatasetError

__all__ = ["parse_cifar_binary", "parse_cifar_python", "parse_idx", "read_bytes"]

# A small compressed file can expand to more than the memory.
_MOST_BYTES = 1 << 30
_CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32


def read_bytes(path: Path, md5: str | None = None) -> bytes:
    """Return the content of a file, decompressed if it is compressed.

    Args:
        path: The file.
        md5: MD5 of the decompressed content; None if it is unknown.

    Returns:
        The content.

    Raises:
        DatasetError: The file cannot be decompressed or has another checksum.
    """
    with open_file(path) as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise DatasetError(
            f"{path} has more than {_MOST_BYTES >> 20} MiB, and no file of a known data set has"
        )
    if md5 is None:
        return content
    # The checksum is that of the content, so that it is valid for any compression.
    digest = files.digest(content, "md5")
    if digest != md5:
        raise DatasetError(
            f"{path} is damaged: the md5 of its content is {digest}, not {md5}; delete it and "
            "get it again"
        )
    return content


def parse_cifar_binary(path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Parse CIFAR-10's "binary version": records of one label byte and three planes of 32x32 bytes.

    Args:
        path: Path of the file, for messages.
        content: The records.

    Returns:
        Images, uint8 of shape (N, 3, 32, 32), and labels, int64 of shape (N,).

    Raises:
        DatasetError: The content is not a whole number of records, or a label is above 9.
    """
    if not content or len(content) % _CIFAR_RECORD_BYTES:
        raise DatasetError(
            f"{path} is damaged: {len(content)} bytes are not a whole number of records of "
            f"{_CIFAR_RECORD_BYTES} bytes"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, _CIFAR_RECORD_BYTES)
    return _images(path, records[:, 1:], records[:, 0])


def parse_cifar_python(path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Parse CIFAR-10's "python version": a pickle of a dictionary with an array and a list.

    The unpickler allows only plain containers, numbers, text and numpy arrays. It refuses every
    other class or function before it looks it up, so no code of the file runs.

    Args:
        path: Path of the file, for messages.
        content: The pickle.

    Returns:
        Images, uint8 of shape (N, 3, 32, 32), and labels, int64 of shape (N,).

    Raises:
        DatasetError: The pickle has other contents.
    """
    try:
        entries = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        # The keys are bytes in a pickle of Python 2, and text in one of Python 3.
        if b"data" in entries:
            rows, labels = np.asarray(entries[b"data"]), np.asarray(entries[b"labels"])
        else:
            rows, labels = np.asarray(entries["data"]), np.asarray(entries["labels"])
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from error
    # A damaged pickle may raise an exception of nearly any type.
    except Exception as error:
        raise DatasetError(
            f"{path} is damaged: {type(error).__name__}: {error}; delete it and get it again"
        ) from error
    if (
        rows.dtype != np.uint8
        or rows.ndim != 2
        or rows.shape != (len(labels), _CIFAR_RECORD_BYTES - 1)
    ):
        raise DatasetError(
            f"{path} is damaged: data is {rows.dtype} of shape {rows.shape} for {len(labels)} "
            "labels"
        )
    return _images(path, rows, labels)


def _images(path: Path, rows: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert rows of bytes to images."""
    if not len(labels):
        raise DatasetError(f"{path} is damaged: it has no images")
    if labels.dtype.kind not in "iu":
        raise DatasetError(f"{path} is damaged: its labels are {labels.dtype}, not integers")
    if labels.min() < 0 or labels.max() > 9:
        wrong = labels[(labels < 0) | (labels > 9)][0]
        raise DatasetError(f"{path} is damaged: a label is {wrong}, but classes go from 0 to 9")
    # Copy the rows, because a framework must not write to memory that belongs to an immutable bytes
    # object.
    images = np.ascontiguousarray(rows).reshape(-1, 3, 32, 32).copy()
    return images, labels.astype(np.int64)


def _encode(text: str, encoding: str) -> bytes:
    """Encode text as latin-1, which pickles of Python 2 need for bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise DatasetError(f"the pickle requests the encoding {encoding!r}, which no array needs")
    return text.encode("latin-1")


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that allows no code except the constructors of numpy's arrays."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the names that arrays need, and refuse everything else."""
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            # Return this numpy's function that rebuilds arrays, because its module depends on the
            # version.
            return np.zeros(1).__reduce__()[0]  # type: ignore[index]
        # These names rebuild arrays and can run nothing else.
        allowed = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _encode,
        }
        if (module, name) not in allowed:
            raise DatasetError(
                f"the pickle requests {module}.{name}, which no array needs; it was not loaded"
            )
        return allowed[module, name]


def parse_idx(path: Path, content: bytes, dimensions: int) -> np.ndarray:
    """Parse MNIST's idx format: big-endian sizes, then bytes.

    Args:
        path: Path of the file, for messages.
        content: The file, decompressed.
        dimensions: Required number of dimensions: 3 for images, 1 for labels.

    Returns:
        uint8 array with the sizes given in the file.

    Raises:
        DatasetError: The file is not in this format, or its length does not match its sizes.
    """
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes((0, 0, 8, dimensions)):
        raise DatasetError(
            f"{path} is damaged: it is not an idx file of bytes with {dimensions} dimensions"
        )
    shape = np.frombuffer(content, dtype=">u4", count=dimensions, offset=4).tolist()
    # A truncated download has a correct header but too few bytes.
    if len(content) - start != int(np.prod(shape)):
        raise DatasetError(f"{path} is damaged: {len(content) - start} bytes for the sizes {shape}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()
