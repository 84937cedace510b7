"""Draw the training time by phase or by step as one bar for each number of workers.

Bars are horizontal, so that time runs from left to right as in a trace, and each long label has a
line.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlbench_core.comparison.figures import canvas
from mlbench_core.comparison.figures.captions import caption, error_bars, not_drawn
from mlbench_core.comparison.figures.numbers import Estimate, has_interval, mean, mean_time
from mlbench_core.comparison.goal_times import cost_per_success_s, known_times_s
from mlbench_core.comparison.group_repeats import Group, series
from mlbench_core.errors import ConfigurationError
from mlbench_core.run_terms import PHASES, STEPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_phases", "draw_steps", "panel_height", "phase_bars", "with_time"]

_COMMUNICATION = "#E69F00"
# The hatch distinguishes the phases in gray print.
_PHASE_LOOKS: dict[str, canvas.Look] = {
    "compute": {"facecolor": "#0072B2", "hatch": ""},
    "communication": {"facecolor": _COMMUNICATION, "hatch": ""},
    "metrics": {"facecolor": "#009E73", "hatch": "////"},
    "data": {"facecolor": "#CC79A7", "hatch": "....."},
    "other": {"facecolor": "#DDDDDD", "hatch": ""},
}
_STEP_LOOKS: dict[str, canvas.Look] = {
    "batch_load": {"facecolor": "#CC79A7", "hatch": "....."},
    "fwd_pass": {"facecolor": "#56B4E9", "hatch": ""},
    "comp_loss": {"facecolor": "#56B4E9", "hatch": "xxxx"},
    "backprop": {"facecolor": "#0072B2", "hatch": ""},
    "opt_step": {"facecolor": "#0072B2", "hatch": "////"},
    "agg": {"facecolor": _COMMUNICATION, "hatch": ""},
    "comp_metrics": {"facecolor": "#009E73", "hatch": "////"},
}
_PHASE_NAMES = {"communication": "communication (waited for)"}
_STEP_NAMES = {
    "batch_load": "data loading",
    "fwd_pass": "forward",
    "comp_loss": "loss",
    "backprop": "backward",
    "opt_step": "update",
    "agg": "aggregation",
    "comp_metrics": "metrics",
}
_BAR_IN = 0.17
_HEADING_SHARE = 0.62
# An interval of two runs may be ten times the mean; the bars must stay readable beside it.
_LONGEST_INTERVAL = 1.5


def draw_phases(groups: Sequence[Group]) -> canvas.Drawing:
    """Draw the training time by phase, with the communication that was hidden behind computation.

    Args:
        groups: Groups of runs.

    Returns:
        The figure ``total_time_by_phase``.

    Raises:
        ConfigurationError: No run reported a time.
    """
    every, groups = groups, with_time(groups)
    figure = canvas.new_figure(canvas.COLUMN_IN, panel_height(groups))
    axes = figure.subplots()
    text = phase_bars(axes, groups, canvas.COLUMN_IN) + not_drawn(every, groups)
    canvas.finish(figure, text, *axes.get_legend_handles_labels())
    header = ["setup", "workers", "runs", "missed", "total_s", "total_low_s", "total_high_s"]
    header += _in_seconds(PHASES)
    rows: list[list[Any]] = [[*header, "communication_hidden_s"]]
    for group in groups:
        total, phases = _total(group), _phases(group)
        hidden = mean(group.values("communication_hidden_s"))
        row: list[Any] = [group.label, group.workers, total.runs, group.missed]
        row += [total.value, total.low, total.high, *map(phases.get, PHASES)]
        row.append(None if hidden is None else hidden.value)
        rows.append(row)
    return canvas.Drawing("total_time_by_phase", figure, text, rows)


def draw_steps(groups: Sequence[Group]) -> canvas.Drawing:
    """Draw the training time by step of a batch.

    Args:
        groups: Groups of runs.

    Returns:
        The figure ``time_all_phases``.

    Raises:
        ConfigurationError: No run reported the time of a step.
    """
    every, groups = groups, list(filter(_steps, groups))
    if not groups:
        raise ConfigurationError("no run reported the time of its steps: nothing to draw")
    figure = canvas.new_figure(canvas.COLUMN_IN, panel_height(groups))
    axes = figure.subplots()
    y, ordered = _places(axes, groups, canvas.COLUMN_IN)
    ends = _stack(axes, y, list(map(_steps, ordered)), _STEP_LOOKS, _STEP_NAMES)
    _write_values(axes, y, ends, ends)
    canvas.title(axes, "Training time by step", groups)
    notes = [caption(groups), "Mean over the runs, whole training.", *_mark_notes(groups)]
    text = " ".join(notes) + not_drawn(every, groups)
    canvas.finish(figure, text, *axes.get_legend_handles_labels())
    rows: list[list[Any]] = [["setup", "workers", "runs", *_in_seconds(STEPS)]]
    for group in groups:
        seconds = map(_steps(group).get, STEPS)
        rows.append([group.label, group.workers, len(group.records), *seconds])
    return canvas.Drawing("time_all_phases", figure, text, rows)


def _in_seconds(names: Iterable[str]) -> list[str]:
    """Return the columns of a CSV file, whose names end with the unit."""
    return [f"{name}_s" for name in names]


def panel_height(groups: Sequence[Group]) -> float:
    """Return the height in inches of a panel with one bar for each group."""
    blocks = series(groups)
    headings = 2 * len(blocks) if len(blocks) > 1 else 0
    return 0.75 + _BAR_IN * max(len(groups) + headings * _HEADING_SHARE + 0.3 * len(blocks), 3)


def phase_bars(axes: Axes, groups: Sequence[Group], width: float) -> str:
    """Draw one bar for each group: phases, hidden communication and the interval of the total.

    Args:
        axes: The axes to draw on.
        groups: Groups with a time, see :func:`with_time`.
        width: Width in inches, the labels of the axes included.

    Returns:
        The caption.
    """
    y, ordered = _places(axes, groups, width)
    bars = _stack(axes, y, list(map(_phases, ordered)), _PHASE_LOOKS, _PHASE_NAMES)
    hidden_y, hidden_s = [], []
    for position, group in zip(y, ordered, strict=True):
        hidden = mean(group.values("communication_hidden_s"))
        if hidden is not None:
            # Below the bar, whose lower edge is at 0.25.
            hidden_y.append(position + 0.36)
            hidden_s.append(hidden.value)
    sentences = [caption(groups)]
    if any(hidden_s):
        look: canvas.Look = {"facecolor": "white", "edgecolor": "#A36F00", "hatch": "////////"}
        axes.barh(hidden_y, hidden_s, height=0.2, label="communication (hidden)", **look)
        sentences.append(
            "Hatched below a bar: hidden communication. It ran at the same time as the "
            "computation and is not part of the total."
        )
    totals = list(map(_total, ordered))
    cut = _intervals(axes, y, totals, bars)
    canvas.title(axes, "Training time by phase", groups)
    for group in groups:
        if sum(_phases(group).values()) > 1.001 * _total(group).value:
            sentences.append(
                "Each phase is that of its slowest worker, so the bars can exceed the totals."
            )
            break
    if has_interval(totals):
        sentences.append(error_bars(cut))
    return " ".join([*sentences, *_mark_notes(groups)])


def with_time(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with a known time.

    Raises:
        ConfigurationError: There is none.
    """
    timed = list(filter(_known_total, groups))
    if not timed:
        raise ConfigurationError("none of the runs reported a time: nothing to draw")
    return timed


