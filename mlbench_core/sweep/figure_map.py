"""Draw the map of the method with the least predicted time to the goal, with the measured networks on it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlbench_core.results.figures import canvas
from mlbench_core.results.figures.captions import caption
from mlbench_core.results.pool import plural
from mlbench_core.sweep.outcome import CLOSE, Outcome
from mlbench_core.sweep.winners import Map

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_map"]

# From this ratio on, a cell has the full color.
_CLEAR = 2.0
_SHADES = {"close": 0.22, "middle": 0.5, "clear": 0.85}


def draw_map(outcome: Outcome, found: Map) -> canvas.Drawing:
    """Draw a map: one color for each method, lighter if the second is nearly as fast, and the measured networks.

    Args:
        outcome: The runs.
        found: The map.
    """
    figure = canvas.new_figure(canvas.COLUMN_IN, 2.6)
    axes = figure.subplots()
    colors = _colors(found)
    _draw_cells(axes, found, colors)
    _draw_points(axes, found, colors)
    _draw_axes(axes, found)
    axes.set_title(f"Fastest method with {plural(found.workers, 'worker')}: predicted")
    handles, labels = _legend(colors, found)
    groups = [cell.group for cell in outcome.cells if cell.workers == found.workers and cell.runs]
    text = " ".join(
        [
            caption(groups).partition(" Missed the goal:")[0],
            "Cells are predicted from these runs: the method with the least time to the goal. Hatched: the second is "
            "within 10 %. Points are measured: the method with the least median.",
            "Two colors: the second is within 10 %, or the intervals overlap." * any(p.second for p in found.points),
            "A network beyond the range is drawn at its edge.",
            *found.left_out,
        ]
    )
    canvas.finish(figure, " ".join(text.split()), handles, labels)
    return canvas.Drawing(f"map_{found.workers}", figure, " ".join(text.split()), _table(found))


def _colors(found: Map) -> dict[str, str]:
    """Return a color for each method that is on the map or was measured as the fastest."""
    names = [*found.shares, *(name for point in found.points for name in (point.measured, point.second) if name)]
    looks = canvas.series_looks(len(names))
    return {name: look["color"] for name, look in zip(dict.fromkeys(names), looks, strict=False)}


def _shade(ratio: float | None) -> str:
    if ratio is None or ratio >= _CLEAR:
        return "clear"
    return "close" if ratio < CLOSE else "middle"


def _draw_cells(axes: Axes, found: Map, colors: Mapping[str, str]) -> None:
    from matplotlib.patches import Rectangle

    columns = len(found.bandwidths)
    x, y = _borders(found.bandwidths), _borders(found.round_trips_s)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for row in range(len(found.round_trips_s)):
        of_row = enumerate(found.cells[row * columns : (row + 1) * columns])
        # Equal neighbors are one rectangle, so that the file is small and has no seams.
        for (winner, shade), same in itertools.groupby(of_row, lambda item: (item[1].winner, _shade(item[1].ratio))):
            places = [column for column, _ in same]
            left, right = x[places[0]], x[places[-1] + 1]
            # Without antialiasing, because the background would shine through between two rectangles.
            look: canvas.Look = {"linewidth": 0, "antialiased": False}
            corner, size = (left, y[row]), (right - left, y[row + 1] - y[row])
            axes.add_patch(Rectangle(corner, *size, facecolor=colors[winner], alpha=_SHADES[shade], **look))
            if shade == "close":
                axes.add_patch(Rectangle(corner, *size, facecolor="none", edgecolor="#444444", hatch="//////", **look))


def _borders(places: tuple[float, ...]) -> list[float]:
    factor = (places[1] / places[0]) ** 0.5
    return [places[0] / factor, *(place * factor for place in places)]


def _draw_points(axes: Axes, found: Map, colors: Mapping[str, str]) -> None:
    used: list[tuple[float, float]] = []
    for point in found.points:
        look: canvas.Look = {"marker": "o", "markersize": 6.5, "markeredgecolor": "black", "markeredgewidth": 0.9}
        first = colors[point.measured] if point.measured else "white"
        look["markerfacecolor"] = first
        if point.second:
            look.update(fillstyle="left", markerfacecoloralt=colors[point.second])
        axes.plot([point.bandwidth], [point.round_trip_s], linestyle="none", zorder=5, clip_on=False, **look)
        right = point.bandwidth > 1e8
        # A label that would lie on another goes below its point.
        below = any(abs(a - point.bandwidth) < 2 * point.bandwidth and b == point.round_trip_s for a, b in used)
        offset = (-6 if right else 6, -7 if below else 0)
        box: canvas.Look = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
        axes.annotate(
            point.network, (point.bandwidth, point.round_trip_s), offset, textcoords="offset points", size=5.5,
            ha="right" if right else "left", va="center", bbox=box, zorder=6,
        )  # fmt: skip
        used.append((point.bandwidth, point.round_trip_s))


def _draw_axes(axes: Axes, found: Map) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    x, y = _borders(found.bandwidths), _borders(found.round_trips_s)
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(y[0], y[-1])
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator())
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(
        lambda value, _: f"{value / 1e6:g} Mbit/s" if value < 1e9 else f"{value / 1e9:g} Gbit/s"
    )
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 1e3:g} ms")
    axes.set_xlabel("bandwidth of a link")
    axes.set_ylabel("round trip")


def _legend(colors: Mapping[str, str], found: Map) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=color, edgecolor="none", alpha=0.85) for color in colors.values()]
    labels = list(colors)
    if any(_shade(cell.ratio) == "close" for cell in found.cells):
        handles.append(Patch(facecolor="#EEEEEE", edgecolor="#444444", hatch="//////", linewidth=0))
        labels.append("second within 10 %")
    if any(_shade(cell.ratio) == "middle" for cell in found.cells):
        handles.append(Patch(facecolor="#999999", edgecolor="none", alpha=0.5))
        labels.append("1.1 to 2 times as long")
    if any(cell.ratio is not None and cell.ratio >= _CLEAR for cell in found.cells):
        handles.append(Patch(facecolor="#999999", edgecolor="none", alpha=0.95))
        labels.append("more than 2 times")
    handles.append(Line2D([], [], marker="o", markersize=5, color="none", markeredgecolor="black", markerfacecolor="w"))
    return handles, [*labels, "measured network"]


def _table(found: Map) -> list[list[Any]]:
    rows: list[list[Any]] = [
        ["kind", "network", "bandwidth_bit_per_s", "round_trip_s", "fastest", "seconds", "second", "second_to_fastest"]
    ]
    for cell in found.cells:
        rows.append(["predicted", None, cell.bandwidth, cell.round_trip_s, cell.winner, cell.seconds, cell.second])
        rows[-1].append(cell.ratio)
    rows += [
        ["measured", point.network, point.bandwidth, point.round_trip_s, point.measured, None, point.second, None]
        for point in found.points
    ]
    return rows
