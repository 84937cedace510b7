"""Terms that library, master and command share, such as the phases of a run and its goal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "PHASES",
    "STEPS",
    "TRACKER_PHASES",
    "UNITS",
    "GoalAim",
    "WorkerRange",
    "check_unit",
    "goal_text",
    "length_text",
]

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


UNITS = ("epochs", "steps")
"""Units in which the length of a run is counted; a step is a training batch."""


@dataclass(frozen=True)
class GoalAim:
    """The aim of a goal: a value of a metric, or the best value after a training time.

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
        """Read an aim as :meth:`to_dict` makes it; values of other types count as absent."""
        metric, minimize = values.get("metric"), values.get("minimize")
        if not isinstance(metric, str) or not metric:
            metric = None
        if not isinstance(minimize, bool):
            minimize = None
        threshold, budget_s = _number(values.get("threshold")), _number(values.get("budget_s"))
        return cls(metric, threshold, minimize, budget_s)

    @classmethod
    def of(cls, goal: object) -> GoalAim:
        """Return the aim of a goal, an object with these attributes or a plain function."""
        return cls.from_dict({name: getattr(goal, name, None) for name in cls.__dataclass_fields__})

    def to_dict(self) -> dict[str, Any]:
        """Return ``metric``, ``threshold``, ``minimize``, and ``budget_s`` unless it is None."""
        aim: dict[str, Any] = {
            "metric": self.metric,
            "threshold": self.threshold,
            "minimize": self.minimize,
        }
        if self.budget_s is not None:
            aim["budget_s"] = self.budget_s
        return aim

    @property
    def text(self) -> str:
        """Return the aim as a text."""
        # A goal watches the validation on the data of all workers unless its metric says otherwise.
        name = (self.metric or "").removeprefix("val_global_")
        if self.budget_s is not None:
            # Without a metric, only the time is left: "60 s of training".
            return f"{name} after {self.budget_s:g} s of training".removeprefix(" after ")
        if not name:
            return "a goal of the script"
        if self.threshold is None:
            return name
        sign = ">="
        if self.minimize:
            sign = "<="
        return f"{name} {sign} {self.threshold:g}"

    def reached_by(self, value: float | None) -> bool:
        """Return True if a value of the metric is good enough; None and nan never are."""
        if value is None or self.threshold is None:
            return False
        if self.minimize:
            return bool(value <= self.threshold)
        return bool(value >= self.threshold)

    def fraction(self, value: float | None) -> float:
        """Return the progress of a metric toward the threshold, from 0 to 1, for displays.

        Example:
            >>> GoalAim("Prec@1", 80.0).fraction(40.0)
            0.5
            >>> GoalAim("loss", 70.0, minimize=True).fraction(140.0)
            0.5
        """
        # Neither a threshold nor a value of 0 has a ratio.
        if value is None or not self.threshold or value <= 0:
            return 0.0
        ratio = value / self.threshold
        if self.minimize:
            ratio = self.threshold / value
        return max(0.0, min(ratio, 1.0))


@dataclass(frozen=True)
class WorkerRange:
    """The numbers of workers with which an elastic run goes on.

    Attributes:
        least: Smallest number of workers of a round.
        most: Largest number of workers that live at the same time.

    Example:
        >>> WorkerRange.parse("2:4")
        WorkerRange(least=2, most=4)
    """

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> WorkerRange:
        """Return the range of a text ``MIN:MAX``.

        Raises:
            ValueError: It is not such a text.
        """
        match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", text.strip(), re.ASCII)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(
                f"must be MIN:MAX, two numbers of workers with 1 <= MIN <= MAX, not {text[:80]!r}: "
                "give for example 2:4"
            )
        return cls(int(match[1]), int(match[2]))

    def check(self, num_workers: int) -> None:
        """Refuse a number of workers outside of the range.

        Raises:
            ValueError: It is outside.
        """
        if not self.least <= num_workers <= self.most:
            raise ValueError(
                f"must be a range with the number of workers, {num_workers}, not {self}: "
                "the run begins with this number"
            )

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


@dataclass(frozen=True)
class PaidSamples:
    """The samples, or tokens, of a run in which work can be lost.

    Attributes:
        useful: Those whose work is in the result: of the rounds that all workers committed.
        paid: Those that workers have computed, also in work that was lost.

    Example:
        >>> str(PaidSamples(useful=90, paid=100))
        '90 % (90 of 100 samples)'
    """

    useful: int
    paid: int

    @property
    def goodput(self) -> float:
        """Return the useful share of the samples that were paid for."""
        return self.useful / self.paid

    def __str__(self) -> str:
        return f"{self.goodput * 100:.3g} % ({self.useful} of {self.paid} samples)"


def goal_text(goal: Mapping[str, Any] | None) -> str:
    """Return the aim of a goal as a text, ``"no goal"`` without one.

    Args:
        goal: ``metric``, ``threshold``, ``minimize`` and, for a training time, ``budget_s``; or
            None.
    """
    if not goal:
        return "no goal"
    return GoalAim.from_dict(goal).text


def check_unit(unit: str) -> str:
    """Return a unit if it is one of :data:`UNITS`.

    Raises:
        ValueError: It is another text.
    """
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}, not {unit!r}")
    return unit


def length_text(epochs: int | None, steps: int | None, unit: str) -> str:
    """Return the length of a part of a run in the run's unit, empty if it is unknown.

    Args:
        epochs: Number of epochs, if known.
        steps: Number of training batches, if known.
        unit: One of :data:`UNITS`.

    Example:
        >>> length_text(3, 1200, "epochs"), length_text(1, 1200, "steps")
        ('3 epochs', '1,200 steps')
    """
    count = epochs
    if unit == "steps":
        count = steps
    if count is None:
        return ""
    if count == 1:
        return f"1 {unit.removesuffix('s')}"
    return f"{count:,} {unit}"


def _number(value: Any) -> float | None:
    """Return a finite number, or None for anything else; a text may hold a number."""
    # In Python a bool is an int, but True is not a threshold.
    if isinstance(value, bool):
        return None
    # A goal of the user may have an attribute of any type with this name, and its conversion may
    # raise any of these errors.
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    if not math.isfinite(number):
        return None
    return number
