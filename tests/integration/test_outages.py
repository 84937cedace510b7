"""What must survive: a master that goes away in mid-run, a worker that is killed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil

from tests.helpers.processes import Master, post_json, running_master, wait_for

WORKER = """
import sys, time
from mlbench_core.utils import LogMetrics
run_id, rank = sys.argv[1], int(sys.argv[2])
gaps = []
for step in range(40):
    start = time.perf_counter()
    LogMetrics.log(run_id, rank, 0, "step", step)
    gaps.append(time.perf_counter() - start)
    print("step", step, flush=True)
    time.sleep(0.1)
LogMetrics.log(run_id, rank, 0, "longest_call_s", max(gaps))
assert LogMetrics.flush(100)
"""

SLEEPER = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"


def start_run(
    master: Master, script: Path, workers: int, arguments: str = "{run_id} {rank}"
) -> int:
    run = post_json(
        f"{master.url}/api/runs/",
        {
            "name": "test-run",
            "num_workers": workers,
            "num_cpus": 1,
            "max_bandwidth": 1000,
            "image_name": "custom_image",
            "custom_image_command": f"python {script} {arguments}",
            "backend": "gloo",
        },
    )
    return int(run["id"])


def test_master_killed_in_mid_run_loses_and_doubles_nothing(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with running_master(tmp_path / "master") as master:
        run_id = start_run(master, script, 2)
        wait_for(
            lambda: len(master.metric_values(run_id, "step @ 0")) >= 5, 60, "the first metrics"
        )
        master.stop(kill=True)
        time.sleep(1)  # the workers go on meanwhile
        master.start()
        wait_for(
            lambda: master.state(run_id) == "finished",
            120,
            f"the run to finish; its log:\n{master.log(run_id)}",
        )
        for rank in (0, 1):
            assert master.metric_values(run_id, f"step @ {rank}") == [
                str(step) for step in range(40)
            ]
            assert len(master.metric_values(run_id, f"longest_call_s @ {rank}")) == 1


def test_killed_worker_fails_the_run_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    with running_master(tmp_path / "master") as master:
        run_id = start_run(master, script, 2)

        def workers() -> list[psutil.Process]:
            found = []
            for process in psutil.process_iter(["cmdline"]):
                command = process.info["cmdline"] or []
                if len(command) > 1 and command[1] == str(script):
                    found.append(process)
            return found

        wait_for(lambda: master.log(run_id).count("here") == 2, 60, "both workers")
        assert len(workers()) == 2
        workers()[0].send_signal(signal.SIGKILL)
        wait_for(lambda: master.state(run_id) == "failed", 60, "the run to be failed")
        wait_for(lambda: not workers(), 60, "the other worker to be gone")
        assert "SIGKILL" in master.log(run_id)
