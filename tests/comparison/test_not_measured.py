"""Communication that nobody measured is unknown, and not free; results of earlier versions stay
readable."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbench_cli import cli_group
from mlbench_core.comparison.load_results import load
from mlbench_core.comparison.result_record import NOT_MEASURED, RunRecord
from mlbench_core.comparison.table import compare_runs
from mlbench_core.errors import ConfigurationError
from mlbench_core.results.folder import RESULT, finish_folder, lacking, read_result, verify_folder
from mlbench_core.results.schema import check_result
from mlbench_core.tracking.summary import TrackerSummary
from mlbench_core.tracking.tracker import Tracker
from mlbench_master.runs.phases import is_measured, total_phases
from tests.helpers.earlier_runs import earlier_runs
from tests.results.helpers import write_run

NUMBERS = (
    "communication_exposed_s",
    "communication_hidden_s",
    "bytes_on_wire",
    "bytes_sent",
    "exchanges",
)
COMMUNICATION = (
    "communication_s",
    "communication_total_s",
    "communication_exposed_s",
    "communication_hidden_s",
)
LATER = ("communication_wire_bytes", "communication_measured", "exchanges")


def without_communication(folder: Path, *, workers: int = 2, old: bool = False) -> Path:
    """Write the folder of a run whose optimizer reported nothing, as with
    DistributedDataParallel."""
    write_run(folder, workers=workers, finish=False, collectives=[])
    for path in folder.glob("metrics.rank-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            known = line.get("totals", {})
            known.update(
                {
                    name: 0
                    for name in (*COMMUNICATION, "communication_size_bytes", *LATER)
                    if name in known
                }
            )
            if "totals" in line:
                known.pop("communication_hidden_s", None)
                known["communication_measured"] = False
                known["steps_s"]["agg"] = 0.0
            for name in LATER if old else ():
                known.pop(name, None)
        end = {**lines[-1], "kind": "end", "state": "finished", "reason": None}
        path.write_text("".join(json.dumps(line) + "\n" for line in (*lines[:-1], end)))
    finish_folder(folder)
    return folder


@pytest.mark.parametrize("old", [False, True])
def test_a_run_of_several_workers_that_reported_nothing_was_not_measured(
    tmp_path: Path, old: bool
) -> None:
    folder = without_communication(tmp_path / "ddp", old=old)
    result = read_result(folder)
    for times in (
        result["times"]["slowest"],
        result["times"]["rank_0"],
        result["goal"]["times"]["slowest"],
    ):
        assert [times[name] for name in COMMUNICATION] == [None] * 4
        assert times["compute_s"] > 0
    assert result["bytes_sent"] == result["bytes_on_wire"] == {"all_workers": None, "rank_0": None}
    (record,) = load([folder])
    assert [getattr(record, name) for name in NUMBERS] == [None] * 5
    assert record.without_communication_s is None and "communication" not in record.phases_s
    assert NOT_MEASURED in record.remarks
    assert verify_folder(folder) == []


def test_one_worker_communicates_for_nothing(tmp_path: Path) -> None:
    (record,) = load([without_communication(tmp_path / "one", workers=1)])
    assert [getattr(record, name) for name in NUMBERS] == [0] * 5
    assert record.without_communication_s == record.total_s
    assert NOT_MEASURED not in record.remarks


def test_the_table_says_not_measured(tmp_path: Path) -> None:
    folders = [
        without_communication(tmp_path / "two"),
        without_communication(tmp_path / "one", workers=1),
    ]
    _, table = compare_runs(load(folders))
    one, two = sorted(table.rows, key=lambda row: row["workers"])
    assert [
        one[name] for name in ("communication_exposed_s", "bytes_on_wire_mb", "bytes_sent_mb")
    ] == [0, 0, 0]
    assert [
        two[name] for name in ("communication_exposed_s", "bytes_on_wire_mb", "bytes_sent_mb")
    ] == [None] * 3
    assert two["speedup"] is not None and two["speedup_without_communication"] is None
    text = table.as_markdown()
    assert text.count("not measured") >= 4
    assert any(NOT_MEASURED in remark for remark in table.remarks)
    _, alone = compare_runs(load(folders[:1]))
    assert "not measured" in alone.as_markdown(), "also if no row has a value"


def test_a_row_with_a_miss_does_not_say_that_nothing_was_measured(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / str(seed), seed=seed, epochs=epochs)
        for seed, epochs in ((1, 3), (2, 2))
    ]
    _, table = compare_runs(load(folders))
    (row,) = table.rows
    assert (row["missed"], row["communication_exposed_s"], row["bytes_on_wire_mb"]) == (
        1,
        None,
        None,
    )
    assert "not measured" not in table.as_markdown()


def test_the_table_of_runs_with_two_goals_is_refused(tmp_path: Path) -> None:
    easier = {"metric": "val_global_Prec@1", "threshold": 50.0, "minimize": False}
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", goal=easier)]
    with pytest.raises(ConfigurationError, match="must have the same goal"):
        compare_runs(load(folders))


def test_the_dashboard_says_not_measured(tmp_path: Path) -> None:
    result = read_result(without_communication(tmp_path / "ddp"))
    totals = total_phases([], result, {})
    assert totals[0].seconds["compute"] > 0 and "communication" not in totals[0].seconds
    assert not is_measured(totals, result, 2)
    assert is_measured(totals, read_result(write_run(tmp_path / "run")), 2)
    assert is_measured(totals, read_result(without_communication(tmp_path / "one", workers=1)), 1)
    assert not is_measured(totals, {}, 2) and is_measured(totals, {}, 1), (
        "before the end of the run"
    )


def test_the_summary_of_a_script_says_so_too() -> None:
    tracker = Tracker([], "run", 0)
    tracker.batch_start()
    tracker.batch_end(samples=1)
    names = ("bytes_sent", "bytes_on_wire", "exchanges")
    report = tracker.summary().report(2)
    assert [report[name] for name in names] == [None] * 3
    assert report["total_s"]["communication"] is report["total_s"]["exposed_communication"] is None
    run = {"name": "script", "num_workers": 2, "state": "finished"}
    record = RunRecord.from_metrics({"summary @ 0": [{"value": json.dumps(report)}]}, run)
    assert [getattr(record, name) for name in NUMBERS] == [
        None
    ] * 5 and "communication" not in record.phases_s
    report = tracker.summary().report(1)
    assert [report[name] for name in names] == [0, 0, 0] and report["total_s"]["communication"] == 0
    tracker.record_communication(1.0, 0.5, 100)
    tracker.record_collective("all_gather", 3, 100, 1, False)
    assert isinstance(tracker.summary(), TrackerSummary)
    assert [tracker.summary().report(3)[name] for name in names] == [100, 200, 1]


def test_folders_of_an_earlier_version_are_right_and_say_what_they_lack() -> None:
    folder = earlier_runs() / "power-sgd-2-r1"
    assert verify_folder(folder) == []
    assert lacking(read_result(folder)) == ["bytes_on_wire", "exchanges"]
    shown = CliRunner().invoke(cli_group, ["results", "verify", str(folder)])
    assert shown.exit_code == 0
    assert shown.output.endswith(
        "ok, written by an earlier version without bytes_on_wire and exchanges\n"
    )


def test_an_earlier_result_has_the_bytes_on_the_wire_of_its_collectives(tmp_path: Path) -> None:
    entry = {"op": "all_gather", "group": 3, "calls": 10, "bytes": 1000, "overlapped": False}
    result = read_result(write_run(tmp_path / "run", workers=3, collectives=[entry]))
    assert RunRecord.from_result(result).bytes_on_wire == 180_000
    for name in ("bytes_on_wire", "exchanges"):
        del result[name]
    assert RunRecord.from_result(result).bytes_on_wire == 2 * result["bytes_sent"]["all_workers"]
    del result["collectives"]
    assert RunRecord.from_result(result).bytes_on_wire is None


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [found for name, each in value.items() for found in places(each, (*place, name))]
    return [place] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return read_result(write_run(tmp_path_factory.mktemp("good") / "run"))


@given(data=st.data())
@settings(derandomize=True, database=None, deadline=None, max_examples=150)
def test_a_number_that_is_not_finite_or_negative_or_not_a_number_is_refused(
    good: dict[str, Any], data: st.DataObject
) -> None:
    result = json.loads(json.dumps(good))
    place = data.draw(
        st.sampled_from(
            [
                found
                for found in places(result)
                if not {"configuration", "threshold", "value"} & {*found}
            ]
        )
    )
    value = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, -1e308, "7", [1], {"a": 1}]))
    inner = result
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    with pytest.raises(ConfigurationError, match=str(place[0])):
        check_result(result, RESULT)


def test_a_time_to_the_goal_that_is_nan_is_not_the_training_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    text = (folder / RESULT).read_text()
    result = json.loads(text)
    result["goal"]["time_to_goal_s"]["slowest"] = math.nan
    (folder / RESULT).write_text(json.dumps(result))
    with pytest.raises(ConfigurationError, match=r"goal.time_to_goal_s.slowest of .* is nan, not"):
        load([folder])
    assert any("not a finite number" in problem for problem in verify_folder(folder))
