"""The end of an observed script: its traceback, its exit status, and the state of its result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.results.folder import verify_folder
from tests.observe.conftest import SCRIPTS, Runner
from tests.observe.test_scripts import both


def real(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python itself, in the folder of the scripts, with a path as a user types it."""
    return subprocess.run(
        [sys.executable, *words, "./ending.py", str(folder), "crash"],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )


def test_crash(tmp_path: Path) -> None:
    """Traceback, arguments and exit status are those that Python gives without observation."""
    plain = real([], tmp_path)
    argv = (tmp_path / "rank-0.json").read_text()
    output = tmp_path / "output"
    observed = real(["-m", "mlbench_core.observe", "--output", str(output)], tmp_path)
    assert (tmp_path / "rank-0.json").read_text() == argv
    assert observed.returncode == plain.returncode == 1
    assert plain.stderr.startswith("Traceback")
    assert observed.stderr.endswith(plain.stderr)
    assert "RuntimeError: out of luck" in (output / "ending" / "1" / "result.json").read_text()


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("crash", 1, "RuntimeError: out of luck"),
        ("sigterm", -15, "_Stopped: the process was stopped"),
        ("exit", 7, "SystemExit: 7"),
        ("message", 1, "SystemExit: no data"),
    ],
)
def test_exit_status_and_state(runner: Runner, end: str, status: int, reason: str) -> None:
    run = runner.run("ending", 2, arguments=[end])
    assert run.statuses == [status, status]
    assert run.result["run"]["state"] == "failed"
    assert run.result["run"]["reason"] == reason
    assert run.result["batches"] == 2


def test_lost_worker(runner: Runner) -> None:
    """The other worker ends with the error of its backward pass, and the result is consistent."""
    run = runner.run("losing", 2)
    assert run.statuses == [1, 1]
    # Its own error, and not one of the observation.
    assert "in backward" in run.logs[0]
    assert "observe/losses.py" not in run.logs[0]
    assert "Gloo" in run.logs[0] or "gloo" in run.logs[0]
    assert "out of luck" in run.logs[1]
    assert run.result["run"]["state"] == "failed"
    assert run.result["batches"] == 2
    assert verify_folder(run.folder) == []


def test_workers_that_the_script_starts(runner: Runner) -> None:
    run = both(runner, "spawning", 1)
    assert (
        "Processes that the script starts itself, as with mp.spawn, are not observed" in run.logs[0]
    )
    assert run.result["run"]["state"] == "failed"


@pytest.mark.parametrize("workers", [1, 2])
def test_limit_of_a_sweep(runner: Runner, workers: int) -> None:
    """All workers end after the same step, without their goal."""
    environment = {"MLBENCH_TRAIN_LIMIT_S": "0.5"}
    goal = ("--metric", "val_loss=never ([0-9.]+)", "--goal", "val_loss<=0")
    run = runner.run("endless", workers, options=goal, environment=environment)
    assert run.statuses == [0] * workers
    assert run.logs[0].count("its training took the seconds of MLBENCH_TRAIN_LIMIT_S") == 1
    result = run.result
    assert result["run"]["state"] == "finished"
    assert result["goal"]["reached"] is False
    assert result["times"]["slowest"]["train_s"] >= 0.5
    steps = {run.lines("end", rank)[0]["totals"]["batches"] for rank in range(workers)}
    assert len(steps) == 1
    assert verify_folder(run.folder) == []


def test_wrong_limit(runner: Runner) -> None:
    run = runner.run("endless", environment={"MLBENCH_TRAIN_LIMIT_S": "soon"})
    assert run.statuses == [2]
    assert "must be a positive number of seconds, not 'soon'" in run.logs[0]


def test_missing_script(runner: Runner) -> None:
    run = runner.run("missing")
    assert run.statuses == [2]
    assert "missing.py does not exist in" in run.logs[0]
    # Nothing is written for it.
    assert "steps" not in run.logs[0]
    assert not run.folder.exists()


def test_refused_script(runner: Runner) -> None:
    """The times of a script that ends before its first step are unknown, not 0."""
    run = runner.run("hand_written", 2, options=("--method", "bf16"))
    assert run.statuses == [2, 2]
    assert "not measured: everything: the script ended before its first step" in run.logs[0]
    assert "mp.spawn" not in run.logs[0]
    times = run.result["times"]["rank_0"]
    assert [times[f"{phase}_s"] for phase in ("compute", "communication", "data")] == [None] * 3
    assert RunRecord.from_result(run.result).total_s is None
    assert verify_folder(run.folder) == []


def test_sigterm_while_the_result_is_written(runner: Runner) -> None:
    """A launcher sends it as soon as another worker has failed, and the result is whole."""
    run = runner.run("ending", 1, arguments=["sigterm late"])
    assert run.statuses == [-15]
    assert run.result["run"]["reason"] == "RuntimeError: out of luck"
    assert run.logs[0].count("seconds of a step") == 1
    assert verify_folder(run.folder) == []
