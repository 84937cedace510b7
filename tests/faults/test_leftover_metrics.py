"""Metrics that a run could not deliver before it ended."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from mlbench_core.client.api import ApiClient
from mlbench_core.client.outbox import Outbox
from mlbench_master.events import EventBus
from mlbench_master.launchers.local import LocalLauncher
from mlbench_master.leftovers import store_leftovers
from mlbench_master.scheduler import Scheduler
from mlbench_master.store import Store, run_owner
from tests.faults.helpers import add_run
from tests.master.helpers import server, wait_for

# Posts a metric every 20 ms, and ends a second after the file "ending" exists.
WORKER = """
import os, pathlib, sys, time
from mlbench_core.client.api import ApiClient
folder = pathlib.Path(sys.argv[1])
with ApiClient(url=os.environ["MLBENCH_MASTER_URL"]) as client:
    value = 0
    while not (folder / "ending").exists():
        client.post_metric(os.environ["MLBENCH_RUN_ID"], f"loss @ {os.environ['RANK']}", value)
        value += 1
        time.sleep(0.02)
(folder / f"posted-{os.environ['RANK']}").write_text(str(value))
"""


def values(base: str, run_id: int, name: str) -> list[str]:
    metrics = httpx.get(f"{base}/api/metrics/{run_id}/", params={"metric_type": "run"}).json()
    return [entry["value"] for entry in metrics.get(name, [])]


def test_a_run_that_ended_without_a_master_keeps_its_metrics(tmp_path: Path) -> None:
    """The next master listens at another port, which no worker knew."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    data = tmp_path / "data"
    with server(data) as (base, master):
        body = {"name": "r", "num_workers": 2, "num_cpus": 0.5, "command": f"{script} {tmp_path}"}
        run_id = httpx.post(f"{base}/api/runs/", json=body).json()["id"]
        wait_for(lambda: values(base, run_id, "loss @ 1"), what="the first metrics")
        master.kill()
        master.wait()
    (tmp_path / "ending").touch()
    status = data / "runs" / str(run_id) / "status.json"
    wait_for(status.exists, 60, what="the end of the run")
    ended = status.stat().st_mtime

    def run(base: str) -> dict[str, Any]:
        return dict(httpx.get(f"{base}/api/runs/{run_id}/").json())

    with server(data) as (base, _):
        wait_for(lambda: run(base)["state"] != "started")
        assert (run(base)["state"], run(base)["job_metadata"]["missing_metrics"]) == ("finished", "")
        for rank in (0, 1):
            posted = int((tmp_path / f"posted-{rank}").read_text())
            assert values(base, run_id, f"loss @ {rank}") == [str(value) for value in range(posted)]
        # The time at which the workers ended, not that of the restart, which takes longer than 0.1 s.
        finished = datetime.fromisoformat(run(base)["finished_at"].replace("Z", "+00:00")).timestamp()
        assert ended - 5 < finished < ended + 0.1


def test_what_is_lost_is_stated(tmp_path: Path) -> None:
    """A worker leaves an outbox with one good metric, one bad one, a damaged outbox, and the count of lost ones."""
    store = Store(f"sqlite:///{tmp_path / 'master.db'}")
    launcher = LocalLauncher(tmp_path / "runs")
    scheduler = Scheduler(store, launcher, EventBus(), {})
    run = add_run(store, "a")
    spool = launcher.spool(f"local-{run.id}")
    ended = {}
    start = launcher.start

    def start_and_leave(job: Any) -> str:
        started = start(job)
        outbox = Outbox(spool, "http://127.0.0.1:1/api/")
        good = f'{{"id": "x", "run_id": {run.id}, "name": "loss @ 0", "value": 1}}'
        outbox.insert(
            [("1", good), ("2", good), ("3", '{"run_id": 77, "name": "a", "value": 1}'), ("4", "[" * 100_000)]
        )
        outbox.report_lost(5)
        with closing(sqlite3.connect(spool / "foreign.sqlite3")) as connection, connection:
            connection.execute("CREATE TABLE metrics (key, line)")
            connection.execute("INSERT INTO metrics VALUES ('1', 5)")
        (spool / "other.sqlite3").write_bytes(b"garbage" * 1000)
        os.mkfifo(spool / "pipe.sqlite3")
        return started

    launcher.start = start_and_leave  # type: ignore[method-assign]
    scheduler.start()
    try:
        wait_for(lambda: ended.update(run=store.run(run.id)) or ended["run"].state in ("finished", "failed"))
    finally:
        scheduler.close()
    assert ended["run"].state == "finished"
    missing = ended["run"].metadata_dict()["missing_metrics"]
    assert missing == ended["run"].metadata_dict()["reason"]
    assert missing.startswith("metrics are missing: an unknown number in ")
    assert ", 2 that are not valid, 5 that a worker could not keep on disk, " in missing
    assert "damaged" in missing and "foreign.sqlite3, which cannot be read" in missing
    assert "pipe.sqlite3" not in missing, "it was not opened"
    assert store.metric_counts([run_owner(run.id)]) == {(run_owner(run.id), "loss @ 0"): 1}
    assert "5 that a worker could not keep on disk" in store_leftovers(spool, store)


def test_metrics_for_another_master_stay_out_of_the_folder_of_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("MLBENCH_SPOOL", str(tmp_path / "spool"))
        patch.setenv("MLBENCH_MASTER_URL", "http://127.0.0.1:1")
        for port in (1, 2):
            with ApiClient(url=f"127.0.0.1:{port}") as client:
                client.post_metric(1, "loss @ 0", 1)
                client.close(0)
    assert [path.name for path in (tmp_path / "spool").glob("*.sqlite3")] == ["http_127.0.0.1_1_api.sqlite3"]
