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
        counts = {name: count for (_, name), count in store.metric_counts([owner]).items()}
        yield json.dumps(
            {"curves": [{"name": n, "count": c} for n, c in counts.items()], "last_id": last_id}
        )
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
    kept = [(np.empty(0, np.int64), Columns.of_rows([]))]
    start = 0
    for part in parts:
        kept.append(_kept(np.arange(start, start + len(part)), part, groups, count))
        start += len(part)
    # A group may be in several parts, and the extremes of a group are those of the extremes of its
    # parts.
    whole = Columns.join([part for _, part in kept])
    steps, chosen = _kept(np.concatenate([steps for steps, _ in kept]), whole, groups, count)
    return steps[-most:], chosen.at(slice(-most, None))


def _kept(steps: Integers, part: Columns, groups: int, count: int) -> tuple[Integers, Columns]:
    """Return the extremes of each group of a part, its first entry and its last one."""
    ends = np.arange(len(part))[[0, -1] if len(part) else []]
    if groups <= 0 or not len(part):
        chosen = np.unique(ends)
        return steps[chosen], part.at(chosen)
    group = np.minimum(steps * groups // count, groups - 1)
    is_first = np.diff(group, prepend=-1) != 0
    firsts = np.flatnonzero(is_first)
    # Number of the group within the part, of each entry.
    place = np.cumsum(is_first) - 1
    indices = [ends]
    for extremes in (
        np.fmin.reduceat(part.numbers, firsts),
        np.fmax.reduceat(part.numbers, firsts),
    ):
        equal = np.flatnonzero(part.numbers == extremes[place])
        at = firsts.copy()
        # Of several assignments to one place the last one counts, so the earliest entry comes last.
        at[place[equal[::-1]]] = equal[::-1]
        indices.append(at)
    chosen = np.unique(np.concatenate(indices))
    return steps[chosen], part.at(chosen)


def start_of(run: Run) -> int:
    """Return the time 0 of a run's curves: its start, or its creation if it has not started."""
    # SQLite may hold any type in any column.
    return next((date for date in (run.started_at, run.created_at) if isinstance(date, int)), 0)


def _or_none(column: np.ndarray[Any, np.dtype[np.float64]]) -> list[float | None]:
    # JSON does not have NaN.
    return [None if math.isnan(number) else number for number in column.tolist()]
