"""Estimate how long the rest of a sweep takes, from its runs that have ended."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlbench_core.sweep.sweep_folder import Done
from mlbench_core.sweep.toml_file import Point

__all__ = ["Estimate", "estimate"]

OVERHEAD_S = 3.0
"""Seconds around a run: the master starts its workers, notices their end and sends the results."""


@dataclass(frozen=True)
class Estimate:
    """The time that some runs take.

    Attributes:
        runs: Number of runs.
        expected_s: The time by runs that have ended; None if there are none. A run without a
            similar one counts with the mean of the others.
        longest_s: The time if every run reaches the limit; None without a limit.
    """

    runs: int
    expected_s: float | None
    longest_s: float | None


def estimate(
    pending: Iterable[Point],
    points: Iterable[Point],
    done: Mapping[str, Done],
    limit_s: float | None,
) -> Estimate:
    """Estimate the time of the runs that are left.

    The time of a run is the mean over the ended runs that are most like it: those of the same
    algorithm, network and number of workers, else those of the same network and number of workers,
    else those of the same number of workers, else all.

    Args:
        pending: The runs that are left.
        points: All runs of the sweep.
        done: The runs that have ended, by name.
        limit_s: The limit of a run, or None.

    Example:
        >>> points = [Point(f"a-{seed}", "a", 1, None, seed, {}) for seed in (42, 43, 44)]
        >>> estimate(points[1:], points, {"a-42": Done("finished", 7.0)}, limit_s=60).expected_s
        20.0
    """
    pending = list(pending)
    ended = [point for point in points if point.name in done]
    expected_s: float | None = None
    if ended:
        seconds = []
        for point in pending:
            seconds.append(_expected_s(point, ended, done) + OVERHEAD_S)
        expected_s = sum(seconds)
    longest_s: float | None = None
    if limit_s is not None:
        # The limit counts training only, so a run takes longer than this: it has validations, too.
        longest_s = len(pending) * (limit_s + OVERHEAD_S)
    return Estimate(len(pending), expected_s, longest_s)


def _expected_s(point: Point, ended: Sequence[Point], done: Mapping[str, Done]) -> float:
    """Return the mean time of the ended runs that are most like a run."""
    key = _likeness(point)
    # Each step ignores one more property: first the algorithm, then the network, then the workers.
    for ignored in range(len(key) + 1):
        seconds = []
        for other in ended:
            if _likeness(other)[ignored:] == key[ignored:]:
                seconds.append(done[other.name].seconds)
        if seconds:
            break
    return statistics.fmean(seconds)


def _likeness(point: Point) -> tuple[str, str | None, int]:
    return point.algorithm, point.network, point.workers
