"""Draw learning curves with bands over repeats, against epochs, steps, time and so on."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlbench_core.comparison.figures import canvas
from mlbench_core.comparison.figures.captions import (
    caption,
    name_of,
    not_among,
    shared_goal,
)
from mlbench_core.comparison.figures.numbers import Band, band
from mlbench_core.comparison.figures.styles import line_looks
from mlbench_core.comparison.group_repeats import Group, plural, workload
from mlbench_core.comparison.result_record import CurvePoint
from mlbench_core.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["AGAINST", "Axis", "draw_learning_curves", "usual_axes"]

_BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
_COUNTS = (("billion", 1e9), ("million", 1e6), ("thousand", 1e3), ("", 1.0))


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of learning curves.

    Attributes:
        title: Its name in the title of the figure.
        label: Its label.
        shared: True if the panels of all numbers of workers have the same axis.
        place: Function that returns the place of a point on the axis; None if it is unknown.
        units: Units of the numbers with their sizes, the largest first.
    """

    title: str
    label: str
    shared: bool
    place: Callable[[CurvePoint], float | None]
    units: Sequence[tuple[str, float]] = (("", 1.0),)


AGAINST: dict[str, Axis] = {
    # The tracker counts epochs from 0; a value before the first batch belongs to 0 trained epochs.
    "epochs": Axis("epochs", "epochs", True, lambda point: point.epoch + 1 if point.step else 0),
    "steps": Axis("steps", "steps", True, lambda point: point.step),
    "tokens": Axis(
        *("training tokens", "training tokens of all workers", False),
        lambda point: point.tokens,
        _COUNTS,
    ),
    "time": Axis("training time", "training time in seconds", False, lambda point: point.train_s),
    "bytes": Axis(
        *("bytes on the wire", "put on the wire by all workers", False),
        lambda point: point.bytes,
        _BYTES,
    ),
}
"""Horizontal axes of learning curves by name."""


def usual_axes(groups: Sequence[Group]) -> tuple[str, ...]:
    """Return the axes of the learning curves of some groups: epochs, unless a run counts steps."""
    for group in groups:
        if group.records[0].unit == "steps":
            return ("steps", "tokens", "time", "bytes")
    return ("epochs", "time", "bytes")


def draw_learning_curves(groups: Sequence[Group], against: str = "epochs") -> canvas.Drawing:
    """Draw the goal's metric of every group: the mean over the runs, and their range as a band.

    The mean and the band end with the shortest run. Longer runs continue as thin lines, and a
    narrow panel below counts them.

    Args:
        groups: Groups of runs with result folders.
        against: One of :data:`AGAINST`.

    Returns:
        The figure ``learning_curves_epochs``, ``learning_curves_time`` and so on. There is one
        panel for each number of workers.

    Raises:
        ConfigurationError: The groups have no task and goal in common, or no run recorded its
            metric.
    """
    if against not in AGAINST:
        raise ConfigurationError(
            f"against must be one of {', '.join(AGAINST)}, not {against!r}: choose one of them"
        )
    goal = shared_goal(groups)
    if goal is None or len(set(map(workload, groups))) > 1:
        raise ConfigurationError(
            "the runs have no task and goal in common, so there is no common metric to draw"
        )
    bands = []
    # A group that has not recorded the metric is left out, so that it does not hide the others.
    for group in groups:
        averaged = _band(group, goal["metric"], AGAINST[against])
        if averaged is not None:
            bands.append((group, averaged))
    if not bands:
        raise ConfigurationError(
            f"no run recorded {goal['metric']} with its {AGAINST[against].title}"
        )
    figure, text = _draw(groups, bands, goal, AGAINST[against])
    rows: list[list[Any]] = [["setup", "workers", "runs", against, "mean", "minimum", "maximum"]]
    for group, averaged in bands:
        setup = (group.label, group.workers, len(averaged.ends))
        for point in zip(averaged.x, averaged.mean, averaged.low, averaged.high, strict=True):
            rows.append([*setup, *point])
    return canvas.Drawing(f"learning_curves_{against}", figure, text, rows)


def _band(group: Group, metric: str, axis: Axis) -> Band | None:
    curves = []
    for record in group.records:
        value_at: dict[float, float] = {}
        for point in record.curve(metric):
            x = axis.place(point)
            if x is not None:
                # A metric that is recorded several times in an epoch has several values at one
                # place: the last one counts.
                value_at[float(x)] = point.value
        curve = list(value_at.items())
        # All points are at 0 bytes if a single worker sends nothing.
        if curve and curve[-1][0] > 0:
            curves.append(curve)
    return band(curves)


