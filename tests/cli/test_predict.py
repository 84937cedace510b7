"""``mlbench predict``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.results.helpers import write_run

SLOW = "10mbit,40ms"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One algorithm with 1 worker, and with 2 on one machine and on a slow network; the goal takes
    30 steps."""
    entry = {"op": "all_reduce", "group": 2, "calls": 30, "bytes": 30_000, "overlapped": False}
    write_run(tmp_path / "runs" / "1", workers=1, epoch_s=6.0, collectives=[])
    for seed in (1, 2, 3):
        write_run(
            tmp_path / "runs" / f"2-{seed}",
            workers=2,
            epoch_s=10.0 + seed,
            seed=seed,
            collectives=[entry],
        )
    write_run(
        tmp_path / "runs" / "2-slow", workers=2, epoch_s=15.0, network=SLOW, collectives=[entry]
    )
    return tmp_path / "runs"


def test_measured_and_predicted_figures_are_marked(folder: Path, call: Call) -> None:
    shown = call(
        "predict",
        str(folder),
        "--network",
        SLOW,
        "--workers",
        "1",
        "--workers",
        "2",
        "--workers",
        "1024",
    )
    lines = [line.split() for line in shown.stdout.splitlines()[1:]]
    assert [line[:4] for line in lines] == [
        ["centralized_sgd", SLOW, "1", "measured"],
        ["centralized_sgd", SLOW, "2", "measured"],
        ["centralized_sgd", SLOW, "1024", "predicted"],
    ]
    # 30 steps to the goal; rank 1 reached it 0.1 s later.
    assert lines[0][4:] == ["600.00", "0.00", "30", "18.0", "0.0"]
    assert lines[1][4:] == ["1,503.33", "550.00", "30", "45.1", "0.1"]
    first, *more = shown.stderr.splitlines()
    assert first == "centralized_sgd: samples to the goal as measured with 2 workers"
    # The runs waited far longer than an all-reduce of a kilobyte takes, and 1024 workers were never
    # calibrated.
    text = " ".join(more)
    assert f"{SLOW}, 1024 workers" in text
    assert "not within the range of calibration" in text
    assert "not explained by its network" in text


def test_a_prediction_is_the_median_over_repeats(folder: Path, call: Call) -> None:
    arguments = (
        "--network",
        "mobile-lte",
        "--workers",
        "2",
        "--json",
        "--machine",
        "gcp-n1-standard-4",
    )
    (row,) = json.loads(call("predict", str(folder), *arguments).stdout)
    assert row["figures"] == "predicted"
    assert row["steps"] == 30
    # The compute time is that of one worker.
    assert row["step_s"] == pytest.approx(0.6 + row["exposed_s"], rel=0.3)
    assert row["time_to_goal_s"] == pytest.approx(30 * row["step_s"])
    assert row["price"] == pytest.approx(row["time_to_goal_s"] / 3600 * 2 * 0.19, rel=0.01)
    more = ("--network", "mobile-lte", "--workers", "8", "--critical-workers", "4", "--json")
    (limited,) = json.loads(call("predict", str(folder), *more).stdout)
    assert limited["steps"] == 15


def test_predicted_times_have_a_range_and_measured_ones_do_not(folder: Path, call: Call) -> None:
    arguments = (
        "predict",
        str(folder),
        "--network",
        SLOW,
        "--network",
        "datacenter",
        "--workers",
        "2",
    )
    measured, predicted = json.loads(call(*arguments, "--json").stdout)
    assert (measured["figures"], predicted["figures"]) == ("measured", "predicted")
    assert measured["step_range_s"] is measured["time_to_goal_range_s"] is None
    # The mean error in datacenter with 2 workers is 5.5 %.
    for name in ("step", "time_to_goal"):
        expected = [predicted[f"{name}_s"] / 1.055, predicted[f"{name}_s"] / 0.945]
        assert predicted[f"{name}_range_s"] == pytest.approx(expected)
    _, first, second = call(*arguments).stdout.splitlines()
    low, high = predicted["step_range_s"]
    assert f"{1e3 * predicted['step_s']:,.2f} ({1e3 * low:,.2f} to {1e3 * high:,.2f})" in second
    low, high = predicted["time_to_goal_range_s"]
    assert f"{predicted['time_to_goal_s']:.1f} ({low:.1f} to {high:.1f})" in second
    assert "(" not in first


