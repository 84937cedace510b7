"""Every task by every way of starting its workers, with the command lines of version 3.0 among
them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlbench_core.tasks import get_task
from mlbench_master.engines import Job
from mlbench_master.engines.local.engine import LocalEngine
from tests.benchmarks import small_digits
from tests.helpers.forked import forked_python, run_script, run_scripts
from tests.helpers.processes import environment, free_port, wait_for

MPIRUN = shutil.which(
    "mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)
LIMIT_S = 200
SHORT = {
    "0": ("--elements", "100", "--repetitions", "3", "--dtypes", "float32"),
    "1a": ("--dataset", "digits", "--epochs", "1", "--model", "resnet8"),
    "2a": ("--dataset", "synthetic_dense", "--epochs", "1"),
}
"""Arguments that make a task small, without data that must be downloaded."""


def script(task: str) -> str:
    return str(get_task(task).script)


def roots(folder: Path) -> list[str]:
    """The folders as version 3.0 took them."""
    return [
        word
        for name in ("dataset", "checkpoint", "output")
        for word in (f"--root-{name}", str(folder / name))
    ]


@pytest.mark.parametrize("task", ["0", "1a"])
def test_the_command_lines_of_version_3(task: str, tmp_path: Path) -> None:
    old = ["--hosts", "127.0.0.1,127.0.0.1", "--backend", "gloo", "--light", *roots(tmp_path)]
    worker = [small_digits.__file__, script(task), "--run_id", "1", *old, *SHORT[task]]
    commands = [[*worker, "--rank", str(rank)] for rank in (0, 1)]
    for done in run_scripts(commands, LIMIT_S, MASTER_PORT=str(free_port())):
        assert done.returncode == 0, done.stdout + done.stderr


def test_torchrun(tmp_path: Path) -> None:
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
    ]
    # Its workers start from nothing here, and are forks in the other tests.
    done = run_script(
        [*torchrun, script("0"), "--run_id", "1", *roots(tmp_path), *SHORT["0"]],
        LIMIT_S,
        PYTHON_EXEC=sys.executable,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun here: install openmpi")
def test_mpirun_over_gloo(tmp_path: Path) -> None:  # over MPI: test_task0.py
    mpirun = [
        str(MPIRUN),
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-n",
        "2",
        forked_python(),
    ]
    worker = [script("0"), "--run_id", "1", "--backend", "gloo", *roots(tmp_path), *SHORT["0"]]
    variables = environment(MASTER_PORT=str(free_port()))
    done = subprocess.run(
        [*mpirun, *worker], env=variables, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_the_masters_engine(backend: str, tmp_path: Path) -> None:
    if backend == "mpi" and MPIRUN is None:
        pytest.skip("no mpirun here: install openmpi")
    engine = LocalEngine(tmp_path / "runs")
    command = get_task("0").command(*roots(tmp_path), *SHORT["0"])
    job = engine.start(Job(run_id=1, name="a", command=command, num_workers=2, backend=backend))
    try:
        wait_for(lambda: engine.poll(job).state != "running", LIMIT_S, "the run")
        assert engine.poll(job).state == "finished", engine.logs(job).lines
        assert any(
            f"all_reduce, {backend}, cpu, 2 workers" in line["text"]
            for line in engine.logs(job).lines
        )
    finally:
        engine.stop(job)


@pytest.mark.parametrize("task", SHORT)
def test_every_task_takes_the_options_of_version_3(task: str) -> None:
    done = run_script([script(task), "--help"], LIMIT_S)
    assert done.returncode == 0, done.stderr
    words = done.stdout.replace(",", " ").split()
    for option in (
        "--run_id",
        "--rank",
        "--hosts",
        "--backend",
        "--light",
        "--validation_only",
        "--gpu",
    ):
        assert option in words
    for option in ("--root-dataset", "--root-checkpoint", "--root-output", "--timeout"):
        assert option in words
