"""A part of large tables of cases, so that the normal suite takes minutes.

``make test-thorough`` sets ``MLBENCH_TEST_THOROUGH=1``, and runs every case. Otherwise each row and
each column of a table is tried, but not each pair of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest

THOROUGH = os.environ.get("MLBENCH_TEST_THOROUGH") == "1"
thorough = pytest.mark.skipif(not THOROUGH, reason="a part of make test-thorough")
"""The mark of a test that takes long, and repeats what quicker ones show."""

R = TypeVar("R")
C = TypeVar("C")


def some(cases: Iterable[C], count: int = 1) -> list[C]:
    """Return the first cases of a list, or all of them."""
    cases = list(cases)
    return cases if THOROUGH else cases[:count]


def pairs(rows: Iterable[R], columns: Sequence[C], each: int = 1) -> list[tuple[R, C]]:
    """Return pairs of a row and a column: each row with some columns in turn, or with all."""
    found = []
    for number, row in enumerate(rows):
        for position, column in enumerate(columns):
            if THOROUGH or (position - number * each) % len(columns) < each:
                found.append((row, column))
    return found


def examples(count: int) -> int:
    """Return on how many random cases to try a property: a third, but at least 10, or all."""
    return count if THOROUGH else min(count, max(10, count // 3))
