"""Run the scripts of this folder with and without observation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import free_port

SCRIPTS = Path(__file__).with_name("scripts")


@dataclass
class Run:
    """A run that has ended.

    Attributes:
        statuses: Exit status of each worker.
        logs: Output and errors of each worker.
        reports: The content that each worker's script has saved, see ``scripts/report.py``.
        folder: The result folder of an observed run.
    """

    statuses: list[int]
    logs: list[str]
    reports: list[dict[str, Any]]
    folder: Path

    @property
    def result(self) -> dict[str, Any]:
        """The content of ``result.json``."""
        content: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return content

    def lines(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return the raw lines of one kind of one worker."""
        text = (self.folder / "metrics.jsonl").read_text()
        lines = map(json.loads, text.splitlines())
        return [line for line in lines if line["kind"] == kind and line["rank"] == rank]


class Runner:
    """A process that starts workers of scripts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.observe.forking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(
        self,
        script: str,
        workers: int = 1,
        observed: bool = True,
        options: Sequence[str] = (),
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Run:
        """Run a script of the folder ``scripts`` to its end."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        port = free_port()
        jobs = []
        words = [str(SCRIPTS / f"{script}.py"), str(folder), *arguments]
        if observed:
            words = [*options, "--output", str(folder / "output"), *words]
        for rank in range(workers):
            variables = {
                "RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": workers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "MLBENCH_HOME": folder / "home", "MLBENCH_RUN_ID": "run",
                **(environment or {}),
            }  # fmt: skip
            jobs.append(
                {
                    "words": words,
                    "observed": observed,
                    "folder": str(folder),
                    "log": str(folder / f"log-{rank}"),
                    "variables": {name: str(value) for name, value in variables.items()},
                }
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(jobs) + "\n")
        self._process.stdin.flush()
        statuses = json.loads(self._process.stdout.readline())
        logs = [Path(job["log"]).read_text() for job in jobs]
        reports = []
        for rank in range(workers):
            path = folder / f"rank-{rank}.json"
            if path.exists():
                reports.append(json.loads(path.read_text()))
        return Run(statuses, logs, reports, folder / "output" / script / "run")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """A process that starts workers."""
    runner = Runner(tmp_path_factory.mktemp("observe"))
    yield runner
    runner.close()
