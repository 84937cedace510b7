"""The way of a run to its goal: the best value so far against the threshold, and its epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlbench_core.comparison.master_metrics import describe_run
from mlbench_core.run_terms import GoalAim, length_text
from mlbench_master.database.columns import epoch_of, numbers_of
from mlbench_master.database.store import Point, Run, Store, run_owner
from mlbench_master.runs.run_goals import PLAN_METRIC, RunPlan

__all__ = ["RunProgress", "progress_of"]

# Metrics that a worker sends at the end of each epoch, and of each validation.
_OF_EPOCH = "CumulativeTrainTimeEpoch @ 0"
_MOST_VALUES = 2000
_AIM_FIELDS = {"metric", "threshold", "minimize", "budget_s", "unit"}


@dataclass(frozen=True)
class RunProgress:
    """The way of a run to its goal.

    Attributes:
        plan: The goal of the run and its number of epochs.
        aim: The goal as text, empty without one.
        best: The best value of the goal's metric so far, or None.
        fraction: The part of the way to the goal, from 0 to 1, as ``mlbench run --wait`` shows it.
        epochs: Number of finished epochs, or of steps if this is the unit of the plan.
    """

    plan: RunPlan
    aim: str
    best: float | None
    fraction: float
    epochs: int

    @property
    def length(self) -> str:
        """Return the number of finished epochs or steps as a text."""
        return length_text(self.epochs, self.epochs, self.plan.unit)


def progress_of(store: Store, run: Run, latest: Mapping[str, Point]) -> RunProgress:
    """Return the way of a run to its goal.

    Args:
        store: The database.
        run: The run.
        latest: The latest entry of each of its metrics.
    """
    sent = latest.get(PLAN_METRIC)
    plan = RunPlan()
    if sent is not None:
        plan = RunPlan.read(sent.value)
    # The goal, which a run sends at its end, has these fields of the plan, too.
    source = run.goal_record or plan
    aim = source.model_dump(include=_AIM_FIELDS)
    if aim["metric"] is None:
        # A task is known before its first epoch ends: by its command.
        goal_of_task = describe_run(run.to_json()).get("goal")
        if goal_of_task:
            aim |= goal_of_task
    plan = plan.model_copy(update=aim)
    best = _best(store, run, plan)
    return RunProgress(
        plan=plan,
        aim=plan.aim,
        best=best,
        fraction=GoalAim.of(plan).fraction(best),
        epochs=max(
            _finished(latest.get(_OF_EPOCH), plan.unit),
            _finished(latest.get(f"{plan.metric} @ 0"), plan.unit),
        ),
    )


def _best(store: Store, run: Run, plan: RunPlan) -> float | None:
    if plan.metric is None:
        return None
    owner = (run_owner(run.id), f"{plan.metric} @ 0")
    for *_, points in store.entries({owner: _MOST_VALUES}, last_n=_MOST_VALUES):
        numbers = numbers_of(point.value for point in points)
        if plan.minimize:
            return min(numbers, default=None)
        return max(numbers, default=None)
    return None


def _finished(point: Point | None, unit: str) -> int:
    """Return the number of epochs or steps that were finished with an entry."""
    if point is None:
        return 0
    epoch = epoch_of(point.extra)
    if not epoch.is_integer():
        return 0
    # A Tracker counts epochs from 0, and sends the number of finished steps in the place of the
    # epoch if this is its unit.
    return int(epoch) if unit == "steps" else int(epoch) + 1
