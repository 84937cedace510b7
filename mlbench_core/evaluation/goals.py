"""Define goals, which decide when a training run is done and return its result.

A goal is a callable object that holds a metric, a threshold and a direction. The tracker calls it
with every statistic that it records. The goal returns None until it is reached, and then the text
of the result. The times in this text are the tracker's training times, without validation.

The functions of this module create the goals of the benchmark tasks. A script may pass the function
itself as a goal: ``task1_time_to_accuracy_goal`` and ``task1_time_to_accuracy_goal()`` give the
same goal.

This module imports no framework.

Example:
    >>> class Clock:
    ...     def get_total_train_time(self): return 407.123
    ...     def get_total_compute_time(self): return 300.0
    ...     def get_total_communication_time(self): return 80.5
    ...     def get_total_metrics_time(self): return 20.0
    ...     def get_total_preprocess_time(self): return 6.5
    >>> goal = time_to_accuracy_goal(80)
    >>> goal("val_global_Prec@1", 79.9, Clock()) is None
    True
    >>> print(goal("val_global_Prec@1", 80.2, Clock()))  # doctest: +NORMALIZE_WHITESPACE
    80% Top 1 Validation Accuracy reached in 407.123 seconds, Compute: 300.000 seconds,
    Communication: 80.500 seconds, Metrics: 20.000 seconds, Preprocess: 6.500 seconds
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol

from mlbench_core.arguments import check_finite_at_least_0
from mlbench_core.run_terms import TRACKER_PHASES, GoalAim, length_text
from mlbench_core.tasks import get_task

__all__ = [
    "AccuracyAfterTime",
    "Goal",
    "TimeToGoal",
    "TrackedTimes",
    "accuracy_after_time_goal",
    "task1_time_to_accuracy_goal",
    "task1_time_to_accuracy_light_goal",
    "task2_time_to_accuracy_goal",
    "task2_time_to_accuracy_light_goal",
    "task3_time_to_perplexity_goal",
    "task4_time_to_bleu_goal",
    "time_to_accuracy_goal",
]

ACCURACY = "val_global_Prec@1"
PERPLEXITY = "val_global_Perplexity"
BLEU = "val_global_BLEU-Score"

# Read from the list of tasks, so that each threshold is written in one place only.
_PERPLEXITY_GOAL = get_task("3a").goal_on(None)
_BLEU_GOAL = get_task("4a").goal_on(None)

_P = ParamSpec("_P")


class TrackedTimes(Protocol):
    """The methods of a tracker that goals use: total times in seconds, without validation."""

    def get_total_train_time(self) -> float:
        """Return the seconds of training so far."""

    def get_total_compute_time(self) -> float:
        """Return the training seconds spent in forward pass, loss, backward pass and update."""

    def get_total_communication_time(self) -> float:
        """Return the training seconds spent on communication between workers."""

    def get_total_metrics_time(self) -> float:
        """Return the training seconds spent on computing metrics."""

    def get_total_preprocess_time(self) -> float:
        """Return the training seconds spent on loading data."""


class Goal(Protocol):
    """Anything that a tracker can take as its goal."""

    def __call__(self, metric_name: str, value: float, tracker: TrackedTimes) -> str | None:
        """Return the text of the result if the goal is reached, else None."""


@dataclass(frozen=True)
class TimeToGoal:
    """The training time until a metric reaches a threshold.

    Attributes:
        metric: Name of the statistic that the goal watches, for example ``"val_global_Prec@1"``.
        threshold: The value to reach; reaching it exactly counts.
        minimize: True if smaller values of the metric are better.
        description: Beginning of the result's text, in which ``{threshold}`` is replaced by the
            number. ``reached in ... seconds`` follows.

    Raises:
        TypeError: ``threshold`` is not a number.
        ValueError: ``threshold`` is not finite.

    Example:
        >>> goal = TimeToGoal("val_global_Loss", 0.25, True, "Validation Loss of {threshold}")
        >>> goal.is_reached(0.3), goal.is_reached(0.25)
        (False, True)
    """

    metric: str
    threshold: float
    minimize: bool = False
    description: str = "{threshold}"

    def __post_init__(self) -> None:
        _check_finite("threshold", self.threshold)

    def is_reached(self, value: float) -> bool:
        """Return True if a value of the metric is good enough; nan never is."""
        return GoalAim(self.metric, self.threshold, self.minimize).reached_by(value)

    def __call__(self, metric_name: str, value: float, tracker: TrackedTimes) -> str | None:
        """Check one recorded statistic.

        Args:
            metric_name: Name of the statistic. All except ``metric`` are ignored.
            value: Its value.
            tracker: The tracker, which knows the times of the run.

        Returns:
            The text of the result if the goal is reached, else None. It has the number of steps if
            the unit of the tracker is ``"steps"``.
        """
        if metric_name != self.metric or not self.is_reached(value):
            return None
        description = self.description.format(threshold=f"{self.threshold:g}")
        return (
            f"{description} reached{_after_steps(tracker)} in "
            f"{tracker.get_total_train_time():.3f} seconds{_detailed_times(tracker)}"
        )

    def result(self, tracker: TrackedTimes) -> dict[str, Any]:
        """Return the result as data. It is meant for the moment when the goal is reached.

        Args:
            tracker: The tracker, which knows the times of the run.

        Returns:
            ``metric``, ``threshold`` and ``minimize``, and in seconds ``train_time_s``,
            ``compute_time_s``, ``communication_time_s``, ``metrics_time_s`` and
            ``preprocess_time_s``. All values can be written as JSON.
        """
        goal = {"metric": self.metric, "threshold": self.threshold, "minimize": self.minimize}
        return {**goal, **_times(tracker)}


@dataclass(frozen=True)
class AccuracyAfterTime:
    """The best value of a metric after a fixed time of training; by default, of the accuracy.

    It is reached at the first validation at or after ``budget_s`` seconds of training. Its value is
    the best one up to and including that validation. The text gives the training seconds at that
    validation.

    The clocks of workers differ, but all of them must stop after the same validation. The tasks'
    option ``--goal-after`` makes them agree. In your own script with several workers, override
    :meth:`is_over`.

    Attributes:
        budget_s: Training time in seconds, without validation.
        metric: Name of the statistic that it reports.
        minimize: True if smaller values of the metric are better.
        description: Beginning of the result's text, in which ``{value}`` is replaced by the value.
            ``after ... seconds`` follows.

    Raises:
        TypeError: ``budget_s`` is not a number.
        ValueError: ``budget_s`` is negative or not finite.

    Example:
        >>> goal = AccuracyAfterTime(600, "val_global_Perplexity", True, "Perplexity of {value}")
        >>> goal.is_over(599.9), goal.is_over(600.0)
        (False, True)
    """

    budget_s: float
    metric: str = ACCURACY
    minimize: bool = False
    description: str = "{value}% Top 1 Validation Accuracy"

    def __post_init__(self) -> None:
        check_finite_at_least_0("seconds", self.budget_s)

    def is_over(self, train_time_s: float) -> bool:
        """Return True if the training is to end; it is called after each validation.

        Args:
            train_time_s: Seconds of training so far on this worker.
        """
        return train_time_s >= self.budget_s

    def best_value(self, value: float, tracker: Any) -> float:
        """Return the best value of the metric so far.

        Args:
            value: The latest value.
            tracker: The tracker. It knows the best value of its primary metric only, so for another
                metric the result is ``value``.
        """
        primary = getattr(getattr(tracker, "primary_metric", None), "name", None)
        if self.metric != f"val_global_{primary}" or tracker.minimize != self.minimize:
            return value
        best = float(tracker.best_metric_value)
        # Before the first value that is a number, the best one is infinite.
        if not math.isfinite(best):
            return value
        # The best value comes first, because min and max keep the first of a number and a nan.
        if self.minimize:
            return min(best, value)
        return max(best, value)

    def __call__(self, metric_name: str, value: float, tracker: TrackedTimes) -> str | None:
        """Check one recorded statistic.

        Args:
            metric_name: Name of the statistic. All except ``metric`` are ignored.
            value: Its value.
            tracker: The tracker, which knows the times of the run.

        Returns:
            The text of the result if the time is over, else None.
        """
        if metric_name != self.metric:
            return None
        train_time_s = tracker.get_total_train_time()
        if not self.is_over(train_time_s):
            return None
        description = self.description.format(value=f"{self.best_value(value, tracker):.3f}")
        return f"{description} after {train_time_s:.3f} seconds{_detailed_times(tracker)}"

    def result(self, tracker: TrackedTimes) -> dict[str, Any]:
        """Return the result as data: metric, ``budget_s``, ``minimize`` and the times.

        The times are those of :meth:`TimeToGoal.result`.
        """
        goal = {"metric": self.metric, "budget_s": self.budget_s, "minimize": self.minimize}
        return {**goal, **_times(tracker)}


def _times(tracker: TrackedTimes) -> dict[str, float]:
    times: dict[str, float] = {}
    for phase in ("train", *TRACKER_PHASES.values()):
        get_total_time = getattr(tracker, f"get_total_{phase}_time")
        times[f"{phase}_time_s"] = float(get_total_time())
    return times


def _after_steps(tracker: Any) -> str:
    """Return the number of steps so far as a text, empty if the run counts epochs."""
    if getattr(tracker, "unit", "epochs") != "steps":
        return ""
    return f" after {length_text(None, tracker.position()[0], 'steps')}"


def _detailed_times(tracker: TrackedTimes) -> str:
    times = _times(tracker)
    text = ""
    counts_steps = getattr(tracker, "unit", "epochs") == "steps"
    for phase in TRACKER_PHASES.values():
        seconds = times[f"{phase}_time_s"]
        # An observed script measures no metrics, for example.
        if seconds or not counts_steps:
            text += f", {phase.capitalize()}: {seconds:.3f} seconds"
    return text


def _check_finite(name: str, value: object) -> None:
    # float() accepts a bool as 0 or 1, but a bool here is a mistake.
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not math.isfinite(float(value)):
        raise ValueError(f"{name} must be a finite number, not {value!r}")


def _callable_as_goal(factory: Callable[_P, TimeToGoal]) -> Callable[_P, TimeToGoal]:
    """Let a function that creates a goal also be called as the goal that it creates by default."""

    # Scripts for version 3.0 may pass the function itself to the tracker, which then calls it with
    # a statistic.
    @functools.wraps(factory)
    def factory_or_goal(*args: Any, **kwargs: Any) -> Any:
        # A goal is called (metric_name, value, tracker). None of these functions has three
        # parameters, so this call means the goal.
        if len(args) == 3 and isinstance(args[0], str) and not kwargs:
            return factory()(*args)  # type: ignore[call-arg]
        return factory(*args, **kwargs)

    return factory_or_goal


def time_to_accuracy_goal(threshold: float) -> TimeToGoal:
    """Create the goal of task 1 or 2: the training time until the accuracy reaches a threshold.

    Args:
        threshold: Accuracy in percent, from 0 to 100.

    Returns:
        A goal that watches ``val_global_Prec@1``.

    Raises:
        TypeError: ``threshold`` is not a number.
        ValueError: ``threshold`` is not from 0 to 100. Such a goal would be reached at once or
            never.
    """
    _check_finite("threshold", threshold)
    if not 0 <= threshold <= 100:
        raise ValueError(f"threshold must be an accuracy from 0 to 100 percent, not {threshold}")
    return TimeToGoal(ACCURACY, threshold, description="{threshold}% Top 1 Validation Accuracy")


@_callable_as_goal
def task1_time_to_accuracy_goal() -> TimeToGoal:
    """Create the goal of task 1, image classification: 80 % top-1 accuracy."""
    return time_to_accuracy_goal(get_task("1a").goal_on(None))


@_callable_as_goal
def task1_time_to_accuracy_light_goal() -> TimeToGoal:
    """Create the light goal of task 1, image classification: 70 % top-1 accuracy."""
    return time_to_accuracy_goal(get_task("1a").goal_on(None, light=True))


@_callable_as_goal
def task2_time_to_accuracy_goal() -> TimeToGoal:
    """Create the goal of task 2, logistic regression: 89 % accuracy."""
    return time_to_accuracy_goal(get_task("2a").goal_on(None))


@_callable_as_goal
def task2_time_to_accuracy_light_goal() -> TimeToGoal:
    """Create the light goal of task 2, logistic regression: 80 % accuracy."""
    return time_to_accuracy_goal(get_task("2a").goal_on(None, light=True))


@_callable_as_goal
def task3_time_to_perplexity_goal(threshold: float = _PERPLEXITY_GOAL) -> TimeToGoal:
    """Create the goal of task 3, language modeling: validation perplexity of at most ``threshold``.

    Args:
        threshold: The perplexity to reach; 70 is the task's goal, 90 the light one.

    Returns:
        A goal that watches ``val_global_Perplexity``; smaller is better.
    """
    return TimeToGoal(
        PERPLEXITY, threshold, minimize=True, description="Validation Perplexity of {threshold}"
    )


@_callable_as_goal
def task4_time_to_bleu_goal(threshold: float = _BLEU_GOAL) -> TimeToGoal:
    """Create the goal of task 4, translation: corpus BLEU of at least ``threshold``.

    Args:
        threshold: BLEU from 0 to 100; 24 is the goal of task 4a, 25 of task 4b, 20 the light one of
            both.

    Returns:
        A goal that watches ``val_global_BLEU-Score``.
    """
    return TimeToGoal(BLEU, threshold, description="Validation BLEU-Score of {threshold}")


def accuracy_after_time_goal(seconds: float = 7200.0) -> AccuracyAfterTime:
    """Create the goal of a fixed training time, whose result is the best top-1 accuracy in it.

    Args:
        seconds: Training time in seconds, without validation; the default is 2 hours.

    Returns:
        A goal that watches ``val_global_Prec@1`` and is reached at the first validation after the
        time is over.

    Raises:
        TypeError: ``seconds`` is not a number.
        ValueError: ``seconds`` is negative or not finite.
    """
    return AccuracyAfterTime(seconds)
