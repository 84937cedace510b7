"""The identity of a master: what a stale record of it can cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import requests

from mlbench_core.client.api import ApiClient
from mlbench_core.client.masters import KEY_VARIABLE, read_record, remember_master
from tests.helpers.processes import free_port
from tests.master.helpers import server, wait_for
from tests.security.helpers import Listener
from tests.security.test_token import mlbench

TOKEN = "the-secret-token-of-the-master"


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the id of a master that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def eve() -> Iterator[Listener]:
    """Another user's program on the port of a master that has ended."""
    listener = Listener(lambda text: '{"status": "ok", "version": "4"}')
    yield listener
    listener.close()


def test_a_program_on_a_dead_masters_port_gets_no_token(
    eve: Listener, innocent: subprocess.Popen[bytes]
) -> None:
    # The record of a living process, as if the process id had been given out again at the same
    # tick.
    remember_master(eve.url, innocent.pid, TOKEN, "key")
    assert mlbench("status").returncode == 1
    assert mlbench("status", "-u", eve.url).returncode == 1
    with (
        ApiClient(url=eve.url) as client,
        pytest.raises(requests.ConnectionError, match="is not the master that this user started"),
    ):
        client.get_runs().result()
    with ApiClient(url=eve.url, token=TOKEN) as client, pytest.raises(requests.ConnectionError):
        client.get_runs().result()
    assert "X-MLBench-Nonce: " in eve.received
    assert TOKEN not in eve.received


def test_a_worker_sends_its_token_only_to_its_master(
    eve: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # There is no record any more: the master has ended properly.
        for name, value in (
            ("MLBENCH_MASTER_URL", eve.url),
            ("MLBENCH_TOKEN", TOKEN),
            (KEY_VARIABLE, "key"),
        ):
            patch.setenv(name, value)
        with ApiClient(url=eve.url) as client, pytest.raises(requests.ConnectionError):
            client.get_runs().result()
    assert TOKEN not in eve.received


def test_a_program_that_asks_the_master_for_the_proof_gets_no_token(tmp_path: Path) -> None:
    with server(tmp_path / "data", token=()) as (base, master):
        record = read_record()
        passed_on = []

        def relay(text: str) -> str:
            nonce = text.partition("X-MLBench-Nonce: ")[2].split()[0]
            answer = httpx.get(f"{base}/api/health/", headers={"X-MLBench-Nonce": nonce})
            passed_on.append(answer.headers["X-MLBench-Proof"])
            return answer.text

        eve = Listener(relay, header=lambda: f"X-MLBench-Proof: {passed_on[-1]}\r\n")
        try:
            remember_master(eve.url, master.pid, record.token, record.key)
            with ApiClient(url=eve.url) as client, pytest.raises(requests.ConnectionError):
                client.get_runs().result()
        finally:
            eve.close()
        assert len(passed_on[0]) == 64
        assert record.token not in eve.received


def test_a_client_asks_for_the_proof_again_on_a_new_connection(tmp_path: Path) -> None:
    port = free_port()
    with server(tmp_path / "data", "--port", str(port), token=()) as (base, master):
        token = read_record().token
        with ApiClient(url=base) as client:
            assert client.get_runs().result().status_code == 200
            master.kill()  # its record stays
            master.wait()
            eve = Listener(port=port)
            try:
                with pytest.raises(requests.ConnectionError):
                    client.get_runs().result()
            finally:
                eve.close()
        assert eve.received and token not in eve.received


def test_stopping_a_stale_master_kills_no_innocent_process(
    innocent: subprocess.Popen[bytes], eve: Listener
) -> None:
    remember_master(eve.url, innocent.pid, TOKEN, "key")
    assert "no embedded master is running" in mlbench("master", "--stop").stderr
    assert innocent.poll() is None
    # Even one that gives the proof is not killed if it started at another time than the master.
    path = Path(os.environ["MLBENCH_HOME"], "master.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "started": "another boot-1"}))
    assert "no embedded master is running" in mlbench("master", "--stop").stderr
    assert innocent.poll() is None
    # A record of an earlier version has no mark of the start.
    path.write_text(json.dumps({"url": eve.url, "pid": innocent.pid, "token": TOKEN}))
    assert mlbench("master", "--stop").returncode == 1
    assert mlbench("status").returncode == 1
    assert innocent.poll() is None
    assert TOKEN not in eve.received


def test_the_real_master_is_stopped(tmp_path: Path) -> None:
    with server(tmp_path / "data", token=()) as (_, master):
        assert "stopped the master" in mlbench("master", "--stop").stdout
        assert wait_for(
            lambda: master.poll() is not None, what="the end"
        ) and master.returncode in (0, -signal.SIGTERM)
        assert read_record() is None
