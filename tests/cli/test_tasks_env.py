"""tasks and env."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest

from mlbench_cli.commands import env as env_module
from mlbench_core import __version__
from mlbench_core.tasks import TASKS
from tests.cli.conftest import Call


def test_tasks_with_goals(call: Call) -> None:
    line = next(line for line in call("tasks").stdout.splitlines() if line.startswith("1a"))
    assert "Prec@1 >= 80 >= 70 164" in " ".join(line.split())
    measuring = next(line for line in call("tasks").stdout.splitlines() if line.startswith("0 "))
    assert measuring.split("random tensors")[1].split() == ["-", "-", "-", "gloo,", "nccl,", "mpi"]
    assert [task["key"] for task in json.loads(call("tasks", "--json").stdout)] == sorted(TASKS)


def test_env_asks_torch_in_a_process_of_its_own(call: Call, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(env_module, "_ASK_TORCH", 'print(\'{"version": "9.9", "backends": ["gloo"]}\')')
    found = json.loads(call("env", "--json").stdout)
    assert found["packages"]["mlbench-core"] == __version__
    assert found["system"]["cores"] >= 1
    assert found["mlbench"]["master"] is None
    if found["packages"]["torch"]:
        assert found["torch"] == {"version": "9.9", "backends": ["gloo"]}
    assert "mlbench-core" in call("env").stdout


def test_env_describes_torch() -> None:
    found = env_module._torch()
    assert found["version"].startswith(importlib.metadata.version("torch").partition("+")[0])
    assert "gloo" in found["backends"]
    assert {"cuda", "cudnn", "nccl", "threads", "driver", "gpus", "torchvision"} < set(found)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise SystemExit('libcudart is missing')", "does not load: libcudart is missing"),
        ("print('x')", "does not load"),
    ],
)
def test_env_says_why_torch_does_not_load(
    code: str, problem: str, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(env_module, "_ASK_TORCH", code)
    assert problem in env_module._torch()["problem"]
    patch.setattr(env_module, "_ASK_TORCH", "while True: pass")
    patch.setattr(env_module, "_TORCH_TIMEOUT_S", 0.2)
    assert env_module._torch() == {"problem": "did not load within 0.2 s"}


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("", "loads"),
        (
            "raise RuntimeError('operator torchvision::nms\\ndoes not exist')",
            "does not load: operator torchvision::nms does not exist",
        ),
    ],
)
def test_env_says_if_torchvision_loads(
    code: str, shown: str, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchvision.py").write_text(code)
    patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert env_module._torch()["torchvision"] == shown
