"""A master for tests: in this process, or as a real server."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

with warnings.catch_warnings():  # newer Starlette would rather have a successor of httpx
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

from mlbench_master.engines import Engine, Job, JobStatus, LogPage
from mlbench_master.engines.interface import FROM_THE_START, LogRange

__all__ = ["IdleEngine", "TestClient", "answers", "processes_of", "server", "wait_for"]

# A busy machine may take longer to answer than httpx's default timeout of 5 seconds.
httpx._config.DEFAULT_TIMEOUT_CONFIG.read = 60
httpx._config.DEFAULT_TIMEOUT_CONFIG.connect = 60

PYTHON = sys.executable
ROOT = Path(__file__).resolve().parents[2]


class IdleEngine(Engine):
    """Starts nothing, and says that it runs."""

    name = "idle"
    capacity = 0.0  # type: ignore[assignment]

    def start(self, job: Job) -> str:
        return f"idle-{job.run_id}"

    def poll(self, job_id: str) -> JobStatus:
        return JobStatus("running")

    def stop(self, job_id: str) -> None: ...
    def note(self, job_id: str, text: str) -> None: ...
    def remove(self, job_id: str) -> None: ...
    def close(self) -> None: ...

    def logs(self, job_id: str, lines: LogRange = FROM_THE_START) -> LogPage:
        found: Any = [{"line": number, **line} for number, line in enumerate(self.log_tail(job_id))]
        end = lines.since_line + lines.limit
        return LogPage(
            [line for line in found[lines.since_line : end] if lines.wanted.matches(line)], 1
        )

    def log_tail(self, job_id: str, max_bytes: int = 65_536) -> list[dict[str, Any]]:
        return [{"rank": 0, "stream": "stdout", "text": "<b>log</b>", "date": ""}]


class IdleContainers(IdleEngine):
    """Would start containers, as the master of version 3.0 did."""

    starts_containers = True


def wait_for(
    condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "the condition"
) -> Any:
    """Ask until the answer is true; the answer."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every living process whose environment names a folder below ``folder``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MLBENCH_RUN_DIR", "").startswith(str(folder)):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@contextmanager
def server(
    data_dir: Path,
    *options: str,
    setup: str = "",
    token: Sequence[str] | None = None,
    verify: ssl.SSLContext | bool = True,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A master in a process of its own; its URL and the process. It is asked to end at the end.

    ``setup`` is Python that runs before it, for example to shorten its time limits. ``token`` are
    the options that say who may use it: ``()`` for a random token; by default everybody here,
    unless the other options name a token."""
    start = (
        ["-c", f"{setup}\nfrom mlbench_cli import main\nmain()"] if setup else ["-m", "mlbench_cli"]
    )
    if token is None:
        token = () if "--token" in options else ("--no-token",)
    log = data_dir.parent / "master.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                PYTHON,
                *start,
                "master",
                "--port",
                "0",
                "--data-dir",
                str(data_dir),
                *options,
                *token,
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=output,
            stdout=output,
        )
    try:

        def url() -> str:
            assert process.poll() is None, log.read_text()
            text = log.read_text()
            return (
                text.split("MLBench master on ")[1].split(" ")[0]
                if "MLBench master on " in text
                else ""
            )

        base = wait_for(url, what="the master's first line")
        wait_for(lambda: answers(base, verify), what="the master's health")
        yield base, process
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def answers(base: str, verify: ssl.SSLContext | bool = True) -> bool:
    """Whether a master answers there."""
    try:
        return httpx.get(f"{base}/api/health/", timeout=10, verify=verify).status_code == 200
    except httpx.TransportError:
        return False
