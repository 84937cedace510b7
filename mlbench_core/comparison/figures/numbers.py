"""Compute the numbers that figures show from groups of repeated runs.

With T_k the time of k workers and k_0 the smallest number of workers of a series::

    speed-up              S_k = T_{k_0} / T_k                       ideal: k / k_0
    price index           I_k = (price_k / price_{k_0}) / S_k       price_k proportional to k T_k
    communication share   exposed communication / training time

If the price index is below 1, the additional workers pay for themselves. Numbers from at least two
runs have a 95 % confidence interval, except those that are 1 by definition. A group with a run that
missed its goal has none of these numbers. This module does not import matplotlib.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlbench_core.comparison.goal_times import complete
from mlbench_core.comparison.significance import (
    confidence_interval,
    known_values,
    log_interval,
    student_quantile,
)

if TYPE_CHECKING:
    from mlbench_core.comparison.group_repeats import Group

__all__ = [
    "Band",
    "Estimate",
    "band",
    "communication_share",
    "mean",
    "mean_time",
    "pareto_front",
    "price_index",
    "ratio",
    "scaled",
    "speed_up",
]


@dataclass(frozen=True)
class Estimate:
    """A number from repeated runs.

    Attributes:
        value: The mean, or a ratio of means.
        low: Lower end of its 95 % confidence interval, for times that of the geometric mean; None
            if the runs do not give one.
        high: Upper end.
        runs: Number of runs, or the smaller number of the two groups of a ratio.
    """

    value: float
    low: float | None = None
    high: float | None = None
    runs: int = 1


def has_interval(estimates: Iterable[Estimate]) -> bool:
    """Return True if one of some estimates has an interval, which the caption then explains."""
    return any(estimate.low is not None for estimate in estimates)


def mean(values: Iterable[float | None]) -> Estimate | None:
    """Average the known values, with the 95 % confidence interval by Student's t distribution.

    Args:
        values: One value for each run; None is left out.

    Returns:
        The mean, or None without a value.

    Example:
        >>> mean([8.0, None]), mean([])
        (Estimate(value=8.0, low=None, high=None, runs=1), None)
    """
    numbers = known_values(values)
    if not numbers:
        return None
    interval: tuple[float, float] | None = None
    # A single number has no spread.
    if len(numbers) > 1:
        interval = confidence_interval(numbers)
    low, high = interval or (None, None)
    return Estimate(statistics.fmean(numbers), low, high, len(numbers))


def mean_time(values: Sequence[float]) -> Estimate | None:
    """Average times, with the 95 % confidence interval of their geometric mean.

    The interval is never negative.

    Args:
        values: One time for each run.

    Returns:
        The mean, or None without a value.
    """
    if not values:
        return None
    low, high = log_interval(values) or (None, None)
    return Estimate(statistics.fmean(values), low, high, len(values))


def ratio(above: Sequence[float], below: Sequence[float], power: int = 1) -> Estimate | None:
    """Divide one mean by another, with a 95 % confidence interval by the delta method.

    The logarithm of a mean has a standard error of about s / (sqrt(n) mean). The standard errors of
    the two independent means add up in squares. The quantile is that of Student's t distribution
    with the degrees of freedom of Welch and Satterthwaite. Back from the logarithm, the interval is
    never negative, and it is not symmetric.

    Args:
        above: Values of the numerator's runs, all positive.
        below: Values of the denominator's runs, all positive.
        power: The ratio is raised to this power.

    Returns:
        The ratio, or None if a mean is missing or not positive. The interval is missing if a side
        has a single run.

    Example:
        >>> ratio([10.0], [4.0]).value
        2.5
    """
    if not above or not below:
        return None
    mean_above, mean_below = statistics.fmean(above), statistics.fmean(below)
    if min(mean_above, mean_below) <= 0:
        return None
    value = (mean_above / mean_below) ** power
    runs = min(len(above), len(below))
    if runs < 2:
        return Estimate(value, runs=runs)
    # The squared standard errors of the logarithms of both means.
    error_above = statistics.variance(above) / len(above) / mean_above**2
    error_below = statistics.variance(below) / len(below) / mean_below**2
    total = error_above + error_below
    # On each side, all runs have the same value, so the degrees of freedom would be 0 / 0.
    if total == 0:
        return Estimate(value, value, value, runs)
    squares = error_above**2 / (len(above) - 1) + error_below**2 / (len(below) - 1)
    freedom = total**2 / squares
    factor = math.exp(abs(power) * student_quantile(0.975, freedom) * math.sqrt(total))
    return Estimate(value, value / factor, value * factor, runs)


def speed_up(groups: Sequence[Group], without_communication: bool = False) -> list[Estimate | None]:
    """Return how many times faster each group is than the first.

    Args:
        groups: Groups of one series, fewest workers first.
        without_communication: True to subtract the exposed communication from the time of every
            group. The first group, as measured, is the reference in both cases.

    Returns:
        One estimate for each group; None if a time is missing. As measured, the first is exactly 1,
        without an interval.
    """
    if not groups:
        return []
    reference = groups[0].values("total_s")
    name = "total_s"
    if without_communication:
        name = "without_communication_s"
    estimates: list[Estimate | None] = []
    for index, group in enumerate(groups):
        times = group.values(name)
        if index == 0 and times and not without_communication:
            estimates.append(Estimate(1.0, runs=len(times)))
            continue
        estimate = ratio(reference, times)
        if index == 0 and estimate is not None and len(times) == len(reference):
            # Both times are of the same runs, which the interval for independent groups does not
            # describe.
            estimate = Estimate(estimate.value, runs=estimate.runs)
        estimates.append(estimate)
    return estimates


def price_index(groups: Sequence[Group]) -> list[Estimate | None]:
    """Return price increase divided by performance increase since the first group.

    The price of an hour of a worker cancels out if all groups use the same machines. The module's
    docstring has the formula.

    Args:
        groups: Groups of one series, fewest workers first.
    """
    if not groups:
        return []
    reference = groups[0].values("total_s")
    indices: list[Estimate | None] = []
    for index, group in enumerate(groups):
        squared = ratio(group.values("total_s"), reference, power=2)
        if squared is None or not group.workers or not groups[0].workers:
            indices.append(None)
        elif index == 0:
            indices.append(Estimate(1.0, runs=squared.runs))
        else:
            indices.append(scaled(squared, group.workers / groups[0].workers))
    return indices


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """Multiply an estimate and the ends of its interval by a positive number."""
    low, high = estimate.low, estimate.high
    if low is not None:
        low *= factor
    if high is not None:
        high *= factor
    return Estimate(estimate.value * factor, low, high, estimate.runs)


def communication_share(group: Group) -> Estimate | None:
    """Return the mean share of the training time, from 0 to 1, that workers wait for messages."""
    shares = []
    for record in complete(group.records):
        total_s, without_s = record.total_s, record.without_communication_s
        if total_s and without_s is not None:
            shares.append(1 - without_s / total_s)
    return mean(shares)


@dataclass(frozen=True)
class Band:
    """Curves of repeated runs on a common grid.

    Attributes:
        x: The grid, only up to the end of the shortest run.
        mean: Mean over the runs at each place of the grid.
        low: Minimum over the runs.
        high: Maximum over the runs.
        tails: For each run that went on longer, its own points from the end of the grid on.
        ends: The last x of every run, in ascending order.
    """

    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    tails: tuple[tuple[tuple[float, float], ...], ...]
    ends: tuple[float, ...]


def band(curves: Sequence[Sequence[tuple[float, float]]], places: int = 60) -> Band | None:
    """Average curves over the range that all of them cover.

    A mean over the runs that remain would jump whenever a run ends, so it stops at the end of the
    shortest run.

    Args:
        curves: For each run its points (x, y), x ascending. An empty curve is left out.
        places: Number of places of the grid. If all curves share the same x, these are the grid
            instead, and no value is interpolated.

    Returns:
        The band, or None if no curve has points. Between the points of a run, its value is
        interpolated linearly.

    Example:
        >>> both = band([[(1, 10.0), (2, 20.0)], [(1, 30.0), (2, 40.0), (3, 60.0)]])
        >>> both.x, both.mean, both.tails
        ((1, 2), (20.0, 30.0), (((2, 40.0), (3, 60.0)),))
    """
    curves = list(filter(None, curves))
    if not curves:
        return None
    ends = sorted(curve[-1][0] for curve in curves)
    grid = _grid(curves, ends[0], places)
    columns = []
    for x in grid:
        columns.append([_value_at(curve, x) for curve in curves])
    tails: list[tuple[tuple[float, float], ...]] = []
    for curve in curves:
        tail = [(x, y) for x, y in curve if x > ends[0]]
        if not grid:
            # Without a common range, every run is drawn separately.
            tails.append(tuple(curve))
        elif tail:
            tails.append(((ends[0], _value_at(curve, ends[0])), *tail))
    return Band(
        x=grid,
        mean=tuple(map(statistics.fmean, columns)),
        low=tuple(map(min, columns)),
        high=tuple(map(max, columns)),
        tails=tuple(tails),
        ends=tuple(ends),
    )


def _grid(
    curves: Sequence[Sequence[tuple[float, float]]], end: float, places: int
) -> tuple[float, ...]:
    """Return the x of curves in the range that all of them cover, or a grid of that range.

    Args:
        curves: The curves.
        end: End of the shortest one.
        places: Number of places of the grid.
    """
    start = max(curve[0][0] for curve in curves)
    if start > end:
        return ()
    inside: set[tuple[float, ...]] = set()
    for curve in curves:
        in_range = [x for x, _ in curve if start <= x <= end]
        inside.add(tuple(in_range))
    # Runs of equal epochs have their points at the same places, and their values stay as recorded.
    if len(inside) == 1:
        return inside.pop()
    if start == end:
        return (start,)
    inner = [start + (end - start) * index / (places - 1) for index in range(places - 1)]
    return (*inner, end)


def _value_at(curve: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate a curve linearly at a place that it covers."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= x < x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[-1][1]


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point dominates, ascending in the first coordinate.

    A point dominates another one if none of its numbers is larger, and one is smaller.

    Args:
        points: Pairs of which both numbers are better if they are smaller, for example price and
            time.

    Example:
        >>> pareto_front([(1, 9), (2, 5), (3, 6), (4, 1)])
        [(1, 9), (2, 5), (4, 1)]
    """
    # Ascending in the first number, a point is on the front if its second one is a new minimum.
    front: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front
