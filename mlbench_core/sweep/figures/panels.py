"""Draw time to goal, accuracy and price of each algorithm, one panel for each network.

A figure with one network has the width of a column, for a page; the figure with all networks has
that of two columns.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mlbench_core.comparison.figures import canvas
from mlbench_core.comparison.figures.captions import caption, not_among
from mlbench_core.comparison.figures.styles import method_looks
from mlbench_core.comparison.prices import Pricing
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.comparison.significance import confidence_interval, known_values, log_interval
from mlbench_core.errors import ConfigurationError
from mlbench_core.run_terms import goal_text
from mlbench_core.sweep.grouped_runs import Cell, Outcome
from mlbench_core.sweep.modelled import ModelledRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = [
    "SMALL_PT",
    "Quantity",
    "algorithm_looks",
    "draw_rows",
    "figure_name",
    "legend",
    "log_ticks",
    "networks_of",
    "new_panels",
    "panel_title",
    "quantities",
    "runs_caption",
]

SMALL_PT = 5.5
"""Size of the texts in a panel."""

_LABEL_IN = 1.0
_ROW_IN = 0.155
# The room to the right of the largest mark, as a factor on a logarithmic axis: for the number or
# the text of a row.
_ROOM = 2.2


@dataclass(frozen=True)
class Quantity:
    """A quantity that is drawn for each algorithm.

    Attributes:
        name: Beginning of the name of the figure.
        title: Title of the figure.
        label: Label of the axis.
        value: Function that returns the value of a run; None if it has none.
        missed: Function that returns the value of a run that missed its goal; None to draw no mark.
        log: True for a logarithmic axis.
        to_goal: True if it is measured until the goal, so that a run that missed the goal has more
            than any other.
        largest_first: True if a larger value is better.
        sentence: Sentence of the caption on the mark of a run that missed its goal.
    """

    name: str
    title: str
    label: str
    value: Callable[[RunRecord], float | None]
    missed: Callable[[RunRecord], float | None]
    log: bool = True
    to_goal: bool = True
    largest_first: bool = False
    sentence: str = ""


def quantities(outcome: Outcome, pricing: Pricing) -> Iterator[Quantity]:
    """Return the quantities of rows: time to goal, best value of the goal's metric, and price."""
    modelled = ""
    if outcome.modelled is not None:
        modelled = "modelled "
    yield Quantity(
        "time_to_goal",
        title="Time to goal",
        label=f"{modelled}training time to the goal in seconds",
        value=attrgetter("time_to_goal_s"),
        missed=attrgetter("train_s"),
        sentence="Open triangle: the training time of a run that missed the goal.",
    )
    goals = (group.records[0].goal for group in outcome.groups)
    goal: Mapping[str, Any] = next(filter(None, goals), {})
    metric = str(goal.get("metric") or "goal's metric").removeprefix("val_global_")
    # Runs end at their goal, so this differs little between runs that reached it.
    yield Quantity(
        "best",
        title=f"Best {metric}",
        label=f"best {metric} of a run",
        value=attrgetter("best"),
        missed=attrgetter("best"),
        log=False,
        to_goal=False,
        largest_first=not goal.get("minimize"),
        sentence="Open triangle: a run that missed the goal. "
        f"A run ends when it reaches the goal ({goal_text(goal)}).",
    )
    if pricing.per_hour is None or pricing.machine is None:
        return

    def price(run: RunRecord) -> float | None:
        if not run.time_to_goal_s or not run.workers:
            return None
        return pricing.price(run.time_to_goal_s, run.workers)

    yield Quantity(
        "price",
        title="Price of a run to the goal",
        label=f"price to the goal in {pricing.machine.currency}",
        value=price,
        # No mark for a run that missed its goal.
        missed=lambda _: None,
        sentence=" ".join(pricing.remarks),
    )


def algorithm_looks(outcome: Outcome) -> dict[str, canvas.Look]:
    """Return the look of each algorithm in all figures of a sweep.

    It has ``color``, ``marker``, ``linestyle`` and ``hatch``. No two algorithms have the same.

    Args:
        outcome: The runs.
    """
    return method_looks(outcome.algorithms)


