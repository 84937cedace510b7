"""Runs on a real Slurm, which these tests start on this machine where its programs are."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlbench_master.engines import Job, JobStatus
from mlbench_master.engines.slurm.engine import SlurmEngine
from tests.master.engines.slurm_cluster import Cluster, cluster, why_not
from tests.master.engines.test_local_engine import create, lines, wait_state
from tests.master.helpers import server, wait_for

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

MEETING = """
import os, socket, sys, time
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 0:
    with socket.create_server(place) as server:
        for _ in range(size - 1):
            server.accept()[0].sendall(b"met")
else:
    deadline = time.monotonic() + 20
    while True:
        try:
            answer = socket.create_connection(place, timeout=60).recv(3).decode()
            print(answer, os.environ["SLURMD_NODENAME"])
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made
    assert made.processes() == []


@pytest.fixture
def engine(real: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmEngine]:
    monkeypatch.setenv("SLURM_CONF", str(real.conf))
    made = SlurmEngine(tmp_path / "runs", interval_s=0.3)
    yield made
    made.close()


def start(engine: SlurmEngine, run_id: int, command: str, **changes: Any) -> str:
    return engine.start(
        Job(**{"run_id": run_id, "name": "a", "num_workers": 1, "command": command, **changes})
    )


def end_of(engine: SlurmEngine, job_id: str) -> JobStatus:
    def look() -> JobStatus | None:
        status = engine.poll(job_id)
        return None if status.state in ("waiting", "running") else status

    found = wait_for(look, 60, "the end of the run")
    assert isinstance(found, JobStatus)
    return found


def wait_for_line(engine: SlurmEngine, job_id: str, text: str) -> None:
    wait_for(
        lambda: engine.poll(job_id) and text in [line["text"] for line in engine.logs(job_id).lines]
    )


def test_workers_on_several_nodes_meet_and_each_end_has_its_reason(
    real: Cluster, engine: SlurmEngine, tmp_path: Path
) -> None:
    """At the same time, because each job takes some seconds; the nodes have eight cores."""
    meeting = tmp_path / "meeting.py"
    meeting.write_text(MEETING)
    met = start(
        engine, 1, str(meeting), num_workers=3, options=("--nodes=3", "--ntasks-per-node=1")
    )
    failing = start(engine, 2, "sh -c 'sleep $0; exit $0' {rank}", num_workers=2)
    sleeping = "sh -c 'echo ready; sleep 100'"
    cancelled = start(engine, 3, sleeping, options=("--nodelist=n4",))
    stopped = start(engine, 4, sleeping, options=("--nodelist=n4",))
    waiting = start(engine, 5, sleeping, options=("--nodelist=n4",))
    for job_id in (cancelled, stopped):
        wait_for_line(engine, job_id, "ready")
    reason = wait_for(lambda: engine.poll(waiting).reason)
    assert reason in (
        "job 5 waits in Slurm's queue: Resources",
        "job 5 waits in Slurm's queue: Priority",
    )
    real.run("scancel", "3")
    engine.stop(stopped)
    engine.stop(waiting)
    assert real.run("squeue", "--noheader", "--jobs=4,5").strip() == ""
    assert end_of(engine, cancelled).reason == "job 3 of Slurm was cancelled, but not by MLBench"
    assert end_of(engine, met) == JobStatus(
        "finished", returncode=0, finished_at=engine.poll(met).finished_at
    )
    said = {
        line["rank"]: line["text"] for line in engine.logs(met).lines if line["stream"] == "stdout"
    }
    assert sorted(said) == [1, 2]
    assert all(text.startswith("met n") for text in said.values()) and len(set(said.values())) == 2
    failed = end_of(engine, failing)
    assert (failed.state, failed.reason, failed.returncode) == (
        "failed",
        "worker 1 failed: exit status 1",
        1,
    )


def test_slurm_ends_a_job_and_says_why(real: Cluster, engine: SlurmEngine) -> None:
    sleeping = "sh -c 'echo ready; sleep 100'"
    fails = start(
        engine, 1, sleeping, num_workers=2, options=("--nodelist=n1,n2", "--ntasks-per-node=1")
    )
    loses = start(engine, 2, sleeping, num_cpus=2, options=("--nodelist=n3",))
    for job_id in (fails, loses):
        wait_for_line(engine, job_id, "ready")
    urgent = start(engine, 3, "true", num_cpus=2, options=("--nodelist=n3", "--partition=urgent"))
    real.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    number = (engine.results(fails).parent / "slurm_job").read_text()
    assert end_of(engine, fails).reason == f"node n2 failed, which ended job {number} of Slurm"
    with contextlib.suppress(
        subprocess.CalledProcessError
    ):  # Slurm may have taken it back by itself
        real.run("scontrol", "update", "nodename=n2", "state=resume")
    assert end_of(engine, loses).reason.endswith(
        " of Slurm was preempted by a job of higher priority"
    )
    assert end_of(engine, urgent).state == "finished"
    # The processes of the nodes that continue are gone, too.
    wait_for(lambda: not [one for one in real.processes() if "sleep" in one.name()])


def test_the_master_is_killed_and_the_next_one_finds_its_job(
    real: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(real.conf))
    monkeypatch.setenv("MLBENCH_SLURM_INTERVAL_S", "0.3")
    data = tmp_path / "data"
    script = tmp_path / "worker.sh"
    script.write_text(
        f"echo before\nwhile [ ! -e {tmp_path / 'go'} ]; do sleep 0.1; done\necho after\n"
    )
    with server(data, "--engine", "slurm") as (base, master):
        run = create(httpx, f"sh {script}", workers=2, name="kept", base=base)
        wait_for(lambda: [x["text"] for x in lines(httpx, run["id"], base)].count("before") == 2)
        # A master that is killed before it has saved the places up to which it has read repeats
        # lines.
        wait_for(lambda: any('"1.out"' in path.read_text() for path in data.rglob("merged.json")))
        master.kill()
        master.wait()
    (tmp_path / "go").touch()
    with server(data, "--engine", "slurm") as (base, _):
        done = wait_state(httpx, run["id"], "finished", "failed", base=base)
        assert done["state"] == "finished", done
        said = sorted(
            (x["rank"], x["text"]) for x in lines(httpx, run["id"], base) if x["stream"] == "stdout"
        )
        assert said == [(0, "after"), (0, "before"), (1, "after"), (1, "before")]
