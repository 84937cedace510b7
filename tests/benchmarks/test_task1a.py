"""Task 1a's script, run as users run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mlbench_core.tasks import get_task
from tests.helpers.processes import environment, free_port

SCRIPT = str(get_task("1a").script)


def run_task(tmp_path: Path, *arguments: str, run_id: str = "1") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--run_id", run_id, "--backend", "gloo", "--root-checkpoint", str(tmp_path / "ckpt"),
         "--root-output", str(tmp_path / "out"), *arguments],
        capture_output=True, text=True, env=environment(MASTER_PORT=str(free_port())), timeout=200,
    )  # fmt: skip


def last_checkpoint(tmp_path: Path, run_id: str) -> dict[str, object]:
    files = sorted(p for p in (tmp_path / "ckpt").rglob("*_0.pth.tar") if run_id in p.parts or run_id in str(p.parent))
    assert files, list((tmp_path / "ckpt").rglob("*"))
    return dict(torch.load(files[-1], weights_only=True))


def test_resumed_run_is_bit_identical_to_an_uninterrupted_one(tmp_path: Path) -> None:
    common = ("--dataset", "digits", "--channels-last", "--checkpoint")
    for arguments, run_id in [
        (("--epochs", "2"), "whole"),
        (("--epochs", "1"), "parted"),
        (("--epochs", "2", "--resume"), "parted"),
    ]:
        done = run_task(tmp_path, *common, *arguments, run_id=run_id)
        assert done.returncode == 0, done.stderr
    whole, parted = last_checkpoint(tmp_path, "whole"), last_checkpoint(tmp_path, "parted")
    assert_equal(whole["model"], parted["model"])
    assert_equal(whole["optimizer"], parted["optimizer"])
    assert_equal(whole["scheduler"], parted["scheduler"])
    timeless = ("current_epoch", "best_epoch", "best_metric_value", "samples", "batches")
    trackers = [{key: state["tracker"]["state"][key] for key in timeless} for state in (whole, parted)]  # type: ignore[index]
    assert trackers[0] == trackers[1]
    assert trackers[0]["current_epoch"] == 2


def test_a_damaged_checkpoint_is_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt" / "task1a" / "1"
    folder.mkdir(parents=True)
    (folder / "0_0.pth.tar").write_bytes(b"PK\x03\x04 torn in the middle")
    done = run_task(tmp_path, "--dataset", "digits", "--resume")
    assert done.returncode == 1, done.stderr
    assert "0_0.pth.tar" in done.stderr
    assert "Traceback" not in done.stderr


def assert_equal(a: object, b: object) -> None:
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert isinstance(b, dict)
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert isinstance(b, list | tuple)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def test_two_workers_by_torchrun(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         SCRIPT, "--run_id", "1", "--backend", "gloo", "--dataset", "digits", "--epochs", "1",
         "--root-checkpoint", str(tmp_path / "ckpt"), "--root-output", str(tmp_path / "out")],
        capture_output=True, text=True, env=environment(), timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--backend", "smoke-signals"], 2, "smoke-signals"),
        (["--hosts", "127.0.0.1,127.0.0.1", "--rank", "2"], 2, "2"),
        (["--dataset", "faces"], 2, "faces"),
        (["--backend", "nccl", "--dataset", "digits"], 1, "GPU"),
        (["--dataset", "cifar10", "--partial", "--root-dataset", "/nonexistent/folder"], 1, "/nonexistent/folder"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, arguments: list[str], status: int, message: str) -> None:
    if "nccl" in arguments and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    done = run_task(tmp_path, *arguments)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
