"""Requests that look like others: two lengths of a body, names with invisible characters, pages of
extensions."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from mlbench_cli._output import clean
from mlbench_master import create_app
from mlbench_master.database.store import Store
from mlbench_master.events import EventBus
from mlbench_master.runs.scheduler import Scheduler
from tests.faults.helpers import add_run
from tests.master.helpers import IdleEngine, TestClient, server

TOKEN = "t" * 32
UNSEEN = [
    0x00,
    0x1B,
    0x85,
    0xAD,
    0x061C,
    *range(0x200B, 0x2010),
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    0xFEFF,
]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    """A client of a master with a token."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    app = create_app(data_dir=tmp_path / "data", token=TOKEN, engine=IdleEngine())
    with TestClient(app, base_url="http://127.0.0.1:5080", headers=headers) as test_client:
        yield test_client


def test_a_body_with_two_lengths_is_refused(tmp_path: Path) -> None:
    """A proxy that believes the other length would see a second request, smuggled in the body."""
    with server(tmp_path / "data") as (base, _):
        host, port = base.removeprefix("http://").split(":")
        for lengths in (
            "Content-Length: 4\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: chunked\r\nContent-Length: 30",
        ):
            with socket.create_connection((host, int(port)), 10) as connection:
                smuggled = "GET /api/runs/ HTTP/1.1\r\nHost: a\r\n\r\n"
                connection.sendall(
                    "POST /api/metrics/ HTTP/1.1\r\nHost: "
                    f"{host}:{port}\r\nContent-Type: application/json\r\n"
                    f"{lengths}\r\n\r\n2\r\n[]\r\n0\r\n\r\n{smuggled}".encode()
                )
                answer = b""
                while part := connection.recv(65_536):
                    answer += part
            assert answer.startswith(b"HTTP/1.1 400 "), answer
            assert answer.count(b"HTTP/1.1 ") == 1, "the connection is closed"


@pytest.mark.parametrize("origin", ["moz-extension", "chrome-extension", "file", "ws", "about", ""])
def test_only_pages_over_http_are_of_the_master(client: TestClient, origin: str) -> None:
    token = client.headers.pop("Authorization")
    code = client.post("/api/login/", headers={"Authorization": token}).json()["path"]
    client.get(code)
    headers = {"Origin": f"{origin}://127.0.0.1:5080"}
    assert client.post("/api/metrics/", json=[], headers=headers).status_code == 403
    assert (
        client.post(
            "/api/metrics/", json=[], headers={"Origin": "http://127.0.0.1:5080"}
        ).status_code
        != 403
    )


@pytest.mark.parametrize("number", UNSEEN)
def test_names_have_no_invisible_characters(client: TestClient, number: int) -> None:
    run = {"name": "a-1", "num_workers": 1, "command": "true"}
    answer = client.post("/api/runs/", json=run)
    assert answer.status_code == 201, answer.text
    run_id = answer.json()["id"]
    text = f"lo{chr(number)}ss"
    answer = client.post("/api/metrics/", json={"run_id": run_id, "name": text, "value": 1})
    assert answer.status_code == 400 and "name: " in answer.json()["message"]
    assert client.post("/api/runs/", json={**run, "name": f"b{chr(number)}1"}).status_code == 400
    visible = client.post(
        "/api/metrics/", json={"run_id": run_id, "name": "Verlust é 損失 @ 0", "value": 1}
    )
    assert visible.status_code == 201
    if number not in (
        0xAD,
        0x200C,
        0x200D,
    ):  # joiners of some scripts and of emoji; hyphens that are not shown
        assert clean(text) == "loss"


def test_a_stop_that_the_database_cannot_record_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(f"sqlite:///{tmp_path / 'master.db'}")
    stopped: list[str] = []

    class Engine(IdleEngine):
        def stop(self, job_id: str) -> None:
            stopped.append(job_id)

    scheduler = Scheduler(store, Engine(), EventBus(), {})
    run = add_run(store, "a")
    scheduler.tick()
    assert store.run(run.id).state == "started"

    def full(*_: Any, **__: Any) -> None:
        raise OperationalError("UPDATE", {}, Exception("database or disk is full"))

    with monkeypatch.context() as patch:
        patch.setattr(store, "update_run", full)
        answer = scheduler.stop_run(run.id).to_json()
        with pytest.raises(OperationalError):
            scheduler.tick()
    assert stopped == [f"{Engine().name}-{run.id}"]
    assert (answer["state"], answer["job_metadata"]["reason"]) == ("failed", "stopped by a user")
    assert store.run(run.id).state == "started"
    scheduler.tick()
    recorded = store.run(run.id)
    assert (recorded.state, json.loads(recorded.job_metadata)["reason"]) == (
        "failed",
        "stopped by a user",
    )