def figure_name(quantity: str, network: str | None) -> str:
    """Return the name of a figure's files."""
    if network is None:
        return quantity
    # The name of a network may be a path, or a text with any characters.
    return f"{quantity}_{re.sub(r'[^A-Za-z0-9.-]+', '-', network)}"


def draw_rows(outcome: Outcome, quantity: Quantity, network: str | None = None) -> canvas.Drawing:
    """Draw a quantity with one row for each algorithm and each number of workers above 1.

    Args:
        outcome: The runs.
        quantity: The quantity.
        network: The network; None for a panel for each network.

    Raises:
        ConfigurationError: No run on the network has the quantity.
    """
    networks = networks_of(outcome, network)
    cells = []
    has_value = False
    for cell in outcome.cells:
        # A cell of which every run failed has nothing to draw.
        if cell.network in networks and cell.workers > 1 and cell.runs:
            cells.append(cell)
            has_value = has_value or bool(known_values(map(quantity.value, cell.group.records)))
    if not has_value:
        raise ConfigurationError(f"no run with more than one worker has a {quantity.title.lower()}")
    different = set(map(attrgetter("algorithm"), cells))
    names = sorted(different, key=outcome.algorithms.index)
    height = 0.62 + _ROW_IN * len(names) * max(len(outcome.several), 1.4)
    figure, panels = new_panels(network, len(networks), height)
    # All figures of a quantity have the same range, so that networks can be compared.
    span = _range(outcome, quantity)
    for axes, name in zip(panels, networks, strict=True):
        _panel(axes, outcome, quantity, name, names, span)
    text = _rows_caption(quantity, cells)
    canvas.finish(figure, text, *legend(panels))
    table = _rows_table(quantity, cells)
    return canvas.Drawing(figure_name(quantity.name, network), figure, text, table)


def networks_of(outcome: Outcome, network: str | None) -> list[str]:
    """Return the networks of a figure, which has a panel for each.

    Args:
        outcome: The runs.
        network: The network; None for all.
    """
    if network is None:
        return list(outcome.networks)
    return [network]