def _mark(group: Group) -> str:
    """Return the mark of a group with misses, which the caption explains."""
    if not group.missed:
        return ""
    if group.reached:
        return "*"
    return "**"


def _mark_notes(groups: Sequence[Group]) -> list[str]:
    marks = set(map(_mark, groups))
    notes = []
    if "*" in marks:
        notes.append(
            "* some runs missed the goal: time of all runs, divided by the number that reached it."
        )
    if "**" in marks:
        notes.append("** all runs missed the goal: sum of the times of all runs.")
    return notes


def _known_total(group: Group) -> Estimate | None:
    """Return the mean time; with misses the cost per success.

    Without a success, it is the time of all runs.
    """
    if _mark(group) == "*":
        cost_s = cost_per_success_s(group.records)
        if cost_s is None:
            return None
        return Estimate(cost_s, runs=len(group.records))
    times = known_times_s(group.records)
    if times and group.missed:
        return Estimate(math.fsum(times), runs=len(times))
    return mean_time(times)


def _total(group: Group) -> Estimate:
    total = _known_total(group)
    assert total is not None, "with_time() leaves out groups without a time"
    return total


def _phases(group: Group) -> dict[str, float]:
    """Return the mean time of each phase; the rest of the total time counts as other."""
    phases = _parts(group, "phases_s", PHASES)
    left = _total(group).value - sum(phases.values())
    # A smaller difference is a rounding error.
    if left > 1e-6 * _total(group).value:
        phases["other"] = phases.get("other", 0.0) + left
    return phases


