"""Charts of results, as PNG and CSV.

Runs with the same number of workers count as repeats and are averaged. With :math:`T_k` the time of :math:`k` workers
and :math:`k_0` the fewest workers there are::

    speed-up      S_k = T_{k_0} / T_k                       ideal: k / k_0
    price index   I_k = (price_k / price_{k_0}) / S_k       price_k proportional to k T_k

so an index below 1 says that the additional workers pay for themselves.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_core.cli._results import PHASES, STEPS, RunResult
from mlbench_core.cli._settings import replacing
from mlbench_core.errors import ConfigurationError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Point", "draw_all", "draw_overview", "summarize"]

COLORS = {"compute": "#3569a8", "communication": "#e0862b", "metrics": "#6ea15a", "data": "#8a6bb0"}
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


@dataclass(frozen=True)
class Point:
    """The mean over all runs with one number of workers; times in seconds.

    Attributes:
        workers: Number of workers.
        runs: How many runs went into it.
        total_s: Time to goal, or all training time.
        without_communication_s: The same less exposed communication.
        phases_s: Time by phase.
        steps_s: Time by step.
        reached: Whether every run reached its goal, as far as known.
    """

    workers: int
    runs: int
    total_s: float | None
    without_communication_s: float | None
    phases_s: Mapping[str, float]
    steps_s: Mapping[str, float]
    reached: bool


def summarize(results: Sequence[RunResult]) -> list[Point]:
    """Average the runs of each number of workers, fewest workers first.

    Example:
        >>> a, b = RunResult("a-1", 1, train_s=8.0), RunResult("b-1", 1, train_s=10.0)
        >>> summarize([a, b])[0].total_s
        9.0
    """
    points = []
    for workers in sorted({result.workers for result in results}):
        same = [result for result in results if result.workers == workers]
        points.append(
            Point(
                workers=workers,
                runs=len(same),
                total_s=_mean([result.total_s for result in same]),
                without_communication_s=_mean([result.without_communication_s for result in same]),
                phases_s=_means([result.phases_s for result in same], PHASES),
                steps_s=_means([result.steps_s for result in same], tuple(STEPS)),
                reached=all(result.goal_reached is not False for result in same),
            )
        )
    return points


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _means(rows: Sequence[Mapping[str, float]], keys: Sequence[str]) -> dict[str, float]:
    found = {key: _mean([row.get(key) for row in rows]) for key in keys}
    return {key: value for key, value in found.items() if value is not None}


def speedup(points: Sequence[Point], time: Callable[[Point], float | None]) -> list[float | None]:
    """How many times faster each point is than the first one; ``None`` where a time is missing or zero."""
    base = time(points[0])
    times = [time(point) for point in points]
    return [base / t if base and t else None for t in times]


def price_index(points: Sequence[Point]) -> list[float | None]:
    """Price increase over performance increase, relative to the first point; see the module's formula."""
    indices: list[float | None] = []
    for point, gain in zip(points, speedup(points, _total), strict=True):
        if gain is None or point.total_s is None or not points[0].total_s:
            indices.append(None)
        else:
            price = point.workers * point.total_s / (points[0].workers * points[0].total_s)
            indices.append(price / gain)
    return indices


def _total(point: Point) -> float | None:
    return point.total_s


def _without(point: Point) -> float | None:
    return point.without_communication_s


