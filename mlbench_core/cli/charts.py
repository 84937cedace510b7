"""``mlbench charts``: draw charts of results, as PNG and CSV.

Runs of the same setup with the same number of workers count as repeats and are averaged. Runs of one setup with
different numbers of workers are a series: one line, or one block of bars. With T_k the time of k workers and k_0 the
smallest number of workers in the series::

    speed-up      S_k = T_{k_0} / T_k                       ideal: k / k_0
    price index   I_k = (price_k / price_{k_0}) / S_k       price_k proportional to k T_k

If the index is below 1, the additional workers pay for themselves: the speed-up is larger than the increase in price.
"""

from __future__ import annotations

import csv
import itertools
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlbench_core.cli._embedded import connect
from mlbench_core.cli._output import clean, dashboard_option, json_option, print_json, remark
from mlbench_core.cli._records import from_master, matches, print_records
from mlbench_core.errors import ConfigurationError, MasterNotFoundError, require
from mlbench_core.files import replacing
from mlbench_core.results.load import load
from mlbench_core.results.pool import Group, pool, usable
from mlbench_core.results.pool import series as group_by_workers
from mlbench_core.results.record import PHASES, STEPS, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["charts", "draw_all", "draw_overview"]

COLORS = {"compute": "#3569a8", "communication": "#e0862b", "metrics": "#6ea15a", "data": "#8a6bb0", "other": "#9ca3af"}
STEP_LABELS = {
    "batch_load": "data loading",
    "fwd_pass": "forward",
    "comp_loss": "loss",
    "backprop": "backward",
    "opt_step": "update",
    "agg": "aggregation",
    "comp_metrics": "metrics",
}
_GREY = "#6b7280"
_SERIES_COLORS = ("#3569a8", "#e0862b", "#6ea15a", "#8a6bb0", "#c0504d", "#4bacc6", "#8c6d31", "#637381")


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--filter", "-f", "pattern", metavar="F", help="Only runs whose name contains F, or matches it as a shell pattern."
)
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the charts (default: FOLDER).",
)
@click.option(
    "--price-per-hour",
    type=click.FloatRange(min=0, min_open=True),
    metavar="PRICE",
    help="Price of one worker for an hour, to show what each run cost.",
)
@dashboard_option
@json_option
def charts(
    folder: Path,
    pattern: str | None,
    output: Path | None,
    price_per_hour: float | None,
    dashboard_url: str | None,
    as_json: bool,
) -> None:
    """Draw charts of results and save them in FOLDER.

    If FOLDER holds files of 'mlbench run --wait' or 'mlbench download', these are drawn. Otherwise, and always with
    --dashboard-url, the finished runs of the master are drawn, and FOLDER is created.

    Runs are averaged only if task or command, arguments, backend, resources and number of workers are the same. The
    charts, each as PNG and CSV, are: the total time by phase, the speed-up with and without communication, the time of
    every step, and the price index (price increase divided by performance increase; below 1, more workers pay for
    themselves). The first two are also drawn side by side in overview.png.
    """
    found = load([folder], empty_is_error=False) if folder.is_dir() and not dashboard_url else []
    if found:
        results = [result for result in found if matches(result.name, pattern)]
    else:
        results = _from_master(folder, dashboard_url, pattern)
    if not results:
        which = f" that matches {pattern!r}" if pattern else ""
        where = f"in {folder}" if found else "at the master has finished"
        raise ConfigurationError(f"no run{which} {where}: nothing to draw")
    kept, left_out = usable(results)
    for reason in left_out:
        remark(f"{clean(reason)} of the charts")
    written = draw_all(pool(kept), output or folder, price_per_hour)
    if as_json:
        print_json({"results": [result.as_json() for result in results], "files": [str(path) for path in written]})
        return
    print_records(results)
    for path in written:
        click.echo(path)


def _from_master(folder: Path, dashboard_url: str | None, pattern: str | None) -> list[RunRecord]:
    """Read the results of the master's finished runs."""
    try:
        client = connect(dashboard_url)
    except MasterNotFoundError as error:
        raise ConfigurationError(
            f"no result in {folder} (files of 'mlbench run --wait' or 'mlbench download'), and {error}"
        ) from None
    with client:
        runs = [run for run in client.runs() if matches(str(run.get("name")), pattern)]
        return from_master(client, [run for run in runs if run.get("state") == "finished"])


