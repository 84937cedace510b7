"""The folder that a run leaves, and its verification."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_core.results.configuration import Configuration
from mlbench_core.results.folder import (
    FILES,
    RESULT,
    find_folders,
    finish_folder,
    prepare_folder,
    read_result,
    verify_folder,
)
from mlbench_core.results.lines import LinesSink, read_lines, statistics
from mlbench_core.results.schema import check_result
from tests.results.helpers import GOAL, change, set_in, totals, write_run


def test_a_finished_run_has_all_files_and_is_verified(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert verify_folder(folder) == []
    result = read_result(folder)
    assert result["run"]["state"] == "finished"
    assert result["configuration"]["division"] == "closed"
    assert (folder / "official_result.txt").read_text() == result["goal"]["text"]


def test_times_are_those_of_the_slowest_worker_in_each_phase(tmp_path: Path) -> None:
    result = read_result(write_run(tmp_path / "run"))
    times = result["times"]
    assert times["rank_0"]["communication_s"] == 10.0
    assert times["slowest"]["communication_s"] == pytest.approx(11.0)
    assert times["slowest"]["train_s"] == times["rank_0"]["train_s"] == 30.0
    assert times["rank_0"]["other_s"] == pytest.approx(30 - 15 - 10 - 1)
    assert times["rank_0"]["communication_hidden_s"] == pytest.approx(5.0)
    goal = result["goal"]
    assert goal["time_to_goal_s"] == {"slowest": 30.1, "rank_0": 30.0}
    assert (goal["reached"], goal["epochs"], goal["step"], goal["value"]) == (True, 3, 30, 90.0)
    assert result["bytes_sent"] == {"all_workers": 60_000, "rank_0": 30_000}
    assert result["samples"] == 1920
    assert result["samples_per_s"] == 64.0


def test_a_missed_goal_is_part_of_the_result(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=2)
    goal = read_result(folder)["goal"]
    assert (goal["reached"], goal["time_to_goal_s"], goal["threshold"]) == (False, None, 90.0)
    assert not (folder / "official_result.txt").exists()
    assert verify_folder(folder) == []


def test_every_changed_byte_of_the_raw_lines_is_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    content = path.read_bytes()
    draw = random.Random(7)
    for place in draw.sample(range(len(content)), 25):
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(7)
        path.write_bytes(changed)
        assert any("metrics.jsonl was changed" in problem for problem in verify_folder(folder))
    path.write_bytes(content)
    assert verify_folder(folder) == []


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (("goal", "time_to_goal_s", "slowest"), 3.0, "goal.time_to_goal_s.slowest of result.json is 3.0, and 30.1"),
        (("times", "slowest", "train_s"), 1.0, "times.slowest.train_s of result.json is 1.0, and 30.0"),
        (("configuration", "dataset"), "cifar10", "configuration.dataset of result.json is 'cifar10', and 'digits'"),
        (("machine", "cpu"), "Model 8", "machine.cpu of result.json is 'Model 8', and 'Model 7'"),
        (("goal", "reached"), False, "goal.reached of result.json is False, and True"),
    ],
)
def test_a_changed_result_is_found(tmp_path: Path, place: tuple[str, ...], value: object, problem: str) -> None:
    folder = write_run(tmp_path / "run")
    set_in(folder / RESULT, value, *place)
    assert [found for found in verify_folder(folder) if found.startswith(problem)]


def test_a_goal_that_no_statistic_reached_is_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if '"value":90.0}' not in line))
    finish_folder(folder)  # with new checksums, as a forger would
    assert verify_folder(folder) == ["the result says that the goal was reached, but no statistic reached it"]


def test_a_goal_that_was_reached_before_is_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    change(folder / "metrics.jsonl", '"value":80.0}', '"value":95.0}')
    finish_folder(folder)
    assert verify_folder(folder) == [
        "the goal was reached at step 10 with 95.0, but the result says at step 30 with 90.0"
    ]


def test_steps_that_take_longer_than_the_training_are_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", workers=1)
    change(folder / "metrics.jsonl", '"steps_s":{"fwd_pass":5.0', '"steps_s":{"fwd_pass":50.0')
    finish_folder(folder)
    assert verify_folder(folder) == ["the steps of rank 0 take 53.667 s of 10.000 s of training"]


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    (folder / "mlperf.log").unlink()
    problems = verify_folder(folder)
    assert "mlperf.log is missing" in problems
    assert "metrics.jsonl is missing: the result cannot be recomputed" in problems
    assert verify_folder(tmp_path) == ["result.json is missing: the run did not end, or this is not a result folder"]


def test_a_killed_run_stays_readable(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finish=False)
    with (folder / "metrics.rank-1.jsonl").open("a") as file:
        file.write('{"rank":1,"kind":"st')
    result = read_result(folder)
    assert result["run"]["state"] == "unfinished"
    assert result["run"]["reason"] == "2 of 2 workers did not write the end of the run"
    assert result["times"]["slowest"]["train_s"] == 30.0
    lines = read_lines(folder)
    assert len(statistics(lines, GOAL["metric"])) == 3
    list(lines)
    assert lines.skipped == ["metrics.rank-1.jsonl:12: half-written line"]
    check_result(result)


def test_half_a_line_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.rank-0.jsonl"
    path.write_text('{"rank":0,"kind":"st')
    sink = LinesSink(path, 0, "1", {})
    sink.finish("failed", "it was full")
    lines = read_lines(tmp_path)
    assert [(line["kind"], line.get("reason")) for line in lines] == [("start", None), ("end", "it was full")]
    assert lines.skipped == ["metrics.rank-0.jsonl:1: damaged line"]


def test_a_resumed_run_repeats_no_batch(tmp_path: Path) -> None:
    sink = LinesSink(tmp_path / "metrics.rank-0.jsonl", 0, "1", Configuration(workers=1, goal=GOAL).to_dict())

    def epoch(number: int, accuracy: float) -> None:
        step = 10 * (number + 1)
        sink.record(GOAL["metric"], accuracy, number, step, float(step))
        now = {"epoch": number, "step": step, "time_s": 1.0, "totals": totals(float(step), 0, step)}
        if accuracy >= 90:
            sink.event("goal", {**now, **GOAL, "value": accuracy, "text": "reached", "time_to_goal_s": float(step)})
        sink.event("epoch", now)

    sink.event("start", {"resumed": False, "epoch": 0, "step": 0})
    epoch(0, 80.0)
    epoch(1, 91.0)  # after the checkpoint that the resumed run loads
    sink.event("start", {"resumed": True, "epoch": 1, "step": 10})
    epoch(1, 85.0)
    epoch(2, 90.0)
    sink.finish("finished")
    result = finish_folder(tmp_path)
    assert (result["run"]["times_resumed"], result["goal"]["step"], result["goal"]["epochs"]) == (1, 30, 3)
    assert [line["value"] for line in statistics(read_lines(tmp_path), GOAL["metric"])] == [80.0, 85.0, 90.0]
    assert verify_folder(tmp_path) == []


def test_an_earlier_run_is_kept(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path / "run", seed=seed)
    seeds = [read_result(tmp_path / "run" / name)["configuration"]["seed"] for name in (".", "earlier-1", "earlier-2")]
    assert seeds == [3, 1, 2]
    assert list(find_folders(tmp_path)) == [tmp_path / "run"]
    prepare_folder(tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / RESULT).exists()
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_folders_are_found_at_any_depth(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("a/b/1", "a/b/2", "c")]
    assert list(find_folders(tmp_path)) == folders


def test_errors_name_the_file_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"must be a result folder, but it has no result\.json"):
        read_result(tmp_path)
    folder = write_run(tmp_path / "run")
    set_in(folder / RESULT, 2, "schema_version")
    with pytest.raises(ConfigurationError, match=r"schema_version of .*result\.json must be 1, not 2"):
        read_result(folder)
    set_in(folder / RESULT, 1, "schema_version")
    set_in(folder / RESULT, "many", "epochs")
    with pytest.raises(ConfigurationError, match=r"must follow its schema, but epochs must be integer"):
        read_result(folder)
    for damaged in ("[]", "{", "[" * 100_000):
        (folder / RESULT).write_text(damaged)
        with pytest.raises(ConfigurationError, match=r"result\.json must hold a JSON object"):
            read_result(folder)
        assert verify_folder(folder) != []


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    sink = LinesSink(tmp_path / "metrics.rank-0.jsonl", 0, "1", {})
    for value in (float("nan"), float("inf"), 0.5):
        sink.record("train_loss", value, 0, 1, 0.0)
    sink.flush()
    text = (tmp_path / "metrics.rank-0.jsonl").read_text()
    assert "NaN" not in text
    assert [json.loads(line)["value"] for line in text.splitlines()] == [None, None, 0.5]


def test_many_records_do_not_wait_in_memory(tmp_path: Path) -> None:
    sink = LinesSink(tmp_path / "metrics.rank-0.jsonl", 0, "1", {})
    for step in range(5001):
        sink.record("train_loss", 0.5, 0, step, 0.0)
    assert len((tmp_path / "metrics.rank-0.jsonl").read_text().splitlines()) == 5000
