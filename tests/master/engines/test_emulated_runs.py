"""Runs whose workers have emulated hosts: placed, ended, cleaned up, and refused where they are not
possible."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlbench_core.client.api import ApiClient
from mlbench_core.network.emulated import EmulatedNetwork
from mlbench_core.network.named_networks import NETWORKS
from mlbench_core.network.namespaces import Namespaces
from mlbench_master import create_app
from mlbench_master.engines import Job
from mlbench_master.engines.local.engine import LocalEngine, worker_commands
from mlbench_master.runs import undelivered_metrics
from tests.master.helpers import IdleEngine, TestClient, wait_for

REASON = EmulatedNetwork.why_not()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"emulated network: {REASON}")
BODY = {"name": "a", "num_workers": 2, "command": "true", "network": "100mbit,20ms"}
URL = "http://127.0.0.1:5080"
WORKER = """
import os, socket, sys, time
rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
address = (os.environ["MASTER_ADDR"], port)
if rank == 0:
    server = socket.create_server(address)
    connection, (peer, _) = server.accept()
    connection.sendall(connection.recv(1))
    print("peer", peer, "hosts", sys.argv[1], "in", os.getcwd())
else:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    start = time.perf_counter()
    connection.sendall(b"x")
    connection.recv(1)
    print("round trip", time.perf_counter() - start)
"""


class Emulating(IdleEngine):
    """An engine that could give workers emulated hosts."""

    emulates_networks = True


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    app = create_app(data_dir=tmp_path, engine=Emulating())
    # Without "with": no scheduler runs, so no run starts.
    yield TestClient(app, base_url="http://127.0.0.1:5080", follow_redirects=False)
    app.state.store.close()


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests be accepted on a machine that cannot emulate a network."""
    monkeypatch.setattr(EmulatedNetwork, "why_not", staticmethod(lambda: None))


def ended(engine: LocalEngine, job_id: str) -> Any:
    return wait_for(
        lambda: engine.poll(job_id) if engine.poll(job_id).state != "running" else None,
        60,
        "the end",
    )


def texts(engine: LocalEngine, job_id: str) -> list[str]:
    return [line["text"] for line in engine.logs(job_id).lines]


def networks_of(pid: int) -> list[str]:
    return [name for name in Namespaces().names() if name.startswith(f"mlbench-{pid}-")]


@needs_namespaces
def test_each_worker_has_a_host_and_the_network_ends_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    engine = LocalEngine(tmp_path / "runs", grace_s=0.5)
    command = f"python {tmp_path}/worker.py {{hosts}}"
    job_id = engine.start(Job(1, "a", command, 2, network="1gbit,30ms"))
    status = ended(engine, job_id)
    said = texts(engine, job_id)
    assert status.state == "finished", said
    work = tmp_path / "runs" / job_id.removeprefix("local-") / "work"
    assert f"peer 10.77.0.2 hosts 10.77.0.1,10.77.0.2 in {work}" in said
    (line,) = [text for text in said if text.startswith("round trip")]
    assert float(line.split()[-1]) >= 0.03
    supervisor = json.loads((work.parent / "supervisor.json").read_text())["pid"]
    assert networks_of(supervisor) == []


@needs_namespaces
def test_a_killed_supervisor_leaves_no_network(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "runs", grace_s=0.1)
    job_id = engine.start(Job(1, "a", "sleep 600", 2, network="1gbit,5ms"))
    file = tmp_path / "runs" / job_id.removeprefix("local-") / "supervisor.json"
    pid = wait_for(
        lambda: json.loads(file.read_text())["pid"] if file.exists() else None, 60, "the supervisor"
    )

    def sleepers() -> list[psutil.Process]:
        found = []
        for process in psutil.Process(pid).children(recursive=True):
            # The programs that make the network end at any time.
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [process] * (process.name() == "sleep")
        return found

    family = [
        psutil.Process(pid),
        *wait_for(lambda: sleepers() if len(sleepers()) == 2 else None, 60, "two workers"),
    ]
    os.kill(pid, signal.SIGKILL)
    assert ended(engine, job_id).state == "lost"
    assert psutil.wait_procs(family[1:], timeout=60)[1] == []
    assert networks_of(pid) == []


