"""The progress of a run while it runs, for the displays of ``mlbench run --wait``."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mlbench_cli._output import clean
from mlbench_core.results.published import goal_fraction

__all__ = ["Goal", "Progress"]


@dataclass(frozen=True)
class Goal:
    """The value that a run should reach, used only for the display: the training script decides.

    ``max_epochs`` is the number of epochs after which a run ends without it, if known.
    """

    metric: str
    threshold: float | None
    minimize: bool = False
    max_epochs: int | None = None


@dataclass
class Progress:
    """The progress of a run while it runs."""

    name: str
    state: str = "initialized"
    epochs: int = 0
    metric: str | None = None
    value: float | None = None
    goal: Goal | None = None
    epoch_s: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    reason: str = ""

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the run was first seen running, 0 before."""
        if self.started_at is None:
            return 0.0
        return (time.monotonic() if self.ended_at is None else self.ended_at) - self.started_at

    @property
    def most_left_s(self) -> float | None:
        """Return the seconds until the run ends if it does not reach its goal, or None if they are unknown."""
        most = self.goal.max_epochs if self.goal else None
        if self.state != "started" or self.epoch_s is None or most is None:
            return None
        return max(most - self.epochs, 0) * self.epoch_s

    @property
    def metric_text(self) -> str:
        """Return the name and the value of the metric, with the goal if it is known."""
        if self.value is None:
            return "-"
        target = f" of {self.goal.threshold:g}" if self.goal and self.goal.threshold else ""
        return f"{self.metric} {self.value:.4g}{target}"

    @property
    def epoch_text(self) -> str:
        """Return the number of epochs that are done, with the largest number if it is known."""
        most = self.goal.max_epochs if self.goal else None
        return f"{self.epochs}/{most}" if most else str(self.epochs)

    @property
    def fraction(self) -> float:
        """Return the progress of the metric toward the goal, from 0 to 1; 1 if the run has finished."""
        if self.state == "finished":
            return 1.0
        return goal_fraction(self.value, self.goal.threshold, self.goal.minimize) if self.goal else 0.0

    @property
    def waits_for(self) -> str:
        """Return what the run waits for before it starts, or an empty text."""
        return self.reason if self.state == "initialized" else ""

    def describe(self) -> str:
        """Return state, number of epochs and metric in one line."""
        parts = [self.state]
        if self.waits_for:
            parts.append(self.waits_for)
        # A number of epochs and not "epoch N", because the logs of the workers count epochs from 0.
        if self.epochs:
            parts.append(f"{self.epochs} epoch{'' if self.epochs == 1 else 's'} done")
        if self.value is not None:
            parts.append(self.metric_text)
        return clean(", ".join(parts))
