"""Draw each algorithm as a line in its color: over the workers, the bandwidth, and the bytes.

A line over the numbers of workers joins only neighbors: without a median at a number of workers,
it has a gap there.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mlbench_core.comparison.figures import canvas
from mlbench_core.comparison.prices import Pricing
from mlbench_core.errors import ConfigurationError
from mlbench_core.sweep.fastest_methods import sharing_text
from mlbench_core.sweep.figures.panels import (
    SMALL_PT,
    algorithm_looks,
    figure_name,
    legend,
    log_ticks,
    networks_of,
    new_panels,
    panel_title,
    runs_caption,
)
from mlbench_core.sweep.grouped_runs import Cell, Outcome, sent_per_worker
from mlbench_core.sweep.utilization import ROUND_TRIP_S, SHARES, Utilization

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Curve", "curves", "draw_bytes", "draw_curve", "draw_utilization"]

_MEGA = 1e6
_PANEL_IN = 2.3
# The marks of misses at the top of a panel: number in a row, width in points, and height of a row
# as a share of the panel.
_MISSES_IN_ROW = 4
_MISS_PT = 6.0
_MISS_SHARE = 0.06
# With more algorithms or fewer runs, bands would hide the lines: the interval of two runs is 12.7
# standard errors wide on each side.
_MOST_BANDS = 6
_LEAST_RUNS = 3


@dataclass(frozen=True)
class Curve:
    """A quantity that is drawn against the number of workers.

    Attributes:
        name: Beginning of the name of the figure.
        title: Title of the figure.
        label: Label of the axis.
        value: Function that returns the value of a cell; None if it has none.
        sentence: Sentence of the caption on the values.
        has_band: True to draw the interval of the time as a band.
        has_networks: True for a panel for each network.
    """

    name: str
    title: str
    label: str
    value: Callable[[Cell], float | None]
    sentence: str
    has_band: bool = False
    has_networks: bool = True


def curves(outcome: Outcome, pricing: Pricing) -> Iterator[Curve]:
    """Yield the quantities over the number of workers: time and steps to the goal, and price.

    Args:
        outcome: The runs.
        pricing: Price of the machines.
    """
    modelled = ""
    if outcome.modelled is not None:
        modelled = "modelled "
    yield Curve(
        "time_by_workers",
        title="Time to goal and number of workers",
        label=f"{modelled}time to the goal in seconds",
        value=attrgetter("median_s"),
        sentence="Median time.",
        has_band=True,
    )
    yield Curve(
        "steps_by_workers",
        title="Steps to goal and number of workers",
        label="training steps to the goal",
        value=_median_steps,
        sentence="Median number of steps, which does not depend on the network: each is that of "
        "the network with the fewest misses.",
        has_networks=False,
    )
    # The last curve needs the price of the machine.
    if pricing.per_hour is None or pricing.machine is None:
        return

    def price(cell: Cell) -> float | None:
        cost_s = cell.cost_per_success_s
        if cost_s is None:
            return None
        return pricing.price(cost_s, cell.workers)

    remarks = " ".join(pricing.remarks)
    yield Curve(
        "price_by_workers",
        title="Price of a success and number of workers",
        label=f"price of a success in {pricing.machine.currency}",
        value=price,
        sentence=f"Price of all runs, divided by the number that reached the goal. {remarks}",
    )


def _median_steps(cell: Cell) -> float | None:
    """Return the median of the steps to the goal, in which a miss has more than all others."""
    steps = list(filter(None, map(attrgetter("steps_to_goal"), cell.reached)))
    # Not every run counts its steps.
    if len(steps) < len(cell.reached):
        return None
    median = statistics.median([*steps, *[math.inf] * (cell.missed + cell.failed)])
    # The mean of the two middle values is infinite, too, if one of them is a miss.
    if math.isinf(median):
        return None
    return median


def draw_curve(outcome: Outcome, curve: Curve, network: str | None = None) -> canvas.Drawing:
    """Draw a quantity against the number of workers, one line for each algorithm.

    Args:
        outcome: The runs.
        curve: The quantity.
        network: The network; None for a panel for each network.

    Raises:
        ConfigurationError: No run has the quantity.
    """
    panels_of: list[str | None] = [None]
    if curve.has_networks:
        panels_of = list(networks_of(outcome, network))
    cells = {}
    drawn: list[Cell] = []
    for name in panels_of:
        cells[name] = _cells(outcome, name, curve)
        drawn += cells[name].values()
    # All networks have the same range, so that they can be compared.
    shown = _cells_of_all(outcome, curve)
    if not any(map(curve.value, drawn)):
        raise ConfigurationError(f"no run has a value of {curve.title.lower()}")
    # Without networks, the figure has one panel of the width of a column, and no network's name.
    place: str | None = ""
    if curve.has_networks:
        place = network
    figure, panels = new_panels(place, len(panels_of), _PANEL_IN)
    for axes, (name, found) in zip(panels, cells.items(), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _lines(axes, outcome, curve, found)
        if curve.name == "steps_by_workers":
            _perfect(axes, outcome, curve, found)
        _limits(axes, outcome, curve, shown)
        axes.set_xlabel("number of workers")
        axes.set_ylabel(curve.label)
        title = curve.title
        if name is not None:
            title = panel_title(outcome, name)
        axes.set_title(title)
    text = _curve_caption(outcome, curve, drawn)
    canvas.finish(figure, text, *legend(panels))
    header = ["network", "algorithm", "workers", "runs", "missed", curve.name]
    rows: list[list[Any]] = [[*header, "low", "high"]]
    for name, found in cells.items():
        for cell in found.values():
            low, high = (curve.has_band and cell.interval_s) or (None, None)
            # One worker is in the panels of all networks.
            row = [name or cell.network, cell.algorithm, cell.workers, cell.runs, cell.missed]
            rows.append([*row, curve.value(cell), low, high])
    return canvas.Drawing(figure_name(curve.name, place or None), figure, text, rows)


def _cells_of_all(outcome: Outcome, curve: Curve) -> list[Cell]:
    places: list[str | None] = [None]
    if curve.has_networks:
        places = list(outcome.networks)
    cells: list[Cell] = []
    for name in places:
        cells += _cells(outcome, name, curve).values()
    return cells


def _cells(outcome: Outcome, network: str | None, curve: Curve) -> dict[tuple[str, int], Cell]:
    """Return the cells of a panel, which always has those of one worker."""
    networks = [network]
    if not curve.has_networks:
        networks = list(outcome.networks)
    found = {}
    for algorithm in outcome.algorithms:
        for workers in outcome.workers:
            candidates = []
            for name in networks:
                cell = outcome.cell(algorithm, name, workers)
                if cell is not None:
                    candidates.append(cell)
            if candidates:
                # Of the same number of misses, the one with more runs, then the first network.
                found[algorithm, workers] = min(
                    candidates, key=lambda cell: (cell.missed + cell.failed, -cell.runs)
                )
    return found


def _lines(axes: Axes, outcome: Outcome, curve: Curve, cells: dict[tuple[str, int], Cell]) -> None:
    has_bands = curve.has_band and len(outcome.algorithms) <= _MOST_BANDS
    late: dict[int, list[canvas.Look]] = {}
    for name, look in algorithm_looks(outcome).items():
        color, marker = look["color"], look["marker"]
        values: list[float] = []
        lows: list[float] = []
        highs: list[float] = []
        for workers in outcome.workers:
            # A line has a gap at a number that is missing.
            values.append(math.nan)
            lows.append(math.nan)
            highs.append(math.nan)
            cell = cells.get((name, workers))
            if cell is None:
                continue
            value, interval = curve.value(cell), cell.interval_s
            if value is not None:
                values[-1] = value
            if has_bands and cell.runs >= _LEAST_RUNS and interval is not None:
                lows[-1], highs[-1] = interval
            if _has_no_value(curve, cell):
                late.setdefault(workers, []).append({"color": color, "marker": marker})
            elif value is not None and not cell.complete:
                hollow: canvas.Look = {"markerfacecolor": "white", "linestyle": "none"}
                axes.plot([workers], [value], color=color, marker=marker, zorder=4, **hollow)
        if all(map(math.isnan, values)):
            continue
        line: canvas.Look = {"color": color, "marker": marker, "linestyle": look["linestyle"]}
        axes.plot(outcome.workers, values, label=name, zorder=3, **line)
        if has_bands:
            axes.fill_between(outcome.workers, lows, highs, color=color, alpha=0.13, linewidth=0)
    _misses(axes, late)


def _has_no_value(curve: Curve, cell: Cell) -> bool:
    """Return True if a cell has no value for its misses."""
    return curve.value(cell) is None and not cell.complete


def _misses(axes: Axes, late: dict[int, list[canvas.Look]]) -> None:
    """Draw the open mark of each algorithm without a value in a strip at the top."""
    from matplotlib.transforms import ScaledTranslation

    for workers, marks in late.items():
        for index, mark in enumerate(marks):
            row, column = divmod(index, _MISSES_IN_ROW)
            count = min(len(marks) - row * _MISSES_IN_ROW, _MISSES_IN_ROW)
            right_in = (column - (count - 1) / 2) * _MISS_PT / 72
            shift = ScaledTranslation(right_in, 0, axes.figure.dpi_scale_trans)
            place: canvas.Look = {"transform": axes.get_xaxis_transform() + shift}
            y = 1 - (row + 0.5) * _MISS_SHARE
            place |= {"fillstyle": "none", "linestyle": "none", "clip_on": False}
            axes.plot([workers], [y], **mark, **place)
    strip = _strip(max(map(len, late.values()), default=0))
    if strip:
        border: canvas.Look = {"color": "#DDDDDD", "linewidth": 0.8, "zorder": 0}
        axes.plot([0, 1], [1 - strip] * 2, transform=axes.transAxes, **border)
        small: canvas.Look = {"size": SMALL_PT, "color": canvas.GRAY, "ha": "right", "va": "center"}
        axes.text(-0.015, 1 - strip / 2, "missed", transform=axes.transAxes, **small)


def _strip(misses: int) -> float:
    """Return the share of a panel's height that a number of marks with equal workers take."""
    return math.ceil(misses / _MISSES_IN_ROW) * _MISS_SHARE


