"""A tracker reports the goal and the events of a run to its sinks and to the master."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from mlbench_core.evaluation.goals import (
    accuracy_after_time_goal,
    task1_time_to_accuracy_goal,
    task3_time_to_perplexity_goal,
)
from mlbench_core.run_terms import GoalAim
from mlbench_core.tracking.tracker import Tracker
from tests.client.stub_master import StubMaster

Clock = Any
TOTALS = {
    "wall_s", "train_s", "validation_s", "compute_s", "communication_s", "metrics_s",
    "preprocess_s", "steps_s",
    "batches", "samples", "tokens", "communication_total_s", "communication_exposed_s",
    "communication_size_bytes",
    "communication_wire_bytes", "communication_measured", "communication_cpu_s", "compute_cpu_s",
    "exchanges",
}  # fmt: skip


class Recorder:
    """A sink that keeps everything it receives."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.derived: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, *_: Any) -> None:
        self.derived.append(name)

    def record(self, *record: Any) -> None:
        self.records.append(record)

    def event(self, kind: str, content: dict[str, Any]) -> None:
        # The raw lines of a run are JSON.
        self.events.append((kind, json.loads(json.dumps(content, allow_nan=False))))


def goals_sent(log: MagicMock) -> list[dict[str, Any]]:
    return [json.loads(entry.args[4]) for entry in log.call_args_list if entry.args[3] == "goal"]


def run_epoch(tracker: Tracker, clock: Clock, accuracy: float) -> None:
    tracker.train()
    tracker.batch_start()
    for step, seconds in {
        "load": 1,
        "fwd_pass": 2,
        "agg": 4,
        "comp_metrics": 8,
        "init": 16,
    }.items():
        clock.tick(seconds)
        getattr(tracker, f"record_batch_{step}")()
    tracker.batch_end(samples=8, tokens=80)
    tracker.validation_start()
    clock.tick(32)
    tracker.validation_end()
    tracker.validation()
    tracker.record_stat("global_Prec@1", accuracy)
    tracker.epoch_end()


def test_sinks_learn_the_course_of_a_run(clock: Clock, log: MagicMock) -> None:
    sink = Recorder()
    with Tracker(
        [], "7", 1, goal=task1_time_to_accuracy_goal, sinks=[sink, lambda *record: None]
    ) as tracker:
        tracker.start()
        clock.tick(64)
        run_epoch(tracker, clock, 79.0)
        run_epoch(tracker, clock, 80.5)
    assert [kind for kind, _ in sink.events] == ["start", "epoch", "goal", "epoch", "end"]
    # The numbers of the events come to the sink itself, and statistics to its method.
    assert {name.partition("_")[0] for name, *_ in sink.records} <= {"train", "val"}
    assert {"agg", "cum_agg", "TaskResult", "global_cum_agg"} <= set(sink.derived)
    assert not {name.partition("_")[0] for name in sink.derived} & {"train", "val"}
    (_, start), (_, epoch), (_, goal), _, (_, end) = sink.events
    assert start == {"resumed": False, "epoch": 0, "step": 0}
    assert set(epoch) == {"epoch", "step", "time_s", "totals"}
    assert (epoch["epoch"], epoch["step"], epoch["time_s"]) == (0, 1, 64 + 63)
    assert set(epoch["totals"]) == TOTALS
    phases = {"preprocess_s": 2, "compute_s": 4, "communication_s": 8, "metrics_s": 16}
    assert (
        goal["totals"].items()
        >= {"wall_s": 190, "train_s": 62, "validation_s": 64, **phases}.items()
    )
    assert goal["totals"].items() >= {"batches": 2, "samples": 16, "tokens": 160}.items()
    assert goal["totals"]["steps_s"]["init"] == 32
    del goal["totals"]
    text = goal.pop("text")
    assert text.startswith("80% Top 1 Validation Accuracy reached in 62.000 seconds")
    assert goal == {
        "epoch": 1, "step": 2, "time_s": 190, "metric": "val_global_Prec@1", "threshold": 80,
        "minimize": False,
        "value": 80.5, "time_to_goal_s": 62, "collectives": [],
    }  # fmt: skip
    assert set(end) == {
        "time_s", "totals", "epochs", "best_metric_value", "best_epoch", "batch_times",
        "memory_peak_bytes", "energy_j",
        "collectives", "state",
    }  # fmt: skip
    assert (end["time_s"], end["epochs"], end["totals"]["train_s"]) == (190, 2, 62)


def test_a_record_has_the_time_it_belongs_to(clock: Clock) -> None:
    sink, plain = Recorder(), []
    tracker = Tracker([], "7", 0, sinks=[sink, lambda *record: plain.append(record)])
    tracker.start()
    clock.tick(5)
    tracker.record_loss(0.5)
    tracker.record_stat("late", 2.0, at=(3, 1.5))
    assert sink.records == [("train_loss", 0.5, 0, 0, 5), ("train_late", 2.0, 0, 3, 1.5)]
    assert plain == [record[:4] for record in sink.records]


