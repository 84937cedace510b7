"""Describe the goal of a run as data, and report it at the end of a process.

A :class:`~mlbench_core.tracking.tracker.Tracker` sends the metric ``goal`` at the goal and when it
is closed. A script of version 3.0 does not close its tracker, and its tracker often lives in a
function that returns before the end. So :func:`end_at_exit` ends the trackers that are alive when
the interpreter exits, and :func:`send_at_exit` keeps the last message of the others.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import math
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from mlbench_core.client.log_metrics import LogMetrics
from mlbench_core.run_terms import TRACKER_PHASES, GoalAim

__all__ = ["Goal", "as_goal", "end_at_exit", "finite", "goal_metric", "send_at_exit"]

logger = logging.getLogger(__name__)

Goal = Callable[[str, float, Any], "str | None"]
"""A goal is called ``(metric_name, value, tracker)``.

See :class:`~mlbench_core.tracking.tracker.Tracker`.
"""


class TrackedRun(Protocol):
    """The part of a :class:`~mlbench_core.tracking.tracker.Tracker` that this module uses."""

    run_id: str | int
    current_epoch: int
    goal_reached: bool
    goal_result: dict[str, Any] | None
    time_to_goal_s: float | None
    unit: str

    @property
    def goal(self) -> Goal | None:
        """Return the goal."""

    def totals(self) -> dict[str, Any]:
        """Return the totals of the run so far."""

    def end(self, at_exit: bool = False) -> None:
        """End the run."""


def as_goal(goal: Any) -> Goal | None:
    """Return the goal; a function without required arguments is called to create it.

    Raises:
        TypeError: ``goal`` is neither a goal nor a function that creates one.
    """
    if goal is None or _accepts(goal, 3):
        return goal
    if callable(goal) and _accepts(goal, 0):
        created = goal()
        if created is not None and _accepts(created, 3):
            return created
    raise TypeError(
        f"goal must be callable as (metric_name, value, tracker), not {goal!r}: pass such a "
        "function, or one without required arguments that returns it"
    )


def _accepts(function: Any, arguments: int) -> bool:
    """Return True if the function can be called with this number of positional arguments."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError:
        return False
    # A builtin without a signature counts as a goal, not as a factory.
    except ValueError:
        return arguments > 0
    return True


def finite(value: Any) -> float | None:
    """Return a number that JSON can hold, or None if ``value`` is not a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    if not math.isfinite(number):
        return None
    return number


def goal_metric(tracker: TrackedRun) -> dict[str, Any] | None:
    """Return the metric ``goal`` as the master receives it.

    Args:
        tracker: The tracker.

    Returns:
        The aim of the goal, see :class:`~mlbench_core.run_terms.GoalAim`, with ``reached``,
        ``value``, ``time_to_goal_s``, ``epochs`` and ``phases_s``. If it was reached, these belong
        to that moment, and ``epochs`` counts the epoch that ran then. Otherwise ``epochs`` and
        ``phases_s`` are those of the run so far. If the unit of the run is steps, ``unit`` and
        ``steps`` are further entries. None without a goal.
    """
    if tracker.goal is None and not tracker.goal_reached:
        return None
    result = None
    # A script may set goal_reached to False to continue.
    if tracker.goal_reached:
        result = tracker.goal_result
    goal = GoalAim.of(tracker.goal).to_dict()
    value: float | None = None
    if result is None:
        totals, epochs = tracker.totals(), tracker.current_epoch
    else:
        totals, epochs, value = result["totals"], result["epoch"] + 1, result["value"]
        for name in (*goal, "budget_s"):
            if name in result:
                goal[name] = result[name]
    metric = {
        **goal,
        "reached": tracker.goal_reached,
        "value": value,
        "time_to_goal_s": None,
        "epochs": None,
        "phases_s": {},
    }
    if tracker.goal_reached:
        metric["time_to_goal_s"] = tracker.time_to_goal_s
    # Checkpoints of earlier versions record that the goal was reached, but not when.
    if result is not None or not tracker.goal_reached:
        metric["epochs"] = epochs
        if tracker.unit == "steps":
            metric |= {"unit": tracker.unit, "steps": totals["batches"]}
        for phase, tracked in TRACKER_PHASES.items():
            metric["phases_s"][phase] = totals[f"{tracked}_s"]
    return metric


# ---------------------------------------------------------------------- the end of the process

_open_trackers: weakref.WeakSet[TrackedRun] = weakref.WeakSet()
_kept_trackers: list[TrackedRun] = []
_last_metrics: dict[object, tuple[Any, ...]] = {}


def end_at_exit(tracker: TrackedRun, keep: bool = False) -> None:
    """Close a tracker when the interpreter exits, if it is alive and open then.

    Args:
        tracker: The tracker.
        keep: True to keep it alive until then.
    """
    _open_trackers.add(tracker)
    if keep:
        _kept_trackers.append(tracker)
    # Handlers run in the reverse order of their registration. The client of the master registers
    # one when it is created, and delivers nothing after that has run.
    LogMetrics.connect()
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def send_at_exit(key: object, metric: tuple[Any, ...] | None) -> None:
    """Keep arguments of ``LogMetrics.log`` until the interpreter exits; None forgets them."""
    if metric is None:
        _last_metrics.pop(key, None)
    else:
        _last_metrics[key] = metric


def _end_all() -> None:
    for tracker in list(_open_trackers):
        try:
            tracker.end(at_exit=True)
        except Exception as error:
            logger.warning("the tracker of run %s could not be closed: %s", tracker.run_id, error)
    # The client's handler, which runs after this one, delivers them.
    for metric in list(_last_metrics.values()):
        LogMetrics.log(*metric)


def _forget_all() -> None:
    _open_trackers.clear()
    _kept_trackers.clear()
    _last_metrics.clear()


# A forked child has copies of the parent's trackers, which the parent ends.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
