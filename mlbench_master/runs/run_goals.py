"""Read the goal of a run and its result, which the first worker sends as metrics.

The Tracker of this worker sends the metric ``goal`` with the result. The metric ``plan`` comes
after the first epoch, and a page shows by it how far a run is.
"""

from __future__ import annotations

import contextlib
import shlex
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlbench_core.comparison.master_metrics import number
from mlbench_core.run_terms import GoalAim, length_text
from mlbench_core.tasks import Task, find_image, get_task, option_value

__all__ = [
    "GOAL_METRIC",
    "PLAN_METRIC",
    "RunGoal",
    "RunPlan",
    "goal_of_task",
    "read_goal",
    "split_command",
    "task_of_image",
]

GOAL_METRIC = "goal @ 0"
"""The metric of the first worker; its value is JSON text with the fields of :class:`RunGoal`."""

PLAN_METRIC = "plan @ 0"
"""The metric of the first worker with the plan: JSON text with the fields of :class:`RunPlan`."""

_MOST_CHARACTERS = 8192


# Other scripts may send a metric of this name, so the values of both models are checked strictly.
# Further fields are ignored: a worker may have a newer version than the master.
class RunPlan(BaseModel):
    """The goal that a run pursues, and its limit of epochs.

    Attributes:
        metric: Name of the metric of the goal; None if the goal is a plain function, or without a
            goal.
        threshold: The value that the metric has to reach.
        minimize: True if the metric has to become as small as the threshold, False if as large.
        budget_s: Training time in seconds after which the best value counts; None for another goal.
        max_epochs: Number of epochs after which the run ends without its goal.
        unit: ``"epochs"``, or ``"steps"`` if the run counts training batches.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, str_max_length=255)

    metric: str | None = None
    threshold: float | None = None
    minimize: bool | None = None
    budget_s: Annotated[float, Field(ge=0)] | None = None
    max_epochs: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    unit: str = "epochs"

    @property
    def aim(self) -> str:
        """Return the aim of the goal as text, empty without a metric."""
        if not self.metric:
            return ""
        return GoalAim.of(self).text

    @classmethod
    def read(cls, text: str) -> RunPlan:
        """Return a plan from the value of its metric; an empty one if the value is not one."""
        if len(text) > _MOST_CHARACTERS:
            return cls()
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return cls()


class RunGoal(BaseModel):
    """The goal of a run, and whether the run has reached it.

    Times are in seconds, by the slowest worker.

    Attributes:
        metric: Name of the metric of the goal; None if the goal is a plain function.
        threshold: The value that the metric has to reach.
        minimize: True if the metric has to become as small as the threshold, False if as large.
        budget_s: Training time in seconds after which the best value counts; None for another goal.
        reached: True if the run has reached its goal.
        value: The metric's value at the goal.
        time_to_goal_s: Training time until the goal was reached.
        unit: ``"epochs"``, or ``"steps"`` if the run counts training batches.
        epochs: Number of epochs that it took.
        steps: Number of training batches that it took.
        phases_s: Training time by phase: compute, communication, metrics, data.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, str_max_length=255)

    metric: str | None = None
    threshold: float | None = None
    minimize: bool | None = None
    budget_s: Annotated[float, Field(ge=0)] | None = None
    reached: bool
    value: float | None = None
    time_to_goal_s: Annotated[float, Field(ge=0)] | None = None
    unit: str = "epochs"
    epochs: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    steps: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    # The remainder of rounded times can be a negative number.
    phases_s: Annotated[dict[str, float], Field(max_length=16)] = {}

    @property
    def aim(self) -> str:
        """Return the aim of the goal as text.

        Example:
            >>> RunGoal(metric="val_global_Prec@1", threshold=95, reached=False).aim
            'Prec@1 >= 95'
        """
        return GoalAim.of(self).text

    @property
    def outcome(self) -> str:
        """Return the outcome as text.

        Example:
            >>> RunGoal(reached=True, time_to_goal_s=407.12, epochs=3).outcome
            'reached in 407.1 s (3 epochs)'
            >>> RunGoal(reached=True, unit="steps", epochs=1, steps=1200).outcome
            'reached (1,200 steps)'
            >>> RunGoal(reached=False).outcome
            'not reached'
            >>> RunGoal(reached=True, budget_s=60, value=91.52, time_to_goal_s=63.4).outcome
            '91.52 after 63.4 s'
        """
        if not self.reached:
            return "not reached"
        text, preposition = "reached", "in"
        if self.budget_s is not None and self.value is not None:
            text, preposition = f"{self.value:.4g}", "after"
        if self.time_to_goal_s is not None:
            text += f" {preposition} {self.time_to_goal_s:.1f} s"
        length = length_text(self.epochs, self.steps, self.unit)
        if length:
            text += f" ({length})"
        return text


def read_goal(text: str | bytes | None) -> RunGoal | None:
    """Return a goal from the value of its metric, or None if the value is not one.

    Args:
        text: The value. A script may use the name of the metric for something else.

    Example:
        >>> read_goal('{"reached": true, "epochs": 3}').epochs
        3
        >>> read_goal("0.5") is None
        True
    """
    # A damaged database may hold any type.
    if not isinstance(text, (str, bytes)) or len(text) > _MOST_CHARACTERS:
        return None
    try:
        return RunGoal.model_validate_json(text)
    except ValidationError:
        return None


def task_of_image(image: str) -> Task | None:
    """Return the task that a run with this image works on, or None for a program of the user.

    Args:
        image: A run's image: the folder of a task, an image of version 3.0, or another text.

    Example:
        >>> task_of_image("task1a_resnet20_cifar10").key, task_of_image("custom_image")
        ('1a', None)
    """
    with contextlib.suppress(ValueError):
        return get_task(image)
    with contextlib.suppress(ValueError):
        return find_image(image)[0]
    return None


def split_command(command: str) -> list[str]:
    """Return the words of a command line, also if it is damaged."""
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def goal_of_task(image: str, command: str, light: bool) -> RunGoal | None:
    """Return the goal that a run of a task pursues, or None.

    It serves before the workers of the run have sent their goal.

    Args:
        image: The run's image.
        command: A worker's command line.
        light: True for the light goal.

    Example:
        >>> goal_of_task("task1a_resnet20_cifar10", "main.py --dataset digits", light=False).aim
        'Prec@1 >= 95'
    """
    task = task_of_image(image)
    if task is None:
        return None
    words = split_command(command)
    metric = f"val_global_{task.metric_of(words)}"
    goal = RunGoal(metric=metric, minimize=task.minimize, reached=False)
    # A goal of a fixed time has no threshold, so the task's own does not count with it.
    budget_s = number(option_value(words, "--goal-after"))
    if budget_s is not None and budget_s >= 0:
        return goal.model_copy(update={"budget_s": budget_s})
    threshold = task.goal_of(words, light or "--light" in words)
    if threshold is None:
        return None
    return goal.model_copy(update={"threshold": threshold})
