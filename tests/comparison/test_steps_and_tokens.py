"""Runs that count steps instead of epochs: what tables, curves and goals say of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlbench_cli.commands.charts import charts
from mlbench_core.comparison import figures
from mlbench_core.comparison.figures.curves import AGAINST, usual_axes
from mlbench_core.comparison.group_repeats import pool
from mlbench_core.comparison.load_results import load
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.comparison.table import COLUMNS, compare_groups
from mlbench_core.evaluation.goals import TimeToGoal
from mlbench_core.results.folder import verify_folder
from mlbench_core.results.summary import goal_message
from mlbench_core.sweep.grouped_runs import sent_per_worker
from mlbench_core.tracking.tracker import Tracker
from mlbench_master.runs.run_goals import read_goal
from tests.results.helpers import write_run


def train(folder: Path, unit: str, goal_step: int = 20) -> RunRecord:
    """Train 30 steps of 8 tokens; evaluate every 10, and reach the goal at ``goal_step``."""
    goal = TimeToGoal("val_loss", 1.5, minimize=True, description="Loss {threshold}")
    with Tracker([], folder.name, 0, goal, results=folder, unit=unit) as tracker:
        for step in range(1, 31):
            tracker.batch_start()
            tracker.record_communication(0.0, 0.0, 100)
            tracker.batch_end(tokens=8)
            if step % 10 == 0:
                tracker.validation()
                tracker.record_loss(1.0 if step >= goal_step else 2.0)
                tracker.train()
    assert verify_folder(folder) == []
    (record,) = load([folder])
    return record


def test_the_table_counts_steps_and_tokens_of_runs_without_epochs(tmp_path: Path) -> None:
    records = [train(tmp_path / f"run-{seed}", "steps", 10 * seed) for seed in (1, 2)]
    (row,) = compare_groups(pool(records)).rows
    assert (row["steps_to_goal"], row["tokens_to_goal"]) == (15, 15 * 8)
    assert (row["epochs_to_goal"], row["seconds_per_epoch_s"]) == (None, None)
    assert records[1].as_json()["tokens_to_goal"] == 160

    (row,) = compare_groups(pool([train(tmp_path / "epochs", "epochs")])).rows
    assert (row["steps_to_goal"], row["tokens_to_goal"], row["epochs_to_goal"]) == (None, None, 1)
    assert {"steps_to_goal", "tokens_to_goal"} < {column.key for column in COLUMNS}


def test_bytes_until_the_goal_end_at_its_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=5, unit="steps")
    (record,) = load([run])
    # The goal is reached after 30 of the 50 steps, and a step of a worker sends 2,000 bytes.
    assert (record.steps_to_goal, record.batches, record.epochs) == (30, 50, None)
    assert sent_per_worker(record) == 30 * 2000


def test_curves_of_steps_are_drawn_against_steps_and_tokens(tmp_path: Path) -> None:
    record = train(tmp_path / "run", "steps")
    groups = pool([record])
    assert usual_axes(groups) == ("steps", "tokens", "time", "bytes")
    places = {}
    for against in ("steps", "tokens"):
        with figures.style():
            drawing = figures.draw_learning_curves(groups, against)
        (line, *_) = drawing.figure.axes[0].lines
        places[against] = [float(x) for x in line.get_xdata()]  # type: ignore[arg-type, union-attr]
    assert places == {"steps": [10, 20, 30], "tokens": [80, 160, 240]}
    assert usual_axes(pool([train(tmp_path / "epochs", "epochs")])) == ("epochs", "time", "bytes")


def test_the_command_draws_the_axes_that_are_asked_for(tmp_path: Path) -> None:
    train(tmp_path / "run", "epochs")
    (option,) = [each for each in charts.params if each.name == "against"]
    assert tuple(option.type.choices) == tuple(AGAINST)  # type: ignore[attr-defined]
    arguments = [str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--against", "tokens"]
    done = CliRunner().invoke(charts, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    curves = {path.stem for path in (tmp_path / "out").glob("learning_curves_*.csv")}
    assert curves == {"learning_curves_tokens"}


@pytest.mark.parametrize(
    ("unit", "text", "outcome"),
    [("steps", "reached after 20 steps in", "(20 steps)"), ("epochs", "reached in", "(1 epoch)")],
)
def test_texts_of_a_reached_goal_have_the_unit(
    tmp_path: Path, unit: str, text: str, outcome: str
) -> None:
    train(tmp_path / "run", unit)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert f"Loss 1.5 {text} " in result["goal"]["text"]
    goal = read_goal(json.dumps(goal_message(result)))
    assert goal is not None
    assert goal.outcome.endswith(outcome)
    # A master that has only the metrics of the run.
    metrics = {"goal @ 0": [{"value": json.dumps(goal_message(result))}]}
    record = RunRecord.from_metrics(metrics, {"name": "run", "num_workers": 1})
    lengths = (record.steps_to_goal, record.epochs_to_goal)
    assert lengths == ((20, None) if unit == "steps" else (None, 1))
    assert record.unit == unit
