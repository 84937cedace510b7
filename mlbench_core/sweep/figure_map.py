"""Draw the map of the method with the least predicted time to the goal, with the measured networks on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlbench_core.comparison.figures import canvas
from mlbench_core.comparison.figures.captions import caption
from mlbench_core.comparison.figures.looks import method_look
from mlbench_core.comparison.pool import plural
from mlbench_core.sweep.outcome import CLOSE, Outcome
from mlbench_core.sweep.winners import BANDWIDTHS, ROUND_TRIPS_S, Map

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mlbench_core.comparison.figures.looks import method_look
from mlbench_core.comparison.pool import Group

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
    colors = _looks(found)
    _draw_cells(axes, found, colors)
    _draw_points(axes, found, colors)
    _draw_axes(axes, found)
    axes.set_title(f"Fastest method with {plural(found.workers, 'worker')}: predicted")
    handles, labels = _legend(colors, found)
    groups = [cell.group for cell in outcome.cells if cell.workers == found.workers and cell.runs]
    text = " ".join(
        [
            caption(groups).partition(" Missed the goal:")[0],
            "Cells are predicted from these runs: the method with the least time to the goal. "
            "Hatched: the second is "
            "within 10 %. Points are measured: the method with the least median.",
            "Two colors: the second is within 10 %, or no difference is shown."
            * any(p.second for p in found.points),
            _shared_cores(groups[0]),
            "A network beyond the range is drawn at its edge.",
            *found.left_out,
        ]
    )
    canvas.finish(figure, " ".join(text.split()), handles, labels)
    return canvas.Drawing(f"map_{found.workers}", figure, " ".join(text.split()), _table(found))


def _shared_cores(group: Group) -> str:
    """Return a sentence if the measured workers shared cores, which those of the prediction do not."""
    cores = (group.machine.get("cores") or 0) * (group.machine.get("hosts") or 1)
    threads = group.workers * (group.configuration.get("threads") or 1)
    return (
        f"The measured workers shared {cores} cores; predicted ones do not share."
        if 0 < cores < threads
        else ""
    )


def _looks(found: Map) -> dict[str, canvas.Look]:
    """Return the look of each method that is on the map or was measured as the fastest, largest area first."""
    measured = (name for point in found.points for name in (point.measured, point.second) if name)
    return {name: method_look(name) for name in dict.fromkeys([*found.shares, *measured])}


def _shade(ratio: float | None) -> str:
    if ratio is None or ratio >= _CLEAR:
        return "clear"
    return "close" if ratio < CLOSE else "middle"


def _draw_cells(axes: Axes, found: Map, colors: Mapping[str, canvas.Look]) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    columns = len(found.bandwidths)
    x, y = _borders(found.bandwidths), _borders(found.round_trips_s)
    axes.set_xscale("log")
    axes.set_yscale("log")
    areas: dict[tuple[str, str], list[Path]] = {}
    for place, cell in enumerate(found.cells):
        row, column = divmod(place, columns)
        corners = [
            (x[column + right], y[row + up])
            for right, up in ((0, 0), (1, 0), (1, 1), (0, 1), (0, 0))
        ]
        areas.setdefault((cell.winner, _shade(cell.ratio)), []).append(Path(corners, closed=True))
    for (winner, shade), paths in areas.items():
        # One shape for each area and without antialiasing: the background would shine through
        # between two cells.
        shape = Path.make_compound_path(*paths)
        look: canvas.Look = {"linewidth": 0, "antialiased": False}
        axes.add_patch(
            PathPatch(shape, facecolor=colors[winner]["color"], alpha=_SHADES[shade], **look)
        )
        if colors[winner]["hatch"]:
            axes.add_patch(
                PathPatch(
                    shape,
                    facecolor="none",
                    edgecolor="white",
                    hatch=colors[winner]["hatch"],
                    **look,
                )
            )
        if shade == "close":
            axes.add_patch(
                PathPatch(shape, facecolor="none", edgecolor="#444444", hatch="//////", **look)
            )


def _borders(places: tuple[float, ...]) -> list[float]:
    factor = (places[1] / places[0]) ** 0.5
    return [places[0] / factor, *(place * factor for place in places)]


def _draw_points(axes: Axes, found: Map, colors: Mapping[str, canvas.Look]) -> None:
    taken = [_box(point.bandwidth, point.round_trip_s, 0, "", "center") for point in found.points]
    for point in found.points:
        look: canvas.Look = {"markersize": 6.5, "markeredgecolor": "black", "markeredgewidth": 0.9}
        look["marker"] = colors[point.measured]["marker"] if point.measured else "o"
        look["markerfacecolor"] = colors[point.measured]["color"] if point.measured else "white"
        if point.second:
            look.update(fillstyle="left", markerfacecoloralt=colors[point.second]["color"])
        axes.plot(
            [point.bandwidth],
            [point.round_trip_s],
            linestyle="none",
            zorder=5,
            clip_on=False,
            **look,
        )
        # Right of the point, or else left of it, higher or lower: the first place without another
        # label.
        sides = [(side, up) for up in (0, 9, -9, 18, -18) for side in ("left", "right")]
        boxes = [
            _box(point.bandwidth, point.round_trip_s, up, point.network, side) for side, up in sides
        ]
        free = [
            place
            for place, box in enumerate(boxes)
            if box[1] < 4.1 and not any(_meet(box, one) for one in taken)
        ]
        place = free[0] if free else 0
        taken.append(boxes[place])
        side, up = sides[place]
        plate: canvas.Look = {"boxstyle": "round,pad=0.15", "facecolor": "#ffffff", "alpha": 0.8}
        axes.annotate(
            point.network, (point.bandwidth, point.round_trip_s), (6 if side == "left" else -6, up), ha=side,
            textcoords="offset points", size=5.5, va="center", zorder=6, bbox={**plate, "edgecolor": "none"},
        )  # fmt: skip


def _box(
    bandwidth: float, round_trip_s: float, up_pt: float, text: str, side: str
) -> tuple[float, float, float, float]:
    """Return left, right, bottom and top of a label or point, in decades; a decade is about 42 points on each axis."""
    x, y = (
        math.log10(bandwidth / BANDWIDTHS[0]),
        math.log10(round_trip_s / ROUND_TRIPS_S[0]) + up_pt / 42,
    )
    width, half = (6 + 3.2 * len(text)) / 42, 4.5 / 42
    if side == "center":
        return (x - half, x + half, y - half, y + half)
    return (
        (x + half, x + width + half, y - half, y + half)
        if side == "left"
        else (x - width - half, x - half, y - half, y + half)
    )


def _meet(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


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


def _legend(colors: Mapping[str, canvas.Look], found: Map) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(
            facecolor=look["color"], edgecolor="white", linewidth=0, alpha=0.85, hatch=look["hatch"]
        )
        for look in colors.values()
    ]
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
    handles.append(
        Line2D(
            [],
            [],
            marker="o",
            markersize=5,
            color="none",
            markeredgecolor="black",
            markerfacecolor="w",
        )
    )
    return handles, [*labels, "measured network"]


def _table(found: Map) -> list[list[Any]]:
    rows: list[list[Any]] = [
        [
            "kind",
            "network",
            "bandwidth_bit_per_s",
            "round_trip_s",
            "fastest",
            "seconds",
            "second",
            "second_to_fastest",
        ]
    ]
    for cell in found.cells:
        rows.append(
            [
                "predicted",
                None,
                cell.bandwidth,
                cell.round_trip_s,
                cell.winner,
                cell.seconds,
                cell.second,
            ]
        )
        rows[-1].append(cell.ratio)
    rows += [
        [
            "measured",
            point.network,
            point.bandwidth,
            point.round_trip_s,
            point.measured,
            None,
            point.second,
            None,
        ]
        for point in found.points
    ]
    return rows
