"""Metrics that a run could not deliver before it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlbench_core.client.api import ApiClient
from mlbench_core.client.undelivered_metrics import Outbox
from mlbench_master.api.schemas import MetricIn
from mlbench_master.database.store import Store, run_owner
from mlbench_master.engines.local.engine import LocalEngine
from mlbench_master.events import EventBus
from mlbench_master.runs.scheduler import Scheduler
from mlbench_master.runs.undelivered_metrics import new_metric, store_leftovers
from tests.client.stub_master import StubMaster
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


# Posts three metrics, and is killed at a step of the delivery of three more, which the master gets
# as one request.
KILLED_WORKER = """
import os, signal, sys
from mlbench_core.client.api import ApiClient
from mlbench_core.client.undelivered_metrics import Outbox

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def post(values):
    metric = {"run_id": 1, "name": "loss @ 0"}
    return client.post_metrics([{**metric, "value": value} for value in values])

url, step = sys.argv[1:]
client = ApiClient(url=url)
post([0, 1, 2]).result()
if step == "queued":
    client._delivery._sending.acquire()
elif step == "before the request":
    client._delivery._poster.post = die
elif step == "after the answer":
    Outbox.delete = die
future = post([3, 4, 5])
if step == "queued":
    die()
future.exception()
"""
STEPS = ("queued", "before the request", "before the answer", "after the answer")


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
        assert (run(base)["state"], run(base)["job_metadata"]["missing_metrics"]) == (
            "finished",
            "",
        )
        for rank in (0, 1):
            posted = int((tmp_path / f"posted-{rank}").read_text())
            assert values(base, run_id, f"loss @ {rank}") == [str(value) for value in range(posted)]
        # The time at which the workers ended, not that of the restart, which takes longer than 0.1
        # s.
        finished = datetime.fromisoformat(
            run(base)["finished_at"].replace("Z", "+00:00")
        ).timestamp()
        assert ended - 30 < finished < ended + 0.1


@pytest.fixture
def masters() -> Iterator[Callable[[], StubMaster]]:
    with contextlib.ExitStack() as stack:

        def start() -> StubMaster:
            master = StubMaster()
            stack.callback(master.stop)
            return master

        yield start


def test_a_worker_killed_at_any_step_of_a_delivery_loses_nothing(
    tmp_path: Path, masters: Callable[[], StubMaster]
) -> None:
    workers: dict[str, subprocess.Popen[bytes]] = {}
    stores = {}
    for step in STEPS:
        (tmp_path / step).mkdir()
        store = stores[step] = Store(f"sqlite:///{tmp_path / step / 'master.db'}")
        add_run(store, "a")
        master = masters()

        def respond(
            method: str, path: str, body: Any, step: str = step, store: Store = store
        ) -> None:
            store.add_metrics([new_metric(MetricIn.model_validate(entry), 0) for entry in body])
            if step == "before the answer" and body[0]["value"] == 3:
                workers[step].kill()

        master.respond = respond
        own = {"MLBENCH_MASTER_URL": master.url, "MLBENCH_SPOOL": str(tmp_path / step / "spool")}
        workers[step] = subprocess.Popen(
            [sys.executable, "-c", KILLED_WORKER, master.url, step],
            env={**os.environ, **own},
            stderr=subprocess.PIPE,
        )
    stored = {}
    for step, worker in workers.items():
        assert (worker.communicate(timeout=120)[1], worker.returncode) == (b"", -signal.SIGKILL), (
            step
        )
        for _ in range(2):  # a master may be killed before it has recorded the end of the run
            assert store_leftovers(tmp_path / step / "spool", stores[step]) == ""
        stored[step] = [point.value for point in stores[step].points(run_owner(1), "loss @ 0")]
    assert stored == {step: [str(value) for value in range(6)] for step in STEPS}


def test_a_worker_leaves_no_file_if_everything_is_delivered(
    tmp_path: Path, masters: Callable[[], StubMaster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may make a client for each metric."""
    master = masters()
    monkeypatch.setenv("MLBENCH_SPOOL", str(tmp_path))
    monkeypatch.setenv("MLBENCH_MASTER_URL", master.url)
    with ApiClient(url=master.url, timeout_s=60) as client:
        client.post_metric(1, "loss @ 0", 1).result(60)
        assert len(list(tmp_path.iterdir())) == 1
        master.stop()
        client.post_metric(1, "loss @ 0", 2).exception(60)
        client.post_metric(1, "loss @ 0", 3)
        master.start()
        assert client.flush(60)
        client.post_metric(1, "loss @ 0", 4).result(60)
        assert client.close() is True
    assert list(tmp_path.iterdir()) == []
    assert (master.values, len(master.deliveries)) == ([1, 2, 3, 4], 4)


