"""Draw figures of results, as PNG, SVG and CSV.

Every figure is for a column of 8 cm, safe for color-blind readers, and readable in gray print. Its
caption, in small print below the axes, names the task, the goal, the machine, the number of runs
and the kind of its error bars.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlbench_core.comparison.figures.bars import (
    draw_phases,
    draw_steps,
    panel_height,
    phase_bars,
    with_time,
)
from mlbench_core.comparison.figures.canvas import PAGE_IN, Drawing, finish, new_figure, save, style
from mlbench_core.comparison.figures.captions import caption, not_drawn
from mlbench_core.comparison.figures.curves import draw_learning_curves, usual_axes
from mlbench_core.comparison.figures.scaling import (
    draw_communication_share,
    draw_price_index,
    draw_speed_up,
    scaling_series,
    speed_up_panels,
)
from mlbench_core.comparison.figures.tradeoff import (
    draw_performance_profile,
    draw_time_against_price,
)
from mlbench_core.comparison.goal_times import known_times_s
from mlbench_core.comparison.group_repeats import workload
from mlbench_core.errors import ConfigurationError

if TYPE_CHECKING:
    from mlbench_core.comparison.group_repeats import Group

__all__ = [
    "Drawing",
    "caption",
    "draw_all",
    "draw_communication_share",
    "draw_learning_curves",
    "draw_overview",
    "draw_performance_profile",
    "draw_phases",
    "draw_price_index",
    "draw_speed_up",
    "draw_steps",
    "draw_time_against_price",
    "drawings",
    "save",
    "style",
]

_logger = logging.getLogger(__name__)


def draw_overview(groups: Sequence[Group]) -> Drawing:
    """Draw the time by phase and the speed-up side by side.

    Args:
        groups: Groups of runs.

    Returns:
        The figure ``overview``.

    Raises:
        ConfigurationError: No run reported a time.
    """
    timed = with_time(groups)
    try:
        every = scaling_series(groups)
    except ConfigurationError:
        # The phases are the whole overview if no speed-up can be computed.
        return dataclasses.replace(draw_phases(groups), name="overview", rows=[])
    figure = new_figure(PAGE_IN, max(panel_height(timed), 3.3))
    parts = figure.subplot_mosaic([["phases", "measured"], ["phases", "without"]])
    left = phase_bars(parts["phases"], timed, PAGE_IN / 2)
    parts["without"].sharex(parts["measured"])
    parts["without"].sharey(parts["measured"])
    right = speed_up_panels([parts["measured"], parts["without"]], groups, every)
    handles, labels = parts["phases"].get_legend_handles_labels()
    more_handles, more_labels = parts["measured"].get_legend_handles_labels()
    # Both halves begin with the caption of their groups.
    left = left.removeprefix(caption(timed)).strip()
    right = right.removeprefix(caption(groups)).strip()
    text = f"{caption(groups)} Left: {left} Right: {right}" + not_drawn(groups, timed)
    finish(figure, text, [*handles, *more_handles], [*labels, *more_labels])
    return Drawing("overview", figure, text)


def drawings(
    groups: Sequence[Group],
    price_per_hour: float | None = None,
    report: Callable[[str], None] | None = None,
    leave_out: Collection[str] = (),
    against: Collection[str] = (),
) -> Iterator[Drawing]:
    """Draw every figure for which the groups have data, one after the other.

    Args:
        groups: Groups of runs, see :func:`mlbench_core.comparison.group_repeats.pool`.
        price_per_hour: Price of one worker for an hour; None if it is unknown.
        report: Called with one sentence for each figure that is not drawn, with the reason. By
            default, the sentence is logged.
        leave_out: Names of figures that are not drawn, and not reported.
        against: Horizontal axes of the learning curves, see
            :data:`~mlbench_core.comparison.figures.curves.AGAINST`. Empty for the usual ones.

    Yields:
        Figures with captions and numbers.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    makers: dict[str, Callable[[], Drawing]] = {
        "overview": functools.partial(draw_overview, groups),
        "total_time_by_phase": functools.partial(draw_phases, groups),
        "speedup": functools.partial(draw_speed_up, groups),
        "time_all_phases": functools.partial(draw_steps, groups),
        "price_index": functools.partial(draw_price_index, groups, price_per_hour),
        "communication_share": functools.partial(draw_communication_share, groups),
    }
    for axis in against or usual_axes(groups):
        makers[f"learning_curves_{axis}"] = functools.partial(draw_learning_curves, groups, axis)
    # Without a price, or with a single task, a report that these two are not drawn would only be
    # noise.
    if price_per_hour is not None:
        maker = functools.partial(draw_time_against_price, groups, price_per_hour)
        makers["time_to_goal_against_price"] = maker
    if len(set(map(workload, groups))) > 1:
        makers["performance_profile"] = functools.partial(draw_performance_profile, groups)
    for name, make in makers.items():
        if name in leave_out:
            continue
        try:
            with style():
                drawing = make()
        except ImportError:
            raise
        # The other figures, and the tables of a command, do not depend on one that cannot be drawn.
        except Exception as error:
            (report or _logger.info)(f"{name} is not drawn: {_reason(error)}")
        else:
            yield drawing


def draw_all(
    groups: Sequence[Group],
    folder: Path,
    price_per_hour: float | None = None,
    report: Callable[[str], None] | None = None,
    against: Collection[str] = (),
) -> list[Path]:
    """Write every figure for which the groups have data as PNG and SVG, and its numbers as CSV.

    Args:
        groups: Groups of runs, see :func:`mlbench_core.comparison.group_repeats.pool`.
        folder: The folder to write to.
        price_per_hour: See :func:`drawings`.
        report: See :func:`drawings`.
        against: See :func:`drawings`.

    Returns:
        The files written.

    Raises:
        ConfigurationError: No run reported a time, so there is nothing to draw.
        MissingDependencyError: matplotlib is not installed.
    """
    if not any(known_times_s(group.records) for group in groups):
        raise ConfigurationError("none of the runs reported a time: nothing to draw")
    written: list[Path] = []
    for drawing in drawings(groups, price_per_hour, report, against=against):
        try:
            written += save(drawing, folder)
        except OSError:  # the others cannot be written either
            raise
        except Exception as error:
            (report or _logger.info)(f"{drawing.name} is not drawn: {_reason(error)}")
    return written


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ConfigurationError):
        return text
    return f"{type(error).__name__}: {text}"
