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
    assert first == "all predicted rows: samples to the goal as measured with 2 workers"
    # The runs waited far longer than an all-reduce of a kilobyte takes, and 1024 workers were never
    # validated.
    text = " ".join(more)
    assert "all predicted rows: the model was not validated with more than 8 workers" in text
    assert "not explained by its network" in text
    # Earlier versions did not record the processor time. So there is no check, and no second table.
    assert "not checked with the measured runs: they have no processor time" in text


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
    # The mean error in datacenter with 2 workers is 7.3 %.
    for name in ("step", "time_to_goal"):
        expected = [predicted[f"{name}_s"] / 1.073, predicted[f"{name}_s"] / 0.927]
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
    assert "is not explained by its network" in old["caveats"][0]
    # The failed check has this waiting, so there is no second sentence on it.
    (check,) = new["checks"]
    assert "probably other programs used the machine" in check["problem"]
    assert new["caveats"] == [] and old["checks"] == []


def busy(folder: Path) -> None:
    """Two methods on a busy machine: steps of a second with 0.501 s of processor time."""
    entry = {"op": "all_reduce", "group": 2, "calls": 30, "bytes": 30_000, "overlapped": False}
    for name in ("first", "second"):
        write_run(
            folder / name, algorithm=name, cpu_share=0.001, network="1gbit", collectives=[entry]
        )


def test_the_model_is_checked_with_the_measured_runs(tmp_path: Path, call: Call) -> None:
    busy(tmp_path)
    arguments = ("predict", str(tmp_path), "--network", "lan-1g", "--workers", "4")
    first, second = json.loads(call(*arguments, "--json").stdout)
    (check,) = first["checks"]
    # Rank 1 reached the goal after 30 steps 0.1 s later.
    measured_s = 30.1 / 30
    assert check["measured_s"] == pytest.approx(measured_s)
    assert check["model_s"] == pytest.approx(0.501, rel=0.01)
    assert (check["network"], check["workers"], check["holds"]) == ("lan-1g", 2, False)
    # The range of the mean error, 21.5 %, is widened to the factor of the check.
    for name in ("step", "time_to_goal"):
        seconds, (low_s, high_s) = first[f"{name}_s"], first[f"{name}_range_s"]
        assert low_s == pytest.approx(seconds / 1.215)
        assert high_s == pytest.approx(seconds * measured_s / check["model_s"])
    assert second["checks"] == first["checks"]
    shown = call(*arguments)
    lines = shown.stdout.splitlines()
    assert lines[3] == ""
    assert lines[4].split() == [
        *("RUN", "NETWORK", "WORKERS", "MEASURED", "(MS)", "MODEL", "(MS)", "CHECK"),
    ]
    low_s, high_s = check["model_range_s"]
    model = f"{1e3 * check['model_s']:.2f} ({1e3 * low_s:.2f} to {1e3 * high_s:.2f})"
    for line, name in zip(lines[5:], ("first", "second"), strict=True):
        assert line.split() == [name, "lan-1g", "2", "1,003.33", *model.split(), "failed"]
    text = "the measured step of 2 workers on lan-1g is not in the range of the model"
    text += f": {check['problem']}"
    assert shown.stderr.splitlines()[-3:-1] == [f"first: {text}", f"second: {text}"]


def test_configurations_of_one_name_have_a_check_each(tmp_path: Path, call: Call) -> None:
    entry = {"op": "all_reduce", "group": 2, "calls": 30, "bytes": 30_000, "overlapped": False}
    for size, cpu_share in ((32, 0.36), (64, 0.001)):
        write_run(
            tmp_path / str(size),
            options={"batch_size": size},
            cpu_share=cpu_share,
            network="1gbit,0.5ms",
            collectives=[entry],
        )
    shown = call("predict", str(tmp_path), "--network", "lan-1g", "--workers", "4").stdout
    assert [line.split()[-1] for line in shown.splitlines()[-2:]] == ["passed", "failed"]


def test_a_check_that_passes_leaves_the_range(tmp_path: Path, call: Call) -> None:
    entry = {"op": "all_reduce", "group": 2, "calls": 30, "bytes": 30_000, "overlapped": False}
    # 0.5 s of computation, and 0.36 s of work while waiting.
    write_run(tmp_path / "run", cpu_share=0.36, network="1gbit,0.5ms", collectives=[entry])
    arguments = ("predict", str(tmp_path), "--network", "lan-1g", "--workers", "4")
    (row,) = json.loads(call(*arguments, "--json").stdout)
    assert [check["holds"] for check in row["checks"]] == [True]
    assert row["step_range_s"] == pytest.approx([row["step_s"] / 1.215, row["step_s"] / 0.785])
    shown = call(*arguments)
    assert shown.stdout.splitlines()[-1].endswith("  passed")
    assert "not in the range" not in shown.stderr and "wider" not in shown.stderr


def test_equal_notes_are_one_line_with_their_rows(tmp_path: Path, call: Call) -> None:
    busy(tmp_path)
    networks = ("--network", "lan-1g", "--network", "200mbit,5ms")
    shown = call("predict", str(tmp_path), *networks, "--workers", "2", "--workers", "16")
    notes = shown.stderr.splitlines()
    # Rows of 2 workers in lan-1g are measured.
    assert notes[:4] == [
        "with 16 workers: samples to the goal as measured with 2 workers",
        "with 2 workers: steps as measured with 2 workers",
        "with 16 workers: the model was not validated with more than 8 workers, so the range is "
        "that of its largest error",
        "with 2 workers: the model was not validated on such networks, so the range is that of its "
        "largest error with as many workers",
    ]
    assert len(notes) == len(set(notes))
    # No row has another name of the network than the typed one.
    assert "1gbit" not in shown.stdout + shown.stderr


def test_a_network_has_the_name_that_was_typed(folder: Path, call: Call) -> None:
    arguments = ("--network", "1gbit", "--network", "datacenter", "--workers", "4", "--json")
    rows = json.loads(call("predict", str(folder), *arguments).stdout)
    assert [row["network"] for row in rows] == ["1gbit", "datacenter"]


def test_a_run_that_cannot_be_predicted_is_named(tmp_path: Path, call: Call) -> None:
    write_run(tmp_path / "ddp", workers=2, algorithm="ddp")
    shown = call("predict", str(tmp_path), "--network", "lan-1g", "--workers", "4", code=1)
    assert "run ddp did not record the collectives of several workers" in shown.stderr


def test_a_configuration_without_a_prediction_has_an_empty_line(folder: Path, call: Call) -> None:
    write_run(folder / "ddp", workers=2, algorithm="ddp")
    shown = call("predict", str(folder), "--network", "lan-1g", "--workers", "4")
    lines = sorted(line.split()[:5] for line in shown.stdout.splitlines()[1:])
    assert lines[1] == ["ddp", "lan-1g", "4", "none", "-"]
    assert lines[0][:4] == ["centralized_sgd", "lan-1g", "4", "predicted"]
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
