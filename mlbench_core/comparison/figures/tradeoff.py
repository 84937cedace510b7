"""Draw the time to the goal against its price, and performance profiles over several tasks."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from mlbench_core.comparison.figures import canvas
from mlbench_core.comparison.figures.captions import caption, error_bars, not_drawn, shared_goal
from mlbench_core.comparison.figures.numbers import (
    Estimate,
    has_interval,
    mean_time,
    pareto_front,
)
from mlbench_core.comparison.figures.styles import line_looks
from mlbench_core.comparison.group_repeats import Group, workload
from mlbench_core.comparison.significance import performance_profile
from mlbench_core.comparison.table import times_to_goal
from mlbench_core.errors import ConfigurationError

__all__ = ["draw_performance_profile", "draw_time_against_price"]

# AlgoPerf integrates its profiles up to this ratio.
_LARGEST_RATIO = 4.0


def draw_time_against_price(groups: Sequence[Group], price_per_hour: float) -> canvas.Drawing:
    """Draw the time to the goal against the price of the run, with the Pareto front.

    Only groups of which every run reached its goal are drawn. The caption names the others.

    Args:
        groups: Groups of runs with the same goal.
        price_per_hour: Price of one worker for an hour.

    Returns:
        The figure ``time_to_goal_against_price``.

    Raises:
        ConfigurationError: Tasks or goals differ, or no run reached the goal.
    """
    if shared_goal(groups) is None or len(set(map(workload, groups))) > 1:
        raise ConfigurationError("the runs have no task and goal in common")
    points: list[tuple[Group, Estimate, float]] = []
    costs = []
    for group in groups:
        # A group with a miss has no mean time.
        time = mean_time(group.values("time_to_goal_s"))
        if time is not None:
            price = group.workers * time.value / 3600 * price_per_hour
            points.append((group, time, price))
            costs.append((price, time.value))
    if not points:
        raise ConfigurationError("no run reached its goal")
    front = pareto_front(costs)
    figure, text = _draw_prices(groups, points, front)
    header = ["setup", "workers", "runs", "missed", "price"]
    rows: list[list[Any]] = [[*header, "time_to_goal_s", "low_s", "high_s", "front"]]
    for group, time, price in points:
        cells = [time.value, time.low, time.high, (price, time.value) in front]
        rows.append([group.label, group.workers, time.runs, group.missed, price, *cells])
    return canvas.Drawing("time_to_goal_against_price", figure, text, rows)


def _draw_prices(
    groups: Sequence[Group],
    points: Sequence[tuple[Group, Estimate, float]],
    front: Sequence[tuple[float, float]],
) -> tuple[Any, str]:
    figure = canvas.new_figure(canvas.COLUMN_IN, 2.4)
    axes = figure.subplots()
    if front:
        dashed: canvas.Look = {"color": canvas.GRAY, "linestyle": (0, (4, 2)), "linewidth": 0.8}
        axes.step(*zip(*front, strict=True), where="post", zorder=1, label="Pareto front", **dashed)
    drawn, times, prices = zip(*points, strict=True)
    looks = line_looks(map(operator.attrgetter("label"), groups))
    limit = 1.5 * max(map(operator.attrgetter("value"), times))
    width = max(prices) - min(prices)
    named: set[str] = set()
    cut = False
    for group, time, price in points:
        look: canvas.Look = dict(looks[group.label])
        errors = None
        if time.low is not None and time.high is not None:
            cut = cut or time.high > limit or time.low < 0
            # The interval of the geometric mean may lie below the mean, which the mark shows.
            below, above = time.value - time.low, min(time.high, limit) - time.value
            errors = [[max(below, 0.0)], [max(above, 0.0)]]
        # One entry in the legend for each series: matplotlib leaves out a label with an underscore.
        label = f"_{group.label}" if group.label in named else group.label
        named.add(group.label)
        look |= {"linestyle": "none", "elinewidth": 0.7, "label": label}
        axes.errorbar([price], [time.value], yerr=errors, **look)
        offset, side = (4, 2), "left"
        for _, other_time, other_price in points:
            is_right = 0 < other_price - price < 0.06 * width
            # The number is on the left if another point is close on the right.
            if is_right and abs(other_time.value - time.value) < 0.1 * limit:
                offset, side = (-4, 2), "right"
        note: canvas.Look = {"textcoords": "offset points", "size": 5.5, "ha": side}
        axes.annotate(str(group.workers), (price, time.value), offset, **note)
    axes.margins(x=0.12, y=0.08)
    # Times are compared by their ratios, so the axis begins at zero.
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel("price of a run to the goal")
    axes.set_ylabel("time to goal in seconds")
    canvas.title(axes, "Time to goal against price", groups)
    text = (
        f"{caption(groups)} Numbers at the points: workers. Price: workers x time to goal x price "
        "of an hour."
    )
    if has_interval(times):
        text += f" {error_bars(cut)}"
    text += not_drawn(groups, drawn)
    canvas.finish(figure, text, *axes.get_legend_handles_labels())
    return figure, text


def draw_performance_profile(groups: Sequence[Group]) -> canvas.Drawing:
    """Draw AlgoPerf's performance profiles.

    A profile is the share of tasks solved within a ratio of the best time. The times are those of
    :func:`mlbench_core.comparison.table.times_to_goal`.

    Args:
        groups: Groups of runs of several tasks.

    Returns:
        The figure ``performance_profile``.

    Raises:
        ConfigurationError: The groups are of fewer than two tasks, or of fewer than two algorithms.

    References:
        Dahl et al., Benchmarking Neural Network Training Algorithms, arXiv:2306.07179.
    """
    times = times_to_goal(groups)
    tasks = set(itertools.chain.from_iterable(times.values()))
    # With one task, the share is 0 or 1 everywhere.
    if len(tasks) < 2 or len(times) < 2:
        raise ConfigurationError(
            "a performance profile needs at least two tasks and two algorithms"
        )
    ratios = [1 + (_LARGEST_RATIO - 1) * index / 200 for index in range(201)]
    profile = performance_profile(times, ratios)
    figure = canvas.new_figure(canvas.COLUMN_IN, 2.3)
    axes = figure.subplots()
    looks = line_looks(profile)
    for name, shares in profile.items():
        axes.step(ratios, shares, where="post", label=name, markevery=40, **looks[name])
    axes.set_ylim(0, 1.05)
    axes.set_xlim(1, _LARGEST_RATIO)
    axes.set_xlabel("time to goal / best time to goal")
    axes.set_ylabel("share of tasks")
    canvas.title(axes, "Performance profile", groups)
    text = (
        f"{caption(groups)} Share of the {len(tasks)} tasks that an algorithm solves within a "
        "ratio of the best time, by median times, in which a miss is longer than every time. "
        "A task is solved if more than half of the runs reached the goal."
    )
    canvas.finish(figure, text, *axes.get_legend_handles_labels())
    rows: list[list[Any]] = [["ratio", *profile]]
    rows += map(list, zip(ratios, *profile.values(), strict=True))
    return canvas.Drawing("performance_profile", figure, text, rows)
