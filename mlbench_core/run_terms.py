"""The words that library, master and command share about a run: the phases of its time, and the aim of its goal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PHASES", "STEPS", "TRACKER_PHASES", "GoalAim", "goal_text"]

TRACKER_PHASES = {
    "compute": "compute",
    "communication": "communication",
    "metrics": "metrics",
    "data": "preprocess",
}
"""The phases of a training batch, with the names that the Tracker of version 3.0 gives them."""

PHASES = (*TRACKER_PHASES, "other")
"""The phases of the training time, in the order of tables and figures."""

STEPS: dict[str, str] = {
    "batch_load": "data",
    "fwd_pass": "compute",
    "comp_loss": "compute",
    "backprop": "compute",
    "opt_step": "compute",
    "agg": "communication",
    "comp_metrics": "metrics",
}
"""Steps of a batch as the tracker names them, and the phase that each belongs to."""


@dataclass(frozen=True)
class GoalAim:
    """What a goal demands of a run: a value of a metric, or the best value after a training time.

    Attributes:
        metric: Name of the statistic, for example ``"val_global_Prec@1"``; None if the goal is a
            plain function.
        threshold: The value to reach; None for a plain function, and for a training time.
        minimize: True if smaller values of the metric are better; None for a plain function.
        budget_s: Seconds of training after which the best value counts; None for another goal.

    Example:
        >>> GoalAim("val_global_Prec@1", 95.0, minimize=False).text
        'Prec@1 >= 95'
        >>> GoalAim("val_loss", 0.1, minimize=True).text
        'val_loss <= 0.1'
        >>> GoalAim("val_global_Prec@1", budget_s=60.0).text
        'Prec@1 after 60 s of training'
        >>> GoalAim().text
        'a goal of the script'
    """

    metric: str | None = None
    threshold: float | None = None
    minimize: bool | None = None
    budget_s: float | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GoalAim:
        """Read an aim from a mapping, as :meth:`to_dict` makes it; values of other types count as absent."""
        metric, minimize = values.get("metric"), values.get("minimize")
        return cls(
            metric if isinstance(metric, str) and metric else None,
            _number(values.get("threshold")),
            minimize if isinstance(minimize, bool) else None,
            _number(values.get("budget_s")),
        )

    @classmethod
    def of(cls, goal: object) -> GoalAim:
        """Return the aim of a goal: an object with these attributes, or a plain function, which has none."""
        return cls.from_dict({name: getattr(goal, name, None) for name in cls.__dataclass_fields__})

    def to_dict(self) -> dict[str, Any]:
        """Return ``metric``, ``threshold`` and ``minimize``, and ``budget_s`` for a goal of a training time."""
        aim = {"metric": self.metric, "threshold": self.threshold, "minimize": self.minimize}
        return aim if self.budget_s is None else {**aim, "budget_s": self.budget_s}

    @property
    def text(self) -> str:
        """Return the aim as a text."""
        # A goal watches the validation on the data of all workers unless its metric says otherwise.
        name = (self.metric or "").removeprefix("val_global_")
        if self.budget_s is not None:
            return f"{name} after {self.budget_s:g} s of training".removeprefix(" after ")
        if not name:
            return "a goal of the script"
        if self.threshold is None:
            return name
        return f"{name} {'<=' if self.minimize else '>='} {self.threshold:g}"

    def reached_by(self, value: float | None) -> bool:
        """Return True if a value of the metric is good enough; None and nan never are."""
        if value is None or self.threshold is None:
            return False
        return bool(value <= self.threshold if self.minimize else value >= self.threshold)

    def fraction(self, value: float | None) -> float:
        """Return the progress of a metric toward the threshold, from 0 to 1, for displays of a run that goes on.

        Example:
            >>> GoalAim("Prec@1", 80.0).fraction(40.0), GoalAim("loss", 70.0, minimize=True).fraction(140.0)
            (0.5, 0.5)
        """
        if value is None or not self.threshold or value <= 0:
            return 0.0
        return max(
            0.0, min(self.threshold / value if self.minimize else value / self.threshold, 1.0)
        )


def goal_text(goal: Mapping[str, Any] | None) -> str:
    """Return the aim of a goal as a text, ``"no goal"`` without one.

    Args:
        goal: ``metric``, ``threshold``, ``minimize`` and, for a training time, ``budget_s``; or
            None.
    """
    return GoalAim.from_dict(goal).text if goal else "no goal"


def _number(value: Any) -> float | None:
    """Return a finite number, or None for anything else; a text may hold a number."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None
