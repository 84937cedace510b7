"""The master as a server: who may talk to it, how it starts, what it streams."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import httpx
import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_core.paths import user_folder
from mlbench_master import create_app
from mlbench_master.database.store import Store
from tests.master.helpers import PYTHON, ROOT, TestClient, server, wait_for


def master(*options: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [PYTHON, "-m", "mlbench_cli", "master", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, cwd=ROOT)


def test_another_address_needs_a_token(tmp_path: Path) -> None:
    done = master("--host", "0.0.0.0", "--port", "0", "--data-dir", str(tmp_path))
    assert done.returncode == 2
    assert "--host 0.0.0.0" in done.stderr and "--token" in done.stderr
    assert master("--port", "70000").returncode == 2


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = master("--port", str(taken.getsockname()[1]), "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Address already in use" in done.stderr and "--port" in done.stderr


def test_what_cannot_start_is_one_clear_line(tmp_path: Path) -> None:
    for options in (
        ("--engine", "kubernetes"),
        ("--database-url", "nonsense"),
        ("--database-url", "sqlite:////proc/x"),
    ):
        done = master("--port", "0", "--data-dir", str(tmp_path), *options)
        assert (done.returncode, len(done.stderr.strip().splitlines())) == (1, 1), done.stderr
    with pytest.raises(ConfigurationError, match="--database-url"):
        Store("nonsense://x")


def test_events_reach_a_watcher_and_do_not_hold_up_the_end(tmp_path: Path) -> None:
    seen: list[str] = []

    with server(tmp_path / "data") as (base, process):
        second = master("--port", "0", "--data-dir", str(tmp_path / "data"))
        assert second.returncode == 1 and "another master uses the folder" in second.stderr

        def watch() -> None:
            with httpx.stream("GET", f"{base}/api/events/", timeout=240) as response:
                seen.extend(line for line in response.iter_lines() if line)

        watcher = threading.Thread(target=watch)
        watcher.start()
        wait_for(lambda: ": connected" in seen, what="the watcher")
        run = httpx.post(
            f"{base}/api/runs/", json={"name": "r", "num_workers": 1, "command": "echo hello"}
        ).json()
        httpx.post(
            f"{base}/api/metrics/", json={"run_id": run["id"], "name": "loss @ 0", "value": 1}
        )
        wait_for(lambda: httpx.get(f"{base}/api/runs/{run['id']}/").json()["state"] == "finished")
        wait_for(
            lambda: (
                {"event: state", "event: metric", "event: log"} <= set(seen)
                and any('"text": "hello"' in line for line in seen)
            ),
            what="the events",
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not user_folder("master.json").exists()  # it is not taken for a master that runs
        watcher.join(60)
        assert not watcher.is_alive()
    # What uvicorn says if it has to cut an open stream off after its limit.
    assert "graceful shutdown exceeded" not in (tmp_path / "master.log").read_text()


def test_a_token_is_asked_of_everybody(tmp_path: Path) -> None:
    with TestClient(
        create_app(data_dir=tmp_path, token="sesame"), base_url="http://mlbench.example"
    ) as client:
        assert client.get("/api/health/").status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer x"},
            {"Authorization": "Basic sesame"},
            {"Authorization": "ü"},
        ):
            raw = {key: value.encode() for key, value in headers.items()}
            for answer in (
                client.get("/api/runs/", headers=raw),
                client.post("/api/metrics", json={}, headers=raw),
            ):
                assert (answer.status_code, set(answer.json())) == (401, {"status", "message"})
        assert client.get("/api/runs/", headers={"Authorization": "Bearer sesame"}).json() == []
        assert (
            client.get("/", headers={"accept": "text/html"}, follow_redirects=False).headers[
                "location"
            ]
            == "/login/"
        )
        assert client.post("/login/", data={"token": "wrong"}).status_code == 401
        assert client.post("/login/", data={"token": "sesame"}).status_code == 200
        assert client.get("/api/runs/").json() == []
        assert (
            client.post(
                "/api/metrics/", json=[], headers={"Origin": "http://evil.example"}
            ).status_code
            == 403
        )


def test_the_login_page_reads_only_short_url_encoded_forms(tmp_path: Path) -> None:
    """Anyone may post there, so a request must not cost more than its own few bytes."""
    with TestClient(
        create_app(data_dir=tmp_path, token="sesame"), base_url="http://mlbench.example"
    ) as client:
        for disposition in (b"form-data; name=" + b"=?utf-8?q?x?= " * 200, b"form-data; name*"):
            part = b"--B\r\nContent-Disposition: " + disposition + b"\r\n\r\nsesame\r\n--B--\r\n"
            headers = {"content-type": "multipart/form-data; boundary=B"}
            assert client.post("/login/", content=part, headers=headers).status_code == 415
        assert client.post("/login/", json={"token": "sesame"}).status_code == 415
        assert client.post("/login/", data={"token": "x" * 4096}).status_code == 413
        assert client.post("/login/", data={"token": "x" * 4000}).status_code == 401
        assert (
            client.post("/login/", data={"token": "sesame"}, follow_redirects=False).status_code
            == 303
        )


def test_without_a_token_foreign_pages_are_refused(tmp_path: Path) -> None:
    with TestClient(create_app(data_dir=tmp_path), base_url="http://127.0.0.1:5080") as client:
        for host in ("evil.example", "evil.example:5080", "10.0.0.1", "", "127.0.0.1.evil.example"):
            assert client.get("/api/runs/", headers={"Host": host}).status_code == 403
        for host in ("localhost:5080", "[::1]:5080", "127.0.0.1"):
            assert client.get("/api/runs/", headers={"Host": host}).status_code == 200
        for origin, status in (
            ("http://evil.example", 403),
            ("null", 403),
            ("http://127.0.0.1:5080", 201),
        ):
            assert (
                client.post("/api/metrics/", json=[], headers={"Origin": origin}).status_code
                == status
            )


def test_an_empty_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token"):
        create_app(data_dir=tmp_path, token=" ")


def test_a_wrong_address_is_a_page_for_a_browser_and_json_for_a_program(tmp_path: Path) -> None:
    wrong = {
        "/runs/999/": (404, "There is no run &#39;999&#39;"),
        "/workers/nobody": (404, "There is no worker &#39;nobody&#39;"),
        "/workers/<b>/": (404, "There is no worker &#39;&lt;b&gt;&#39;"),
        "/nothing": (404, "There is nothing at this address"),
        "/compare/?machine=x": (400, "Machine: must be one of"),
        "/logout/": (405, "Method Not Allowed"),
    }
    with TestClient(create_app(data_dir=tmp_path), base_url="http://127.0.0.1:5080") as client:
        for path, (status, text) in wrong.items():
            page = client.get(path, headers={"Accept": "text/html,*/*;q=0.8"})
            assert (page.status_code, page.headers["content-type"]) == (
                status,
                "text/html; charset=utf-8",
            ), path
            assert text in page.text and '<a href="/runs/">' in page.text
            assert client.get(path).json()["status"] in (
                "Not Found",
                "Bad Request",
                "Method Not Allowed",
            )
        for path in ("/api/runs/999/", "/static/nothing.css"):
            assert client.get(path, headers={"Accept": "text/html"}).json()["status"] == "Not Found"
