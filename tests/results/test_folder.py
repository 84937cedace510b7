"""The folder that a run leaves, and its verification."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.comparison.load_results import load
from mlbench_core.comparison.submission_rules import check_rules
from mlbench_core.errors import ConfigurationError
from mlbench_core.files import digest
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
from mlbench_core.results.raw_lines import LinesSink, read_lines, statistics
from mlbench_core.results.schema import check_result
from mlbench_core.results.summary import goal_message
from tests.results.helpers import GOAL, change, set_in, totals, write_run


def test_a_finished_run_has_all_files_and_is_verified(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert verify_folder(folder) == []
    result = read_result(folder)
    assert result["run"]["state"] == "finished"
    assert result["configuration"]["division"] == "closed"
    assert (folder / "official_result.txt").read_text() == result["goal"]["text"] + "\n"


@pytest.mark.parametrize(
    ("end", "problems"),
    [("", []), (" ", ["official_result.txt does not follow from the raw lines"])],
)
def test_the_official_result_of_an_earlier_version_has_no_line_break(
    tmp_path: Path, end: str, problems: list[str]
) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "official_result.txt"
    path.write_text(path.read_text().removesuffix("\n") + end)
    set_in(
        folder / RESULT, {"sha256": digest(path), "bytes": path.stat().st_size}, "files", path.name
    )
    assert verify_folder(folder) == problems


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
        (
            ("goal", "time_to_goal_s", "slowest"),
            3.0,
            "goal.time_to_goal_s.slowest of result.json is 3.0, and 30.1",
        ),
        (
            ("times", "slowest", "train_s"),
            1.0,
            "times.slowest.train_s of result.json is 1.0, and 30.0",
        ),
        (
            ("configuration", "dataset"),
            "cifar10",
            "configuration.dataset of result.json is 'cifar10', and 'digits'",
        ),
        (("machine", "cpu"), "Model 8", "machine.cpu of result.json is 'Model 8', and 'Model 7'"),
        (("goal", "reached"), False, "goal.reached of result.json is False, and True"),
    ],
)
def test_a_changed_result_is_found(
    tmp_path: Path, place: tuple[str, ...], value: object, problem: str
) -> None:
    folder = write_run(tmp_path / "run")
    set_in(folder / RESULT, value, *place)
    assert [found for found in verify_folder(folder) if found.startswith(problem)]


def test_a_goal_that_no_statistic_reached_is_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(
        "".join(line for line in lines if '"value":90.0}' not in line)
    )
    finish_folder(folder)  # with new checksums, as a forger would
    assert verify_folder(folder) == [
        "the result says that the goal was reached, but no statistic reached it"
    ]


def test_a_goal_that_was_reached_before_is_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    change(folder / "metrics.jsonl", '"value":80.0}', '"value":95.0}')
    finish_folder(folder)
    assert verify_folder(folder) == [
        (
            "the goal was reached at step 10 in epoch 1 with 95.0, but the "
            "result says at step 30 in epoch 3 with 90.0"
        )
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
    assert verify_folder(tmp_path) == [
        "result.json is missing: the run did not end, or this is not a result folder"
    ]


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
    assert [(line["kind"], line.get("reason")) for line in lines] == [
        ("start", None),
        ("end", "it was full"),
    ]
    assert lines.skipped == ["metrics.rank-0.jsonl:1: damaged line"]


def test_a_resumed_run_repeats_no_batch(tmp_path: Path) -> None:
    sink = LinesSink(
        tmp_path / "metrics.rank-0.jsonl", 0, "1", Configuration(workers=1, goal=GOAL).to_dict()
    )

    def epoch(number: int, accuracy: float) -> None:
        step = 10 * (number + 1)
        sink.record(GOAL["metric"], accuracy, number, step, float(step))
        now = {"epoch": number, "step": step, "time_s": 1.0, "totals": totals(float(step), 0, step)}
        if accuracy >= 90:
            sink.event(
                "goal",
                {
                    **now,
                    **GOAL,
                    "value": accuracy,
                    "text": "reached",
                    "time_to_goal_s": float(step),
                },
            )
        sink.event("epoch", now)

    sink.event("start", {"resumed": False, "epoch": 0, "step": 0})
    epoch(0, 80.0)
    epoch(1, 91.0)  # after the checkpoint that the resumed run loads
    sink.event("start", {"resumed": True, "epoch": 1, "step": 10})
    epoch(1, 85.0)
    epoch(2, 90.0)
    sink.finish("finished")
    result = finish_folder(tmp_path)
    assert (result["run"]["times_resumed"], result["goal"]["step"], result["goal"]["epochs"]) == (
        1,
        30,
        3,
    )
    lines = tmp_path / "metrics.jsonl"
    starts = [
        json.loads(line)["time"] for line in lines.read_text().splitlines() if '"start"' in line
    ]
    assert result["run"]["started_at"] == starts[0] < starts[1]
    assert [line["value"] for line in statistics(read_lines(tmp_path), GOAL["metric"])] == [
        80.0,
        85.0,
        90.0,
    ]
    assert verify_folder(tmp_path) == []


def test_an_earlier_run_is_kept(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path / "run", seed=seed)
    seeds = [
        read_result(tmp_path / "run" / name)["configuration"]["seed"]
        for name in (".", "earlier-1", "earlier-2")
    ]
    assert seeds == [3, 1, 2]
    assert list(find_folders(tmp_path)) == [tmp_path / "run"]
    prepare_folder(tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / RESULT).exists()
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_folders_are_found_at_any_depth(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("a/b/1", "a/b/2", "c")]
    assert list(find_folders(tmp_path)) == folders


def test_errors_name_the_file_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a result folder: it has no result\.json"):
        read_result(tmp_path)
    folder = write_run(tmp_path / "run")
    set_in(folder / RESULT, 2, "schema_version")
    with pytest.raises(ConfigurationError, match=r"schema_version of .*result\.json is 2, not 1"):
        read_result(folder)
    set_in(folder / RESULT, 1, "schema_version")
    set_in(folder / RESULT, "many", "epochs")
    with pytest.raises(ConfigurationError, match=r"wrong field in .*: epochs must be integer"):
        read_result(folder)
    for damaged in ("[]", "{", "[" * 100_000):
        (folder / RESULT).write_text(damaged)
        with pytest.raises(ConfigurationError, match=r"result\.json is not a JSON object"):
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


def test_a_pipe_or_a_folder_in_place_of_a_file_is_a_problem(tmp_path: Path) -> None:
    for name in (RESULT, "metrics.jsonl", "environment.json", "mlperf.log", "official_result.txt"):
        folder = write_run(tmp_path / name)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert verify_folder(folder), name
    (write_run(tmp_path / "other") / "metrics.rank-7.jsonl").mkdir()
    assert verify_folder(tmp_path / "other") == []


def test_a_file_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "official_result.txt"):
        # A file with a hole takes no space.
        os.truncate(folder / name, 1 << 40)
    problems = verify_folder(folder)
    assert any("metrics.jsonl" in each and "line of 4 MiB or more" in each for each in problems)
    assert any("official_result.txt was changed" in each for each in problems)
    os.truncate(folder / "environment.json", 1 << 40)
    problems = verify_folder(folder)
    too_large = "environment.json is not a JSON object: it has more than 16 MiB"
    assert any(too_large in each for each in problems)


def test_every_file_needs_a_checksum(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    files = json.loads((folder / RESULT).read_text())["files"]
    del files["metrics.jsonl"], files["environment.json"]
    set_in(folder / RESULT, files, "files")
    problems = verify_folder(folder)
    assert problems == [
        f"{name} has no checksum in result.json" for name in ("metrics.jsonl", "environment.json")
    ]


@pytest.mark.parametrize(
    "field",
    [
        '"epoch":"x"', '"step":-1', '"epoch":' + 20 * "9", '"step":1.5', '"time_s":NaN',
        '"totals":[]',
        '"totals":{"train_s":"1"}', '"rank":-1',
        '"totals":{"train_s":1' + 400 * "0" + "}", '"totals":{"steps_s":{"agg":null}}',
        '"kind":"stat"',
    ],
)  # fmt: skip
def test_a_line_with_fields_of_wrong_types_is_skipped_and_named(tmp_path: Path, field: str) -> None:
    folder = write_run(tmp_path / "run", workers=1, finish=False)
    path = folder / "metrics.rank-0.jsonl"
    good = len(list(read_lines(folder)))
    with path.open("a") as file:
        file.write(f'{{"rank":0,"kind":"epoch",{field}}}\n')
    lines = read_lines(folder)
    assert len(list(lines)) == good
    assert lines.skipped == [f"metrics.rank-0.jsonl:{good + 1}: damaged line"]
    assert read_result(folder)["times"]["slowest"]["train_s"] == 30.0


def test_lines_without_statistics_are_all_others(tmp_path: Path) -> None:
    lines = read_lines(write_run(tmp_path / "run", workers=2, finish=False))
    with lines.paths[-1].open("a") as file:
        for separators in ((",", ":"), (", ", ": ")):
            row = {"rank": 1, "kind": "stat", "epoch": 0, "step": 1, "time_s": 1.0, "name": "a"}
            file.write(json.dumps({**row, "value": 1.0}, separators=separators) + "\n")
        file.write('{"ra')
    wanted = [line for line in lines if line["kind"] != "stat"]
    assert {line["kind"] for line in wanted} == {"start", "epoch", "goal"}
    skipped = list(lines.skipped)
    assert list(lines.without_statistics()) == wanted
    assert lines.skipped == skipped and len(skipped) == 1


@pytest.mark.parametrize(
    "change_line",
    [
        {"kind": "start", "configuration": 5},
        {"kind": "end", "epochs": float("inf")},
        {"kind": "end", "batch_times": "x"},
    ],
)
def test_wrong_types_in_raw_lines_are_one_message(
    tmp_path: Path, change_line: dict[str, Any]
) -> None:
    folder = write_run(tmp_path / "run", workers=1)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    changed = [
        {**line, **change_line} if line["kind"] == change_line["kind"] else line for line in lines
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert any(
        "result cannot be recomputed from the raw lines" in problem
        for problem in verify_folder(folder)
    )
    (folder / RESULT).unlink()
    with pytest.raises(ConfigurationError, match=r"run is not a result folder: it has no result"):
        read_result(folder)


def test_a_run_that_lost_lines_on_a_full_disk_does_not_count_as_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_folder(tmp_path)
    sink = LinesSink(
        tmp_path / "metrics.rank-0.jsonl", 0, "run", Configuration(workers=1).to_dict()
    )
    sink.event("start", {"resumed": False, "epoch": 0, "step": 0})
    path_open = Path.open

    def full(path: Path, mode: str) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError):
        sink.event("epoch", {"epoch": 0, "step": 1, "time_s": 1.0, "totals": totals(1.0)})
    monkeypatch.setattr(Path, "open", path_open)
    sink.finish("finished")
    run = finish_folder(tmp_path)["run"]
    assert run["state"] == "failed"
    lost = f"No space left on device: {sink.path}"
    assert run["reason"] == f"raw lines are missing, because they could not be written: {lost}"


@pytest.mark.parametrize(
    ("change_goal", "problem"),
    [
        ({"time_to_goal_s": 1.0}, "rank 0 reached the goal in 1.000 s, but had trained 30.000 s"),
        ({"totals": {**totals(30.0), "tokens": -1}}, "totals of rank 0 are negative: tokens"),
        (
            {"epoch": 0},
            (
                "the goal was reached at step 30 in epoch 3 with 90.0, but the "
                "result says at step 30 in epoch 1 with 90.0"
            ),
        ),
    ],
)
def test_a_forged_goal_is_found_though_all_checksums_are_right(
    tmp_path: Path, change_goal: dict[str, Any], problem: str
) -> None:
    folder = write_run(tmp_path / "run", workers=1)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [{**line, **change_goal} if line["kind"] == "goal" else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    finish_folder(folder)
    assert verify_folder(folder) == [problem]


AFTER_25_S = {"metric": GOAL["metric"], "threshold": None, "minimize": False, "budget_s": 25.0}


def test_the_best_value_after_a_fixed_time_is_a_result(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", accuracies=(70.0, 90.0, 80.0, 95.0), goal=AFTER_25_S)
    assert verify_folder(folder) == []
    goal = read_result(folder)["goal"]
    found = [goal[name] for name in ("reached", "value", "epochs", "step", "threshold", "budget_s")]
    assert found == [True, 90.0, 3, 30, None, 25.0]
    assert goal_message(read_result(folder))["budget_s"] == 25.0
    (record,) = load([folder])
    assert (record.goal_value, record.goal_text) == (90.0, "Prec@1 after 25 s of training")
    missed = write_run(tmp_path / "missed", epochs=2, goal=AFTER_25_S)
    assert verify_folder(missed) == []
    assert (read_result(missed)["goal"]["reached"], load([missed])[0].goal_value) == (False, None)


@pytest.mark.parametrize(
    ("change_goal", "problem"),
    [
        ({"value": 95.0}, "the best value until step 30 was 90.0, but the result says 95.0"),
        (
            {"step": 20, "epoch": 1, "time_to_goal_s": 20.0, "totals": totals(20.0, batches=20)},
            "the goal needs 25 s of training, but was reached after 20.000 s",
        ),
        (
            {
                "step": 40,
                "epoch": 3,
                "value": 95.0,
                "time_to_goal_s": 40.0,
                "totals": totals(40.0, batches=40),
            },
            "the training time was over at step 30, but the result says at step 40",
        ),
        (
            {"kind": "forgotten"},
            "the training time was over at step 30, but the result says it was not",
        ),
    ],
)
def test_a_forged_goal_of_a_fixed_time_is_found(
    tmp_path: Path, change_goal: dict[str, Any], problem: str
) -> None:
    folder = write_run(
        tmp_path / "run", workers=1, accuracies=(70.0, 90.0, 80.0, 95.0), goal=AFTER_25_S
    )
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [{**line, **change_goal} if line["kind"] == "goal" else line for line in lines]
    # A forger keeps the lines in the order of the training.
    changed = [line for line in changed if line["kind"] != "forgotten"]
    place = sorted(
        changed,
        key=lambda line: (line["kind"] == "end", line.get("step", 0), line["kind"] == "epoch"),
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in place))
    finish_folder(folder)
    assert problem in verify_folder(folder)


def test_a_run_that_ended_before_its_first_epoch_has_none(tmp_path: Path) -> None:
    prepare_folder(tmp_path)
    sink = LinesSink(
        tmp_path / "metrics.rank-0.jsonl", 0, "run", Configuration(workers=1).to_dict()
    )
    sink.event("start", {"resumed": False, "epoch": 0, "step": 0})
    sink.finish("failed", "RuntimeError: no data")
    finish_folder(tmp_path)
    result = read_result(tmp_path)
    assert (result["epochs"], result["run"]["times_resumed"]) == (0, 0)


def test_a_failure_inside_a_batch_is_no_contradiction(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", workers=1, epochs=1, finish=False)
    sink = LinesSink(folder / "metrics.rank-0.jsonl", 0, "run", Configuration(workers=1).to_dict())
    steps_s = {"fwd_pass": 6.0, "agg": 5.0}
    now = totals(10.0, batches=10, compute_s=6.0, communication_s=5.0, steps_s=steps_s)
    sink.event("start", {"resumed": True, "epoch": 1, "step": 10})
    sink.event("end", {"time_s": 12.0, "totals": now, "epochs": 1})
    sink.finish("failed", "RuntimeError: Connection closed by peer")
    finish_folder(folder)
    assert verify_folder(folder) == []
    assert not [finding for finding in check_rules(load([folder])) if "phases" in finding.reason]
