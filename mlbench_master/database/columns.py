"""Keep the numbers of long metrics in columns, which are read a hundred times as fast as rows.

The entries of a metric by date are cut into pages of ``PAGE`` entries. A full page is stored a
second time, packed, in the table ``metric_pages``. The rows stay the only source::

    rows     0 ........ 4095 | 4096 ........ 8191 | 8192 .... 9000
    pages    page 0          | page 1             | (not full: read from the rows)

An entry that arrives late, with a date before the end of the last page, belongs into a page. The
transaction that adds it deletes this page and the following ones, and they are packed again later.
So pages always agree with the rows, and losing them costs only time.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mlbench_master.dates import us_of

__all__ = ["PAGE", "Columns", "epoch_of", "number_of", "numbers_of"]

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

PAGE = 4096
"""Number of entries of a page: 128 KiB."""

# Little-endian on every machine, so that a database can move to another one.
_KINDS = ("<i8", "<i8", "<f8", "<f8")
# As mlbench_core.client.log_metrics sends it; to parse any JSON takes five times as long.
_USUAL = re.compile(r'\{"rank": \d{1,9}, "epoch": (\d{1,15}(?:\.\d{1,17})?)\}')


@dataclass(frozen=True)
class Columns:
    """Successive entries of one metric.

    Attributes:
        dates: Microseconds since 1970, as int64.
        ids: The ids of the rows, as int64.
        numbers: The values as float64; NaN for a value that is a text or not finite.
        epochs: The epochs in the metadata as float64; NaN for metadata without one.
    """

    dates: Integers
    ids: Integers
    numbers: Floats
    epochs: Floats

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of_rows(cls, rows: Sequence[Any]) -> Columns:
        """Make columns of rows of id, date, value and metadata."""
        # SQLite may hold any type in any column.
        if rows:
            ids, dates, values, metadata = zip(*rows, strict=True)
        else:
            ids = dates = values = metadata = ()
        # One look at each column is several times as fast as one at each value.
        if set(map(type, dates)) - {int}:
            dates = tuple(map(us_of, dates))
        numbers = None
        if set(map(type, values)) <= {str}:
            with contextlib.suppress(ValueError):
                numbers = np.array([*map(float, values)], np.float64)
        if numbers is None:
            # NumPy converts None to NaN.
            numbers = np.array([*map(number_of, values)], np.float64)
        numbers[~np.isfinite(numbers)] = math.nan
        epochs = np.array([*map(epoch_of, metadata)], np.float64)
        return cls(np.array(dates, np.int64), np.array(ids, np.int64), numbers, epochs)

    @classmethod
    def unpack(cls, page: bytes) -> Columns:
        """Return the columns that :meth:`pack` has packed."""
        dates, ids, numbers, epochs = np.frombuffer(page, "<i8").reshape(len(_KINDS), -1)
        return cls(dates, ids, numbers.view("<f8"), epochs.view("<f8"))

    @classmethod
    def join(cls, parts: Sequence[Columns]) -> Columns:
        """Return the columns of successive parts, at least one."""
        return cls(*map(np.concatenate, zip(*map(cls._all, parts), strict=True)))

    def _all(self) -> tuple[Any, ...]:
        return self.dates, self.ids, self.numbers, self.epochs

    def pack(self) -> bytes:
        """Return the columns as bytes, the same on every machine."""
        parts = []
        for column, kind in zip(self._all(), _KINDS, strict=True):
            parts.append(column.astype(kind).tobytes())
        return b"".join(parts)

    def at(self, indices: Any) -> Columns:
        """Return the columns of some entries.

        Args:
            indices: Indices, or a slice.
        """
        return Columns(*(column[indices] for column in self._all()))


def number_of(value: object) -> float | None:
    """Return the value of an entry as a number, or None if it is a text or not finite."""
    if not isinstance(value, str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    # JSON has neither infinity nor NaN.
    return number if math.isfinite(number) else None


def numbers_of(values: Iterable[object]) -> list[float]:
    """Return the finite numbers among the values of entries."""
    return [number for number in map(number_of, values) if number is not None]


def epoch_of(metadata: object) -> float:
    """Return the epoch of metadata such as ``{"rank": 0, "epoch": 2}``, NaN without one."""
    if not isinstance(metadata, str) or '"epoch"' not in metadata:
        return math.nan
    if usual := _USUAL.fullmatch(metadata):
        return float(usual[1])
    try:
        content = json.loads(metadata)
        if not isinstance(content, dict):
            return math.nan
        epoch = content.get("epoch")
        if isinstance(epoch, bool) or not isinstance(epoch, (int, float)):
            return math.nan
        # A whole number may be too large for a float.
        number = float(epoch)
    except (ValueError, OverflowError, RecursionError):
        return math.nan
    return number if math.isfinite(number) else math.nan