def _draw(
    groups: Sequence[Group],
    bands: Sequence[tuple[Group, Band]],
    goal: Mapping[str, Any],
    axis: Axis,
) -> tuple[Figure, str]:
    """Draw one panel for each number of workers.

    If the runs did not end together, each panel has another one below it, which counts the runs.
    """
    bands_of: dict[int, list[tuple[Group, Band]]] = {}
    uneven, largest = False, 0.0
    for group, averaged in bands:
        bands_of.setdefault(group.workers, []).append((group, averaged))
        uneven = uneven or bool(averaged.tails)
        largest = max(largest, averaged.ends[-1])
    workers = sorted(bands_of)
    panel_in = 1.6
    if uneven:
        # With the panel below that counts the runs.
        panel_in = 1.9
    figure = canvas.new_figure(canvas.COLUMN_IN, 0.5 + panel_in * len(workers))
    curves, counts = _panels(figure, len(workers), uneven, axis.shared)
    # A series has the same look in every panel, and in the other figures of these groups.
    looks = line_looks(map(operator.attrgetter("label"), groups))
    entries: dict[str, Any] = {}
    goal_line = None
    for index, (number, axes) in enumerate(zip(workers, curves, strict=True)):
        for group, averaged in bands_of[number]:
            line = _curve(axes, averaged, looks[group.label])
            entries.setdefault(group.label, line)
        # The goal of a fixed training time has no threshold.
        if goal.get("threshold") is not None:
            look: canvas.Look = {"linestyle": (0, (4, 2)), "color": canvas.GRAY, "linewidth": 0.8}
            goal_line = axes.axhline(goal["threshold"], **look)
        axes.set_ylabel(goal["metric"])
        if len(workers) > 1:
            note: canvas.Look = {"ha": "right", "va": "bottom", "size": 6, "style": "italic"}
            count = plural(number, "worker")
            axes.annotate(count, (1, 0), (-3, 3), "axes fraction", "offset points", **note)
        if uneven:
            _count(counts[index], bands_of[number], looks)
    if goal_line is not None:
        entries["goal"] = goal_line
    _label(curves + counts, axis, largest)
    figure.align_ylabels()
    canvas.title(curves[0], f"Learning curves against {axis.title}", groups)
    text = _caption(groups, bands, axis)
    canvas.finish(figure, text, list(entries.values()), list(entries))
    return figure, text


def _label(panels: Sequence[Axes], axis: Axis, largest: float) -> None:
    """Write the numbers and the label of the horizontal axis in a readable unit."""
    # The largest unit in which the end of the axis is at least 1, or else the smallest.
    fitting = [pair for pair in axis.units if largest >= pair[1]]
    unit, size = (*fitting, axis.units[-1])[0]
    for axes in panels:
        axes.locator_params(axis="x", integer=axis.shared, nbins=6)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / size:g}")
    panels[0].figure.axes[-1].set_xlabel(f"{unit} {axis.label}".strip())


def _panels(figure: Figure, rows: int, uneven: bool, shared: bool) -> tuple[list[Axes], list[Axes]]:
    """Return the axes for curves and those for counts of runs, from top to bottom."""
    heights = [1.0] * rows
    if uneven:
        heights = [5.0, 1.0] * rows
    grid = figure.subplots(len(heights), 1, sharex=shared, squeeze=False, height_ratios=heights)
    curves: list[Axes] = list(grid[:, 0])
    counts: list[Axes] = []
    if uneven:
        curves, counts = curves[::2], curves[1::2]
    # The same range of the metric in all panels, so that numbers of workers can be compared.
    for axes in curves[1:]:
        axes.sharey(curves[0])
    if not shared:
        for above, below in zip(curves, counts, strict=False):
            below.sharex(above)
            above.tick_params(labelbottom=False)
    return curves, counts


def _curve(axes: Axes, averaged: Band, look: canvas.Look) -> Any:
    """Draw mean, band and tails, and return the line of the mean for the legend."""
    x, color = averaged.x, look["color"]
    every = max(1, len(x) // 8)
    (line,) = axes.plot(x, averaged.mean, markevery=every, **look)
    if len(averaged.ends) > 1:
        axes.fill_between(x, averaged.low, averaged.high, color=color, alpha=0.2, linewidth=0)
    for tail in averaged.tails:
        points = zip(*tail, strict=True)
        axes.plot(*points, color=color, linestyle=look["linestyle"], linewidth=0.5)
    return line


def _count(axes: Axes, bands: Sequence[tuple[Group, Band]], looks: dict[str, canvas.Look]) -> None:
    """Draw how many runs remain at each place."""
    most = max(len(averaged.ends) for _, averaged in bands)
    for index, (group, averaged) in enumerate(bands):
        color, dash = looks[group.label]["color"], looks[group.label]["linestyle"]
        # Lines of equal counts are shifted, so that all of them can be seen.
        shift = (index - (len(bands) - 1) / 2) * 0.08 * most
        runs = len(averaged.ends)
        remaining = [runs - done + shift for done in range(runs)]
        start = 0.0
        if averaged.x:
            start = averaged.x[0]
        x, y = [start, *averaged.ends], [*remaining, shift]
        axes.step(x, y, where="post", color=color, linewidth=0.8, linestyle=dash)
    axes.set_ylim(-0.25 * most, 1.3 * most)
    axes.set_yticks([0, most])
    axes.set_ylabel("runs")


def _caption(groups: Sequence[Group], bands: Sequence[tuple[Group, Band]], axis: Axis) -> str:
    sentences = [caption(groups)]
    has_repeats = has_tails = False
    for _, averaged in bands:
        has_repeats = has_repeats or len(averaged.ends) > 1
        has_tails = has_tails or bool(averaged.tails)
    if has_repeats:
        sentences.append("Line: mean over the runs; band: minimum to maximum.")
    if has_tails:
        sentences.append(
            "Mean and band end with the shortest run. Thin lines are longer runs, and the "
            "narrow panel counts the runs that remain."
        )
    drawn = map(operator.itemgetter(0), bands)
    missing = list(map(name_of, not_among(groups, drawn)))
    if missing:
        reason = "there are no raw lines"
        if axis is AGAINST["bytes"]:
            reason = f"nothing was sent or {reason}"
        sentences.append(f"Not drawn, because {reason}: {', '.join(missing)}.")
    return " ".join(sentences)
