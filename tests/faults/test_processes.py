"""Processes that die, clocks that are set, files that are damaged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from mlbench_master.database.store import Run, Store
from mlbench_master.engines import Job
from mlbench_master.engines.local import engine as local_engine
from mlbench_master.engines.local.engine import LocalEngine
from mlbench_master.events import EventBus
from mlbench_master.processes import start_mark
from mlbench_master.runs.scheduler import Scheduler
from tests.faults.helpers import add_run
from tests.master.helpers import IdleEngine, TestClient, processes_of, server, wait_for


def test_a_clock_that_is_set_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux computes the time of the boot from the clock, and a process's start time from that."""
    pslinux = pytest.importorskip("psutil._pslinux", reason="needs Linux")
    children: dict[object, subprocess.Popen[bytes]] = {}
    monkeypatch.setattr(local_engine, "_children", children)
    engine = LocalEngine(tmp_path)
    job = engine.start(Job(run_id=1, name="a", command="sleep 100", num_workers=1))
    wait_for(lambda: len(processes_of(tmp_path)) == 2)
    (supervisor,) = children.values()
    children.clear()  # another master is not the parent of the supervisor
    boot_time = pslinux.boot_time()
    for step_s in (-2, 1, 3600):
        monkeypatch.setattr(pslinux, "boot_time", lambda step_s=step_s: boot_time + step_s)
        assert engine.poll(job).state == "running"
    engine.stop(job)
    supervisor.wait()
    assert processes_of(tmp_path) == []


def test_another_process_with_the_same_id_is_not_the_supervisor(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path)
    (tmp_path / "1").mkdir()
    own = {"pid": os.getpid(), "started": "another-boot-12345"}
    (tmp_path / "1" / "supervisor.json").write_text(json.dumps(own))
    assert engine.poll("local-1").state == "lost"
    engine.stop("local-1")  # this process goes on
    # A worker can write into the file, which only a later master reads: this one has the supervisor
    # as its child.
    for damaged in ("[]", "{", '{"pid": "own"}', f'{{"pid": {os.getpid()}, "started": null}}'):
        (tmp_path / "1" / "supervisor.json").write_text(damaged)
        assert engine.poll("local-1").state == "lost"
        engine.stop("local-1")


def test_a_worker_that_replaces_the_state_of_its_run_ends_no_other_process(tmp_path: Path) -> None:
    """The next master, which reads the file, still finds the supervisor."""
    engine = LocalEngine(tmp_path)
    job = engine.start(Job(run_id=1, name="a", command="sleep 1000", num_workers=1))
    wait_for(lambda: len(processes_of(tmp_path)) == 2)
    with subprocess.Popen(["sleep", "1000"]) as innocent:
        try:
            replaced = {"pid": innocent.pid, "started": start_mark(innocent.pid)}
            (tmp_path / "1" / "supervisor.json").write_text(json.dumps(replaced))
            supervisor = local_engine._children.pop(tmp_path / "1")
            assert engine.poll(job).state == "running"
            engine.stop(job)
            assert innocent.poll() is None
        finally:
            innocent.kill()
    supervisor.wait(60)
    assert processes_of(tmp_path) == []


