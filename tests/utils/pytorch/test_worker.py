"""What a task's script does around its training."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_core.utils.pytorch import worker
from mlbench_core.utils.task_args import add_run_arguments, task_main


def test_arguments_reach_backend_and_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    @contextlib.contextmanager
    def fake_backends(**arguments: Any) -> Iterator[tuple[int, int, None]]:
        seen["backend"] = arguments
        yield 1, 3, None

    def train(*arguments: Any) -> SimpleNamespace:
        seen["train"] = arguments
        return SimpleNamespace(goal_reached=True)

    def prepare(args: argparse.Namespace) -> None:
        assert "backend" not in seen
        args.prepared = True

    monkeypatch.setattr(worker, "initialize_backends", fake_backends)
    roots = [f"--root-{name}={tmp_path}" for name in ("dataset", "checkpoint", "output")]
    task_main(
        worker.worker_main(train, prepare),  # type: ignore[arg-type]
        uid="task9z",
        argv=["--run_id", "7", "--seed", "5", "--timeout", "9", "--light", *roots],
        add_arguments=add_run_arguments,
    )
    assert (seen["backend"]["seed"], seen["backend"]["timeout_s"], seen["backend"]["comm_backend"]) == (5, 9.0, "gloo")
    *given, args = seen["train"]
    folders = [str(tmp_path / "torch" / "task9z"), str(tmp_path / "task9z" / "7")]
    assert given == [1, 3, "7", *folders, False, True, False]
    assert args.prepared