def draw_overview(results: Sequence[RunResult], path: Path) -> Path:
    """Draw time by phase and speed-up side by side.

    Args:
        results: Runs to compare.
        path: The PNG file.

    Returns:
        ``path``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    points = summarize(results)
    figure = _figure(11.0)
    left, right = figure.subplots(1, 2)
    _draw_phases(left, points)
    _draw_speedup(right, points)
    return _save(figure, path, points)


def draw_all(results: Sequence[RunResult], folder: Path, price_per_hour: float | None = None) -> list[Path]:
    """Draw every chart as PNG and write its figures as CSV.

    Args:
        results: Runs to compare.
        folder: Where to write.
        price_per_hour: Price of one worker for an hour.

    Returns:
        The files written.

    Raises:
        ConfigurationError: No run reported any time.
        MissingDependencyError: matplotlib is not installed.
    """
    points = summarize(results)
    if not any(point.total_s for point in points):
        raise ConfigurationError("none of the runs reported a time: nothing to draw")
    written = [draw_overview(results, folder / "overview.png")]
    charts: dict[str, tuple[Callable[[Axes, Sequence[Point]], None], list[list[Any]]]] = {
        "total_time_by_phase": (_draw_phases, _phase_rows(points)),
        "speedup": (_draw_speedup, _speedup_rows(points)),
        "time_all_phases": (_draw_steps, _step_rows(points)),
        "price_index": (_draw_price, _price_rows(points, price_per_hour)),
    }
    for name, (draw, rows) in charts.items():
        figure = _figure(6.5)
        draw(figure.subplots(), points)
        written.append(_save(figure, folder / f"{name}.png", points))
        written.append(_write_csv(folder / f"{name}.csv", rows))
    return written


def _phase_rows(points: Sequence[Point]) -> list[list[Any]]:
    header = ["workers", "runs", "total_s", *(f"{phase}_s" for phase in PHASES), "goal_reached"]
    return [header] + [
        [p.workers, p.runs, p.total_s, *(p.phases_s.get(phase) for phase in PHASES), p.reached] for p in points
    ]


def _speedup_rows(points: Sequence[Point]) -> list[list[Any]]:
    columns = zip(points, speedup(points, _total), speedup(points, _without), strict=True)
    rows = [[p.workers, p.workers / points[0].workers, with_, without] for p, with_, without in columns]
    return [["workers", "ideal", "speedup", "speedup_without_communication"], *rows]


def _step_rows(points: Sequence[Point]) -> list[list[Any]]:
    header = ["workers", *(f"{step}_s" for step in STEPS)]
    return [header] + [[p.workers, *(p.steps_s.get(step) for step in STEPS)] for p in points]


def _price_rows(points: Sequence[Point], price_per_hour: float | None) -> list[list[Any]]:
    rows: list[list[Any]] = [["workers", "total_s", "price", "price_index"]]
    for point, index in zip(points, price_index(points), strict=True):
        known = price_per_hour is not None and point.total_s is not None
        price = point.workers * point.total_s / 3600 * price_per_hour if known else None  # type: ignore[operator]
        rows.append([point.workers, point.total_s, price, index])
    return rows


def _write_csv(path: Path, rows: Sequence[Sequence[Any]]) -> Path:
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["" if cell is None else cell for cell in row] for row in rows])
    return path


def _figure(width: float) -> Figure:
    require("matplotlib", "charts")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 4.4), dpi=150, layout="constrained")


def _save(figure: Figure, path: Path, points: Sequence[Point]) -> Path:
    if not all(point.reached for point in points):
        figure.supxlabel("* the goal was not reached: all training time is shown", fontsize=8, color=_GREY)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
    return path


def _style(axes: Axes, points: Sequence[Point], title: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("workers")
    axes.set_ylabel(y_label)
    axes.set_xticks(range(len(points)), [f"{p.workers}{'' if p.reached else '*'}" for p in points])
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(bottom=0)


def _draw_phases(axes: Axes, points: Sequence[Point]) -> None:
    """Stacked bars: training time by phase for each number of workers."""
    bottom = [0.0] * len(points)
    for phase in PHASES:
        heights = [point.phases_s.get(phase, 0.0) for point in points]
        if any(heights):
            axes.bar(range(len(points)), heights, bottom=bottom, width=0.6, color=COLORS[phase], label=phase)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for x, top in enumerate(bottom):
        axes.annotate(f"{top:,.1f} s", (x, top), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    _style(axes, points, "Training time by phase", "seconds")
    axes.margins(y=0.12)
    axes.set_xlim(-0.6, len(points) - 0.4)
    _legend(axes)


def _draw_speedup(axes: Axes, points: Sequence[Point]) -> None:
    """Lines: speed-up with and without communication, and the ideal one."""
    x = range(len(points))
    ideal = [point.workers / points[0].workers for point in points]
    axes.plot(x, ideal, "--", color=_GREY, linewidth=1.2, label="ideal")
    _line(axes, speedup(points, _without), COLORS["compute"], "without communication", "s")
    _line(axes, speedup(points, _total), COLORS["communication"], "with communication", "o", labelled=True)
    _style(axes, points, f"Speed-up over {_count(points[0].workers)}", "times faster")
    axes.margins(x=0.12, y=0.12)
    _legend(axes)


def _draw_steps(axes: Axes, points: Sequence[Point]) -> None:
    """Grouped bars: time of every step for each number of workers."""
    steps = [step for step in STEPS if any(step in point.steps_s for point in points)]
    width = 0.8 / max(len(steps), 1)
    shades = {"batch_load": 1.0, "fwd_pass": 0.45, "comp_loss": 0.6, "backprop": 0.8, "opt_step": 1.0}
    for index, step in enumerate(steps):
        x = [position - 0.4 + (index + 0.5) * width for position in range(len(points))]
        heights = [point.steps_s.get(step, 0.0) for point in points]
        color = COLORS[STEPS[step]]
        axes.bar(x, heights, width=width * 0.92, color=color, alpha=shades.get(step, 1.0), label=STEP_LABELS[step])
    _style(axes, points, "Training time by step", "seconds")
    _legend(axes)


def _draw_price(axes: Axes, points: Sequence[Point]) -> None:
    """Line: the price index, with the limit below which more workers pay for themselves."""
    axes.axhline(1.0, linestyle="--", color=_GREY, linewidth=1.2, label="workers pay for themselves below")
    _line(axes, price_index(points), COLORS["compute"], "price index", "o", labelled=True)
    _style(axes, points, "Price index", "price increase / performance increase")
    axes.margins(x=0.12, y=0.15)
    _legend(axes)


def _line(
    axes: Axes, values: Sequence[float | None], color: str, label: str, marker: str, labelled: bool = False
) -> None:
    known = [(x, value) for x, value in enumerate(values) if value is not None]
    if not known:
        return
    axes.plot(*zip(*known, strict=True), marker=marker, color=color, linewidth=2, label=label)
    if labelled:
        for x, value in known:
            axes.annotate(f"{value:.2f}", (x, value), (0, -14), textcoords="offset points", ha="center", fontsize=9)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"