def test_a_run_starts_with_its_first_batch_and_a_resumed_one_says_so(
    clock: Clock, log: MagicMock
) -> None:
    sink = Recorder()
    tracker = Tracker([], "7", 0, sinks=[sink])
    tracker.load_state_dict(json.loads(json.dumps(Tracker([], "7", 0).state_dict())))
    run_epoch(tracker, clock, 1.0)
    run_epoch(tracker, clock, 1.0)
    start = {"resumed": True, "epoch": 0, "step": 0, "latest": {}}
    assert [content for kind, content in sink.events if kind == "start"] == [start]
    assert sink.events[0][0] == "start"


def test_the_master_gets_the_goal_as_data_when_it_is_reached_and_at_the_end(
    clock: Clock, log: MagicMock
) -> None:
    tracker = Tracker([], "7", 0, goal=task1_time_to_accuracy_goal)
    run_epoch(tracker, clock, 79.0)
    assert goals_sent(log) == []
    run_epoch(tracker, clock, 80.5)
    expected = {
        "metric": "val_global_Prec@1", "threshold": 80, "minimize": False, "reached": True,
        "value": 80.5,
        "time_to_goal_s": 62, "epochs": 2, "phases_s": {"compute": 4, "communication": 8,
        "metrics": 16, "data": 2},
    }  # fmt: skip
    assert goals_sent(log) == [expected]
    run_epoch(tracker, clock, 99.0)  # past the goal
    tracker.close()
    tracker.close()
    assert goals_sent(log) == [expected, expected]


def test_a_missed_goal_is_reported_at_the_end(clock: Clock, log: MagicMock) -> None:
    with Tracker([], "7", 0, goal=task3_time_to_perplexity_goal) as tracker:
        run_epoch(tracker, clock, 1.0)
    assert goals_sent(log) == [{
        "metric": "val_global_Perplexity", "threshold": 70, "minimize": True, "reached": False,
        "value": None,
        "time_to_goal_s": None, "epochs": 1,
        "phases_s": {"compute": 2, "communication": 4, "metrics": 8, "data": 1},
    }]  # fmt: skip


@pytest.mark.parametrize(("rank", "goal"), [(0, None), (1, task1_time_to_accuracy_goal)])
def test_nothing_is_said_about_no_goal_nor_by_other_ranks(
    rank: int, goal: Any, clock: Clock, log: MagicMock
) -> None:
    with Tracker([], "7", rank, goal=goal) as tracker:
        run_epoch(tracker, clock, 99.0)
        tracker.publish_summary()
    assert goals_sent(log) == []


def test_the_end_repeats_nothing_that_was_published(clock: Clock, log: MagicMock) -> None:
    tracker = Tracker([], "7", 0, goal=task1_time_to_accuracy_goal)
    run_epoch(tracker, clock, 81.0)
    tracker.publish_summary(2)
    tracker.close()
    first, last = goals_sent(log)
    assert last == first
    (summary,) = (
        json.loads(entry.args[4]) for entry in log.call_args_list if entry.args[3] == "summary"
    )
    assert summary["total_s"]["train"] == 31


def test_a_run_resumed_after_its_goal_reports_the_same(clock: Clock, log: MagicMock) -> None:
    tracker = Tracker([], "7", 0, goal=task1_time_to_accuracy_goal)
    run_epoch(tracker, clock, 81.0)
    state = json.loads(json.dumps(tracker.state_dict()))
    with Tracker([], "7", 0, goal=task1_time_to_accuracy_goal) as resumed:
        resumed.load_state_dict(state)
        assert resumed.goal_result == tracker.goal_result
        run_epoch(resumed, clock, 99.0)
    first, last = goals_sent(log)
    assert first == last


def test_a_checkpoint_of_an_earlier_version_only_knows_that_the_goal_was_reached(
    clock: Clock, log: MagicMock
) -> None:
    tracker = Tracker([], "7", 0, goal=task1_time_to_accuracy_goal)
    run_epoch(tracker, clock, 81.0)
    state = tracker.state_dict()
    del state["goal_result"]
    log.reset_mock()
    with Tracker([], "7", 0, goal=task1_time_to_accuracy_goal) as validating:
        validating.load_state_dict(state)
    assert goals_sent(log) == []
    with Tracker([], "7", 0, goal=task1_time_to_accuracy_goal) as resumed:
        resumed.load_state_dict(state)
        resumed.start()
    (last,) = goals_sent(log)
    assert (last["reached"], last["time_to_goal_s"], last["threshold"]) == (True, 31, 80)
    assert (last["value"], last["epochs"], last["phases_s"]) == (None, None, {})


