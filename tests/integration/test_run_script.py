"""A new user's first minutes: an unchanged script under an emulated network, another method, and a
prediction, by a master that the command starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.network import EmulatedNetwork
from tests.helpers.processes import ROOT

REASON = EmulatedNetwork.why_not()
# The network of the script has layers of 64 x 1024, 1024 x 1024 and 1024 x 10, with biases.
WEIGHTS = 64 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10
# 1437 images for two workers, in batches of 32.
STEPS = 23

Mlbench = Callable[..., str]


@pytest.fixture
def mlbench(tmp_path: Path) -> Iterator[Mlbench]:
    """Call the command in an empty folder that has only the script."""
    script = ROOT / "benchmarks" / "tutorial" / "train.py"
    (tmp_path / "train.py").write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
    variables = {**os.environ, "MLBENCH_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}

    def call(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "mlbench_cli", *words],
            cwd=tmp_path, env=variables, text=True, timeout=240, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    yield call
    call("master", "--stop")


@pytest.mark.skipif(REASON is not None, reason=f"emulated network: {REASON}")
@pytest.mark.timeout(1200)
def test_an_unchanged_script_is_measured_with_another_method_and_predicted(
    mlbench: Mlbench, tmp_path: Path
) -> None:
    network = ("2", "--network", "lan-1g")
    shown = mlbench("run", "me", *network, "train.py", "--epochs", "1")
    goal = ("--metric", "loss=val loss ([0-9.]+)", "--goal", "loss<=1000")
    half = ("--method", "bf16", *goal)
    mlbench("run", "half", *network, *half, "train.py", "--epochs", "1")

    # Each worker sends each gradient once, in 4 bytes or in 2.
    for name, size in (("me", 4), ("half", 2)):
        folder = tmp_path / "mlbench-results" / name / f"{name}-2"
        assert mlbench("results", "verify", str(folder)).strip().endswith("ok")
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        assert result["batches"] == STEPS
        assert result["bytes_on_wire"]["rank_0"] == STEPS * WEIGHTS * size
        assert result["configuration"]["program"] == "train.py"
    assert result["configuration"]["algorithm"] == "bf16"
    assert (result["goal"]["reached"], result["goal"]["metric"]) == (True, "val_loss")
    assert re.search(rf"^steps +{STEPS}$", shown, re.MULTILINE)
    assert f"{WEIGHTS * 4 / 1e6:.2f} MB a step" in shown

    workers = ("--workers", "4", "--workers", "8")
    text = mlbench("predict", "mlbench-results", "--network", "lan-1g", *workers, "--json")
    predictions = json.loads(text)
    assert [(row["run"], row["workers"]) for row in predictions] == [
        (run, count) for run in ("train.py, bf16", "train.py, as-is") for count in (4, 8)
    ]
    for row in predictions:
        low, high = row["step_range_s"]
        assert low < row["step_s"] < high
