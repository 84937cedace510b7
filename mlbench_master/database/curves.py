"""Thin the metrics of a run or a pod for charts, with the extremes kept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from mlbench_master.database.columns import Columns
from mlbench_master.database.store import Run, Store

__all__ = ["curves_json", "start_of", "thin"]

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def curves_json(
    store: Store, owner: str, start_us: int | None, names: Sequence[str], most: int
) -> Iterator[str]:
    """Yield the answer to ``GET /api/runs/{id}/curves/`` in pieces, each of one metric.

    Args:
        store: The database.
        owner: Owner of the metrics.
        start_us: Time 0 of the curves, in microseconds since 1970. By default it is the first date
            of the owner.
        names: The metrics to include; without one, the names and counts of all metrics, without
            their entries.
        most: Maximum number of points of a curve.

    Yields:
        Text of JSON. A metric of ``names`` without entries has a curve without points.
    """
    # Before everything else: the entries up to this id are in the answer, and later ones may be.
    last_id = store.last_id()
    if not names:
        counts = store.metric_counts([owner])
        curves = [{"name": name, "count": count} for (_, name), count in counts.items()]
        yield json.dumps({"curves": curves, "last_id": last_id})
        return
    separator = '{"curves": ['
    if start_us is None:
        start_us = store.first_date(owner)
    for name in dict.fromkeys(names):
        count = store.size(owner, name)
        steps, kept = thin(store.columns(owner, name), count, most)
        curve = {
            "name": name,
            "count": count,
            "time_s": ((kept.dates - start_us) / 1e6).tolist(),
            "epoch": _or_none(kept.epochs),
            "step": steps.tolist(),
            "value": _or_none(kept.numbers),
        }
        yield separator + json.dumps(curve, allow_nan=False)
        separator = ", "
    yield f'], "last_id": {last_id}}}'


def thin(parts: Iterable[Columns], count: int, most: int) -> tuple[Integers, Columns]:
    """Choose entries of a metric such that a chart of them looks like a chart of all entries.

    Without the first and the last place, ``most`` leaves room for b = floor((most - 2) / 2) groups.
    Entry i of n belongs to group floor(i * b / n). Of each group, the entries with the smallest and
    the largest number are kept, the earliest ones of equal numbers, or its first entry if it has no
    finite number. The first and the last entry are always kept (of one point, only the last). If
    there are at most ``most`` entries, all are kept.

    Args:
        parts: The entries, by date.
        count: Number of entries. Further entries, which arrived in the meantime, join the last
            group.
        most: Maximum number of entries to keep, at least 1.

    Returns:
        The numbers of the kept entries within the metric, from 0, and these entries.
    """
    groups = count if count <= most else (most - 2) // 2
    # The empty first parts serve a metric without entries.
    all_steps = [np.empty(0, np.int64)]
    all_kept = [Columns.of_rows([])]
    start = 0
    for part in parts:
        steps, kept = _kept(np.arange(start, start + len(part)), part, groups, count)
        all_steps.append(steps)
        all_kept.append(kept)
        start += len(part)
    # A group may be in several parts; its extremes are among the extremes of these parts.
    steps, kept = _kept(np.concatenate(all_steps), Columns.join(all_kept), groups, count)
    return steps[-most:], kept.at(slice(-most, None))


def _kept(steps: Integers, part: Columns, groups: int, count: int) -> tuple[Integers, Columns]:
    """Return the extremes of each group of a part, its first entry and its last one."""
    if not len(part):
        return steps, part
    ends = np.array([0, len(part) - 1])
    if groups <= 0:
        chosen = np.unique(ends)
        return steps[chosen], part.at(chosen)
    group = np.minimum(steps * groups // count, groups - 1)
    is_first = np.diff(group, prepend=-1) != 0
    firsts = np.flatnonzero(is_first)
    # The group of each entry, counted from 0 within this part.
    groups_here = np.cumsum(is_first) - 1
    indices = [ends]
    # fmin and fmax ignore NaN unless the group has nothing else.
    for extreme in (np.fmin, np.fmax):
        extremes = extreme.reduceat(part.numbers, firsts)
        equal = np.flatnonzero(part.numbers == extremes[groups_here])
        # A group without a finite number keeps its first entry: NaN equals nothing.
        at = firsts.copy()
        # Of several assignments to one index the last one counts, so the earliest entry comes last.
        at[groups_here[equal[::-1]]] = equal[::-1]
        indices.append(at)
    chosen = np.unique(np.concatenate(indices))
    return steps[chosen], part.at(chosen)


def start_of(run: Run) -> int:
    """Return the time 0 of a run's curves: its start, or its creation if it has not started."""
    # SQLite may hold any type in any column.
    for date in (run.started_at, run.created_at):
        if isinstance(date, int):
            return date
    return 0


def _or_none(column: np.ndarray[Any, np.dtype[np.float64]]) -> list[float | None]:
    numbers: list[float | None] = []
    for number in column.tolist():
        # JSON does not have NaN.
        if math.isnan(number):
            numbers.append(None)
        else:
            numbers.append(number)
    return numbers