def test_a_goal_that_a_script_takes_back_is_missed(clock: Clock, log: MagicMock) -> None:
    with Tracker([], "7", 0, goal=task1_time_to_accuracy_goal) as tracker:
        run_epoch(tracker, clock, 81.0)
        tracker.goal_reached = False
        run_epoch(tracker, clock, 79.0)
    names = ("reached", "value", "epochs", "time_to_goal_s")
    assert [tuple(goal[name] for name in names) for goal in goals_sent(log)] == [
        (True, 81.0, 1, 31),
        (False, None, 2, None),
    ]


def test_the_goal_of_a_fixed_time_has_the_best_value_until_then(
    clock: Clock, log: MagicMock
) -> None:
    accuracy = SimpleNamespace(name="Prec@1")
    # An epoch trains for 31 seconds.
    with Tracker([accuracy], "7", 0, goal=accuracy_after_time_goal(62.5)) as tracker:
        for value in (70.0, 90.0, 80.0, 95.0):
            tracker.update_primary_metric(value)
            run_epoch(tracker, clock, value)
    assert tracker.goal_text is not None
    assert tracker.goal_text.startswith("90.000% Top 1 Validation Accuracy after 93.000 seconds")
    goal = goals_sent(log)[-1]
    assert {name: goal[name] for name in ("value", "epochs", "time_to_goal_s", "threshold",
    "budget_s", "reached")} == {
        "value": 90.0, "epochs": 3, "time_to_goal_s": 93.0, "threshold": None, "budget_s": 62.5,
        "reached": True,
    }  # fmt: skip


def test_goals_are_described_by_their_attributes() -> None:
    nothing = {"metric": None, "threshold": None, "minimize": None}
    assert (
        GoalAim.of(None).to_dict()
        == GoalAim.of(lambda name, value, tracker: None).to_dict()
        == nothing
    )
    described = {
        "metric": "val_global_Prec@1",
        "threshold": None,
        "minimize": False,
        "budget_s": 60.0,
    }
    assert GoalAim.of(accuracy_after_time_goal(60)).to_dict() == described

    class Strange:
        metric, threshold, minimize = 3, math.inf, "yes"

    assert GoalAim.of(Strange()).to_dict() == nothing


# ---------------------------------------------------------------------- the end of a process

SCRIPT = """
import sys
from mlbench_core.evaluation.goals import task1_time_to_accuracy_goal
from mlbench_core.tracking.tracker import Tracker

class Sink:
    def __call__(self, *record): pass
    def event(self, kind, content): print(kind, flush=True)

def train(scope, first):
    tracker = Tracker([], "7", 0, goal=task1_time_to_accuracy_goal, sinks=[Sink()], progress=False)
    scope["tracker"] = tracker
    tracker.batch_start()
    tracker.batch_end()
    if first == "epoch":
        tracker.epoch_end()
        tracker.record_loss(1.0, log_to_api=True)
    if first == "raise":
        raise SystemExit(3)

train(globals() if sys.argv[1] == "alive" else {}, sys.argv[2])
"""


@pytest.mark.parametrize(
    ("life", "first", "events"),
    [
        ("alive", "epoch", ["start", "epoch", "end"]),
        # The client of the master does not exist before the exit.
        ("alive", "nothing", ["start", "end"]),
        ("alive", "raise", ["start", "end"]),
        ("deleted", "epoch", ["start", "epoch"]),
    ],
)
def test_a_script_that_never_closes_its_tracker_reports_its_goal_at_exit(
    life: str, first: str, events: list[str]
) -> None:
    master = StubMaster()
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, life, first],
            env={**os.environ, "MLBENCH_MASTER_URL": master.url},
            capture_output=True,
            text=True,
            timeout=240,
        )
    finally:
        master.stop()
    assert (done.returncode, done.stderr) == (3 if first == "raise" else 0, "")
    assert done.stdout.split() == events
    (goal,) = (
        json.loads(metric["value"]) for metric in master.metrics if metric["name"] == "goal @ 0"
    )
    assert (goal["reached"], goal["threshold"]) == (False, 80)


def test_a_metric_of_a_process_that_exits_while_the_master_is_away_is_kept(tmp_path: Path) -> None:
    master = StubMaster()
    master.stop()
    spool = tmp_path / "spool"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "alive", "nothing"],
        env={**os.environ, "MLBENCH_MASTER_URL": master.url, "MLBENCH_SPOOL": str(spool)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    (database,) = spool.glob("*.sqlite3")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        ((*_, line),) = connection.execute("SELECT * FROM metrics")
    assert json.loads(line)["name"] == "goal @ 0"