def test_a_run_has_not_ended_before_its_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes would still be there, and its port in use, when the next run starts."""
    engine = LocalEngine(tmp_path)
    job = engine.start(Job(run_id=1, name="a", command="sleep 100", num_workers=1))
    wait_for(lambda: len(processes_of(tmp_path)) == 2)
    (tmp_path / "1" / "status.json").write_text('{"returncode": 0, "reason": "", "finished_at": 0}')
    assert engine.poll(job).state == "running"
    engine.stop(job)
    assert processes_of(tmp_path) == []


def test_a_run_that_no_master_could_start_starts_again(tmp_path: Path) -> None:
    """The master died after it recorded the start, and before the supervisor lived."""
    store = Store(f"sqlite:///{tmp_path / 'master.db'}")
    engine = LocalEngine(tmp_path / "runs")
    places = {"died": engine.place, "elsewhere": "machine-b:/runs"}
    for name, place in places.items():
        run = add_run(store, name)
        store.update_run(
            run.id, {"started_at_place": place}, state="started", job_id=f"local-{run.id}"
        )
    scheduler = Scheduler(store, engine, EventBus(), {})
    scheduler.start()
    try:
        wait_for(lambda: not store.runs("initialized", "started"))
    finally:
        scheduler.close()
    died, elsewhere = store.runs()
    assert died.state == "finished"
    # A run of a master with another folder may still go on there.
    assert (elsewhere.state, elsewhere.metadata_dict()["reason"]) == (
        "failed",
        "lost: another master started it in machine-b:/runs",
    )


class SlowEngine(IdleEngine):
    """Needs time to stop the first run, whose workers ignore SIGTERM."""

    capacity = 9.0  # type: ignore[assignment]

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.may_end = threading.Event()

    def stop(self, job_id: str) -> None:
        if job_id == "idle-1":
            self.stopping.set()
            assert self.may_end.wait(200)


def test_a_run_that_takes_long_to_stop_delays_no_other(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'master.db'}")
    engine = SlowEngine()
    scheduler = Scheduler(store, engine, EventBus(), {})
    for name in ("first", "second"):
        add_run(store, name)
    scheduler.tick()
    ended: list[Run | None] = []
    slow = threading.Thread(target=lambda: ended.append(scheduler.stop_run(1)))
    slow.start()
    try:
        assert engine.stopping.wait(60)
        add_run(store, "third")
        quick = threading.Thread(target=lambda: (scheduler.tick(), scheduler.stop_run(2)))  # type: ignore[func-returns-value]
        quick.start()
        quick.join(60)
        assert [run.state for run in store.runs()] == ["started", "failed", "started"]
    finally:
        engine.may_end.set()
        slow.join(60)
        quick.join(60)
    assert ended[0] is not None and ended[0].metadata_dict()["reason"] == "stopped by a user"


def test_an_interrupt_ends_a_master_in_the_background(tmp_path: Path) -> None:
    """A shell starts a process in the background so that it ignores the interrupts of the
    terminal."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with server(tmp_path / "data") as (_, process):
            signal.signal(signal.SIGINT, before)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
    finally:
        signal.signal(signal.SIGINT, before)


DAMAGE = {
    "log": (
        "pathlib.Path('../log.jsonl').write_text('5\\n{\"rank\": 0}\\n' + '[' * 100_000 + "
        "'\\nnull\\n')"
    ),
    # Again if a file of the supervisor came in between.
    "folder": (
        "folder = pathlib.Path('..').resolve()\nwhile folder.exists(): "
        "shutil.rmtree(folder, ignore_errors=True)"
    ),
    "status": "pathlib.Path('../status.json').mkdir()",
    "supervisor": (
        "pathlib.Path('../supervisor.json').write_text('[]'); "
        "pathlib.Path('../status.json').write_text('5')"
    ),
    "spool": "pathlib.Path('../spool').write_text('no folder')",
}


def test_a_run_that_damages_its_files_harms_no_other(client: TestClient, tmp_path: Path) -> None:
    def get(path: str) -> Any:
        answer = client.get(path)
        assert answer.status_code == 200, (path, answer.text)
        return answer

    def start(name: str, command: str) -> int:
        body = {"name": name, "num_workers": 1, "num_cpus": 0.1, "command": command}
        return int(client.post("/api/runs/", json=body).json()["id"])

    def check(run_id: int) -> str:
        for path in (
            f"/api/runs/{run_id}/",
            f"/api/runs/{run_id}/logs/",
            f"/runs/{run_id}/",
            "/api/runs/",
            "/",
        ):
            get(path)
        return str(get(f"/api/runs/{run_id}/").json()["state"])

    runs = {}
    for name, statement in DAMAGE.items():
        script = tmp_path / f"{name}.py"
        script.write_text(
            f"import pathlib, shutil, time\n{statement}\nprint('damaged', "
            "flush=True)\ntime.sleep(1)\n"
        )
        runs[name] = start(name, str(script))
    other = start("other", "sleep 2")
    states: dict[str, str] = {}

    def ended() -> bool:
        states.update({name: check(run_id) for name, run_id in runs.items()})
        return not {"initialized", "started"} & set(states.values())

    wait_for(ended)
    assert states == {
        "log": "finished",
        "folder": "failed",
        "status": "failed",
        "supervisor": "finished",
        "spool": "finished",
    }
    for name, reason in (("folder", "left no status"), ("status", "status.json is damaged")):
        assert reason in get(f"/api/runs/{runs[name]}/").json()["job_metadata"]["reason"]
    wait_for(lambda: check(other) == "finished")
    assert [client.delete(f"/api/runs/{run_id}/").status_code for run_id in runs.values()] == [
        204
    ] * len(runs)
    assert processes_of(tmp_path) == []
