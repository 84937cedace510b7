"""Kill the master, the supervisor, a worker, the command, at random moments of a run of two
workers.

The normal suite tries two moments each. ``MLBENCH_KILLS=20 pytest tests/faults/test_kills.py``
tries twenty, and then each end must come within 10 s of the kill, or more in proportion to the load
of the machine."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.processes import Master, environment
from tests.master.helpers import processes_of, wait_for

MOMENTS = int(os.environ.get("MLBENCH_KILLS", "2"))
LIMIT_S = 10.0
RUN_S = 2.0
SEED = 20

# Posts 60 metrics in about 1 s. It writes each value to a file when the master has answered.
WORKER = """
import os, time
from mlbench_core.client.api import ApiClient
from mlbench_core.errors import MLBenchError
rank, run_id = os.environ["RANK"], os.environ["MLBENCH_RUN_ID"]
answered = open(f"{FOLDER}/answered-{run_id}-{rank}", "w")
with ApiClient(url=os.environ["MLBENCH_MASTER_URL"], max_workers=1) as client:
    for value in range(60):
        future = client.post_metric(run_id, f"loss @ {rank}", value)
        try:
            future.result(100)
            print(value, file=answered, flush=True)
        except MLBenchError:
            pass  # kept, and delivered later
        time.sleep(0.015)
print("done", rank)
"""


class Fault:
    """A master with runs that are killed.

    Args:
        folder: Folder for the master, the script and the results of the command.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.master = Master(folder / "data")
        self.script = folder / "worker.py"
        self.script.write_text(f"FOLDER = {str(folder)!r}\n{WORKER}")
        self.random = random.Random(SEED)
        self.count = 0
        self.killed_at = 0.0

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.master.url}/api/{path}", timeout=60).json()

    def start(self) -> int:
        """Start a run of two workers, and return its id."""
        self.count += 1
        body = {
            "name": f"run-{self.count}",
            "num_workers": 2,
            "num_cpus": 0.5,
            "command": str(self.script),
        }
        return int(httpx.post(f"{self.master.url}/api/runs/", json=body, timeout=60).json()["id"])

    def wait(self) -> None:
        """Wait for a random moment of the run, from its creation to some time after its end."""
        time.sleep(self.random.uniform(0, RUN_S))

    def kill(self, process: psutil.Process | subprocess.Popen[bytes]) -> None:
        self.killed_at = time.monotonic()
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
            process.wait(60)

    def processes(self, run_id: int) -> list[psutil.Process]:
        return processes_of(self.run_folder(run_id))

    def run_folder(self, run_id: int) -> Path:
        return self.master.folder / "runs" / str(run_id)

    def supervisors(self, run_id: int) -> list[psutil.Process]:
        # The run may end meanwhile, and its processes with it.
        return [process for process in self.processes(run_id) if is_supervisor(process)]

    def end(self, run_id: int) -> dict[str, Any]:
        """Wait for the end of a run, and check what holds for each end; return the run."""

        def ended() -> Any:
            run = self.get(f"runs/{run_id}/")
            return run if run["state"] in ("finished", "failed") else None

        run = dict(wait_for(ended, 120, f"the end of run {run_id}"))
        taken_s = time.monotonic() - self.killed_at
        assert self.processes(run_id) == []
        busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        assert MOMENTS <= 2 or taken_s < RUN_S + LIMIT_S * busy, f"the end took {taken_s:.1f} s"
        print(f"the end took {taken_s:.1f} s")
        for rank in (0, 1):
            stored = [
                int(entry["value"]) for entry in self.metrics(run_id).get(f"loss @ {rank}", [])
            ]
            assert max(Counter(stored).values(), default=1) == 1, f"rank {rank}: doubled"
            path = self.folder / f"answered-{run_id}-{rank}"
            assert path.exists() or run["state"] == "failed"
            # None, if the master was away for the second in which the worker posted.
            answered = [int(line) for line in path.read_text().split()] if path.exists() else []
            assert set(answered) <= set(stored), (
                f"rank {rank}: lost {sorted(set(answered) - set(stored))}"
            )
            assert stored == sorted(stored)
            if run["state"] == "finished":
                assert stored == list(range(60)), f"rank {rank}: {len(stored)} of 60 metrics"
        if run["state"] == "finished":
            assert (run["job_metadata"]["reason"], run["job_metadata"]["missing_metrics"]) == (
                "",
                "",
            )
        return run

    def metrics(self, run_id: int) -> dict[str, Any]:
        return dict(self.get(f"metrics/{run_id}/?metric_type=run"))


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fault]:
    made = Fault(tmp_path_factory.mktemp("kills"))
    made.master.start()
    yield made
    # A command that was killed may have created one more run at its last moment.
    states = ("finished", "failed")
    wait_for(lambda: all(run["state"] in states for run in made.get("runs/")), 120, "the last run")
    made.master.stop()
    assert processes_of(made.folder) == []


def test_the_master_is_killed(fault: Fault) -> None:
    for _ in range(MOMENTS):
        run_id = fault.start()
        fault.wait()
        assert fault.master.process is not None
        fault.kill(fault.master.process)
        fault.master.start()
        assert fault.end(run_id)["state"] == "finished"


def test_the_supervisor_is_killed(fault: Fault) -> None:
    for _ in range(MOMENTS):
        run_id = fault.start()
        fault.wait()
        supervisors = fault.supervisors(run_id)
        for process in supervisors:
            fault.kill(process)
        run = fault.end(run_id)
        # Without a supervisor the run has ended before, or has not started yet and goes on.
        if supervisors and not (fault.run_folder(run_id) / "status.json").exists():
            assert (run["state"], run["job_metadata"]["reason"].startswith("lost")) == (
                "failed",
                True,
            ), run
        else:
            assert run["state"] == "finished"


def test_a_worker_is_killed(fault: Fault) -> None:
    for number in range(MOMENTS):
        run_id = fault.start()
        fault.wait()
        rank = number % 2
        for process in fault.processes(run_id):
            if rank_of(process) == str(rank):
                fault.kill(process)
        run = fault.end(run_id)
        if run["state"] == "failed":
            assert run["job_metadata"]["reason"] == f"worker {rank} died: signal 9 (SIGKILL)"
        else:
            assert (run["state"], run["job_metadata"]["returncode"]) == ("finished", 0)


def is_supervisor(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "mlbench_master.engines.supervisor.supervise" in process.cmdline()
    return False


def rank_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.environ().get("RANK", "")
    return ""


def test_the_command_is_killed(fault: Fault) -> None:
    """Its runs go on; a killed command has either created its run or not."""
    command = [sys.executable, "-m", "mlbench_cli", "run", "--num-cpus", "0.5", "--wait"]
    for number in range(MOMENTS):
        options = ["--command", str(fault.script), "--output", str(fault.folder / "out")]
        with subprocess.Popen(
            [*command, f"by-command-{number}", "2", *options],
            env=environment(MLBENCH_MASTER_URL=fault.master.url),
            cwd=fault.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            time.sleep(fault.random.uniform(0, RUN_S + 1))
            fault.kill(process)
        for run in fault.get("runs/"):
            if run["name"] == f"by-command-{number}-2":
                assert fault.end(int(run["id"]))["state"] == "finished"