def new_panels(
    network: str | None, count: int, height: float, share: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure of one column for a network, or of a page with two panels in a row.

    Args:
        network: The network; None for a figure of the width of a page.
        count: Number of panels.
        height: Height of a panel in inches.
        share: True if the panels have the same axes.
    """
    rows = math.ceil(count / 2)
    width = canvas.COLUMN_IN
    if network is None:
        width = canvas.PAGE_IN
    figure = canvas.new_figure(width, height * rows)
    grid = figure.subplots(rows, min(count, 2), squeeze=False, sharex=share, sharey=share)
    panels = list(grid.flatten())
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def legend(panels: Iterable[Axes]) -> tuple[list[Any], list[str]]:
    """Return the handles and the labels of several panels, each once.

    Args:
        panels: The panels.
    """
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    # The line of one worker is the last.
    labels = sorted(handles, key=lambda label: (label.startswith("1 worker"), len(label), label))
    return list(map(handles.__getitem__, labels)), labels


def _panel(
    axes: Axes,
    outcome: Outcome,
    quantity: Quantity,
    network: str,
    names: Sequence[str],
    span: tuple[float, float],
) -> None:
    """Draw the rows of one network in a range of values, best algorithm at the top."""
    if quantity.log:
        axes.set_xscale("log")
    axes.set_xlim(span)
    looks = algorithm_looks(outcome)
    marks: dict[int, str] = {}
    for workers, look in zip(
        outcome.several, canvas.series_looks(len(outcome.several)), strict=True
    ):
        marks[workers] = look["marker"]

    def rank(name: str) -> float:
        median = _best(outcome, quantity, name, network)
        # Without a median, an algorithm is the last in both directions.
        if median is None:
            return math.inf
        if quantity.largest_first:
            return -median
        return median

    ordered = sorted(names, key=rank)
    step = 0.8 / max(len(outcome.several), 1)
    for row, name in enumerate(ordered):
        for index, workers in enumerate(outcome.several):
            cell = outcome.cell(name, network, workers)
            y = row + (index - (len(outcome.several) - 1) / 2) * step
            if cell is not None:
                mark: canvas.Look = {"color": looks[name]["color"], "marker": marks[workers]}
                _row(axes, outcome, quantity, cell, y, mark)
        _alone(axes, outcome, quantity, name, row)
    if quantity.name == "time_to_goal":
        _reference(axes, outcome)
    # The color is that of the algorithm, so the legend of the numbers of workers has none.
    for workers, marker in marks.items():
        row_of_workers = outcome.row(network, workers)
        if any(_median(quantity, cell) is not None for cell in row_of_workers):
            gray: canvas.Look = {"color": canvas.GRAY, "marker": marker, "linestyle": "none"}
            axes.plot([], [], label=f"{workers} workers", **gray)
    labels = [canvas.wrap(name, _LABEL_IN, 6) for name in ordered]
    axes.set_yticks(range(len(ordered)), labels, linespacing=0.95)
    # Downward, so that the best algorithm is at the top.
    axes.set_ylim(len(ordered) - 0.5, -0.5)
    for border in range(1, len(ordered)):
        axes.axhline(border - 0.5, color="#DDDDDD", linewidth=0.4, zorder=0)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(quantity.label)
    if quantity.log:
        log_ticks(axes.xaxis)
    else:
        axes.locator_params(axis="x", nbins=5)
    axes.set_title(panel_title(outcome, network))


def panel_title(outcome: Outcome, network: str) -> str:
    """Return the name of a network with its description.

    Args:
        outcome: The runs.
        network: Name of the network.
    """
    described = str(outcome.networks[network])
    # The file can name a network by its description.
    if described == network:
        return network
    return f"{network} ({described})"


def _best(outcome: Outcome, quantity: Quantity, name: str, network: str) -> float | None:
    """Return the best median of an algorithm on a network, over the numbers of workers above 1."""
    medians = []
    for workers in outcome.several:
        median = _median(quantity, outcome.cell(name, network, workers))
        if median is not None:
            medians.append(median)
    if not medians:
        return None
    if quantity.largest_first:
        return max(medians)
    return min(medians)


def _median(quantity: Quantity, cell: Cell | None) -> float | None:
    """Return the median of a quantity over the runs of a cell, or None if it is not known.

    A run that missed its goal counts as longer or more expensive than any other.
    """
    if cell is None or (quantity.to_goal and cell.median_s is None):
        return None
    # Only a time has a median with misses, as a miss is longer than every time.
    if quantity.name != "time_to_goal" and not cell.complete:
        return None
    values = known_values(map(quantity.value, cell.group.records))
    if quantity.to_goal:
        values += [math.inf] * (cell.missed + cell.failed)
    median = statistics.median(values or [math.inf])
    if median == math.inf:
        return None
    return median


def _row(
    axes: Axes, outcome: Outcome, quantity: Quantity, cell: Cell, y: float, look: canvas.Look
) -> None:
    """Draw the runs of a cell as dots, their median as a mark, and the interval as a line."""
    color, marker = look["color"], look["marker"]
    hit = known_values(map(quantity.value, cell.reached))
    others = not_among(cell.group.records, cell.reached)
    # A run that missed its goal has no time to it, so its training time is drawn.
    late = list(filter(None, map(quantity.missed, others)))
    # Below the interval, on which they could not be seen.
    axes.scatter(hit, [y + 0.13] * len(hit), s=3.5, color=color, alpha=0.75, linewidths=0, zorder=3)
    hollow: canvas.Look = {"facecolors": "none", "edgecolors": color, "linewidths": 0.7}
    axes.scatter(late, [y] * len(late), s=11, marker=">", zorder=3, **hollow)
    middle = _median(quantity, cell)
    interval = None
    # Without the runs that missed the goal, an interval would be too narrow and too low.
    if cell.complete and len(hit) == cell.runs:
        # Times have their interval on the logarithms, as in all tables.
        if quantity.to_goal:
            interval = log_interval(hit)
        else:
            interval = confidence_interval(hit)
    if interval is not None:
        axes.plot(interval, [y, y], color=color, linewidth=0.9, solid_capstyle="butt", zorder=2)
    mark: canvas.Look = {"color": color, "marker": marker, "linestyle": "none"}
    text = ""
    if middle is not None:
        axes.plot([middle], [y], zorder=4, **mark)
        text = canvas.number(middle)
    if cell.missed:
        late_text = outcome.missed_text(cell)
        text = f"{text}  {late_text}: {cell.missed} of {cell.runs}".strip()
    ends = [*hit, *late, *(interval or ())]
    if ends or text:
        low, high = axes.get_xlim()
        x = min(max(ends, default=low), high)
        near: canvas.Look = {"textcoords": "offset points", "va": "center", "size": SMALL_PT}
        axes.annotate(text, (x, y), (3, 0), color="#222222", annotation_clip=False, **near)


def _alone(axes: Axes, outcome: Outcome, quantity: Quantity, name: str, row: int) -> None:
    """Mark the algorithm's own median with one worker."""
    middle = _median(quantity, outcome.cell(name, None, 1))
    if middle is not None:
        look: canvas.Look = {"color": canvas.GRAY, "marker": "|", "markersize": 8, "zorder": 1}
        axes.plot([middle], [row], label="1 worker, same algorithm", linestyle="none", **look)


def _reference(axes: Axes, outcome: Outcome) -> None:
    """Draw a line at the median of the baseline with one worker, or else of the least one."""
    # To the right of the line, more workers did not pay.
    reference: Cell | None = None
    for cell in outcome.row(None, 1):
        if cell.median_s is not None and (reference is None or cell.algorithm == outcome.baseline):
            reference = cell
    if reference is not None and reference.median_s is not None:
        dashed: canvas.Look = {"linestyle": (0, (4, 2)), "linewidth": 0.8, "zorder": 1}
        label = f"1 worker, {reference.algorithm}"
        axes.axvline(reference.median_s, label=label, color=canvas.GRAY, **dashed)


def _range(outcome: Outcome, quantity: Quantity) -> tuple[float, float]:
    """Return the range of the axis over all networks, with room for the text of a row."""
    values: list[float] = []
    for group in outcome.groups:
        for run in group.records:
            values += filter(None, (quantity.value(run), quantity.missed(run)))
    low, high = min(values), max(values)
    if quantity.log:
        return low / 1.25, high * _ROOM
    width = (high - low) or 1.0
    return low - 0.05 * width, high + 0.45 * width


def log_ticks(axis: Axis) -> None:
    """Put ticks at 1, 2 and 5 times the powers of 10.

    Args:
        axis: A logarithmic axis.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def runs_caption(cells: Iterable[Cell]) -> str:
    """Describe the runs without those that missed the goal, which the figure has itself.

    Args:
        cells: The cells in the figure.
    """
    groups = list(map(attrgetter("group"), cells))
    text = caption(groups).partition(" Missed the goal:")[0]
    if any(isinstance(group.records[0], ModelledRecord) for group in groups):
        text += " Steps and bytes are measured; seconds are modelled."
    return text


def _rows_caption(quantity: Quantity, cells: Sequence[Cell]) -> str:
    missed = any(map(attrgetter("missed"), cells))
    sentences = [runs_caption(cells), "Mark and number: median; dots: single runs."]
    if any(map(attrgetter("interval_s"), cells)):
        sentences.append(
            "Line: 95 % confidence interval of the mean, "
            "of times the geometric one, if all runs reached the goal."
        )
    if (missed and quantity.sentence) or quantity.name == "price":
        sentences.append(quantity.sentence)
    if quantity.to_goal and missed:
        sentences.append(
            "The median treats a missed run as the longest. "
            "There is none if half of the runs or more did."
        )
    return " ".join(sentences)


def _rows_table(quantity: Quantity, cells: Sequence[Cell]) -> list[list[Any]]:
    rows: list[list[Any]] = [["network", "algorithm", "workers", "run", "reached", quantity.name]]
    for cell in cells:
        for run in cell.group.records:
            row = [cell.network, cell.algorithm, cell.workers, run.name, bool(run.reached)]
            rows.append([*row, quantity.value(run)])
    return rows
