"""Commands while the master runs and cannot answer, or can answer and cannot write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from mlbench_core.client.masters import MasterRecord, read_record, remember_master, start_mark
from tests.faults.helpers import full
from tests.master.helpers import processes_of, wait_for


def mlbench(
    *arguments: str, code: int = 0, patience_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    # The time in which the master must answer, which is always over if it is stopped.
    setup = f"import mlbench_cli._embedded as e; e._ANSWER_S = {patience_s}; "
    done = subprocess.run(
        [sys.executable, "-c", setup + "from mlbench_cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder; a master that a test has started there is ended."""
    for name in ("MLBENCH_MASTER_URL", "MLBENCH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    record = read_record()
    if record is not None and record.is_alive():
        os.kill(record.pid, signal.SIGKILL)
    for process in processes_of(tmp_path):
        # It may have ended because of the one before.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


# A stopped master never answers, so nobody need wait long for it.
impatient = partial(mlbench, patience_s=0.5)


def start(name: str = "a", command: str = "sleep 1000") -> MasterRecord:
    mlbench("run", name, "1", "--command", command)
    record = read_record()
    assert record is not None
    wait_for(lambda: "started" in mlbench("status", f"{name}-1").stdout, 60)
    return record


def test_a_stopped_master_is_named_and_its_runs_are_stopped_without_it(home: Path) -> None:
    record = start(
        command=f"{sys.executable} -uc \"print('hello'); import time; time.sleep(1000)\""
    )
    wait_for(lambda: "hello" in mlbench("logs", "a-1").stdout, 60)
    os.kill(record.pid, signal.SIGSTOP)
    for arguments in (
        ("status",),
        ("run", "b", "1", "--command", "true"),
        ("download", "a-1"),
        ("master",),
    ):
        error = impatient(*arguments, code=1).stderr
        assert (
            f"the master at {record.url} (process {record.pid}) "
            "does not answer: its process is stopped"
        ) in error
        assert "no master is running" not in error
    logs = impatient("logs", "a-1", "--rank", "0")
    assert "[0] hello" in logs.stdout and "reading its files instead" in logs.stderr
    assert "[0] hello" in impatient("logs", "a-1", "--dashboard-url", record.url).stdout
    assert json.loads(impatient("env", "--json").stdout)["mlbench"]["master"]["problem"].startswith(
        "the master at"
    )
    assert processes_of(home)
    assert "stopped a-1" in impatient("stop", "a-1").stdout
    assert not processes_of(home)
    assert "no run 'c-1' in " in impatient("stop", "c-1", code=1).stderr
    os.kill(record.pid, signal.SIGCONT)
    wait_for(
        lambda: (
            "started" not in mlbench("status", "a-1").stdout.split("state", 1)[1].splitlines()[0]
        ),
        60,
    )
    assert "stopped by a user, while the master did not answer" in mlbench("logs", "a-1").stdout
    os.kill(record.pid, signal.SIGSTOP)
    assert "stopped the master" in impatient("master", "--stop").stdout
    assert not record.is_alive()
    assert "no master is running" in mlbench("status", code=1).stderr


def test_a_master_whose_disk_is_full_is_used_and_stopped(
    small_disk: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(small_disk / "home"))
    record = start()
    with full(small_disk):
        assert "a-1" in mlbench("status").stdout
        assert (
            "No space" in (error := mlbench("run", "b", "1", "--command", "true", code=1).stderr)
            or "full" in error
        )
        mlbench("logs", "a-1")
        assert "stopped a-1" in mlbench("stop", "a-1").stdout
        assert not processes_of(small_disk)
    wait_for(lambda: "stopped by a user" in mlbench("status", "a-1").stdout, 60)
    with full(small_disk):
        assert "stopped the master" in mlbench("master", "--stop").stdout
    assert not record.is_alive()


def test_a_replaced_record_ends_no_other_process(home: Path) -> None:
    record = start()
    with subprocess.Popen(["sleep", "1000"]) as innocent:
        try:
            mark = start_mark(innocent.pid)
            assert mark is not None
            path = home / "master.json"
            path.write_text(json.dumps(record._replace(pid=innocent.pid, started=mark)._asdict()))
            assert (
                f"process {innocent.pid} does not listen there"
                in mlbench("master", "--stop", code=1).stderr
            )
            assert innocent.poll() is None and psutil.pid_exists(record.pid)
            os.kill(record.pid, signal.SIGSTOP)
            assert "no embedded master" in impatient("master", "--stop", code=1).stderr
            assert innocent.poll() is None
        finally:
            os.kill(record.pid, signal.SIGCONT)
            innocent.kill()
    remember_master(record.url, record.pid, record.token, record.key, record.folder)
    assert "stopped the master" in mlbench("master", "--stop").stdout
