"""Draw how series scale with the workers: speed-up, communication share and price index."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mlbench_core.comparison.figures import canvas
from mlbench_core.comparison.figures.captions import caption, error_bars, not_drawn
from mlbench_core.comparison.figures.numbers import (
    Estimate,
    communication_share,
    price_index,
    scaled,
    speed_up,
)
from mlbench_core.comparison.figures.styles import line_looks
from mlbench_core.comparison.group_repeats import Group, Series, plural, series
from mlbench_core.comparison.significance import known_values
from mlbench_core.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "draw_communication_share",
    "draw_price_index",
    "draw_speed_up",
    "scaling_series",
    "speed_up_panels",
]

Estimates = Sequence[Estimate | None]

# Both ends are positive, and the interval is not symmetric.
_RATIO_INTERVAL = (
    "Error bars: 95 % confidence interval of the ratio of means (delta method on its logarithm)"
)


def draw_speed_up(groups: Sequence[Group]) -> canvas.Drawing:
    """Draw the speed-up over the fewest workers of each series, with and without communication.

    Args:
        groups: Groups of runs.

    Returns:
        The figure ``speedup``.

    Raises:
        ConfigurationError: No configuration was run with several numbers of workers.
    """
    every = scaling_series(groups)
    figure = canvas.new_figure(canvas.COLUMN_IN, 3.5)
    text = speed_up_panels(figure.subplots(2, 1, sharex=True, sharey=True), groups, every)
    canvas.finish(figure, text, *figure.axes[0].get_legend_handles_labels())
    names = ["speedup", "speedup_low", "speedup_high"]
    without = [f"{name}_without_communication" for name in names]
    rows: list[list[Any]] = [["setup", "workers", "ideal", *names, *without]]
    for one in every:
        measured = speed_up(one.groups)
        compared = speed_up(one.groups, without_communication=True)
        for group, value, other in zip(one.groups, measured, compared, strict=True):
            ideal = group.workers / one.groups[0].workers
            rows.append([one.label, group.workers, ideal, *_cells(value), *_cells(other)])
    return canvas.Drawing("speedup", figure, text, rows)


def draw_communication_share(groups: Sequence[Group]) -> canvas.Drawing:
    """Draw the share of the training time in which runs waited for communication.

    Args:
        groups: Groups of runs.

    Returns:
        The figure ``communication_share``.

    Raises:
        ConfigurationError: No run reported that it waited for communication.
    """
    # By identity, because a group holds dictionaries and has no hash.
    percent_of: dict[int, Estimate] = {}
    reported = []
    heights = []
    for group in groups:
        share = communication_share(group)
        if share is not None:
            estimate = scaled(share, 100.0)
            percent_of[id(group)] = estimate
            reported.append(group)
            heights.append(estimate.value)
    if not any(heights):
        raise ConfigurationError("no run waited for communication or reported it")
    every = series(reported)
    figure = canvas.new_figure(canvas.COLUMN_IN, 2.2)
    axes = figure.subplots()
    percent = []
    for one in every:
        percent.append([percent_of[id(group)] for group in one.groups])
    _prepare(axes, every)
    _lines(axes, groups, every, percent)
    axes.set_ylabel("% of the training time")
    # Bars and shares are compared by their distance from zero.
    cut = _limit(axes, percent, 0.0, min(max(1.5 * max(heights), 1.0), 104.0))
    canvas.title(axes, "Time spent waiting for communication", groups)
    text = _caption(_groups_of(every), percent, error_bars(cut))
    canvas.finish(figure, text, *axes.get_legend_handles_labels())
    rows: list[list[Any]] = [
        ["setup", "workers", "share_percent", "share_low_percent", "share_high_percent"]
    ]
    for one, values in zip(every, percent, strict=True):
        for group, value in zip(one.groups, values, strict=True):
            rows.append([one.label, group.workers, *_cells(value)])
    return canvas.Drawing("communication_share", figure, text, rows)


def draw_price_index(
    groups: Sequence[Group], price_per_hour: float | None = None
) -> canvas.Drawing:
    """Draw the price index of each series.

    Below the line at 1, more workers pay for themselves.

    Args:
        groups: Groups of runs.
        price_per_hour: Price of one worker for an hour; None if it is unknown. The index does not
            depend on it. It only gives the column ``price`` of the CSV file.

    Returns:
        The figure ``price_index``.

    Raises:
        ConfigurationError: No configuration was run with several numbers of workers.
    """
    every = scaling_series(groups)
    figure = canvas.new_figure(canvas.COLUMN_IN, 2.2)
    axes = figure.subplots()
    indices = [price_index(one.groups) for one in every]
    _prepare(axes, every)
    axes.axhline(1.0, linestyle=(0, (4, 2)), color=canvas.GRAY, linewidth=0.8, label="break-even")
    _lines(axes, groups, every, indices)
    axes.set_ylabel("price increase / performance increase")
    top = 1.35 * max(1.0, *_values(indices))
    cut = _limit(axes, indices, 0.0, top)
    canvas.title(axes, "Price index", groups)
    meaning = "Below 1, the additional workers pay for themselves."
    text = f"{_scaling_caption(groups, every, indices, cut)} {meaning}"
    canvas.finish(figure, text, *axes.get_legend_handles_labels())
    names = ["total_s", "price", "price_index", "price_index_low", "price_index_high"]
    rows: list[list[Any]] = [["setup", "workers", *names]]
    for one, row in zip(every, indices, strict=True):
        for group, value in zip(one.groups, row, strict=True):
            # scaling_series() leaves out groups without a time.
            times = group.values("total_s")
            total = sum(times) / len(times)
            price = None
            if price_per_hour is not None:
                price = group.workers * total / 3600 * price_per_hour
            rows.append([one.label, group.workers, total, price, *_cells(value)])
    return canvas.Drawing("price_index", figure, text, rows)


def scaling_series(groups: Sequence[Group]) -> list[Series]:
    """Return the series with the groups whose times can be divided by one another.

    Raises:
        ConfigurationError: No series has times of several numbers of workers.
    """
    every = []
    has_several = False
    for one in series(groups):
        timed = [group for group in one.groups if group.values("total_s")]
        base, *others = one.groups
        # Without a single time of the fewest workers, a series has no reference.
        is_single = all(group.workers > base.workers for group in others)
        if timed and timed[0] is base and is_single:
            every.append(Series(one.label, tuple(timed)))
            has_several = has_several or len(timed) > 1
    if not has_several:
        raise ConfigurationError("no configuration was run with several numbers of workers")
    return every


def speed_up_panels(
    panels: Sequence[Axes], groups: Sequence[Group], every: Sequence[Series]
) -> str:
    """Draw the speed-up into two panels: as measured, and without communication.

    Args:
        panels: Two axes, one above the other.
        groups: All groups of the figure; the caption names those that are not drawn.
        every: Series of :func:`scaling_series`.

    Returns:
        The caption.
    """
    starts = sorted({one.groups[0].workers for one in every})
    largest = _workers_of(every)[-1]
    measured = [speed_up(one.groups) for one in every]
    without = [speed_up(one.groups, without_communication=True) for one in every]
    all_rows = [*measured, *without]
    values = _values(all_rows)
    contents = ((measured, "as measured"), (without, "without communication"))
    for axes, (rows, text) in zip(panels, contents, strict=True):
        _prepare(axes, every)
        for start in starts:
            ideal: canvas.Look = {"linestyle": (0, (4, 2)), "color": canvas.GRAY, "linewidth": 0.8}
            # One entry in the legend is for the lines of all starts: matplotlib leaves out a label
            # with an underscore.
            label = "ideal" if start == starts[0] else "_ideal"
            # With both axes logarithmic, as with both linear, the ideal is a straight line.
            axes.plot([start, largest], [1.0, largest / start], label=label, **ideal)
        _lines(axes, groups, every, rows)
        note: canvas.Look = {"va": "top", "size": 6, "style": "italic"}
        axes.annotate(text, (0, 1), (3, -2), "axes fraction", "offset points", **note)
        axes.set_ylabel("times faster")
    top = 1.15 * max(*values, largest / starts[0])
    bottom = 0.0
    if panels[0].get_xscale() == "log":
        bottom = min(0.9, *values) / 1.1
        for axes in panels:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    cut = _limit(panels[0], all_rows, bottom, top)
    panels[0].set_xlabel("")
    panels[0].tick_params(labelbottom=False)
    over = "the fewest workers"
    if len(starts) == 1:
        over = plural(starts[0], "worker")
    canvas.title(panels[0], f"Speed-up over {over}", groups)
    text = _scaling_caption(groups, every, all_rows, cut)
    return (
        f"{text} Without communication: exposed communication is subtracted from all times "
        "but the reference."
    )


def _scaling_caption(
    groups: Sequence[Group], every: Sequence[Series], rows: Sequence[Estimates], cut: bool
) -> str:
    text = _caption(groups, rows, error_bars(cut, _RATIO_INTERVAL))
    return text + not_drawn(groups, _groups_of(every))


def _caption(groups: Sequence[Group], rows: Sequence[Estimates], interval: str) -> str:
    text = caption(groups)
    if _ends(rows):
        text += f" {interval}"
    return text


def _groups_of(every: Iterable[Series]) -> list[Group]:
    groups: list[Group] = []
    for one in every:
        groups += one.groups
    return groups


def _workers_of(every: Iterable[Series]) -> list[int]:
    """Return the different numbers of workers of all groups, in ascending order."""
    return sorted(set(map(operator.attrgetter("workers"), _groups_of(every))))


def _values(rows: Iterable[Estimates]) -> list[float]:
    """Return the values of the estimates in all rows, without those that are missing."""
    estimates = known_values(itertools.chain.from_iterable(rows))
    return list(map(operator.attrgetter("value"), estimates))


def _ends(rows: Iterable[Estimates]) -> list[float]:
    """Return both ends of each interval in all rows."""
    ends = []
    for estimate in itertools.chain.from_iterable(rows):
        if estimate is not None and estimate.low is not None and estimate.high is not None:
            ends += [estimate.low, estimate.high]
    return ends


def _cells(value: Estimate | None) -> list[float | None]:
    if value is None:
        return [None, None, None]
    return [value.value, value.low, value.high]


def _prepare(axes: Axes, every: Sequence[Series]) -> None:
    """Make an axis of workers on which the ideal speed-up is a straight line."""
    workers = _workers_of(every)
    labels = list(map(str, workers))
    axes.set_xticks(workers, labels)
    # Above 8 workers the small numbers would touch one another.
    if workers[-1] > 8 * workers[0]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(workers, labels, minor=False)
        axes.set_xlim(workers[0] / 1.3, workers[-1] * 1.3)
    else:
        room = max(0.12 * (workers[-1] - workers[0]), 0.4)
        axes.set_xlim(workers[0] - room, workers[-1] + room)
    axes.set_xlabel("workers")


def _lines(
    axes: Axes, groups: Sequence[Group], every: Sequence[Series], rows: Sequence[Estimates]
) -> None:
    """Draw a line with error bars for each series, shifted so that no error bar hides another.

    The look of a series is the same in all figures of these groups, drawn there or not.
    """
    low, high = axes.get_xlim()
    # With a single number of workers, the points have the whole width.
    step = 0.9 / len(every)
    if len(axes.get_xticks()) > 1:
        step = min(0.02, 0.1 / len(every))
    looks = line_looks(map(operator.attrgetter("label"), groups))
    for index, (one, values) in enumerate(zip(every, rows, strict=True)):
        look = looks[one.label]
        shift = (index - (len(every) - 1) / 2) * step
        x, y, estimates = [], [], []
        for group, value in zip(one.groups, values, strict=True):
            if value is None:
                continue
            y.append(value.value)
            estimates.append(value)
            if axes.get_xscale() == "log":
                x.append(group.workers * (high / low) ** shift)
            else:
                x.append(group.workers + (high - low) * shift)
        if estimates:
            lengths = _errors(estimates)
            axes.errorbar(x, y, yerr=lengths, label=one.label, elinewidth=0.7, **look)


def _errors(values: Sequence[Estimate]) -> list[list[float]] | None:
    """Return the lengths of error bars below and above; not a number if a value has no interval."""
    if not _ends([values]):
        return None
    below, above = [], []
    for estimate in values:
        if estimate.low is None or estimate.high is None:
            below.append(math.nan)
            above.append(math.nan)
        else:
            below.append(estimate.value - estimate.low)
            above.append(estimate.high - estimate.value)
    return [below, above]


def _limit(axes: Axes, rows: Sequence[Estimates], bottom: float, top: float) -> bool:
    """Set the vertical axis by the values, and return True if an interval leaves it."""
    ends = _ends(rows)
    # A longer interval than half of the axis, as of two runs, would make the values unreadable.
    top = max(top, min(max(ends, default=top) * 1.05, 1.5 * top))
    axes.set_ylim(bottom, top)
    return bool(ends) and (min(ends) < bottom or max(ends) > top)
