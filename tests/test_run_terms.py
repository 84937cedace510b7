"""The same goal has the same text everywhere: table, caption, dashboard, command and JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mlbench_cli import _wait
from mlbench_core.comparison.figures.captions import caption
from mlbench_core.comparison.group_repeats import pool
from mlbench_core.comparison.table import compare_groups
from mlbench_core.evaluation.goals import AccuracyAfterTime, TimeToGoal
from mlbench_core.run_terms import PHASES, STEPS, GoalAim, goal_text
from mlbench_master.runs.run_goals import RunGoal, RunPlan
from tests.comparison.test_group_repeats import a_record


class OnlyMetric:
    """A goal of a script that names its metric and nothing else."""

    metric = "val_global_F1"

    def __call__(self, metric_name: str, value: float, tracker: Any) -> str | None:
        return None


SHAPES = [
    (TimeToGoal("val_global_Prec@1", 95), "Prec@1 >= 95"),
    (TimeToGoal("val_global_Perplexity", 70.5, minimize=True), "Perplexity <= 70.5"),
    (TimeToGoal("val_loss", 0.1, minimize=True), "val_loss <= 0.1"),
    (TimeToGoal("train_loss", 1e-3, minimize=True), "train_loss <= 0.001"),
    (AccuracyAfterTime(60), "Prec@1 after 60 s of training"),
    (AccuracyAfterTime(7200, "val_global_Perplexity", True), "Perplexity after 7200 s of training"),
    (OnlyMetric(), "F1"),
    (lambda metric_name, value, tracker: None, "a goal of the script"),
]


@pytest.mark.parametrize(("goal", "text"), SHAPES, ids=[text for _, text in SHAPES])
def test_a_goal_has_one_text(goal: Any, text: str) -> None:
    aim = GoalAim.of(goal)
    sent = json.loads(json.dumps(aim.to_dict()))
    assert GoalAim.from_dict(sent) == aim
    assert aim.text == goal_text(sent) == text
    record = a_record("a", goal=sent)
    groups = pool([record])
    (row,) = compare_groups(groups).rows
    assert record.goal_text == row["goal"] == record.as_json()["goal_text"] == text
    assert f"goal: {text}" in caption(groups) or f"Goal: {text}" in caption(groups)
    assert RunGoal(reached=False, **sent).aim == text
    # Without a metric, a plan is that of a script without a goal.
    assert RunPlan(**sent).aim == (text if aim.metric else "")
    shown = _wait.Progress("a", "started", metric="x", value=1.0, goal=_wait.Goal(aim)).metric_text
    assert shown == ("x 1" if aim.threshold is None else f"x 1 of {aim.threshold:g}")


def test_no_goal_has_a_text() -> None:
    assert goal_text(None) == goal_text({}) == "no goal"


@pytest.mark.parametrize("value", [None, math.nan, -math.inf])
def test_what_is_no_value_reaches_no_goal(value: float | None) -> None:
    assert not GoalAim("x", 1.0).reached_by(value)
    assert not GoalAim("x").reached_by(1.0)


def test_other_types_count_as_absent() -> None:
    assert (
        GoalAim.from_dict({"metric": 3, "threshold": True, "minimize": "yes", "budget_s": "inf"})
        == GoalAim()
    )
    assert GoalAim.from_dict({"threshold": "2.5"}).threshold == 2.5


def test_each_step_belongs_to_a_phase() -> None:
    assert set(STEPS.values()) | {"other"} == set(PHASES)