def test_waiting_for_other_load_is_not_added(tmp_path: Path, call: Call) -> None:
    entry = {"op": "all_reduce", "group": 2, "calls": 30, "bytes": 30_000, "overlapped": False}
    # Of each step of a second, a third is waiting, with a millisecond of work in it.
    for name, cpu_share in (("new", 0.001), ("old", None)):
        write_run(tmp_path / name / "run", collectives=[entry], cpu_share=cpu_share)
    arguments = ("--network", "datacenter", "--workers", "2", "--json")
    (new,) = json.loads(call("predict", str(tmp_path / "new"), *arguments).stdout)
    (old,) = json.loads(call("predict", str(tmp_path / "old"), *arguments).stdout)
    assert new["exposed_s"] < 0.003
    assert old["exposed_s"] > 0.3
    assert "is not added" in new["caveats"][0]
    assert "is not explained by its network" in old["caveats"][0]


def test_a_run_that_cannot_be_predicted_is_named(tmp_path: Path, call: Call) -> None:
    write_run(tmp_path / "ddp", workers=2, algorithm="ddp")
    shown = call("predict", str(tmp_path), "--network", "lan-1g", "--workers", "4", code=1)
    assert "run ddp did not record the collectives of several workers" in shown.stderr


def test_a_configuration_without_a_prediction_has_an_empty_line(folder: Path, call: Call) -> None:
    write_run(folder / "ddp", workers=2, algorithm="ddp")
    shown = call("predict", str(folder), "--network", "lan-1g", "--workers", "4")
    lines = sorted(line.split()[:5] for line in shown.stdout.splitlines()[1:])
    assert lines[1] == ["ddp", "1gbit", "4", "none", "-"]
    assert lines[0][:4] == ["centralized_sgd", "1gbit", "4", "predicted"]
    assert "ddp: run ddp did not record the collectives of several workers" in shown.stderr


def test_bytes_are_those_until_the_goal(tmp_path: Path, call: Call) -> None:
    entry = {"op": "all_reduce", "group": 2, "calls": 40, "bytes": 40_000, "overlapped": False}
    write_run(tmp_path / "longer", epochs=4, network=SLOW, collectives=[entry])
    write_run(
        tmp_path / "missed", epochs=2, network=SLOW, collectives=[entry], algorithm="power_sgd"
    )
    shown = call(
        "predict",
        str(tmp_path),
        "--network",
        SLOW,
        "--network",
        "lan-1g",
        "--workers",
        "2",
        "--json",
    )
    rows = {(row["run"], row["figures"]): row["bytes_sent"] for row in json.loads(shown.stdout)}
    # The goal takes 30 steps of 2 workers, and each sends 1000 bytes in a step.
    assert rows == {
        ("centralized_sgd", "measured"): 60_000,
        ("centralized_sgd", "predicted"): 60_000,
        ("power_sgd", "measured"): None,
        ("power_sgd", "predicted"): None,
    }


def test_a_run_that_cannot_be_used_is_left_out_with_one_line(folder: Path, call: Call) -> None:
    arguments = ("predict", str(folder), "--network", "lan-1g", "--workers", "4", "--json")
    good = json.loads(call(*arguments).stdout)
    damaged = write_run(folder / "damaged", workers=2)
    (damaged / "result.json").write_text("{")
    without_lines = write_run(folder / "without-lines", workers=2)
    (without_lines / "metrics.jsonl").unlink()
    killed = write_run(folder / "killed", workers=2)
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    (killed / "metrics.jsonl").write_text(
        "\n".join(line for line in lines if '"end"' not in line) + "\n"
    )
    (killed / "result.json").unlink()
    shown = call(*arguments)
    assert json.loads(shown.stdout) == good
    left_out = [
        line for line in shown.stderr.splitlines() if line.endswith("left out of the prediction")
    ]
    assert [sum(name in line for line in left_out) for name in ("damaged", "without-lines")] == [
        1,
        1,
    ]
    # The same run alone is an error that names it.
    assert "damaged" in call("predict", str(damaged), *arguments[2:], code=1).stderr


def test_scripts_with_different_optimizers_have_different_names(folder: Path, call: Call) -> None:
    for optimizer in ("muon", None):
        options = {} if optimizer is None else {"optimizer": optimizer}
        names = {"task": None, "program": "train.py", "algorithm": "as-is", "options": options}
        write_run(folder / str(optimizer), workers=2, **names)
    shown = call("predict", str(folder), "--network", "lan-1g", "--workers", "2")
    for name in ("train.py, as-is, muon  ", "train.py, as-is  "):
        assert f"\n{name}" in shown.stdout
