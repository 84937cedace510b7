"""Requests that are large or strange, and cost the master more than their sender."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("fastapi", reason="needs the [master] extra")

from mlbench_master import create_app
from mlbench_master.api import bodies
from mlbench_master.api.bodies import parse_body
from tests.master.helpers import TestClient, server

HEADERS = {"Authorization": "Bearer sesame"}
FORM = "application/x-www-form-urlencoded"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    app = create_app(data_dir=tmp_path, token="sesame")
    app.state.scheduler.start = lambda: None
    with TestClient(
        app, base_url="http://127.0.0.1:5080", raise_server_exceptions=False, headers=HEADERS
    ) as test_client:
        yield test_client


@pytest.mark.parametrize(
    ("path", "content", "kind", "limit"),
    [
        ("/login/", b"token=" + b"x" * 5000, "application/x-www-form-urlencoded", 4096),
        ("/api/runs/", b'{"name": "' + b"x" * 2**21 + b'"}', "application/json", 2**21),
        ("/api/runs/", b"name=" + b"x" * 2**21, "application/x-www-form-urlencoded", 2**21),
        ("/api/metrics/", b"name=" + b"x" * 2**21, "application/x-www-form-urlencoded", 2**21),
        ("/api/metrics/", b"[" + b" " * 2**24 + b"]", "application/json", 2**24),
        ("/api/metrics/", b"[" + b" " * 2**24 + b"]", "x/y", 2**24),
    ],
    ids=range(6),
)
def test_every_path_limits_its_body(
    client: Any, path: str, content: bytes, kind: str, limit: int
) -> None:
    answer = client.post(path, content=content, headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["message"]) == (
        413,
        f"body: must have at most {limit} bytes: send it in parts",
    )


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"{}," * 1_000_000 + b"{}]",
        b"[" + b"1," * 1_000_000 + b"1]",
        b"{" + b'"a":1,' * 1_000_000 + b'"a":1}',
        b"[" * 65 + b"]" * 65,
        b'{"a":' * 65 + b"1" + b"}" * 65,
        b"[" * 1_000_000,
        b"a=1&" * 1001,
    ],
    ids=range(7),
)
def test_the_number_and_the_depth_of_values_are_limited(client: Any, body: bytes) -> None:
    for path in ("/api/metrics/", "/api/runs/"):
        is_form = body[:1] == b"a"
        answer = client.post(
            path, content=body, headers={"Content-Type": FORM} if is_form else JSON
        )
        assert answer.status_code in (400, 413)
        assert ("number of fields" if is_form else "must have at most") in answer.json()["message"]


@pytest.mark.parametrize("values", [b"{},", b"1,", b'"\\"",'])
def test_too_many_values_are_refused_before_they_are_parsed(
    values: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies.json, "loads", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(ValueError, match="must have at most 1000000 values"):
        parse_body(b"[" + values * 1_000_000 + b"1]", "application/json")


def test_text_with_many_commas_is_no_list() -> None:
    text = ',[{"\\' * 400_000  # more than a list may have
    assert parse_body(json.dumps([text]).encode(), "application/json") == [text]


def test_a_large_body_does_not_hold_up_the_event_loop(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_loop = []

    def parse(body: bytes, kind: str) -> Any:
        try:
            asyncio.get_running_loop()
            in_the_loop.append(True)
        except RuntimeError:
            in_the_loop.append(False)
        return parse_body(body, kind)

    monkeypatch.setattr(bodies, "parse_body", parse)
    for size in (10, 100_000):
        assert (
            client.post(
                "/api/metrics/", content=b"[" + b" " * size + b"]", headers=JSON
            ).status_code
            == 201
        )
    assert in_the_loop == [True, False]


def test_the_deepest_metadata_is_read_back(client: Any) -> None:
    run = client.post("/api/runs/", json={"name": "r", "num_workers": 1, "command": "true"}).json()
    metadata: Any = 1
    for _ in range(62):
        metadata = [metadata]
    body = [{"run_id": run["id"], "name": "m", "value": 1, "metadata": metadata}]
    assert client.post("/api/metrics/", json=body).status_code == 201
    ((entry,),) = client.get("/api/metrics/").json()["run_metrics"]["r"].values()
    assert json.loads(entry["metadata"]) == metadata
    body[0]["metadata"] = [[[metadata]]]
    assert client.post("/api/metrics/", json=body).status_code == 400


def test_crafted_bodies_neither_freeze_the_master_nor_fill_its_memory(tmp_path: Path) -> None:
    """From people without the token, too, where nothing but the login page reads a body."""
    bodies = [
        (
            "/login/",
            "multipart/form-data; boundary=B",
            b"--B\r\nContent-Disposition: form-data; " + b";" * 64_000,
        ),
        (
            "/login/",
            "multipart/form-data; boundary=B",
            b"--B\r\nContent-Disposition: form-data; name*\r\n\r\nx\r\n--B--",
        ),
        ("/login/", "application/x-www-form-urlencoded", b"&" * 60_000_000),
        ("/api/metrics/", "application/json", b"[" + b"{}," * 5_000_000 + b"{}]"),
        ("/api/metrics/", "application/json", b"[" + b'{"a":[1,2,3]},' * 70_000 + b"{}]"),
        ("/api/metrics/", "application/x-www-form-urlencoded", b"a=b&" * 500_000),
    ]
    with server(tmp_path / "data", "--token", "sesame") as (base, process):
        refusals: list[int] = []

        def attack(path: str, kind: str, content: bytes) -> None:
            headers = {**HEADERS, "Content-Type": kind}
            for _ in range(2):
                try:
                    refusals.append(
                        httpx.post(
                            base + path, content=content, headers=headers, timeout=60
                        ).status_code
                    )
                except httpx.TransportError:  # refused before all of it was sent
                    refusals.append(413)

        attackers = [threading.Thread(target=attack, args=body) for body in bodies]
        for attacker in attackers:
            attacker.start()
        # A frozen master would answer too late.
        with httpx.Client(base_url=base, headers=HEADERS, timeout=60) as client:
            while any(attacker.is_alive() for attacker in attackers):
                assert client.post("/api/metrics/", json=[]).status_code == 201
        for attacker in attackers:
            attacker.join()
        assert len(refusals) == 12 and set(refusals) <= {400, 413, 415}
        assert psutil.Process(process.pid).memory_info().rss < 300 * 2**20


def test_a_long_header_is_refused(tmp_path: Path) -> None:
    with server(tmp_path / "data", "--token", "sesame") as (base, _):
        try:
            status = httpx.get(
                f"{base}/api/runs/", headers={**HEADERS, "X-Long": "x" * 500_000}
            ).status_code
        except httpx.TransportError:  # refused before all of it was sent
            status = 400
        assert status == 400
        assert httpx.get(f"{base}/api/runs/", headers=HEADERS).status_code == 200


def test_a_page_of_a_log_is_bounded_whatever_the_length_of_its_lines(tmp_path: Path) -> None:
    """Workers write into the folder above their own, too, where their log is."""
    app = create_app(data_dir=tmp_path, token="sesame")
    app.state.scheduler.start = lambda: None
    with TestClient(app, base_url="http://127.0.0.1:5080", headers=HEADERS) as client:
        run = client.post(
            "/api/runs/", json={"name": "r", "num_workers": 1, "command": "true"}
        ).json()
        app.state.store.update_run(run["id"], state="started", job_id=f"local-{run['id']}")
        folder = tmp_path / "runs" / str(run["id"])
        folder.mkdir()
        line = (
            json.dumps({"rank": 0, "stream": "stdout", "text": "\ufffd" * 30_000, "date": ""})
            + "\n"
        )
        (folder / "log.jsonl").write_text(line * 60 + "x" * 3_000_000 + "\n" + line)
        found, following = [], 0
        while True:
            answer = client.get(f"/api/runs/{run['id']}/logs/?since_line={following}")
            assert len(answer.content) < 3_000_000
            lines, following = answer.json()["lines"], answer.json()["next"]
            if not lines:
                break
            found += [line["text"] for line in lines]
        assert [text[0] for text in found[:60]] == ["\ufffd"] * 60 and found[
            -1
        ] == "\ufffd" * 30_000
        assert "".join(found[60:-1]) == "x" * 3_000_000
        assert client.get(f"/api/runs/{run['id']}/").json()["job_metadata"]["stdout"]
        page = client.get(f"/runs/{run['id']}/")
        assert len(page.content) < 3_000_000 and "\ufffd" * 30_000 in page.text