def _perfect(
    axes: Axes, outcome: Outcome, curve: Curve, cells: dict[tuple[str, int], Cell]
) -> None:
    """Draw the steps of the first algorithm with one worker, divided by the number of workers."""
    cell = cells.get((outcome.baseline, 1))
    if cell is None:
        return
    alone = curve.value(cell)
    if alone is None:
        return
    ideal = [alone / workers for workers in outcome.workers]
    dashed: canvas.Look = {"linestyle": (0, (4, 2)), "linewidth": 0.8, "zorder": 1}
    label = f"perfect scaling of {outcome.baseline}"
    axes.plot(outcome.workers, ideal, label=label, color=canvas.GRAY, **dashed)


def _limits(axes: Axes, outcome: Outcome, curve: Curve, shown: Sequence[Cell]) -> None:
    """Set ranges that all panels share, with room for the misses at the top."""
    from matplotlib.ticker import FixedLocator, NullLocator

    first, last = outcome.workers[0], outcome.workers[-1]
    axes.set_xlim(first / 1.2, last * 1.2)
    axes.xaxis.set_major_locator(FixedLocator(outcome.workers))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    values = list(filter(None, map(curve.value, shown)))
    low, high = min(values) / 1.2, max(values) * 1.2
    alone = outcome.cell(outcome.baseline, None, 1)
    if curve.name == "steps_by_workers" and alone is not None:
        perfect = curve.value(alone)
        # With many workers, the line of perfect scaling leaves the panel.
        if perfect is not None:
            low = max(min(low, perfect / last / 1.2), low / 4)
    late: Counter[tuple[str | None, int]] = Counter()
    for cell in shown:
        late[cell.network, cell.workers] += _has_no_value(curve, cell)
    strip = _strip(max(late.values()))
    # The axis is logarithmic, so the strip is a share of its decades.
    axes.set_ylim(low, high * (high / low) ** (strip / (1 - strip)))
    log_ticks(axes.yaxis)
    # A number beside the strip would look like the time of a miss.
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))


