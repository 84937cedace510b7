"""The record of a run: from a result, and from the metrics at a master."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError
from mlbench_core.evaluation.goals import time_to_accuracy_goal
from mlbench_core.results.configuration import Configuration
from mlbench_core.results.folder import lines_path, read_result
from mlbench_core.results.raw_lines import LinesSink
from mlbench_core.run_terms import PHASES, goal_text
from tests.cli.fake_master import entry, summary
from tests.results.helpers import GOAL, totals, write_run


def read(folder: Path) -> RunRecord:
    return RunRecord.from_result(read_result(folder), folder, str(folder))


def metrics_of(
    workers: int, compute: float, communication: float
) -> dict[str, list[dict[str, Any]]]:
    return {"summary @ 0": [entry(json.dumps(summary(workers, compute, communication)))]}


def test_times_of_a_reached_goal_are_those_at_the_goal(tmp_path: Path) -> None:
    """Rank 1 is 10 % slower in communication; the run goes on for two epochs after the goal."""
    record = read(write_run(tmp_path / "run", epochs=5))
    assert (record.reached, record.time_to_goal_s, record.total_s, record.train_s) == (
        True,
        30.1,
        30.1,
        50.0,
    )
    assert (record.epochs_to_goal, record.steps_to_goal, record.epochs) == (3, 30, 5)
    assert record.phases_s == pytest.approx(
        {"compute": 15.0, "communication": 11.0, "metrics": 0.0, "data": 1.0, "other": 4.0}
    )
    assert record.communication_exposed_s == pytest.approx(11.0)
    assert record.without_communication_s == pytest.approx(19.1)
    assert record.seconds_per_epoch == pytest.approx(30.1 / 3)
    assert (record.workers, record.seed, record.goal_text) == (2, 1, "Prec@1 >= 90")
    assert (record.bytes_sent, record.bytes_on_wire, record.exchanges) == (100_000, 200_000, 50)
    assert (record.machine["cpu"], record.software["torch"]) == ("Model 7", "2.13.0")


def test_times_of_a_missed_goal_are_those_of_the_whole_run(tmp_path: Path) -> None:
    record = read(write_run(tmp_path / "run", epochs=2))
    assert (record.reached, record.time_to_goal_s, record.total_s) == (False, None, 20.0)
    assert record.phases_s["compute"] == 10.0
    assert (record.epochs_to_goal, record.seconds_per_epoch) == (None, 10.0)


@pytest.mark.parametrize("workers", [1, 2])
def test_times_of_a_run_that_was_killed_in_its_first_epoch_are_unknown(
    tmp_path: Path, workers: int
) -> None:
    settings = Configuration(workers=workers, goal=GOAL).to_dict()
    for rank in range(workers):
        sink = LinesSink(lines_path(tmp_path, rank), rank, "run", settings)
        sink.event("start", {"resumed": False, "epoch": 0, "step": 0})
        sink.record("train_loss", 1.0, 0, 5, 50.0)
        sink.flush()
    record = read(tmp_path)
    assert (record.state, record.reached) == ("unfinished", False)
    names = ("train_s", "total_s", "wall_s", "validation_s", "communication_exposed_s")
    assert [getattr(record, name) for name in names] == [None] * 5
    assert record.phases_s == {}


def test_an_optimizer_that_reports_no_communication_hides_nothing(tmp_path: Path) -> None:
    result = read_result(write_run(tmp_path / "run"))
    for times in (result["times"]["slowest"], result["goal"]["times"]["slowest"]):
        times.update(
            communication_total_s=0.0, communication_exposed_s=0.0, communication_hidden_s=0.0
        )
    record = RunRecord.from_result(result)
    assert (record.communication_exposed_s, record.communication_hidden_s) == (None, None)
    assert record.without_communication_s == pytest.approx(30.1 - 11.0), (
        "the communication steps count"
    )


def test_a_curve_has_the_values_of_rank_0_with_the_bytes_of_all_workers(tmp_path: Path) -> None:
    record = read(write_run(tmp_path / "run", accuracies=(80.0, float("nan"), 90.0)))
    points = record.curve(str(GOAL["metric"]))
    assert [(point.epoch, point.step, point.value) for point in points] == [
        (0, 10, 80.0),
        (2, 30, 90.0),
    ]
    assert [point.bytes for point in points] == [40_000, 120_000]
    losses = record.curve("train_loss")
    assert [point.bytes for point in losses] == [20_000, 60_000, 100_000], (
        "interpolated between the ends of epochs"
    )
    assert [point.time_s for point in losses] == [9.0, 19.0, 29.0]
    assert record.curve("nothing") == []
    assert RunRecord("a").curve("train_loss") == []


def test_exchanges_until_the_goal_of_a_run_that_went_on(tmp_path: Path) -> None:
    record = read(write_run(tmp_path / "run", epochs=5))
    assert (record.steps_to_goal, record.exchanges, record.exchanges_to_goal) == (30, 50, 30)
    missed = read(write_run(tmp_path / "missed", accuracies=(1.0, 2.0)))
    assert (missed.exchanges, missed.exchanges_to_goal) == (20, 20)


def test_a_curve_of_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", workers=1, accuracies=(1.0, 2.0), finish=False)
    sink = LinesSink(lines_path(folder, 0), 0, "run", Configuration(workers=1).to_dict())
    sink.event("start", {"resumed": True, "epoch": 1, "step": 10})
    sink.record(str(GOAL["metric"]), 5.0, 1, 20, 100.0)
    sink.event("epoch", {"epoch": 1, "step": 20, "time_s": 100.0, "totals": totals(20.0, 0, 20)})
    sink.flush()
    assert [(point.step, point.value) for point in read(folder).curve(str(GOAL["metric"]))] == [
        (10, 1.0),
        (20, 5.0),
    ]


def test_the_published_result_takes_precedence(tmp_path: Path) -> None:
    result = read_result(write_run(tmp_path / "run"))
    metrics = metrics_of(2, 1.0, 1.0) | {"result @ 0": [entry("{}"), {"value": json.dumps(result)}]}
    record = RunRecord.from_metrics(metrics, {"name": "demo-2", "state": "failed"})
    assert (record.name, record.state, record.time_to_goal_s) == ("demo-2", "failed", 30.1)
    metrics["result @ 0"] = [{"value": json.dumps({**result, "schema_version": 2})}]
    with pytest.raises(ConfigurationError, match="version of the result of run demo-2 is 2, not 1"):
        RunRecord.from_metrics(metrics, {"name": "demo-2"})


def test_a_published_goal_needs_no_text() -> None:
    """The tracker of a script sends it, even if the script never calls ``publish_summary``."""
    goal = {
        "metric": "F1",
        "threshold": 0.5,
        "minimize": False,
        "reached": True,
        "time_to_goal_s": 12.5,
        "epochs": 4,
    }
    goal["phases_s"] = {"compute": 8.0, "communication": 3.0, "metrics": 0.5, "data": 1.0}
    record = RunRecord.from_metrics(
        {"goal @ 0": [{"value": json.dumps(goal)}]}, {"name": "a", "num_workers": 2}
    )
    assert (record.reached, record.time_to_goal_s, record.epochs_to_goal) == (True, 12.5, 4)
    assert (record.phases_s, record.goal_text) == (goal["phases_s"], "F1 >= 0.5")
    timed = json.dumps({**goal, "threshold": None, "budget_s": 60.0})
    timed_record = RunRecord.from_metrics({"goal @ 0": [{"value": timed}]}, {"name": "a"})
    assert timed_record.goal_text.startswith("F1 after 60 s")
    assert (record.has_fixed_time, timed_record.has_fixed_time) == (False, True)
    missed = {**goal, "reached": False, "time_to_goal_s": None}
    record = RunRecord.from_metrics(
        {"goal @ 0": [{"value": json.dumps(missed)}], "TaskResult @ 0": [entry("text")]},
        {"name": "a"},
    )
    assert (record.reached, record.time_to_goal_s) == (False, None), "the data counts, not the text"


def test_summary_is_believed_first() -> None:
    metrics = metrics_of(2, 40.0, 8.0) | {"global_cum_agg @ 0": [entry(99.0)]}
    record = RunRecord.from_metrics(metrics, {"name": "a-2", "num_workers": 2})
    assert record.phases_s == {"compute": 40.0, "communication": 8.0, "metrics": 0.5, "data": 1.0}
    assert (record.total_s, record.without_communication_s) == (49.5, 41.5)
    assert (record.reached, record.samples_per_s, record.epochs, record.bytes_sent) == (
        True,
        800.0,
        3,
        2000.0,
    )
    assert record.steps_s == {"agg": 99.0}


def test_steps_fill_in_for_a_missing_summary() -> None:
    steps = {
        "agg": 8.0,
        "fwd_pass": 10.0,
        "comp_loss": 1.0,
        "backprop": 20.0,
        "opt_step": 9.0,
        "batch_load": 2.0,
    }
    metrics = {
        f"global_cum_{step} @ 0": [entry(value / 2), entry(value)] for step, value in steps.items()
    }
    metrics["TotalCumulativeTrainTime @ 0"] = [entry(50.0)]
    record = RunRecord.from_metrics(metrics, {"name": "a-2", "state": "finished"})
    assert record.phases_s == {"compute": 40.0, "communication": 8.0, "data": 2.0}
    assert (record.workers, record.total_s, record.reached) == (None, 50.0, None)
    metrics["TaskResult @ 0"] = [entry(45.0)]
    record = RunRecord.from_metrics(metrics, {"name": "a", "state": "finished"})
    assert (record.total_s, record.reached) == (45.0, True)


def reached(train_s: float) -> str:
    """Return the text of a reached goal, which a script of version 3.0 posts as ``TaskResult``."""

    class Clock:
        get_total_train_time = staticmethod(lambda: train_s)
        get_total_compute_time = staticmethod(lambda: 300.0)
        get_total_communication_time = staticmethod(lambda: 80.5)
        get_total_metrics_time = staticmethod(lambda: 20.0)
        get_total_preprocess_time = staticmethod(lambda: 6.5)

    text = time_to_accuracy_goal(80)("val_global_Prec@1", 80.2, Clock())  # type: ignore[arg-type]
    assert text is not None
    return str(text)


def test_the_text_of_a_goal_counts_as_reached() -> None:
    metrics: dict[str, list[dict[str, object]]] = {"TaskResult @ 0": [entry(reached(407.123))]}
    record = RunRecord.from_metrics(metrics, {"name": "a", "num_workers": 2, "state": "finished"})
    assert (record.reached, record.time_to_goal_s, record.samples_per_s) == (True, 407.123, None)
    assert record.phases_s == {
        "compute": 300.0,
        "communication": 80.5,
        "metrics": 20.0,
        "data": 6.5,
    }
    metrics |= {
        "TotalCumulativeTrainTime @ 0": [entry(407.1234)],
        "global_cum_agg @ 0": [entry(80.0)],
    }
    record = RunRecord.from_metrics(metrics, {"name": "a", "num_workers": 2, "state": "finished"})
    assert (record.time_to_goal_s, record.train_s, record.phases_s) == (
        407.123,
        407.1234,
        {"communication": 80.0},
    )
    after = [entry("71.5% Top 1 Validation Accuracy after 7201.5 seconds, Compute: 1.0 seconds")]
    assert RunRecord.from_metrics({"TaskResult @ 0": after}, {"name": "a"}).time_to_goal_s == 7201.5


def test_the_text_of_a_goal_of_ones_own_counts_as_reached() -> None:
    metrics = {"TaskResult @ 0": [entry("done")], "TotalCumulativeTrainTime @ 0": [entry(12.5)]}
    record = RunRecord.from_metrics(metrics, {"name": "a", "state": "finished"})
    assert (record.reached, record.time_to_goal_s, record.total_s) == (True, 12.5, 12.5)
    assert RunRecord.from_metrics({"TaskResult @ 0": [entry("")]}, {"name": "a"}).reached is None


def test_cumulative_times_fill_in_for_a_goal_that_was_not_reached() -> None:
    metrics = {
        "cum_agg @ 0": [entry(4.0), entry(8.0)],
        "cum_fwd_pass @ 0": [entry(5.0), entry(10.0)],
    }
    record = RunRecord.from_metrics(metrics | {"cum_agg @ 1": [entry(9.0)]}, {"name": "a"})
    assert (record.phases_s, record.total_s) == ({"compute": 10.0, "communication": 8.0}, 18.0)
    assert record.workers == 2, "each worker sends its own"


@pytest.mark.parametrize("name", ["exp-2024", "a-4", "run"])
def test_the_number_of_workers_is_never_read_from_the_name(name: str) -> None:
    assert RunRecord.from_metrics({}, {"name": name}).workers is None
    assert RunRecord.from_metrics({}, {"name": name, "num_workers": 3}).workers == 3


def test_flat_summary_of_the_tracker() -> None:
    flat = {
        "train_s": 50.0,
        "compute_s": 40.0,
        "communication_s": 8.0,
        "communication_exposed_s": 6.0,
        "preprocess_s": 2.0,
        "best_metric_value": 95.0,
        "goal_reached": False,
        "time_to_goal_s": None,
    }
    record = RunRecord.from_metrics({"summary @ 0": [entry(json.dumps(flat))]}, {"name": "a-2"})
    assert record.phases_s == {"compute": 40.0, "communication": 8.0, "data": 2.0}
    assert (record.total_s, record.without_communication_s, record.best) == (50.0, 44.0, 95.0)


@pytest.mark.parametrize(
    "damaged", ["{", "null", "7", '{"total_s": 3, "best": "x", "goal_reached": 1}', "NaN"]
)
def test_damaged_summary_counts_as_missing(damaged: str) -> None:
    record = RunRecord.from_metrics({"summary @ 0": [entry(damaged)]}, {"name": "a"})
    assert record.phases_s == {}
    assert record.best is None
    assert record.total_s is None


def test_a_command_line_tells_the_configuration() -> None:
    command = (
        "/opt/benchmarks/task1a_resnet20_cifar10/main.py --run_id {run_id} --backend {backend} "
        "--dataset=digits "
        "--light --optimizer ddp --seed 7 --lr -0.1 --milestones 3 5 --nesterov"
    )
    run = {"name": "a-2", "num_workers": 2, "backend": "gloo", "command": command, "num_cpus": 4.0}
    assert RunRecord.from_metrics({}, {**run, "max_bandwidth": 1000}).configuration == {
        "task": "1a",
        "dataset": "digits",
        "options": {"optimizer": "ddp", "lr": "-0.1", "milestones": "3 5", "nesterov": True},
        "workers": 2,
        "backend": "gloo",
        "threads": 4.0,
        "light": True,
        "seed": 7,
        "goal": {"metric": "val_global_Prec@1", "threshold": 90.0, "minimize": False},
    }
    after = RunRecord.from_metrics(
        {}, {**run, "command": command.replace("--light", "--goal-after 60")}
    )
    assert after.goal == {
        "metric": "val_global_Prec@1",
        "threshold": None,
        "minimize": False,
        "budget_s": 60.0,
    }
    assert "goal_after" not in after.configuration["options"]
    run = {
        "name": "a-2",
        "num_workers": 2,
        "command": "python -u own/train.py data --depth 3",
        "image": "me/own",
    }
    assert RunRecord.from_metrics({}, run).configuration == {
        "program": "python -u own/train.py",
        "options": {"arguments": "data", "depth": "3"},
        "workers": 2,
        "image": "me/own",
    }
    assert RunRecord.from_metrics({}, {"name": "a-2", "num_workers": 2}).configuration == {
        "workers": 2,
        "series": "a",
    }


@pytest.mark.parametrize(
    ("command", "configuration"),
    [
        (
            "--method bf16 --metric 'a=(.) b' own/train.py --depth 3",
            {"program": "own/train.py", "algorithm": "bf16", "options": {"depth": "3"}},
        ),
        (
            "--method=diloco:period=5 -m own.train",
            {"program": "-m own.train", "algorithm": "diloco:period=5", "options": {}},
        ),
        ("train.py", {"program": "train.py", "algorithm": "as-is", "options": {}}),
        # Without a script it cannot run, but a user may have sent it.
        (
            "--method",
            {"program": "python", "options": {"m": "mlbench_core.observe", "method": True}},
        ),
    ],
)
def test_the_configuration_of_a_script_has_its_method(
    command: str, configuration: dict[str, Any]
) -> None:
    run = {"name": "a-2", "num_workers": 2, "command": f"python -m mlbench_core.observe {command}"}
    run["image"] = "custom_image"
    read = RunRecord.from_metrics({}, run).configuration
    assert read == {**configuration, "workers": 2}


@pytest.mark.parametrize(
    ("goal", "text"),
    [
        (None, "no goal"),
        ({"metric": "Perplexity", "threshold": 70.5, "minimize": True}, "Perplexity <= 70.5"),
        ({"metric": "val_global_Prec@1", "threshold": 95.0, "minimize": False}, "Prec@1 >= 95"),
        ({"metric": None, "threshold": None}, "a goal of the script"),
        ({"metric": None, "budget_s": 60.0}, "60 s of training"),
        (
            {"metric": "val_global_Prec@1", "threshold": None, "budget_s": 60.0},
            "Prec@1 after 60 s of training",
        ),
        ({"metric": "val_global_Prec@1", "threshold": None}, "Prec@1"),
    ],
)
def test_goals_as_text(goal: dict[str, Any] | None, text: str) -> None:
    assert goal_text(goal) == text


def test_a_record_is_written_as_json() -> None:
    content = json.loads(
        json.dumps(RunRecord("a", folder=Path("b"), phases_s=dict.fromkeys(PHASES, 1.0)).as_json())
    )
    assert (content["folder"], content["total_s"], content["goal_text"]) == ("b", 5.0, "no goal")
