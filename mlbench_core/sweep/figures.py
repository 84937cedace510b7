"""Draw a sweep: time to goal, bytes, accuracy and price of each algorithm, one panel for each network.

A figure with one network has the width of a column, for a page; the figure with all networks has
that of two columns.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlbench_core.comparison.figures import canvas
from mlbench_core.comparison.figures.captions import caption
from mlbench_core.comparison.figures.looks import method_looks
from mlbench_core.comparison.prices import Pricing
from mlbench_core.comparison.record import RunRecord
from mlbench_core.comparison.stats import confidence_interval, log_interval
from mlbench_core.errors import ConfigurationError
from mlbench_core.run_terms import goal_text
from mlbench_core.sweep.outcome import Cell, Outcome, sent_per_worker

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Quantity", "draw_bytes", "draw_rows", "figure_name", "quantities"]

_LABEL_IN = 1.0
_ROW_IN = 0.155
_SMALL_PT = 5.5
_MEGA = 1e6
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
    """Return what is drawn as rows: time to goal, best value of the goal's metric, and price."""
    yield Quantity(
        "time_to_goal", "Time to goal", ("training time to the goal in "
                                        "seconds"), lambda run: run.time_to_goal_s,
        lambda run: run.train_s, sentence=("Open triangle: the training time of a run that "
                                          "missed the goal."),
    )  # fmt: skip
    goal = (
        next((group.records[0].goal for group in outcome.groups if group.records[0].goal), None)
        or {}
    )
    metric = str(goal.get("metric") or "goal's metric").removeprefix("val_global_")
    yield Quantity(
        "best", f"Best {metric}", f"best {metric} of a run", lambda run: run.best, lambda run: run.best, log=False,
        to_goal=False, largest_first=not goal.get("minimize"),
        sentence=("Open triangle: a run that missed the goal. A run ends when it reaches the "
                 f"goal ({goal_text(goal)})."),
    )  # fmt: skip
    if pricing.per_hour is not None and pricing.machine is not None:
        yield Quantity(
            "price", "Price of a run to the goal", ("price to the goal in "
                                                   f"{pricing.machine.currency}"),
            lambda run: pricing.price(run.time_to_goal_s, run.workers) if run.time_to_goal_s and run.workers else None,
            lambda _: None, sentence=" ".join(pricing.remarks),
        )  # fmt: skip


def figure_name(quantity: str, network: str | None) -> str:
    """Return the name of a figure's files; a network may be a text with any characters."""
    return quantity if network is None else f"{quantity}_{re.sub(r'[^A-Za-z0-9.-]+', '-', network)}"


