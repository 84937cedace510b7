"""Judge the times of repeated runs: misses, the cost of a success, and the test of two groups.

A run *missed* if it did not reach its goal, or if it failed. Its time to the goal is only known to
be longer than the training time that it took. So a group with misses

* has no mean, deviation, interval or olympic mean, and nothing that is made of a mean: speed-up,
  efficiency, price index, ratio, and "yes" in a test;
* has a median in which each miss is longer than every time; it is unknown if half of the runs or
  more missed;
* has a cost per success: the training time of all runs, successes and misses, divided by the number
  of successes.

A further miss therefore never makes a group look better. Tables, sweeps, figures and the dashboard
all use this module.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.comparison.significance import known_values, paired_test, welch_test

__all__ = [
    "TimesTest",
    "compare_times",
    "complete",
    "cost_per_success_s",
    "is_miss",
    "known_times_s",
    "median_s",
]


def is_miss(record: RunRecord) -> bool:
    """Return True if a run did not reach its goal, or failed before it.

    A run without a goal misses only if it fails.

    Args:
        record: The run.
    """
    # A run that failed after it reached its goal has a valid time to the goal.
    return record.reached is False or (record.state == "failed" and not record.reached)


def complete(records: Sequence[RunRecord]) -> tuple[RunRecord, ...]:
    """Return the runs of a group that may be averaged: all of them, or none if one of them missed.

    Args:
        records: The runs of one group.
    """
    if any(map(is_miss, records)):
        return ()
    return tuple(records)


def known_times_s(records: Iterable[RunRecord]) -> list[float]:
    """Return the times by which runs are compared, without those that are unknown.

    Args:
        records: The runs.
    """
    return known_values(map(operator.attrgetter("total_s"), records))


def median_s(records: Sequence[RunRecord], lost: int = 0) -> float | None:
    """Return the median time to the goal in seconds, in which a miss is longer than every time.

    Args:
        records: The runs of one group.
        lost: Number of further misses of which there is no record.

    Returns:
        The median; None if half of the runs or more missed, or if no time is known.
    """
    misses = sum(map(is_miss, records)) + lost
    times = known_times_s(itertools.filterfalse(is_miss, records))
    if not times:
        return None
    # With half of the runs or more, the misses decide the median, and it is infinite.
    median = statistics.median(times + [math.inf] * misses)
    return median if math.isfinite(median) else None


def cost_per_success_s(records: Sequence[RunRecord], lost: int = 0) -> float | None:
    """Return the training time of all runs, divided by the number of successes.

    Args:
        records: The runs of one group.
        lost: Number of further misses of which there is no record.

    Returns:
        Seconds; None without a success, or if the training time of a run is not known.
    """
    successes = len(records) - sum(map(is_miss, records))
    times = known_times_s(records)
    # The training time of a miss without a record is not known.
    if lost or not successes or len(times) < len(records):
        return None
    return math.fsum(times) / successes


@dataclass(frozen=True)
class TimesTest:
    """The result of :func:`compare_times`.

    Attributes:
        kind: ``"paired by seed"`` or ``"Welch"``.
        ratio: Geometric mean of the times of ``a``, divided by that of ``b``.
        interval: 95 % confidence interval of the ratio; never negative.
        effect: Difference of the mean logarithms in standard deviations (Hedges' g).
        p: Two-sided p value.
    """

    kind: str
    ratio: float
    interval: tuple[float, float]
    effect: float
    p: float


def compare_times(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> TimesTest | None:
    """Test whether the times of two groups differ, by Student's t on the logarithms of the times.

    Runs with equal seeds have equal data orders and initial weights, so their times vary together.
    If the two groups have the same seeds, each once, the test is the paired one, on the ratios of
    the times of each seed. Otherwise, it is Welch's test for independent samples; no run is left
    out to make pairs.

    Args:
        a: The runs of one group.
        b: Those of the other.

    Returns:
        The test; None if a group has a miss, fewer than two runs, or a time that is unknown or 0.
    """
    logarithms = []
    for records in (a, b):
        # A group with a miss has no test, so complete() returns none of its runs.
        times = [record.total_s or 0.0 for record in complete(records)]
        if len(times) < 2 or min(times) <= 0:
            return None
        # With logarithms, a difference is a factor, which is the same on a fast and a slow machine.
        logarithms.append(list(map(math.log, times)))
    first, second = logarithms
    seed_of = operator.attrgetter("seed")
    seeds_a, seeds_b = list(map(seed_of, a)), list(map(seed_of, b))
    each_once = None not in seeds_a and len(set(seeds_a)) == len(a) == len(b)
    if each_once and set(seeds_a) == set(seeds_b):
        by_seed: Mapping[int, float] = dict(zip(seeds_b, second, strict=True))
        kind, test = "paired by seed", paired_test(first, map(by_seed.__getitem__, seeds_a))
    else:
        kind, test = "Welch", welch_test(first, second)
    low, high = test.interval
    return TimesTest(kind, _exp(test.difference), (_exp(low), _exp(high)), test.effect, test.p)


def _exp(value: float) -> float:
    # The interval of two very different runs may be wider than the range of a float.
    return math.exp(value) if value < 709 else math.inf
