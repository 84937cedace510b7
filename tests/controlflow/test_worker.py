"""What a task's script does around its training."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.controlflow.pytorch import worker
from mlbench_core.controlflow.task_arguments import add_run_arguments, task_main
from mlbench_core.utils import Tracker


class FakeWorker:
    """Calls a task's main function with nothing around it; notes what reached the backends and the training."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 1) -> None:
        self.seen: dict[str, Any] = {}
        self.rank = rank
        self.kept: list[bool] = []
        monkeypatch.setattr(worker, "initialize_backends", self.backends)
        monkeypatch.setattr(worker, "keep_freed_memory", lambda: self.kept.append(True))

    @contextlib.contextmanager
    def backends(self, **arguments: Any) -> Iterator[tuple[int, int, None]]:
        self.seen["backend"] = arguments
        yield self.rank, 3, None

    def train(self, *arguments: Any) -> Tracker:
        self.seen["train"] = arguments
        return Tracker([], "7", self.rank)

    def run(self, folder: Path, *argv: str, **options: Any) -> None:
        task_main(
            worker.worker_main(self.train, **options),
            uid="task9z",
            argv=["--run_id", "7", *argv, *(f"--root-{name}={folder}" for name in ("dataset", "checkpoint", "output"))],
            add_arguments=add_run_arguments,
        )


def test_arguments_reach_backend_and_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWorker(monkeypatch)

    def prepare(args: argparse.Namespace) -> None:
        assert "backend" not in fake.seen
        args.prepared = True

    fake.run(tmp_path, "--seed", "5", "--timeout", "9", "--light", prepare=prepare)
    backend = fake.seen["backend"]
    assert (backend["seed"], backend["timeout_s"], backend["comm_backend"]) == (5, 9.0, "gloo")
    *given, args = fake.seen["train"]
    folders = [str(tmp_path / "torch" / "task9z"), str(tmp_path / "task9z" / "7")]
    assert given == [1, 3, "7", *folders, False, True, False]
    assert args.prepared
    assert not (tmp_path / "task9z" / "7" / "summary.json").exists()  # rank 0 writes it


@pytest.mark.parametrize(("argv", "is_written"), [((), True), (("--validation_only",), False)])
def test_the_output_folder_gets_the_summary(
    argv: tuple[str, ...], is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeWorker(monkeypatch, rank=0).run(tmp_path, *argv)
    path = tmp_path / "task9z" / "7" / "summary.json"
    assert path.exists() == is_written
    if is_written:
        summary = json.loads(path.read_text())
        assert (summary["run_id"], summary["rank"], summary["goal_reached"]) == ("7", 0, False)


def test_malloc_is_left_alone_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWorker(monkeypatch)
    fake.run(tmp_path, keep_memory=False)
    assert fake.kept == []
    fake.run(tmp_path)
    assert fake.kept == [True]