@needs_namespaces
def test_a_network_that_cannot_be_made_is_the_reason_of_the_failure(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "runs", grace_s=0.1)
    # A request with three workers would have been refused.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlbench_master.engines.local.emulated_hosts.host_addresses", lambda job: [])
        patch.setattr("mlbench_master.engines.local.emulated_hosts.place_worker", lambda *_: None)
        job_id = engine.start(Job(1, "a", "true", 3, network="2x2:1gbit/1gbit"))
    status = ended(engine, job_id)
    assert status.state == "failed"
    assert "hosts must be 4 (2 racks of 2), not 3" in status.reason


def test_the_variables_of_a_worker_are_those_of_its_host() -> None:
    first, second = worker_commands(Job(1, "a", "run {hosts} {rank}", 2, network="1gbit"), 1234)
    assert second["argv"] == ["run", "10.77.0.1,10.77.0.2", "1"]
    env = second["env"]
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["RANK"], env["WORLD_SIZE"]) == (
        "10.77.0.1",
        "1234",
        "1",
        "2",
    )
    assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"], env["GLOO_SOCKET_IFNAME"]) == (
        "0",
        "1",
        "eth0",
    )
    assert (env["MLBENCH_NETWORK"], env["MLBENCH_SPOOL_ONLY"]) == ("1gbit", "1")
    assert first["env"]["RANK"] == "0"
    (plain,) = worker_commands(Job(1, "a", "true", 1), 1234)
    assert "GLOO_SOCKET_IFNAME" not in plain["env"]


def test_the_text_of_a_named_network_is_recorded_with_the_run(client: Any, able: None) -> None:
    run = client.post("/api/runs/", json={**BODY, "network": "two-racks", "num_workers": 4}).json()
    assert run["job_metadata"]["network"] == NETWORKS["two-racks"].text
    assert any(
        "it reads their metrics from disk every 2 s" in note
        for note in run["job_metadata"]["notes"]
    )
    # The list has the name.
    assert '<td class="field" title="two-racks">two-racks</td>' in client.get("/runs/").text


def outbox(spool: Path, patch: pytest.MonkeyPatch) -> ApiClient:
    """A client as that of a worker on an emulated host, which only keeps its metrics."""
    for name, value in (("SPOOL", str(spool)), ("SPOOL_ONLY", "1"), ("MASTER_URL", URL)):
        patch.setenv(f"MLBENCH_{name}", value)
    return ApiClient(url=URL)


