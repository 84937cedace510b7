"""Draw learning curves with bands over repeats, against epochs, training time or bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlbench_core.comparison.figures import canvas
from mlbench_core.comparison.figures.captions import caption, name_of, shared_goal
from mlbench_core.comparison.figures.looks import method_looks
from mlbench_core.comparison.figures.numbers import Band, band
from mlbench_core.comparison.pool import Group, plural, workload
from mlbench_core.comparison.record import CurvePoint
from mlbench_core.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["AGAINST", "Axis", "draw_learning_curves"]


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of learning curves.

    Attributes:
        title: Its name in the title of the figure.
        label: Its label.
        shared: True if the panels of all numbers of workers have the same axis.
        place: Function that returns the place of a point on the axis; None if it is unknown.
    """

    title: str
    label: str
    shared: bool
    place: Callable[[CurvePoint], float | None]


AGAINST: dict[str, Axis] = {
    # The tracker counts epochs from 0; a value before the first batch belongs to 0 trained epochs.
    "epochs": Axis("epochs", "epochs", True, lambda point: point.epoch + 1 if point.step else 0),
    "time": Axis("training time", "training time in seconds", False, lambda point: point.train_s),
    "bytes": Axis(
        "bytes on the wire", "put on the wire by all workers", False, lambda point: point.bytes
    ),
}
"""Horizontal axes of learning curves by name."""

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))


def draw_learning_curves(groups: Sequence[Group], against: str = "epochs") -> canvas.Drawing:
    """Draw the goal's metric of every group: the mean over the runs, and a band from their minimum to their maximum.

    The mean and the band end with the shortest run. Longer runs continue as thin lines, and a
    narrow panel below counts them.

    Args:
        groups: Groups of runs with result folders.
        against: ``"epochs"``, ``"time"`` or ``"bytes"``.

    Returns:
        The figure ``learning_curves_epochs``, ``learning_curves_time`` or
        ``learning_curves_bytes``. There is one panel for each number of workers.

    Raises:
        ConfigurationError: The groups have no task and goal in common, or no run recorded its
            metric.
    """
    if against not in AGAINST:
        raise ConfigurationError(
            f"against must be one of {', '.join(AGAINST)}, not {against!r}: choose one of them"
        )
    goal = shared_goal(groups)
    if goal is None or len({workload(group) for group in groups}) > 1:
        raise ConfigurationError(
            "the runs have no task and goal in common, so there is no common metric to draw"
        )
    bands = [
        (group, found)
        for group in groups
        if (found := _band(group, goal["metric"], AGAINST[against]))
    ]
    if not bands:
        raise ConfigurationError(
            f"no run recorded {goal['metric']} with its {AGAINST[against].title}"
        )
    figure, text = _draw(groups, bands, goal, AGAINST[against])
    rows: list[list[Any]] = [["setup", "workers", "runs", against, "mean", "minimum", "maximum"]]
    for group, found in bands:
        columns = zip(found.x, found.mean, found.low, found.high, strict=True)
        rows += [[group.label, group.workers, len(found.ends), *column] for column in columns]
    return canvas.Drawing(f"learning_curves_{against}", figure, text, rows)


def _band(group: Group, metric: str, axis: Axis) -> Band | None:
    curves = []
    for record in group.records:
        points = [(axis.place(point), point.value) for point in record.curve(metric)]
        # A metric that is recorded several times in an epoch has several values at one place: the
        # last one counts.
        curves.append(list({float(x): value for x, value in points if x is not None}.items()))
    # All points are at 0 bytes if a single worker sends nothing.
    return band([curve for curve in curves if curve and curve[-1][0] > 0])


def _draw(
    groups: Sequence[Group],
    bands: Sequence[tuple[Group, Band]],
    goal: Mapping[str, Any],
    axis: Axis,
) -> tuple[Figure, str]:
    """Draw one panel for each number of workers, with a panel that counts runs if they did not end together."""
    workers = sorted({group.workers for group, _ in bands})
    uneven = any(found.tails for _, found in bands)
    figure = canvas.new_figure(canvas.COLUMN_IN, 0.5 + (1.9 if uneven else 1.6) * len(workers))
    curves, counts = _panels(figure, len(workers), uneven, axis.shared)
    # A series has the same look in every panel.
    labels = list(dict.fromkeys(group.label for group, _ in bands))
    looks = method_looks(labels)
    entries: dict[str, Any] = {}
    goal_line = None
    for index, (number, axes) in enumerate(zip(workers, curves, strict=True)):
        same = [(group, found) for group, found in bands if group.workers == number]
        for group, found in same:
            line = _curve(axes, found, looks[group.label])
            entries.setdefault(group.label, line)
        # The goal of a fixed training time has no threshold.
        if goal.get("threshold") is not None:
            look: canvas.Look = {"linestyle": (0, (4, 2)), "color": canvas.GRAY, "linewidth": 0.8}
            goal_line = axes.axhline(goal["threshold"], **look)
        axes.set_ylabel(goal["metric"])
        if len(workers) > 1:
            note: canvas.Look = {"ha": "right", "va": "bottom", "size": 6, "style": "italic"}
            axes.annotate(
                plural(number, "worker"), (1, 0), (-3, 3), "axes fraction", "offset points", **note
            )
        if uneven:
            _count(counts[index], same, looks)
    if goal_line is not None:
        entries["goal"] = goal_line
    _label(curves + counts, axis, max(found.ends[-1] for _, found in bands))
    figure.align_ylabels()
    canvas.title(curves[0], f"Learning curves against {axis.title}", groups)
    text = _caption(groups, bands, axis)
    canvas.finish(figure, text, list(entries.values()), list(entries))
    return figure, text


