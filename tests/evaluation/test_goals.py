"""When a goal is reached and what it says."""

from __future__ import annotations

import inspect
import json
from unittest.mock import MagicMock

import pytest

from mlbench_core.evaluation import goals

TIMES = (
    ", Compute: 1.000 seconds, Communication: 1.000 seconds, "
    "Metrics: 1.000 seconds, Preprocess: 1.000 seconds"
)


@pytest.fixture
def tracker() -> MagicMock:
    """A tracker after 407.123 seconds of training."""
    tracker = MagicMock()
    tracker.get_total_train_time.return_value = 407.123
    for part in ("compute", "communication", "metrics", "preprocess"):
        getattr(tracker, f"get_total_{part}_time").return_value = 1.0
    return tracker


FACTORIES = [
    (
        goals.task1_time_to_accuracy_goal,
        "val_global_Prec@1",
        80,
        79.999,
        "80% Top 1 Validation Accuracy",
    ),
    (
        goals.task1_time_to_accuracy_light_goal,
        "val_global_Prec@1",
        70,
        69.999,
        "70% Top 1 Validation Accuracy",
    ),
    (
        goals.task2_time_to_accuracy_goal,
        "val_global_Prec@1",
        89,
        88.999,
        "89% Top 1 Validation Accuracy",
    ),
    (
        goals.task2_time_to_accuracy_light_goal,
        "val_global_Prec@1",
        80,
        79.999,
        "80% Top 1 Validation Accuracy",
    ),
    (
        goals.task3_time_to_perplexity_goal,
        "val_global_Perplexity",
        70,
        70.001,
        "Validation Perplexity of 70",
    ),
    (
        goals.task4_time_to_bleu_goal,
        "val_global_BLEU-Score",
        24,
        23.999,
        "Validation BLEU-Score of 24",
    ),
]


@pytest.mark.parametrize(("factory", "metric", "enough", "too_little", "text"), FACTORIES)
@pytest.mark.parametrize("called", [True, False], ids=["called", "uncalled"])
def test_each_task_reaches_its_goal(
    factory, metric, enough, too_little, text, called, tracker
) -> None:
    """The factory itself stands for its goal: the published tutorial passes it uncalled."""
    goal = factory() if called else factory
    assert goal(metric, too_little, tracker) is None
    assert goal(metric, float("nan"), tracker) is None
    assert goal(metric.replace("val_", "train_"), enough, tracker) is None
    assert goal(metric, enough, tracker) == f"{text} reached in 407.123 seconds{TIMES}"


@pytest.mark.parametrize("factory", [row[0] for row in FACTORIES])
def test_factories_need_no_arguments(factory) -> None:
    for parameter in inspect.signature(factory).parameters.values():
        assert parameter.default is not inspect.Parameter.empty


def test_a_fractional_threshold_is_said_when_reached(tracker) -> None:
    goal = goals.time_to_accuracy_goal(70.5)
    assert goal("val_global_Prec@1", 70.4, tracker) is None
    assert goal("val_global_Prec@1", 70.5, tracker) == (
        f"70.5% Top 1 Validation Accuracy reached in 407.123 seconds{TIMES}"
    )


@pytest.mark.parametrize(
    ("goal", "metric", "value"),
    [
        (goals.task3_time_to_perplexity_goal(90), "val_global_Perplexity", 90),
        (goals.task3_time_to_perplexity_goal(threshold=90), "val_global_Perplexity", 90),
        (goals.task4_time_to_bleu_goal(20), "val_global_BLEU-Score", 20),
    ],
)
def test_other_thresholds(goal, metric, value, tracker) -> None:
    assert goal.threshold == value
    assert f" of {value} reached" in goal(metric, value, tracker)


def test_a_goal_is_data_and_gives_a_result_for_programs(tracker) -> None:
    goal = goals.task3_time_to_perplexity_goal()
    assert goal == goals.task3_time_to_perplexity_goal(70)
    assert json.loads(json.dumps(goal.result(tracker))) == {
        "metric": "val_global_Perplexity",
        "threshold": 70,
        "minimize": True,
        "train_time_s": 407.123,
        "compute_time_s": 1.0,
        "communication_time_s": 1.0,
        "metrics_time_s": 1.0,
        "preprocess_time_s": 1.0,
    }


def test_accuracy_after_a_fixed_time(tracker) -> None:
    goal = goals.accuracy_after_time_goal(400)
    assert goal("val_loss", 1.0, tracker) is None
    assert goal("val_global_Prec@1", 61.5, tracker) == (
        f"61.500% Top 1 Validation Accuracy after 407.123 seconds{TIMES}"
    )
    assert goals.accuracy_after_time_goal(408)("val_global_Prec@1", 99.0, tracker) is None
    assert goals.accuracy_after_time_goal().budget_s == 2 * 60 * 60
    assert goal.result(tracker)["budget_s"] == 400


def test_the_best_value_after_a_fixed_time_has_a_direction(tracker) -> None:
    tracker.primary_metric.name, tracker.minimize, tracker.best_metric_value = (
        "Perplexity",
        True,
        71.5,
    )
    goal = goals.AccuracyAfterTime(
        400, "val_global_Perplexity", True, "Validation Perplexity of {value}"
    )
    assert goal("val_global_Perplexity", 80.0, tracker) == (
        f"Validation Perplexity of 71.500 after 407.123 seconds{TIMES}"
    )
    assert goal.best_value(70.0, tracker) == 70.0
    tracker.best_metric_value = float("inf")
    assert goal.best_value(80.0, tracker) == 80.0
    # The tracker knows the best value of its primary metric, in its own direction.
    tracker.best_metric_value = 71.5
    assert goals.AccuracyAfterTime(400, "val_global_Prec@5", True).best_value(80.0, tracker) == 80.0
    assert goals.AccuracyAfterTime(400, "val_global_Perplexity").best_value(80.0, tracker) == 80.0
    assert (
        goals.AccuracyAfterTime(408, "val_global_Perplexity", True)(
            "val_global_Perplexity", 1.0, tracker
        )
        is None
    )


@pytest.mark.parametrize("threshold", [-1, 100.5, float("nan")])
def test_an_impossible_accuracy_is_refused(threshold) -> None:
    with pytest.raises(ValueError, match=str(threshold)):
        goals.time_to_accuracy_goal(threshold)


def test_a_threshold_must_be_a_number() -> None:
    with pytest.raises(TypeError, match="'80'"):
        goals.time_to_accuracy_goal("80")
    with pytest.raises(ValueError, match="-3"):
        goals.accuracy_after_time_goal(-3)