def test_a_disk_that_is_full_delays_no_delivery(
    tmp_path: Path,
    masters: Callable[[], StubMaster],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    master = masters()
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLBENCH_SPOOL", str(tmp_path / "file"))
    monkeypatch.setenv("MLBENCH_MASTER_URL", master.url)
    with ApiClient(url=master.url, timeout_s=60) as client:
        for value in range(3):
            client.post_metric(1, "loss @ 0", value).result(60)
        assert client.close() is True
    assert (master.values, len(master.deliveries)) == ([0, 1, 2], 3)
    assert caplog.text.count("cannot be kept on disk") == 1


def test_what_is_lost_is_stated(tmp_path: Path) -> None:
    """A worker leaves an outbox with one good metric, one bad one, a damaged outbox, and the count
    of lost ones."""
    store = Store(f"sqlite:///{tmp_path / 'master.db'}")
    engine = LocalEngine(tmp_path / "runs")
    scheduler = Scheduler(store, engine, EventBus(), {})
    run = add_run(store, "a")
    spool = engine.spool(f"local-{run.id}")
    ended: dict[str, Any] = {}
    start = engine.start

    def start_and_leave(job: Any) -> str:
        started = start(job)
        outbox = Outbox(spool, "http://127.0.0.1:1/api/")
        good = f'{{"id": "x", "run_id": {run.id}, "name": "loss @ 0", "value": 1}}'
        outbox.insert(
            [
                ("1", good),
                ("2", good),
                ("3", '{"run_id": 77, "name": "a", "value": 1}'),
                ("4", "[" * 100_000),
            ]
        )
        outbox.report_lost(5)
        with closing(sqlite3.connect(spool / "foreign.sqlite3")) as connection, connection:
            connection.execute("CREATE TABLE metrics (key, line)")
            connection.execute("INSERT INTO metrics VALUES ('1', 5)")
        (spool / "other.sqlite3").write_bytes(b"garbage" * 1000)
        os.mkfifo(spool / "pipe.sqlite3")
        return started

    engine.start = start_and_leave  # type: ignore[method-assign]
    scheduler.start()
    try:
        wait_for(
            lambda: (
                ended.update(run=store.run(run.id)) or ended["run"].state in ("finished", "failed")
            )
        )
    finally:
        scheduler.close()
    assert ended["run"].state == "finished"
    missing = ended["run"].metadata_dict()["missing_metrics"]
    assert missing == ended["run"].metadata_dict()["reason"]
    assert missing.startswith("metrics are missing: an unknown number in ")
    assert missing.endswith(", 2 that are not valid, 5 that a worker could not keep on disk")
    for name in ("foreign", "other"):
        assert f"{name}.sqlite3, which cannot be read" in missing
    assert "pipe.sqlite3" not in missing, "it was not opened"
    assert store.metric_counts([run_owner(run.id)]) == {(run_owner(run.id), "loss @ 0"): 1}
    assert "5 that a worker could not keep on disk" in store_leftovers(spool, store)


ENDLESS = (
    "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT n, n AS line FROM t"
)


@pytest.mark.parametrize(
    ("statements", "problem"),
    [
        (
            f"CREATE VIEW metrics AS {ENDLESS.replace('n, n', 'n AS key, n')}",
            "other tables than an outbox",
        ),
        (
            (
                "CREATE TABLE metrics (key TEXT PRIMARY KEY, line "
                "TEXT) WITHOUT ROWID; CREATE TABLE more (a)"
            ),
            "other tables",
        ),
        (
            "CREATE TABLE metrics (key TEXT PRIMARY KEY, line TEXT) WITHOUT ROWID; CREATE "
            "TRIGGER t AFTER DELETE ON "
            "metrics BEGIN INSERT INTO metrics VALUES (old.key || 'x', '{}'); END",
            "other tables than an outbox",
        ),
        (
            (
                "CREATE TABLE metrics (key TEXT PRIMARY KEY, line TEXT "
                "AS (hex(zeroblob(1e8)))) WITHOUT ROWID"
            ),
            "other tables",
        ),
        (
            "CREATE TABLE metrics (key TEXT PRIMARY KEY, line TEXT, more TEXT) WITHOUT ROWID",
            "other tables",
        ),
        ("CREATE VIRTUAL TABLE metrics USING fts5(key, line)", "other tables"),
    ],
)
def test_only_the_table_of_an_outbox_is_read(statements: str, problem: str, tmp_path: Path) -> None:
    store, spool = Store(f"sqlite:///{tmp_path / 'master.db'}"), tmp_path / "spool"
    spool.mkdir()
    with closing(sqlite3.connect(spool / "a.sqlite3")) as connection, connection:
        connection.executescript(statements)
    missing = store_leftovers(spool, store)
    assert "a.sqlite3, which cannot be read" in missing and problem in missing
    assert (spool / "a.sqlite3").exists()


def test_files_that_hold_up_the_master_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, spool = Store(f"sqlite:///{tmp_path / 'master.db'}"), tmp_path / "spool"
    run = add_run(store, "a")
    for name, count in (("1", 3), ("2", 200_000)):
        line = f'{{"run_id": {run.id}, "name": "loss @ 0", "value": 1}}'
        Outbox(spool, name).insert([(f"{number:09d}", line) for number in range(count)])
    # Of absurd size, though it takes no room on the disk.
    with (spool / "3.sqlite3").open("wb") as file:
        file.truncate(2**40)
    # A link must not lead to a database that is not of the worker.
    (spool / "4.sqlite3").symlink_to(tmp_path / "master.db")
    with monkeypatch.context() as patch:
        patch.setattr("mlbench_master.runs.undelivered_metrics._LONGEST_S", 0.0)
        missing = store_leftovers(spool, store)
    assert "2.sqlite3, which cannot be read (" in missing
    for name in ("3", "4"):
        assert f"{name}.sqlite3 is not a regular file of at most 1024 MiB" in missing
    assert (spool / "2.sqlite3").exists() and (tmp_path / "master.db").exists()


def test_a_line_that_does_not_fit_into_memory_is_not_read(tmp_path: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("needs the limits of SQLite from Python 3.11")
    store, spool = Store(f"sqlite:///{tmp_path / 'master.db'}"), tmp_path / "spool"
    Outbox(spool, "1").insert([("1", "x" * 20_000_000)])
    assert "1.sqlite3, which cannot be read (string or blob too big)" in store_leftovers(
        spool, store
    )


def test_metrics_for_another_master_stay_out_of_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("MLBENCH_SPOOL", str(tmp_path / "spool"))
        patch.setenv("MLBENCH_MASTER_URL", "http://127.0.0.1:1")
        for port in (1, 2):
            with ApiClient(url=f"127.0.0.1:{port}") as client:
                client.post_metric(1, "loss @ 0", 1)
                client.close(0)
    (path,) = (tmp_path / "spool").glob("*.sqlite3")
    assert path.name.startswith("http_127.0.0.1_1_api-")
