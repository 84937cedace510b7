"""Real processes for tests: a master, free ports, and the environment they run in."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A TCP port on the loopback address that no other program is given as long as this process
    lives.

    The socket that holds it stays open and does not listen, so a server that reuses addresses
    (torch's store, the master) can listen there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = int(held.getsockname()[1])
    held.detach()
    return port


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with changes, fit for worker processes: one thread each, the
    checkout importable."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **changes}


def get_json(url: str, timeout_s: float = 60.0) -> Any:
    """The JSON that a URL answers."""
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        return json.load(answer)


def post_json(url: str, body: Any, timeout_s: float = 60.0) -> Any:
    """Post JSON and return the JSON of the answer."""
    request = urllib.request.Request(
        url,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.load(answer)


def wait_for(condition: Any, timeout_s: float, what: str) -> Any:
    """Poll until ``condition()`` is true and return its value; fail naming ``what`` after the
    limit."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"waited {timeout_s} s for {what}")


class Master:
    """A master in a process of its own, which can be stopped and started again.

    Args:
        folder: Its data folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        options = ["--port", str(self.port), "--data-dir", str(self.folder), "--no-token"]
        with open(self.folder / "master.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlbench_cli", "master", *options],
                stdout=log,
                stderr=log,
                env=environment(),
                cwd=ROOT,
            )
        wait_for(
            self._answers,
            120,
            f"the master to answer; its log:\n{(self.folder / 'master.log').read_text()}",
        )

    def _answers(self) -> bool:
        try:
            return bool(get_json(f"{self.url}/api/health/", timeout_s=10))
        except (urllib.error.URLError, OSError):
            assert self.process is not None and self.process.poll() is None, (
                self.folder / "master.log"
            ).read_text()
            return False

    def stop(self, kill: bool = False) -> None:
        """End it by SIGTERM, or by SIGKILL."""
        if self.process is not None:
            (self.process.kill if kill else self.process.terminate)()
            self.process.wait(60)
            self.process = None

    def state(self, run_id: int) -> str:
        """The state of a run."""
        return str(get_json(f"{self.url}/api/runs/{run_id}/")["state"])

    def log(self, run_id: int) -> str:
        """The log of a run as text."""
        return "\n".join(
            line["text"] for line in get_json(f"{self.url}/api/runs/{run_id}/logs/")["lines"]
        )

    def metric_values(self, run_id: int, name: str) -> list[str]:
        """The values of a run's metric, in the master's order."""
        metrics = get_json(f"{self.url}/api/metrics/{run_id}/?metric_type=run")
        return [entry["value"] for entry in metrics.get(name, [])]


@contextmanager
def running_master(folder: Path) -> Iterator[Master]:
    """A master that is stopped at the end."""
    master = Master(folder)
    master.start()
    try:
        yield master
    finally:
        master.stop()
