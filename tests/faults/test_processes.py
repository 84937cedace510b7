"""Processes that die, clocks that are set, files that are damaged."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from mlbench_master.launchers import Job
from mlbench_master.launchers import local as local_launcher
from mlbench_master.launchers.local import LocalLauncher
from tests.master.helpers import processes_of, wait_for


def test_a_clock_that_is_set_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux computes the time of the boot from the clock, and a process's start time from that."""
    pslinux = pytest.importorskip("psutil._pslinux", reason="needs Linux")
    children: dict[object, subprocess.Popen[bytes]] = {}
    monkeypatch.setattr(local_launcher, "_children", children)
    launcher = LocalLauncher(tmp_path)
    job = launcher.start(Job(run_id=1, name="a", command="sleep 100", num_workers=1))
    wait_for(lambda: len(processes_of(tmp_path)) == 2)
    (supervisor,) = children.values()
    children.clear()  # another master is not the parent of the supervisor
    boot_time = pslinux.boot_time()
    for step_s in (-2, 1, 3600):
        monkeypatch.setattr(pslinux, "boot_time", lambda step_s=step_s: boot_time + step_s)
        assert launcher.poll(job).state == "running"
    launcher.stop(job)
    supervisor.wait()
    assert processes_of(tmp_path) == []


def test_another_process_with_the_same_id_is_not_the_supervisor(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path)
    (tmp_path / "1").mkdir()
    own = {"pid": os.getpid(), "started": "another-boot-12345"}
    (tmp_path / "1" / "supervisor.json").write_text(json.dumps(own))
    assert launcher.poll("local-1").state == "lost"
    launcher.stop("local-1")  # this process goes on


def test_a_run_has_not_ended_before_its_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes would still be there, and its port in use, when the next run starts."""
    launcher = LocalLauncher(tmp_path)
    job = launcher.start(Job(run_id=1, name="a", command="sleep 100", num_workers=1))
    wait_for(lambda: len(processes_of(tmp_path)) == 2)
    (tmp_path / "1" / "status.json").write_text('{"returncode": 0, "reason": "", "finished_at": 0}')
    assert launcher.poll(job).state == "running"
    launcher.stop(job)
    assert processes_of(tmp_path) == []


def test_a_run_that_no_master_could_start_starts_again(tmp_path: Path) -> None:
    """The master died after it recorded the start, and before the supervisor lived."""
    launcher = LocalLauncher(tmp_path)
    assert launcher.poll("local-7").state == "unstarted"