def test_metrics_on_disk_are_stored_while_the_run_goes_on(
    client: Any, able: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = client.post("/api/runs/", json=BODY).json()["id"]
    plain_id = client.post("/api/runs/", json={**BODY, "name": "b", "network": ""}).json()["id"]
    store = client.app.state.store
    for one in (run_id, plain_id):
        store.update_run(one, state="started", job_id=str(one))
    monkeypatch.setattr(undelivered_metrics, "READ_EVERY_S", 0.0)
    monkeypatch.setattr(Emulating, "spool", lambda self, job_id: tmp_path / "spools" / job_id)
    tick = client.app.state.scheduler.tick

    def values(of: int = run_id) -> list[str]:
        metrics = client.get(f"/api/metrics/{of}/?metric_type=run").json()
        return [entry["value"] for entry in metrics.get("loss @ 0", [])]

    spool = tmp_path / "spools" / str(run_id)
    with contextlib.closing(outbox(spool, monkeypatch)) as worker:
        tick()  # there is no folder yet
        worker.post_metric(str(run_id), "loss @ 0", 0.5)
        tick()
        assert values() == ["0.5"]
        worker.post_metric(str(run_id), "loss @ 0", 0.25)
        (path,) = spool.glob("*.sqlite3")
        # A file in which a worker is writing is read later.
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as writing:
            writing.execute("BEGIN EXCLUSIVE")
            tick()
            assert values() == ["0.5"]
            writing.execute("ROLLBACK")
        tick()
        assert values() == ["0.5", "0.25"]
        # One more, which only the end finds.
        worker.post_metric(str(run_id), "loss @ 0", 0.125)
    with contextlib.closing(sqlite3.connect(path)) as kept:
        assert kept.execute("SELECT count(*) FROM metrics").fetchone() == (3,)
    client.app.state.scheduler.stop_run(run_id)
    assert values() == ["0.5", "0.25", "0.125"]
    # A worker on the machine of the master delivers its metrics itself, until its end.
    with contextlib.closing(outbox(tmp_path / "spools" / str(plain_id), monkeypatch)) as worker:
        worker.post_metric(str(plain_id), "loss @ 0", 1.5)
        tick()
        assert values(plain_id) == []


def test_a_file_of_a_worker_that_is_no_outbox_is_left_to_the_end(
    client: Any, able: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = client.post("/api/runs/", json=BODY).json()["id"]
    store = client.app.state.store
    store.update_run(run_id, state="started", job_id="1")
    monkeypatch.setattr(Emulating, "spool", lambda self, job_id: tmp_path / "spool")
    with contextlib.closing(outbox(tmp_path / "spool", monkeypatch)) as worker:
        worker.post_metric(str(run_id), "loss @ 0", 0.5)
    (good,) = (tmp_path / "spool").glob("*.sqlite3")
    (tmp_path / "spool" / "0.sqlite3").write_bytes(b"no database" * 100)
    (tmp_path / "spool" / "1.sqlite3").symlink_to(good)
    lines = {"2": {"value": 1}, "3": {"value": 2, "id": "own"}}
    with contextlib.closing(sqlite3.connect(tmp_path / "spool" / "2.sqlite3")) as own, own:
        own.execute("CREATE TABLE metrics (key TEXT PRIMARY KEY, line TEXT) WITHOUT ROWID")
        for key, line in lines.items():
            metric = {"run_id": run_id, "name": "own @ 0", **line}
            own.execute("INSERT INTO metrics VALUES (?, ?)", (key, json.dumps(metric)))
    undelivered_metrics.OutboxReader(store, Emulating(), client.app.state.events).keep(
        store.run(run_id)
    )
    found = client.get(f"/api/metrics/{run_id}/?metric_type=run").json()
    assert [entry["value"] for entry in found["loss @ 0"]] == ["0.5"]
    # Without an id, the end would store it again.
    assert [entry["value"] for entry in found["own @ 0"]] == ["2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": "slow"}, "network: .*not 'slow'"),
        (
            {"network": "/etc/lab.toml"},
            "network: must be a name or a text .*, not the file '/etc/lab.toml'",
        ),
        ({"network": "two-racks"}, r"network: hosts must be 4 \(2 racks of 2\), not 2"),
        ({"backend": "mpi"}, "network: must be left out with backend mpi"),
        ({"backend": "nccl"}, "network: must be left out with backend nccl"),
        (
            {"backend": "custom_backend", "custom_backend": "x", "run_all_nodes": False},
            "network: must be left out if only worker 0 runs the command",
        ),
    ],
)
def test_a_network_that_a_run_cannot_have_is_refused(
    changes: dict[str, Any], message: str, client: Any, able: None
) -> None:
    answer = client.post("/api/runs/", json={**BODY, **changes})
    assert answer.status_code == 400
    assert re.search(message, answer.json()["message"]), answer.json()["message"]


def test_a_machine_that_cannot_emulate_a_network_refuses_it(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmulatedNetwork, "why_not", staticmethod(lambda: "ip not found"))
    message = client.post("/api/runs/", json=BODY).json()["message"]
    assert message.endswith("this machine cannot emulate a network: ip not found")


def test_another_engine_refuses_a_network_and_its_page_says_so(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Emulating, "emulates_networks", False)
    assert (
        "engine idle cannot emulate a network"
        in client.post("/api/runs/", json=BODY).json()["message"]
    )
    page = client.get("/runs/new/").text
    assert 'name="network"' not in page
    assert "engine idle cannot emulate a network; leave it out, or choose the engine local" in page


def test_the_form_offers_the_names_and_shows_the_network_again(client: Any, able: None) -> None:
    page = client.get("/runs/new/").text
    assert re.findall(r'<option value="([\w-]+)">[^<]*: ', page) == list(NETWORKS)
    form = {"name": "demo", "num_workers": "2", "kind": "command", "command": "true",
    "num_cpus": "1",
            "backend": "gloo"}  # fmt: skip
    wrong = client.post("/runs/", data={**form, "network": "lan1g"})
    assert wrong.status_code == 400
    assert "did you mean 'lan-1g'" in html.unescape(
        re.findall(r'id="error-network">(.*?)</p>', wrong.text)[0]
    )
    assert client.post("/runs/", data={**form, "network": "lan-1g"}).status_code == 303
    (run,) = client.get("/api/runs/").json()
    assert run["job_metadata"]["network"] == "1gbit"
    assert 'value="1gbit"' in client.get(f"/runs/new/?from={run['id']}").text