@dataclass(frozen=True)
class Point:
    """The mean over all runs of one setup with one number of workers; times are in seconds.

    Attributes:
        workers: Number of workers.
        runs: Number of averaged runs.
        total_s: Time to the goal if it was reached, or all training time.
        without_communication_s: ``total_s`` without exposed communication.
        phases_s: Time by phase.
        steps_s: Time by step.
        reached: True unless a run is known to have missed its goal.
    """

    workers: int
    runs: int
    total_s: float | None
    without_communication_s: float | None
    phases_s: Mapping[str, float]
    steps_s: Mapping[str, float]
    reached: bool


@dataclass(frozen=True)
class Series:
    """The runs of one setup.

    Attributes:
        label: The parts of the setup in which this series differs from the others.
        setup: The whole setup as text.
        points: One point for each number of workers, fewest workers first.
    """

    label: str
    setup: str
    points: tuple[Point, ...]


def in_series(groups: Sequence[Group]) -> list[Series]:
    """Divide groups into one series for each configuration."""
    return [Series(each.label, each.label, tuple(map(_point, each.groups))) for each in group_by_workers(groups)]


def _point(group: Group) -> Point:
    return Point(
        workers=group.workers,
        runs=len(group.records),
        total_s=_mean([record.total_s for record in group.records]),
        without_communication_s=_mean([record.without_communication_s for record in group.records]),
        phases_s=_means([record.phases_s for record in group.records], PHASES),
        steps_s=_means([record.steps_s for record in group.records], tuple(STEPS)),
        # Unknown counts as reached, because a program may have no goal.
        reached=len(group.reached) == len(group.records),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _means(rows: Sequence[Mapping[str, float]], keys: Sequence[str]) -> dict[str, float]:
    found = {key: _mean([row.get(key) for row in rows]) for key in keys}
    return {key: value for key, value in found.items() if value is not None}


def speedup(times: Sequence[float | None]) -> list[float | None]:
    """Return how many times faster each time is than the first; ``None`` if a time is missing or zero."""
    return [times[0] / time if times[0] and time else None for time in times]


def price_index(points: Sequence[Point]) -> list[float | None]:
    """Return the price index of each point: price increase divided by performance increase since the first point.

    The module's docstring has the formula. ``None`` stands for a point without a time.
    """
    gains = zip(points, speedup([point.total_s for point in points]), strict=True)
    # The price of an hour cancels out, so the price increase is (k / k_0) / S_k.
    return [None if gain is None else point.workers / points[0].workers / gain**2 for point, gain in gains]


def draw_overview(groups: Sequence[Group], path: Path) -> Path:
    """Draw time by phase and speed-up side by side.

    Args:
        groups: Runs to compare.
        path: The PNG file.

    Returns:
        ``path``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    all_series = in_series(groups)
    figure = _figure(2 * _width(all_series))
    left, right = figure.subplots(1, 2)
    _draw_phases(left, all_series)
    _draw_speedup(right, all_series)
    return _save(figure, path, all_series)


def draw_all(groups: Sequence[Group], folder: Path, price_per_hour: float | None = None) -> list[Path]:
    """Draw every chart as PNG and write its numbers as CSV.

    Args:
        groups: Runs to compare.
        folder: The folder to write to.
        price_per_hour: Price of one worker for an hour.

    Returns:
        The files written.

    Raises:
        ConfigurationError: No run reported any time.
        MissingDependencyError: matplotlib is not installed.
    """
    all_series = in_series(groups)
    # Checked first, so that no file is written if there is nothing to draw.
    if not any(point.total_s for series in all_series for point in series.points):
        raise ConfigurationError("none of the runs reported a time: nothing to draw")
    written = [draw_overview(groups, folder / "overview.png")]
    charts: dict[str, tuple[Callable[[Axes, Sequence[Series]], None], list[list[Any]]]] = {
        "total_time_by_phase": (
            _draw_phases,
            _rows(
                all_series,
                ["runs", "total_s", *(f"{phase}_s" for phase in PHASES), "goal_reached"],
                lambda point: [point.runs, point.total_s, *map(point.phases_s.get, PHASES), point.reached],
            ),
        ),
        "speedup": (_draw_speedup, _speedup_rows(all_series)),
        "time_all_phases": (
            _draw_steps,
            _rows(
                all_series, [f"{step}_s" for step in STEPS], lambda point: [point.steps_s.get(step) for step in STEPS]
            ),
        ),
        "price_index": (_draw_price, _price_rows(all_series, price_per_hour)),
    }
    for name, (draw, rows) in charts.items():
        figure = _figure(_width(all_series) + 1.0)
        draw(figure.subplots(), all_series)
        written.append(_save(figure, folder / f"{name}.png", all_series))
        with replacing(folder / f"{name}.csv") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
        written.append(folder / f"{name}.csv")
    return written


def _rows(all_series: Sequence[Series], names: Sequence[str], values: Callable[[Point], list[Any]]) -> list[list[Any]]:
    """Return a header and a row for each point of each series."""
    rows = [[series.setup, point.workers, *values(point)] for series in all_series for point in series.points]
    return [["setup", "workers", *names], *rows]


def _speedup_rows(all_series: Sequence[Series]) -> list[list[Any]]:
    rows: list[list[Any]] = [["setup", "workers", "ideal", "speedup", "speedup_without_communication"]]
    for series in all_series:
        points = series.points
        total = speedup([point.total_s for point in points])
        without = speedup([point.without_communication_s for point in points])
        for point, *speedups in zip(points, total, without, strict=True):
            rows.append([series.setup, point.workers, point.workers / points[0].workers, *speedups])
    return rows


def _price_rows(all_series: Sequence[Series], price_per_hour: float | None) -> list[list[Any]]:
    rows: list[list[Any]] = [["setup", "workers", "total_s", "price", "price_index"]]
    for series in all_series:
        for point, index in zip(series.points, price_index(series.points), strict=True):
            price = None
            if price_per_hour is not None and point.total_s is not None:
                price = point.workers * point.total_s / 3600 * price_per_hour
            rows.append([series.setup, point.workers, point.total_s, price, index])
    return rows


def _width(all_series: Sequence[Series]) -> float:
    """Return the width in inches of a chart with the bars of all series and a legend."""
    return 2.0 + max(4.5, 0.6 * (len(all_series) + sum(len(series.points) for series in all_series)))


def _figure(width: float) -> Figure:
    require("matplotlib", "charts")
    from matplotlib.figure import Figure

    # A figure without pyplot needs no display and leaves no global state.
    return Figure(figsize=(width, 4.4), dpi=150, layout="constrained")


def _save(figure: Figure, path: Path, all_series: Sequence[Series]) -> Path:
    if not all(point.reached for series in all_series for point in series.points):
        figure.supxlabel("* the goal was not reached: all training time is shown", fontsize=8, color=_GREY)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
    return path


def _style(axes: Axes, title: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("workers")
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    # Bars are compared by their lengths, so the axis begins at zero.
    axes.set_ylim(bottom=0)


def _blocks(axes: Axes, all_series: Sequence[Series]) -> list[tuple[int, Point]]:
    """Place the bars in one block for each series, with a gap between blocks and the label below the first bar."""
    places: list[tuple[int, Point]] = []
    ticks: list[str] = []
    for series in all_series:
        start = places[-1][0] + 2 if places else 0
        for index, point in enumerate(series.points):
            places.append((start + index, point))
            # A long label is cut, because it must fit below the bars of its series.
            label = textwrap.wrap(series.label, 18)[:4] if len(all_series) > 1 and index == 0 else []
            ticks.append("\n".join([f"{point.workers}{'' if point.reached else '*'}", *label]))
    axes.set_xticks([x for x, _ in places], ticks)
    axes.set_xlim(-0.6, places[-1][0] + 0.6)
    return places


def _draw_phases(axes: Axes, all_series: Sequence[Series]) -> None:
    """Draw stacked bars: training time by phase for each number of workers."""
    places = _blocks(axes, all_series)
    bottom = [0.0] * len(places)
    for phase in PHASES:
        heights = [point.phases_s.get(phase, 0.0) for _, point in places]
        if any(heights):
            axes.bar([x for x, _ in places], heights, bottom=bottom, width=0.6, color=COLORS[phase], label=phase)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for (x, _), top in zip(places, bottom, strict=True):
        axes.annotate(f"{top:,.1f} s", (x, top), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    _style(axes, "Training time by phase", "seconds")
    # Leave room for the numbers above the bars.
    axes.margins(y=0.12)
    _legend(axes)


def _draw_steps(axes: Axes, all_series: Sequence[Series]) -> None:
    """Draw grouped bars: time of every step for each number of workers."""
    places = _blocks(axes, all_series)
    steps = [step for step in STEPS if any(step in point.steps_s for _, point in places)]
    width = 0.8 / max(len(steps), 1)
    # Steps of one phase have its color, so that both charts agree; shades distinguish them.
    shades = {"batch_load": 1.0, "fwd_pass": 0.45, "comp_loss": 0.6, "backprop": 0.8, "opt_step": 1.0}
    for index, step in enumerate(steps):
        x = [place - 0.4 + (index + 0.5) * width for place, _ in places]
        heights = [point.steps_s.get(step, 0.0) for _, point in places]
        color = COLORS[STEPS[step]]
        axes.bar(x, heights, width=width * 0.92, color=color, alpha=shades.get(step, 1.0), label=STEP_LABELS[step])
    _style(axes, "Training time by step", "seconds")
    _legend(axes)


def _draw_speedup(axes: Axes, all_series: Sequence[Series]) -> None:
    """Draw the speed-up with and without communication, and the ideal speed-up for each first number of workers."""
    ticks = _shared_ticks(axes, all_series)
    starts = sorted({series.points[0].workers for series in all_series})
    for start in starts:
        ideal = {k: k / start for k in ticks if k >= start}
        axes.plot([ticks[k] for k in ideal], list(ideal.values()), "--", color=_GREY, linewidth=1.2)
    # One entry in the legend stands for the ideal lines of all series.
    axes.lines[0].set_label("ideal")
    single = len(all_series) == 1
    for series, color in zip(all_series, itertools.cycle(_SERIES_COLORS), strict=False):
        names = ("without communication", "with communication") if single else (None, series.label)
        total = speedup([point.total_s for point in series.points])
        without = speedup([point.without_communication_s for point in series.points])
        colors = (COLORS["compute"], COLORS["communication"]) if single else (color, color)
        _line(axes, ticks, series, without, "s:", color=colors[0], label=names[0])
        _line(axes, ticks, series, total, "o-", color=colors[1], label=names[1])
    if not single:
        # A line without points: the legend needs one entry for the dotted lines of all series.
        axes.plot([], [], "s:", color=_GREY, label="without communication")
    over = f"{starts[0]} worker{'' if starts[0] == 1 else 's'}"
    if len(starts) > 1:
        over = "the fewest workers of each series"
    _style(axes, f"Speed-up over {over}", "times faster")
    axes.margins(x=0.12, y=0.12)
    _legend(axes)


def _draw_price(axes: Axes, all_series: Sequence[Series]) -> None:
    """Draw the price index, with a line at 1: below it, more workers pay for themselves."""
    ticks = _shared_ticks(axes, all_series)
    axes.axhline(1.0, linestyle="--", color=_GREY, linewidth=1.2, label="below: more workers pay for themselves")
    for series, color in zip(all_series, itertools.cycle(_SERIES_COLORS), strict=False):
        name = "price index" if len(all_series) == 1 else series.label
        _line(axes, ticks, series, price_index(series.points), "o-", color=color, label=name)
    _style(axes, "Price index", "price increase / performance increase")
    axes.margins(x=0.12, y=0.15)
    _legend(axes)


def _shared_ticks(axes: Axes, all_series: Sequence[Series]) -> dict[int, int]:
    """Place the numbers of workers on the axis that all series share."""
    workers = sorted({point.workers for series in all_series for point in series.points})
    # A star marks the number of workers if any series missed its goal with it.
    missed = {point.workers for series in all_series for point in series.points if not point.reached}
    axes.set_xticks(range(len(workers)), [f"{k}{'*' if k in missed else ''}" for k in workers])
    return {k: place for place, k in enumerate(workers)}


def _line(
    axes: Axes,
    ticks: Mapping[int, int],
    series: Series,
    values: Sequence[float | None],
    style: str,
    **appearance: Any,
) -> None:
    """Draw a line through the values of a series, and write the values below a solid line."""
    pairs = zip(series.points, values, strict=True)
    known = [(ticks[point.workers], value) for point, value in pairs if value is not None]
    if not known:
        return
    axes.plot(*zip(*known, strict=True), style, linewidth=2, **appearance)
    for x, value in known if style.endswith("-") else ():
        axes.annotate(f"{value:.2f}", (x, value), (0, -14), textcoords="offset points", ha="center", fontsize=9)


def _legend(axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    if handles:
        # Right of the axes: inside, a legend covers bars, and matplotlib's search for a free place takes long on a busy
        # machine and then warns. A long name is wrapped, so that the axes keep most of the width.
        wrapped = ["\n".join(textwrap.wrap(name, 24)) for name in names]
        axes.legend(handles, wrapped, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