def _label(panels: Sequence[Axes], axis: Axis, largest: float) -> None:
    """Write the numbers and the label of the horizontal axis, bytes in a readable unit."""
    unit, size = "", 1.0
    if axis is AGAINST["bytes"]:
        unit, size = next((name, size) for name, size in _UNITS if largest >= size or size == 1)
    for axes in panels:
        axes.locator_params(axis="x", integer=axis.shared, nbins=6)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / size:g}")
    panels[0].figure.axes[-1].set_xlabel(f"{unit} {axis.label}".strip())


def _panels(figure: Figure, rows: int, uneven: bool, shared: bool) -> tuple[list[Axes], list[Axes]]:
    """Return the axes for curves and those for counts of runs, from top to bottom."""
    heights = [5.0, 1.0] * rows if uneven else [1.0] * rows
    every = list(
        figure.subplots(len(heights), 1, sharex=shared, squeeze=False, height_ratios=heights)[:, 0]
    )
    curves = every[:: 2 if uneven else 1]
    counts = every[1::2] if uneven else []
    for axes in curves[1:]:
        axes.sharey(curves[0])
    if not shared:
        for above, below in zip(curves, counts, strict=False):
            below.sharex(above)
            above.tick_params(labelbottom=False)
    return curves, counts


def _curve(axes: Axes, found: Band, look: canvas.Look) -> Any:
    """Draw mean, band and tails, and return the line of the mean for the legend."""
    every = max(1, len(found.x) // 8)
    (line,) = axes.plot(found.x, found.mean, markevery=every, **look)
    if len(found.ends) > 1:
        axes.fill_between(
            found.x, found.low, found.high, color=look["color"], alpha=0.2, linewidth=0
        )
    for tail in found.tails:
        axes.plot(
            *zip(*tail, strict=True),
            color=look["color"],
            linestyle=look["linestyle"],
            linewidth=0.5,
        )
    return line


def _count(axes: Axes, bands: Sequence[tuple[Group, Band]], looks: dict[str, canvas.Look]) -> None:
    """Draw how many runs remain at each place."""
    most = max(len(found.ends) for _, found in bands)
    for index, (group, found) in enumerate(bands):
        # Lines of equal counts are shifted, so that all of them can be seen.
        shift = (index - (len(bands) - 1) / 2) * 0.08 * most
        remaining = [len(found.ends) - done + shift for done in range(len(found.ends))]
        x = [found.x[0] if found.x else 0.0, *found.ends]
        axes.step(
            x,
            [*remaining, shift],
            where="post",
            color=looks[group.label]["color"],
            linewidth=0.8,
            linestyle=looks[group.label]["linestyle"],
        )
    axes.set_ylim(-0.25 * most, 1.3 * most)
    axes.set_yticks([0, most])
    axes.set_ylabel("runs")


def _caption(groups: Sequence[Group], bands: Sequence[tuple[Group, Band]], axis: Axis) -> str:
    sentences = [caption(groups)]
    if any(len(found.ends) > 1 for _, found in bands):
        sentences.append("Line: mean over the runs; band: minimum to maximum.")
    if any(found.tails for _, found in bands):
        sentences.append(
            "Mean and band end with the shortest run. Thin lines are longer runs, and the "
            "narrow panel counts the runs "
            "that remain."
        )
    drawn = [group for group, _ in bands]
    missing = [name_of(group) for group in groups if not any(group is one for one in drawn)]
    if missing:
        reason = (
            "nothing was sent or there are no raw lines"
            if axis is AGAINST["bytes"]
            else "there are no raw lines"
        )
        sentences.append(f"Not drawn, because {reason}: {', '.join(missing)}.")
    return " ".join(sentences)
