"""The log with the keys of MLPerf, read by the package mlperf-logging."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.compliance_checker.mlp_parser import parse_file
from mlperf_logging.mllog import constants
from mlperf_logging.mllog.mllog import _encode_log

from mlbench_core.results.mlperf import mlperf_lines

RULES = "5.1.0"
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
START_MS = 1767323045000
ACCURACY = "val_global_Prec@1"
GOAL = {"metric": ACCURACY, "threshold": 90.0, "minimize": False}
CONFIGURATION = {
    "task": "1a", "program": "/x/main.py", "dataset": "cifar10", "algorithm": "power_sgd",
    "workers": 2, "light": False,
    "options": {"batch_size": 64, "lr": 0.25, "precision": "fp32"}, "division": "open",
    "goal": GOAL, "seed": 7,
}  # fmt: skip
RESULT = {
    "configuration": CONFIGURATION,
    "machine": {"cpu": "Ä", "cores": 4, "gpus": 2, "gpu": "H", "hosts": 1},
}
RESULT |= {"goal": {**GOAL, "reached": True}, "best": {"metric": "Prec@1"}, "samples_per_s": 500.0}
COMMON = {
    "submission_benchmark",
    "submission_division",
    "submission_platform",
    "cache_clear",
    "seed",
    "opt_name",
}

Line = dict[str, Any]


def line(kind: str, at_s: float, **fields: Any) -> Line:
    """Return a raw line of rank 0, written this many seconds after the first one."""
    return {
        "rank": 0,
        "kind": kind,
        "time": (START + timedelta(seconds=at_s)).isoformat(),
        **fields,
    }


def stat(name: str, at_s: float, epoch: int, step: int, value: float | None = 1.0) -> Line:
    return line("stat", at_s, epoch=epoch, step=step, time_s=at_s - 2, name=name, value=value)


def epoch_of(number: int, accuracy: float | None, at_s: float, validation_s: float) -> list[Line]:
    """Return the lines of an epoch of 10 s: 6 s of training until the last record, 2 s more, and 2
    s of validation."""
    step, totals = 100 * (number + 1), {"validation_s": validation_s}
    return [
        stat("train_loss", at_s + 6, number, step),
        *(stat(name, at_s + 10, number, step, accuracy) for name in ("val_global_loss", ACCURACY)),
        line("epoch", at_s + 11, epoch=number, step=step, time_s=at_s + 9, totals=totals),
    ]


def end(at_s: float, state: str = "finished") -> Line:
    return line("end", at_s, time_s=at_s - 2, state=state, totals={"validation_s": 99.0})


def goal(at_s: float, epoch: int, step: int) -> Line:
    return line("goal", at_s, epoch=epoch, step=step, time_s=at_s - 2, totals={"validation_s": 0.0})


TWO_EPOCHS = [line("start", 0), *epoch_of(0, 50.0, 2, 2.0), *epoch_of(1, 95.0, 13, 4.0)]
REACHED = [*TWO_EPOCHS[:-1], goal(23.001, 1, 200), TWO_EPOCHS[-1], end(30)]


@pytest.fixture
def parsed(tmp_path: Path) -> Any:
    """Return the lines as the package's own parser reads them from a file, which must not find an
    error."""

    def parse(
        lines: Sequence[Line], result: Line = RESULT, environment: Line | None = None
    ) -> list[Any]:
        path = tmp_path / "mlperf.log"
        path.write_text("\n".join(mlperf_lines(result, environment or {}, lines)) + "\n")
        found, errors = parse_file(str(path), ruleset=RULES)
        assert errors == []
        assert len(found) == len(path.read_text().splitlines())
        return found

    return parse


def events(found: Sequence[Any]) -> list[tuple[str, float]]:
    """Return the keys after the hyper-parameters, with their seconds since the first raw line."""
    keys = [each.key for each in found]
    return [
        (each.key, (each.timestamp - START_MS) / 1e3) for each in found[keys.index("init_start") :]
    ]


def test_the_events_of_a_run_that_reaches_its_goal(parsed: Any) -> None:
    found = parsed(REACHED)
    assert events(found) == [
        ("init_start", 0), ("init_stop", 2), ("run_start", 2),
        ("block_start", 2), ("epoch_start", 2), ("epoch_stop", 10), ("block_stop", 10),
        ("eval_start", 10), ("eval_stop", 12), ("eval_accuracy", 12),
        ("block_start", 13), ("epoch_start", 13), ("epoch_stop", 21), ("block_stop", 21),
        ("eval_start", 21), ("eval_stop", 23), ("eval_accuracy", 23), ("tracked_stats", 23.001),
         ("run_stop", 23.001),
    ]  # fmt: skip
    by_key = {each.key: each.value for each in found}
    assert by_key["run_stop"]["metadata"] == {"status": constants.SUCCESS}
    assert by_key["eval_accuracy"] == {
        "value": 95.0,
        "metadata": {"epoch_num": 2, "step_num": 200, "metric": ACCURACY},
    }
    assert by_key["block_start"]["metadata"] == {"first_epoch_num": 2, "epoch_count": 1}
    assert by_key["epoch_stop"]["metadata"] == {"epoch_num": 2}
    assert by_key["tracked_stats"]["value"] == {"throughput": 500.0}


def test_only_values_that_are_known(parsed: Any) -> None:
    found = {each.key: each.value["value"] for each in parsed(REACHED[:1])}
    assert found == {
        "submission_benchmark": "mlbench_task1a", "submission_division": "open",
        "submission_platform": "1 x Ä (4 cores) with 2 x H", "cache_clear": False, "seed": 7,
        "opt_name": "power_sgd",
        "global_batch_size": 128, "opt_base_learning_rate": 0.25, "init_start": None,
    }  # fmt: skip
    environment = {"system": {"cpu": "B", "cores": 3}}
    found = {
        each.key: each.value["value"]
        for each in parsed(REACHED[:1], {"configuration": {}}, environment)
    }
    assert found == {"submission_platform": "B (3 cores)", "cache_clear": False, "init_start": None}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"dataset": "digits"}, "mlbench_task1a_digits"),
        ({"light": True}, "mlbench_task1a_light"),
        (
            {"goal": {"metric": ACCURACY, "threshold": None, "budget_s": 60.0}},
            "mlbench_task1a_after_60s",
        ),
        ({"task": None}, "mlbench_main"),
    ],
)
def test_the_benchmark_names_what_was_trained(parsed: Any, changes: Line, name: str) -> None:
    result = {**RESULT, "configuration": {**CONFIGURATION, **changes}}
    assert parsed(REACHED, result)[0].value["value"] == name


def test_a_batch_size_that_may_be_an_upper_bound_gives_no_global_batch_size(parsed: Any) -> None:
    options = {"--global-batch": 512, "batch-size": 64, "update-freq": 4, "lr": "fast"}
    for task, expected in (
        ("4b", {"gradient_accumulation_steps": 4, "global_batch_size": 512}),
        ("1a", None),
    ):
        result = {**RESULT, "configuration": {**CONFIGURATION, "task": task, "options": options}}
        keys = {
            each.key: each.value["value"]
            for each in parsed(REACHED[:1], result)
            if each.key not in COMMON
        }
        assert keys.pop("init_start", 0) is None
        assert keys == (expected or {"gradient_accumulation_steps": 4, "global_batch_size": 128})


def test_every_line_is_as_the_package_writes_it() -> None:
    # The key of the throughput in submissions to MLPerf, which the package does not list.
    known = {
        *(value for value in vars(constants).values() if isinstance(value, str)),
        "tracked_stats",
    }
    for text in mlperf_lines(RESULT, {}, REACHED):
        content = json.loads(text.removeprefix(":::MLLOG "))
        assert text == _encode_log(**content)
        assert content["key"] in known


def test_the_rules_of_mlperf_miss_only_values_that_a_run_does_not_know(parsed: Any) -> None:
    checker = mlp_compliance.make_checker("training", RULES, quiet=False, werror=True)
    checker.configured_checks(
        parsed(REACHED), Path(mlp_compliance.__file__).parent / f"training_{RULES}/common.yaml"
    )
    # These rules ask for the rules of the division, which in turn know only MLPerf's own
    # benchmarks.
    assert mlp_compliance.enqueued_configs.pop() == f"training_{RULES}/open_common.yaml"
    assert set(checker.overwritable) == {"submission_org", "train_samples", "eval_samples"}
    assert checker.not_overwritable == []


def test_a_goal_that_is_missed_or_absent_and_a_run_that_fails(parsed: Any) -> None:
    def status(lines: Sequence[Line], goal: Line | None = GOAL) -> str:
        result = {**RESULT, "configuration": {**CONFIGURATION, "goal": goal}, "goal": goal}
        last = parsed(lines, result)[-1]
        assert last.key == "run_stop"
        return str(last.value["metadata"]["status"])

    assert status([*TWO_EPOCHS, end(30)]) == constants.ABORTED
    assert status([*TWO_EPOCHS, end(30)], None) == constants.SUCCESS
    assert status([*TWO_EPOCHS, end(30, "failed")], None) == constants.ABORTED
    assert events(parsed([*TWO_EPOCHS, end(30)]))[-1] == ("run_stop", 30)


def test_a_killed_run_has_no_end(parsed: Any) -> None:
    assert [key for key, _ in events(parsed(TWO_EPOCHS[:2]))][-2:] == ["block_start", "epoch_start"]
    # The validation has ended, although no line follows. Nobody has counted its time.
    assert events(parsed(TWO_EPOCHS[:4]))[-5:] == [
        ("epoch_stop", 8), ("block_stop", 8), ("eval_start", 8), ("eval_stop", 12),
         ("eval_accuracy", 12),
    ]  # fmt: skip
    assert [key for key, _ in events(parsed(TWO_EPOCHS[:1]))] == ["init_start"]


def test_a_run_that_fails_before_its_clock_starts_only_begins_to_start(parsed: Any) -> None:
    failure = {
        key: value for key, value in end(50, "failed").items() if key not in ("time_s", "totals")
    }
    assert events(parsed([TWO_EPOCHS[0], failure])) == [("init_start", 0)]
    again = [TWO_EPOCHS[0], failure, line("start", 1, resumed=True, epoch=0, step=0), *REACHED[1:]]
    assert events(parsed(again)) == events(parsed(REACHED))
    lost = line("start", 40, resumed=True, epoch=3, step=500)
    assert events(parsed([*TWO_EPOCHS[:5], lost, failure]))[-2:] == [
        ("tracked_stats", 50),
        ("run_stop", 50),
    ]
    assert (
        len(events(parsed([*TWO_EPOCHS[:5], lost, failure])))
        == len(events(parsed(TWO_EPOCHS[:5]))) + 2
    )


def test_the_parts_of_an_epoch_are_blocks(parsed: Any) -> None:
    first = [line("start", 0), stat("train_loss", 4, 0, 50), stat(ACCURACY, 5, 0, 50, 95.0)]
    # 6 s are the time of both validations.
    found = events(parsed([*first, *epoch_of(0, 60.0, 2, 6.0), end(20)]))
    assert found[3:] == [
        ("block_start", 2), ("epoch_start", 2), ("block_stop", 4), ("eval_start", 4),
         ("eval_stop", 5),
        ("eval_accuracy", 5), ("block_start", 5), ("epoch_stop", 8), ("block_stop", 8),
         ("eval_start", 8),
        ("eval_stop", 12), ("eval_accuracy", 12), ("tracked_stats", 20), ("run_stop", 20),
    ]  # fmt: skip
    # The run ends at its goal, even if it continues.
    found = events(parsed([*first, goal(5, 0, 50), *epoch_of(0, 60.0, 2, 3.0), end(20)]))
    assert found[-4:] == [
        ("eval_accuracy", 5),
        ("epoch_stop", 5),
        ("tracked_stats", 5),
        ("run_stop", 5),
    ]


def test_a_goal_of_the_training_ends_the_block(parsed: Any) -> None:
    found = events(
        parsed(
            [
                line("start", 0),
                stat("train_loss", 6, 0, 9),
                goal(7, 0, 9),
                *epoch_of(0, 1.0, 10, 2.0),
            ]
        )
    )
    assert found[3:] == [
        ("block_start", 2), ("epoch_start", 2), ("epoch_stop", 7), ("block_stop", 7),
         ("tracked_stats", 7),
        ("run_stop", 7),
    ]  # fmt: skip


def test_a_resumed_run_starts_once_and_ends_once(parsed: Any) -> None:
    cut = [
        stat("train_loss", 15, 1, 130),
        end(16, "failed"),
        line("start", 40, resumed=True, epoch=1, step=100),
    ]
    again = stat("train_loss", 41, 1, 110)
    found = parsed([*TWO_EPOCHS[:5], *cut, again, *epoch_of(1, 95.0, 41, 4.0), end(60)])
    keys = events(found)
    assert [key for key, _ in keys].count("run_start") == 1
    assert [key for key, _ in keys].count("run_stop") == 1
    assert keys[10:19] == [
        ("block_start", 13), ("epoch_start", 13), ("epoch_stop", 15), ("block_stop", 15),
         ("block_start", 40),
        ("epoch_start", 40), ("epoch_stop", 47), ("block_stop", 47), ("eval_start", 47),
    ]  # fmt: skip
    stopped = [each.value["metadata"] for each in found if each.key == "epoch_stop"]
    assert stopped == [{"epoch_num": 1}, {"epoch_num": 2, "status": "aborted"}, {"epoch_num": 2}]


def test_a_validation_without_training_has_no_block(parsed: Any) -> None:
    resumed = [
        line("start", 40, resumed=True, epoch=1, step=100),
        stat(ACCURACY, 42, 1, 100),
        end(60),
    ]
    keys = [key for key, _ in events(parsed([*TWO_EPOCHS[:5], *resumed]))]
    assert keys.count("eval_start") == 2
    assert keys.count("block_start") == 1
    found = events(parsed([line("start", 0), stat(ACCURACY, 5, 0, 0), end(6)]))
    assert [key for key, _ in found[3:]] == [
        "eval_start", "eval_stop", "eval_accuracy", "tracked_stats", "run_stop",
    ]  # fmt: skip


def test_epochs_whose_end_the_script_does_not_report(parsed: Any) -> None:
    lines = [
        line("start", 0),
        stat("train_loss", 4, 0, 5),
        stat("train_loss", 8, 1, 10),
        stat(ACCURACY, 9, 1, 10),
    ]
    found = events(parsed([*lines, stat("train_loss", 12, 2, 15), end(20)]))
    assert found[3:] == [
        ("block_start", 2), ("epoch_start", 2), ("epoch_stop", 4), ("block_stop", 4),
        ("block_start", 4), ("epoch_start", 4), ("epoch_stop", 8), ("block_stop", 8),
        ("eval_start", 8), ("eval_stop", 9), ("eval_accuracy", 9),
        ("block_start", 9), ("epoch_start", 9), ("epoch_stop", 20), ("block_stop", 20),
        ("tracked_stats", 20), ("run_stop", 20),
    ]  # fmt: skip


def test_times_never_go_back(parsed: Any) -> None:
    lines = [line("start", 0), stat("train_loss", 20, 0, 5), stat("train_loss", 9, 1, 10), end(12)]
    times = [each.timestamp for each in parsed(lines)]
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_values_that_are_not_finite_and_other_ranks_are_left_out(parsed: Any) -> None:
    other = [{**each, "rank": 1} for each in REACHED]
    lines = [REACHED[0], *other, *epoch_of(0, None, 2, 2.0), end(20)]
    keys = [each.key for each in parsed(lines)]
    assert "eval_accuracy" not in keys
    assert keys.count("eval_stop") == 1
    assert mlperf_lines(RESULT, {}, other) == []