def draw_rows(outcome: Outcome, quantity: Quantity, network: str | None = None) -> canvas.Drawing:
    """Draw a quantity with one row for each algorithm and each number of workers above 1.

    Args:
        outcome: The runs.
        quantity: The quantity.
        network: The network; None for a panel for each network.

    Raises:
        ConfigurationError: No run on the network has the quantity.
    """
    networks = [network] if network is not None else list(outcome.networks)
    shown = [
        cell
        for cell in outcome.cells
        if cell.network in networks and cell.workers > 1 and cell.runs
    ]
    if not any(quantity.value(run) is not None for cell in shown for run in cell.group.records):
        raise ConfigurationError(f"no run with more than one worker has a {quantity.title.lower()}")
    names = [name for name in outcome.algorithms if any(cell.algorithm == name for cell in shown)]
    height = 0.62 + _ROW_IN * len(names) * max(len(outcome.several), 1.4)
    columns = min(len(networks), 2)
    rows = -(-len(networks) // 2)
    width = canvas.COLUMN_IN if network is not None else canvas.PAGE_IN
    figure = canvas.new_figure(width, height * rows)
    every = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in every[len(networks) :]:
        axes.remove()
    # All figures of a quantity have the same range, so that networks can be compared.
    span = _range(outcome, quantity)
    for axes, name in zip(every, networks, strict=False):
        _panel(axes, outcome, quantity, name, names, span)
    text = _rows_caption(outcome, quantity, shown)
    canvas.finish(figure, text, *_legend(every[: len(networks)]))
    return canvas.Drawing(
        figure_name(quantity.name, network), figure, text, _rows_table(quantity, shown)
    )


def _legend(every: Iterable[Axes]) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for axes in every:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    # The line of one worker is the last.
    labels = sorted(found, key=lambda label: (label.startswith("1 worker"), len(label), label))
    return [found[label] for label in labels], labels


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
    looks = dict(zip(outcome.several, canvas.series_looks(len(outcome.several)), strict=True))
    middle = {name: _best(outcome, quantity, name, network) for name in names}
    worst = float("inf")
    sign = -1 if quantity.largest_first else 1
    ordered = sorted(
        names, key=lambda name: worst if middle[name] is None else sign * (middle[name] or 0.0)
    )
    step = 0.8 / max(len(outcome.several), 1)
    for place, name in enumerate(ordered):
        for index, workers in enumerate(outcome.several):
            cell = outcome.cell(name, network, workers)
            y = place + (index - (len(outcome.several) - 1) / 2) * step
            if cell is not None:
                _row(axes, outcome, quantity, cell, y, looks[workers])
        _alone(axes, outcome, quantity, name, place)
    if quantity.name == "time_to_goal":
        _reference(axes, outcome)
    axes.set_yticks(
        range(len(ordered)), [canvas.wrap(name, _LABEL_IN, 6) for name in ordered], linespacing=0.95
    )
    axes.set_ylim(len(ordered) - 0.5, -0.5)
    for border in range(1, len(ordered)):
        axes.axhline(border - 0.5, color="#DDDDDD", linewidth=0.4, zorder=0)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(quantity.label)
    _ticks(axes, quantity.log)
    axes.set_title(
        f"{network} ({outcome.networks[network]})"
        if str(outcome.networks[network]) != network
        else network
    )


def _best(outcome: Outcome, quantity: Quantity, name: str, network: str) -> float | None:
    """Return the best median of an algorithm on a network, over the numbers of workers above 1."""
    cells = [outcome.cell(name, network, workers) for workers in outcome.several]
    medians = [median for cell in cells if cell and (median := _median(quantity, cell)) is not None]
    return (max(medians) if quantity.largest_first else min(medians)) if medians else None


def _median(quantity: Quantity, cell: Cell) -> float | None:
    """Return the median of a quantity; a run that missed its goal counts as longer or more expensive than any other."""
    if quantity.to_goal and cell.median_s is None:
        return None
    # Only a time has a median with misses, as a miss is longer than every time.
    if quantity.name != "time_to_goal" and not cell.complete:
        return None
    values = [value for run in cell.group.records if (value := quantity.value(run)) is not None]
    if quantity.to_goal:
        values += [float("inf")] * (cell.missed + cell.failed)
    found = statistics.median(values) if values else float("inf")
    return None if found == float("inf") else found


def _row(
    axes: Axes, outcome: Outcome, quantity: Quantity, cell: Cell, y: float, look: canvas.Look
) -> None:
    """Draw the runs of a cell as dots, their median as a mark, and the interval as a line."""
    color, marker = look["color"], look["marker"]
    hit = [value for run in cell.reached if (value := quantity.value(run)) is not None]
    reached = {id(run) for run in cell.reached}
    late = [
        value
        for run in cell.group.records
        if id(run) not in reached and (value := quantity.missed(run))
    ]
    # Below the interval, on which they could not be seen.
    axes.scatter(hit, [y + 0.13] * len(hit), s=3.5, color=color, alpha=0.75, linewidths=0, zorder=3)
    hollow: canvas.Look = {
        "facecolors": "none",
        "edgecolors": color,
        "linewidths": 0.7,
        "zorder": 3,
    }
    axes.scatter(late, [y] * len(late), s=11, marker=">", **hollow)
    middle = _median(quantity, cell)
    interval_of = log_interval if quantity.to_goal else confidence_interval
    interval = interval_of(hit) if cell.complete and len(hit) == cell.runs else None
    if interval is not None:
        axes.plot(interval, [y, y], color=color, linewidth=0.9, solid_capstyle="butt", zorder=2)
    if middle is not None:
        label = f"{cell.workers} workers"
        axes.plot(
            [middle], [y], color=color, marker=marker, linestyle="none", label=label, zorder=4
        )
    end = max([*hit, *late, *(interval or ())], default=None)
    text = canvas.number(middle) if middle is not None else ""
    if cell.missed:
        text = (
            f"{text}  {outcome.not_within(cell.network, cell.workers)}: {cell.missed} of "
            f"{cell.runs}"
        ).strip()
    if end is not None or text:
        low, high = axes.get_xlim()
        at = low if end is None else min(end, high)
        near: canvas.Look = {
            "textcoords": "offset points",
            "va": "center",
            "size": _SMALL_PT,
            "color": "#222222",
        }
        axes.annotate(text, (at, y), (3, 0), annotation_clip=False, **near)


def _alone(axes: Axes, outcome: Outcome, quantity: Quantity, name: str, place: int) -> None:
    """Mark the algorithm's own median with one worker."""
    cell = outcome.cell(name, None, 1)
    middle = _median(quantity, cell) if cell is not None else None
    if middle is not None:
        look: canvas.Look = {
            "color": canvas.GRAY,
            "marker": "|",
            "markersize": 8,
            "linestyle": "none",
            "zorder": 1,
        }
        axes.plot([middle], [place], label="1 worker, same algorithm", **look)


def _reference(axes: Axes, outcome: Outcome) -> None:
    """Draw a line at the median of the baseline with one worker, or of the fastest algorithm without a baseline."""
    row = [cell for cell in outcome.row(None, 1) if cell.median_s is not None]
    chosen = next(
        (cell for cell in row if cell.algorithm == outcome.baseline), row[0] if row else None
    )
    if chosen is not None and chosen.median_s is not None:
        dashed: canvas.Look = {
            "color": canvas.GRAY,
            "linestyle": (0, (4, 2)),
            "linewidth": 0.8,
            "zorder": 1,
        }
        axes.axvline(chosen.median_s, label=f"1 worker, {chosen.algorithm}", **dashed)


def _range(outcome: Outcome, quantity: Quantity) -> tuple[float, float]:
    """Return the range of the axis over all networks: that of the runs, with room for the text of a row."""
    runs = [run for group in outcome.groups for run in group.records]
    values = [
        value for run in runs for value in (quantity.value(run), quantity.missed(run)) if value
    ]
    low, high = min(values), max(values)
    if quantity.log:
        return low / 1.25, high * _ROOM
    width = (high - low) or 1.0
    return low - 0.05 * width, high + 0.45 * width


def _ticks(axes: Axes, log: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    if log:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.locator_params(axis="x", nbins=5)


def _rows_caption(outcome: Outcome, quantity: Quantity, cells: Sequence[Cell]) -> str:
    sentences = [caption([cell.group for cell in cells]).partition(" Missed the goal:")[0]]
    sentences.append("Mark and number: median; dots: single runs.")
    if any(cell.interval_s for cell in cells):
        sentences.append(
            "Line: 95 % confidence interval of the mean, of times the geometric one, if all "
            "runs reached the goal."
        )
    if (any(cell.missed for cell in cells) and quantity.sentence) or quantity.name == "price":
        sentences.append(quantity.sentence)
    if quantity.to_goal and any(cell.missed for cell in cells):
        sentences.append(
            "The median treats a missed run as the longest. There is none if half of the runs "
            "or more did."
        )
    return " ".join(sentences)


def _rows_table(quantity: Quantity, cells: Sequence[Cell]) -> list[list[Any]]:
    rows: list[list[Any]] = [["network", "algorithm", "workers", "run", "reached", quantity.name]]
    for cell in cells:
        rows += [
            [
                cell.network,
                cell.algorithm,
                cell.workers,
                run.name,
                bool(run.reached),
                quantity.value(run),
            ]
            for run in cell.group.records
        ]
    return rows


def draw_bytes(outcome: Outcome, network: str | None = None) -> canvas.Drawing:
    """Draw the time to the goal against the bytes that a worker sends until then, one point for each cell.

    Args:
        outcome: The runs.
        network: The network; None for a panel for each network.

    Raises:
        ConfigurationError: No run on the network reached its goal and counted its bytes.
    """
    networks = [network] if network is not None else list(outcome.networks)
    points = {name: _points(outcome, name) for name in networks}
    if not any(points.values()):
        raise ConfigurationError(
            "no run with more than one worker reached its goal and counted its bytes"
        )
    rows = -(-len(networks) // 2)
    width = canvas.COLUMN_IN if network is not None else canvas.PAGE_IN
    figure = canvas.new_figure(width, 2.4 * rows)
    every = figure.subplots(
        rows, min(len(networks), 2), squeeze=False, sharex=True, sharey=True
    ).flatten()
    looks = method_looks(outcome.algorithms)
    for axes in every[len(networks) :]:
        axes.remove()
    for axes, name in zip(every, networks, strict=False):
        _bytes_panel(axes, outcome, name, points[name], looks)
    cells = [cell for name in networks for cell, _, _ in points[name]]
    groups = [cell.group for cell in cells]
    text = (
        f"{caption(groups).partition(' Missed the goal:')[0]} Numbers at the points: workers. "
        "Median of the "
        "time, and of the bytes. Not drawn: algorithms of which a run missed the goal."
    )
    canvas.finish(figure, text, *_legend(every[: len(networks)]))
    table: list[list[Any]] = [
        ["network", "algorithm", "workers", "bytes_per_worker", "time_to_goal_s"]
    ]
    table += [
        [c.network, c.algorithm, c.workers, sent, s]
        for name in networks
        for c, sent, s in points[name]
    ]
    return canvas.Drawing(figure_name("bytes_to_goal", network), figure, text, table)


def _points(outcome: Outcome, network: str) -> list[tuple[Cell, float, float]]:
    """Return the cells of a network with their bytes of a worker and their seconds."""
    found = []
    for workers in outcome.several:
        for cell in outcome.row(network, workers):
            sent = [
                value for run in cell.reached if cell.complete and (value := sent_per_worker(run))
            ]
            if sent and cell.median_s is not None:
                found.append((cell, statistics.median(sent), cell.median_s))
    return found


def _bytes_panel(axes: Axes, outcome: Outcome, network: str, points: Any, looks: Any) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for cell, sent, seconds in points:
        look = {name: looks[cell.algorithm][name] for name in ("color", "marker")}
        axes.plot([sent / _MEGA], [seconds], linestyle="none", label=cell.algorithm, **look)
        beside: canvas.Look = {"textcoords": "offset points", "size": _SMALL_PT, "va": "center"}
        axes.annotate(str(cell.workers), (sent / _MEGA, seconds), (4, 2), **beside)
    _ticks(axes, log=True)
    _vertical_ticks(axes)
    axes.margins(0.1)
    axes.set_xlabel("put on the wire by a worker until the goal in MB")
    axes.set_ylabel("time to goal in seconds")
    axes.tick_params(labelbottom=True, labelleft=True)
    axes.set_title(network)


def _vertical_ticks(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
