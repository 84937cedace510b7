"""Draw the map of the methods with the least predicted time to the goal.

The measured networks are points on the map.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from mlbench_core.comparison.figures import canvas
from mlbench_core.comparison.figures.captions import caption
from mlbench_core.comparison.group_repeats import plural
from mlbench_core.sweep.fastest_methods import (
    BANDWIDTHS,
    ROUND_TRIPS_S,
    Map,
    MapPoint,
    shared_cores,
)
from mlbench_core.sweep.figures.panels import algorithm_looks
from mlbench_core.sweep.grouped_runs import CLOSE, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_map"]

# From this ratio on, a cell has the full color.
_CLEAR = 2.0
# The lighter the color, the closer the second method.
_SHADES = {"close": 0.22, "middle": 0.5, "clear": 0.85}
_PT_PER_DECADE = 42
# Left, right, bottom and top of a label or point, in decades.
_Box = tuple[float, float, float, float]


def draw_map(outcome: Outcome, found: Map) -> canvas.Drawing:
    """Draw a map with one color for each method, and the measured networks.

    The color is lighter if the second method has nearly the same time.

    Args:
        outcome: The runs.
        found: The map.
    """
    figure = canvas.new_figure(canvas.COLUMN_IN, 2.6)
    axes = figure.subplots()
    colors = _looks(outcome, found)
    _draw_cells(axes, found, colors)
    _draw_points(axes, found, colors)
    _draw_axes(axes, found)
    title = "Least time"
    # Without tuning, no method is called the fastest, see Outcome.is_tuned.
    if outcome.is_tuned:
        title = "Fastest method"
    axes.set_title(f"{title} with {plural(found.workers, 'worker')}: predicted")
    handles, labels = _legend(colors, found)
    groups = [group for group in outcome.groups if group.workers == found.workers]
    sentences = [
        caption(groups).partition(" Missed the goal:")[0],
        "Cells are predicted from these runs: the method with the least time to the goal. "
        "Hatched: the second is within 10 %. "
        f"Points are {_kind(found)}: the method with the least median.",
    ]
    if any(map(operator.attrgetter("second"), found.points)):
        sentences.append("Two colors: the second is within 10 %, or no difference is shown.")
    cores = shared_cores(groups)
    if cores:
        sentences.append(f"The measured workers shared {cores} cores; predicted ones do not share.")
    sentences += [
        "A network beyond the range is drawn at its edge.",
        *found.left_out,
    ]
    text = " ".join(sentences)
    canvas.finish(figure, text, handles, labels)
    return canvas.Drawing(f"map_{found.workers}", figure, text, _table(found))


def _kind(found: Map) -> str:
    """Return the kind of the times of the points."""
    if found.is_modelled:
        return "modelled"
    return "measured"


def _looks(outcome: Outcome, prediction: Map) -> dict[str, canvas.Look]:
    """Return the look of each method on the map, largest area first, and of the measured ones."""
    names = list(prediction.shares)
    for point in prediction.points:
        names += filter(None, (point.measured, point.second))
    looks = algorithm_looks(outcome)
    return {name: looks[name] for name in dict.fromkeys(names)}


def _shade(ratio: float | None) -> str:
    if ratio is None or ratio >= _CLEAR:
        return "clear"
    if ratio < CLOSE:
        return "close"
    return "middle"


def _draw_cells(axes: Axes, prediction: Map, colors: Mapping[str, canvas.Look]) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    columns = len(prediction.bandwidths)
    x, y = _borders(prediction.bandwidths), _borders(prediction.round_trips_s)
    axes.set_xscale("log")
    axes.set_yscale("log")
    areas: dict[tuple[str, str], list[Path]] = {}
    for index, cell in enumerate(prediction.cells):
        row, column = divmod(index, columns)
        left, right = x[column], x[column + 1]
        bottom, top = y[row], y[row + 1]
        corners = [(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)]
        areas.setdefault((cell.first, _shade(cell.ratio)), []).append(Path(corners, closed=True))
    for (first, shade), paths in areas.items():
        # One shape for each area and without antialiasing: the background would shine through
        # between two cells.
        shape = Path.make_compound_path(*paths)
        look: canvas.Look = {"linewidth": 0, "antialiased": False}
        hollow: canvas.Look = {"facecolor": "none", **look}
        color, hatch = colors[first]["color"], colors[first]["hatch"]
        axes.add_patch(PathPatch(shape, facecolor=color, alpha=_SHADES[shade], **look))
        if hatch:
            # The color of a hatch is read from the settings when the patch is made.
            with _hatches(color, shade):
                axes.add_patch(PathPatch(shape, hatch=hatch, **hollow))
        if shade == "close":
            axes.add_patch(PathPatch(shape, edgecolor="#444444", hatch="//////", **hollow))


def _hatches(color: str, shade: str) -> AbstractContextManager[None]:
    """Return a context in which hatches have a color that can be seen on an area."""
    import matplotlib

    # A close black is a light gray, on which the dark hatches of all other areas can be seen.
    is_dark = color == "#000000" and shade != "close"
    if not is_dark:
        return nullcontext()
    return matplotlib.rc_context({"hatch.color": "white"})


def _borders(centers: tuple[float, ...]) -> list[float]:
    """Return the borders of the cells with these centers, on a logarithmic axis."""
    factor = (centers[1] / centers[0]) ** 0.5
    borders = [centers[0] / factor]
    for center in centers:
        borders.append(center * factor)
    return borders


def _draw_points(axes: Axes, prediction: Map, colors: Mapping[str, canvas.Look]) -> None:
    taken = [_box(point, 0, "", "center") for point in prediction.points]
    for point in prediction.points:
        look: canvas.Look = {"markersize": 6.5, "markeredgecolor": "black", "markeredgewidth": 0.9}
        if point.measured:
            look["marker"] = colors[point.measured]["marker"]
            look["markerfacecolor"] = colors[point.measured]["color"]
        else:
            look.update(marker="o", markerfacecolor="white")
        if point.second:
            # The second is within 10 %, or the difference from it is not significant.
            look.update(fillstyle="left", markerfacecoloralt=colors[point.second]["color"])
        x, y = point.bandwidth, point.round_trip_s
        axes.plot([x], [y], linestyle="none", zorder=5, clip_on=False, **look)
        side, up_pt = _free_side(point, taken)
        taken.append(_box(point, up_pt, point.network, side))
        # A text that has its point at its left begins to the right of it.
        right_pt = -6
        if side == "left":
            right_pt = 6
        text: canvas.Look = {"textcoords": "offset points", "size": 5.5, "va": "center"}
        text["bbox"] = {
            "boxstyle": "round,pad=0.15",
            "facecolor": "#ffffff",
            "alpha": 0.8,
            "edgecolor": "none",
        }
        axes.annotate(point.network, (x, y), (right_pt, up_pt), ha=side, zorder=6, **text)


def _free_side(point: MapPoint, taken: Sequence[_Box]) -> tuple[str, int]:
    """Return which side of a label is at its point, and how many points it is moved up.

    A label is right of its point, or else left of it, higher or lower: the first position that
    another label does not use.
    """
    for up_pt, side in itertools.product((0, 9, -9, 18, -18), ("left", "right")):
        box = _box(point, up_pt, point.network, side)
        # The map is 4 decades wide.
        if box[1] < 4.1 and not any(_meet(box, other) for other in taken):
            return side, up_pt
    return "left", 0


def _box(point: MapPoint, up_pt: float, text: str, side: str) -> _Box:
    """Return the box of a label that has the point at its side, or of the point itself."""
    x = math.log10(point.bandwidth / BANDWIDTHS[0])
    y = math.log10(point.round_trip_s / ROUND_TRIPS_S[0]) + up_pt / _PT_PER_DECADE
    width, half = (6 + 3.2 * len(text)) / _PT_PER_DECADE, 4.5 / _PT_PER_DECADE
    if side == "center":
        return (x - half, x + half, y - half, y + half)
    if side == "left":
        return (x + half, x + width + half, y - half, y + half)
    return (x - width - half, x - half, y - half, y + half)


def _meet(a: _Box, b: _Box) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


def _draw_axes(axes: Axes, prediction: Map) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    x, y = _borders(prediction.bandwidths), _borders(prediction.round_trips_s)
    axes.set_xlim(x[0], x[-1])
    axes.set_ylim(y[0], y[-1])
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator())
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(_bandwidth_text)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 1e3:g} ms")
    axes.set_xlabel("bandwidth of a link")
    axes.set_ylabel("round trip")


def _bandwidth_text(value: float, _: Any) -> str:
    if value < 1e9:
        return f"{value / 1e6:g} Mbit/s"
    return f"{value / 1e9:g} Gbit/s"


def _legend(colors: Mapping[str, canvas.Look], prediction: Map) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    labels = list(colors)
    handles: list[Any] = []
    for look in colors.values():
        color, hatch = look["color"], look["hatch"]
        with _hatches(color, "clear"):
            handles.append(Patch(facecolor=color, linewidth=0, alpha=0.85, hatch=hatch))
    # A cell without a second method has a clear color, but no ratio for which a label is needed.
    shades = set()
    for cell in prediction.cells:
        if cell.ratio is not None:
            shades.add(_shade(cell.ratio))
    if "close" in shades:
        handles.append(Patch(facecolor="#EEEEEE", edgecolor="#444444", hatch="//////", linewidth=0))
        labels.append("second within 10 %")
    if "middle" in shades:
        handles.append(Patch(facecolor="#999999", edgecolor="none", alpha=0.5))
        labels.append("1.1 to 2 times as long")
    if "clear" in shades:
        handles.append(Patch(facecolor="#999999", edgecolor="none", alpha=0.95))
        labels.append("more than 2 times")
    circle: canvas.Look = {"markeredgecolor": "black", "markerfacecolor": "w", "markersize": 5}
    handles.append(Line2D([], [], marker="o", color="none", **circle))
    return handles, [*labels, f"{_kind(prediction)} network"]


def _table(prediction: Map) -> list[list[Any]]:
    header = ["kind", "network", "bandwidth_bit_per_s", "round_trip_s", "first", "seconds"]
    rows: list[list[Any]] = [[*header, "second", "second_to_first"]]
    for cell in prediction.cells:
        network: list[Any] = [None, cell.bandwidth, cell.round_trip_s]
        rows.append(["predicted", *network, cell.first, cell.seconds, cell.second, cell.ratio])
    for point in prediction.points:
        network = [point.network, point.bandwidth, point.round_trip_s]
        rows.append([_kind(prediction), *network, point.measured, None, point.second, None])
    return rows