def _steps(group: Group) -> dict[str, float]:
    return _parts(group, "steps_s", STEPS)


def _parts(group: Group, attribute: str, names: Iterable[str]) -> dict[str, float]:
    """Return the mean of each part of the runs' times in an attribute.

    With misses, it is the sum divided by the number of successes, or the sum without a success.
    """
    parts = list(map(operator.attrgetter(attribute), group.records))
    means = {}
    for name in names:
        values = []
        for part in parts:
            if part.get(name) is not None:
                values.append(part[name])
        runs = len(values)
        # A mean over all runs would be smaller for a miss that ended early.
        if group.missed:
            runs = max(len(group.reached), 1)
        if values:
            means[name] = math.fsum(values) / runs
    return means


def _places(axes: Axes, groups: Sequence[Group], width: float) -> tuple[list[float], list[Group]]:
    """Place the bars from top to bottom, with the label of each series above its bars.

    Returns:
        The position of each bar, and the groups in the same order.
    """
    y: list[float] = []
    ordered: list[Group] = []
    labels = []
    blocks, top = series(groups), 0.0
    for block in blocks:
        if len(blocks) > 1:
            # The axes are narrower than the figure by the numbers of workers.
            lines = canvas.wrap(block.label, width - 0.5, 6).split("\n")[:2]
            top += _HEADING_SHARE * len(lines)
            style: canvas.Look = {"ha": "left", "va": "bottom", "size": 6, "linespacing": 1.0}
            axes.text(
                0.005, top - 0.32, "\n".join(lines), transform=axes.get_yaxis_transform(), **style
            )
        for group in block.groups:
            y.append(top + 0.3)
            ordered.append(group)
            labels.append(f"{group.workers}{_mark(group)}")
            top += 1.0
        top += 0.3
    axes.set_yticks(y, labels)
    axes.set_ylim(max(top, 1.0), -0.2)
    axes.set_ylabel("workers")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds")
    return y, ordered


def _stack(
    axes: Axes,
    y: Sequence[float],
    bars: Sequence[Mapping[str, float]],
    looks: Mapping[str, canvas.Look],
    names: Mapping[str, str],
) -> list[float]:
    """Draw stacked bars and return their ends."""
    ends = [0.0] * len(bars)
    for part, look in looks.items():
        lengths = [bar.get(part, 0.0) for bar in bars]
        if any(lengths):
            axes.barh(y, lengths, left=ends, height=0.5, label=names.get(part, part), **look)
        ends = list(map(operator.add, ends, lengths))
    return ends


def _intervals(
    axes: Axes, y: Sequence[float], totals: Sequence[Estimate], bars: Sequence[float]
) -> bool:
    """Draw the totals' intervals and write the totals; return True if an interval is cut.

    Args:
        axes: The axes to draw on.
        y: Positions of the bars.
        totals: The totals.
        bars: Ends of the bars, which can exceed the totals.
    """
    values = list(map(operator.attrgetter("value"), totals))
    limit = _LONGEST_INTERVAL * max(values)
    ends, cut = [], False
    for position, total, bar_end in zip(y, totals, bars, strict=True):
        end = total.value
        if total.low is not None and total.high is not None:
            cut = cut or total.high > limit or total.low < 0
            low, end = max(total.low, 0.0), min(total.high, limit)
            bar: canvas.Look = {"fmt": "none", "ecolor": "black", "elinewidth": 0.8}
            # The interval of the geometric mean may lie below the mean, which the bar shows.
            lengths = [[max(total.value - low, 0.0)], [max(end - total.value, 0.0)]]
            axes.errorbar([total.value], [position], xerr=lengths, **bar)
        # On the bar, the number could not be read.
        ends.append(max(end, bar_end))
    _write_values(axes, y, values, ends)
    return cut


def _write_values(
    axes: Axes, y: Sequence[float], values: Sequence[float], ends: Sequence[float]
) -> None:
    """Write each value to the right of its bar, and leave room for it.

    Args:
        axes: The axes to write on.
        y: Positions of the bars.
        values: Their values.
        ends: Ends of the bars with their intervals.
    """
    look: canvas.Look = {"textcoords": "offset points", "va": "center", "size": 6}
    for position, value, end in zip(y, values, ends, strict=True):
        axes.annotate(canvas.number(value), (end, position), (3, 0), **look)
    axes.set_xlim(0, 1.16 * max(ends) or 1.0)