def _curve_caption(outcome: Outcome, curve: Curve, cells: Sequence[Cell]) -> str:
    sentences = [runs_caption(cells), curve.sentence]
    if curve.has_band and any(map(attrgetter("interval_s"), cells)):
        has_runs = max(map(attrgetter("runs"), cells)) >= _LEAST_RUNS
        if has_runs and len(outcome.algorithms) <= _MOST_BANDS:
            sentences.append(
                "Band, cut at the edge of the panel: 95 % confidence interval of the geometric "
                f"mean, with {_LEAST_RUNS} runs or more that all reached the goal."
            )
        else:
            sentences.append("The intervals are in the table.")
    shared = sharing_text(outcome.groups)
    if shared and curve.has_networks and outcome.modelled is None:
        sentences.append(f"{shared}, so their times are longer than those on as many machines.")
    if any(curve.value(cell) is not None and not cell.complete for cell in cells):
        sentences.append("Open mark on a line: a run missed the goal.")
    if any(_has_no_value(curve, cell) for cell in cells):
        reason = "half of the runs or more missed the goal"
        if curve.name == "price_by_workers":
            reason = "no run reached the goal, or one ended with an error"
        sentences.append(f"Open marks at the top: no value, as {reason}.")
    return " ".join(sentences)


def draw_utilization(outcome: Outcome, found: Sequence[Utilization]) -> canvas.Drawing:
    """Draw the predicted compute utilization over the bandwidth, one line for each algorithm.

    Args:
        outcome: The runs.
        found: The utilization, one for each panel.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    # A figure of one panel has the width of a column and a name of its own, like that of a network.
    single: str | None = None
    if len(found) == 1:
        single = str(found[0].workers)
    figure, panels = new_panels(single, len(found), _PANEL_IN)
    rows: list[list[Any]] = [["workers", "algorithm", "bandwidth_bit_per_s", "compute_share"]]
    left_out: list[str] = []
    for axes, one in zip(panels, found, strict=True):
        axes.set_xscale("log")
        for index, (name, look) in enumerate(algorithm_looks(outcome).items()):
            if name not in one.shares:
                continue
            line: canvas.Look = {key: look[key] for key in ("color", "marker", "linestyle")}
            # Marks at other places, so that lines that meet can be told apart.
            every = (index % 6, 6)
            percent = [100 * share for share in one.shares[name]]
            axes.plot(one.bandwidths, percent, label=name, markevery=every, **line)
            for bandwidth, share in zip(one.bandwidths, one.shares[name], strict=True):
                rows.append([one.workers, name, bandwidth, share])
        axes.set_ylim(0, 103)
        axes.set_yticks([0, *(100 * share for share in SHARES), 25, 100])
        axes.xaxis.set_major_locator(LogLocator())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(_short_rate)
        axes.set_xlabel(
            f"bandwidth of a link in bit/s, with a round trip of {ROUND_TRIP_S * 1e3:g} ms"
        )
        axes.set_ylabel("compute utilization in %")
        axes.set_title(f"{one.workers} workers: predicted")
        left_out += one.left_out
    numbers = {one.workers for one in found}
    cells = []
    for cell in outcome.cells:
        if cell.workers in numbers and cell.runs:
            cells.append(cell)
    sentences = [
        runs_caption(cells),
        "Share of computation in a step, predicted from the run with the median time on the "
        "network with the highest bandwidth. Compression and waiting are not computation.",
        *left_out,
    ]
    text = " ".join(sentences)
    canvas.finish(figure, text, *legend(panels))
    return canvas.Drawing(figure_name("compute_utilization", single), figure, text, rows)


def _short_rate(value: float, _: Any) -> str:
    if value < 1e9:
        return f"{value / 1e6:g}M"
    return f"{value / 1e9:g}G"


def draw_bytes(outcome: Outcome, network: str | None = None) -> canvas.Drawing:
    """Draw the time to the goal against the bytes that a worker sends until then.

    Each cell is one point.

    Args:
        outcome: The runs.
        network: The network; None for a panel for each network.

    Raises:
        ConfigurationError: No run on the network reached its goal and counted its bytes.
    """
    networks = networks_of(outcome, network)
    points = {name: _points(outcome, name) for name in networks}
    if not any(points.values()):
        raise ConfigurationError(
            "no run with more than one worker reached its goal and counted its bytes"
        )
    figure, panels = new_panels(network, len(networks), 2.4, share=True)
    looks = algorithm_looks(outcome)
    table: list[list[Any]] = [
        ["network", "algorithm", "workers", "bytes_per_worker", "time_to_goal_s"]
    ]
    cells = []
    for axes, name in zip(panels, networks, strict=True):
        _bytes_panel(axes, name, points[name], looks)
        for cell, sent, seconds in points[name]:
            cells.append(cell)
            table.append([cell.network, cell.algorithm, cell.workers, sent, seconds])
    text = (
        f"{runs_caption(cells)} Numbers at the points: workers. Median of the time, and of the "
        "bytes. Not drawn: algorithms of which a run missed the goal."
    )
    canvas.finish(figure, text, *legend(panels))
    return canvas.Drawing(figure_name("bytes_to_goal", network), figure, text, table)


def _points(outcome: Outcome, network: str) -> list[tuple[Cell, float, float]]:
    """Return the cells of a network with their bytes of a worker and their seconds."""
    points = []
    for workers in outcome.several:
        for cell in outcome.row(network, workers):
            # Over the runs that reached the goal alone, a method would look better for its misses.
            if not cell.complete or cell.median_s is None:
                continue
            sent = list(filter(None, map(sent_per_worker, cell.reached)))
            if sent:
                points.append((cell, statistics.median(sent), cell.median_s))
    return points


def _bytes_panel(axes: Axes, network: str, points: Any, looks: Any) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for cell, sent, seconds in points:
        look = looks[cell.algorithm]
        mark: canvas.Look = {"color": look["color"], "marker": look["marker"]}
        axes.plot([sent / _MEGA], [seconds], linestyle="none", label=cell.algorithm, **mark)
        offset: canvas.Look = {"textcoords": "offset points", "size": SMALL_PT, "va": "center"}
        axes.annotate(str(cell.workers), (sent / _MEGA, seconds), (4, 2), **offset)
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    axes.margins(0.1)
    axes.set_xlabel("put on the wire by a worker until the goal in MB")
    axes.set_ylabel("time to goal in seconds")
    axes.tick_params(labelbottom=True, labelleft=True)
    axes.set_title(network)
