"""Thin the metrics of a run or a pod for charts, with the extremes kept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlbench_master.store import Point, Run, Store

__all__ = ["curves_json", "number_of", "start_of", "thin"]


def curves_json(store: Store, owner: str, start_us: int | None, names: Sequence[str], most: int) -> Iterator[str]:
    """Yield the answer to ``GET /api/runs/{id}/curves/`` in pieces, each of one metric.

    Args:
        store: The database.
        owner: Owner of the metrics.
        start_us: Time 0 of the curves, in microseconds since 1970. By default it is the first date of the owner.
        names: The metrics to include; without one, the names and counts of all metrics, without their entries.
        most: Maximum number of points of a curve.

    Yields:
        Text of JSON. A metric of ``names`` without entries has a curve without points.
    """
    # Before everything else: the entries up to this id are in the answer, and later ones may be.
    last_id = store.last_id()
    counts = {name: count for (_, name), count in store.metric_counts([owner]).items()}
    if not names:
        yield json.dumps({"curves": [{"name": n, "count": c} for n, c in counts.items()], "last_id": last_id})
        return
    separator = '{"curves": ['
    if start_us is None:
        start_us = min((date for name in counts if (date := store.first_date(owner, name)) is not None), default=0)
    for name in dict.fromkeys(names):
        kept = thin(store.points(owner, name), counts[name], most) if name in counts else []
        curve = {"name": name, "count": counts.get(name, 0), **_columns(kept, start_us)}
        yield separator + json.dumps(curve, allow_nan=False)
        separator = ", "
    yield f'], "last_id": {last_id}}}'


def thin(points: Iterable[Point], count: int, most: int) -> list[tuple[int, Point]]:
    """Choose entries of a metric such that a chart of them looks like a chart of all entries.

    Without the first and the last place, ``most`` leaves room for b = floor((most - 2) / 2) groups. Entry i of n
    belongs to group floor(i * b / n). Of each group, the entries with the smallest and the largest number are kept, the
    earliest ones of equal numbers, or its first entry if it has no finite number. The first and the last entry are
    always kept (of one point, only the last).

    Args:
        points: The entries, by date.
        count: Number of entries. Further entries, which arrived in the meantime, join the last group.
        most: Maximum number of entries to keep, at least 1.

    Returns:
        Number within the metric, from 0, and entry of each kept entry. All of them if there are at most ``most``.
    """
    if count <= most:
        return list(enumerate(points))[-most:]
    groups = (most - 2) // 2
    kept: dict[int, Point] = {}
    extremes: list[tuple[float, int, Point]] = []
    current = -1
    step, point = -1, None
    for step, point in enumerate(points):
        if step == 0 and most > 1:
            kept[step] = point
        group = min(step * groups // count, groups - 1)
        if group != current and groups > 0:
            kept.update((index, entry) for _, index, entry in extremes)
            current, extremes = group, [(math.nan, step, point)]
        number = number_of(point.value)
        if number is None or groups <= 0:
            continue
        if math.isnan(extremes[0][0]):
            extremes = [(number, step, point)] * 2
        elif number < extremes[0][0]:
            extremes[0] = (number, step, point)
        elif number > extremes[1][0]:
            extremes[1] = (number, step, point)
    kept.update((index, entry) for _, index, entry in extremes)
    if point is not None:
        kept[step] = point
    return sorted(kept.items(), key=lambda item: item[0])


def number_of(value: str) -> float | None:
    """Return the value of an entry as a number, or None if it is a text or not finite, which JSON does not have."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def start_of(run: Run) -> int:
    """Return the time 0 of a run's curves: its start, or its creation if it has not started."""
    # SQLite may hold any type in any column.
    return next((date for date in (run.started_at, run.created_at) if isinstance(date, int)), 0)


def _columns(kept: Iterable[tuple[int, Point]], start_us: int) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {"time_s": [], "epoch": [], "step": [], "value": []}
    for step, point in kept:
        columns["time_s"].append((point.date - start_us) / 1e6)
        columns["epoch"].append(_epoch(point.extra))
        columns["step"].append(step)
        columns["value"].append(number_of(point.value))
    return columns


def _epoch(extra: str) -> float | None:
    """Return the epoch of metadata as workers send it: ``{"rank": 0, "epoch": 2}``."""
    if '"epoch"' not in extra:
        return None
    try:
        metadata = json.loads(extra)
    except (ValueError, RecursionError):
        return None
    epoch = metadata.get("epoch") if isinstance(metadata, dict) else None
    # A whole number may be too large for a float.
    is_number = isinstance(epoch, float) and math.isfinite(epoch)
    return epoch if is_number or (type(epoch) is int and abs(epoch) < 2**53) else None
