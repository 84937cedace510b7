"""The comparison of task 1a with a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.conftest import MICRO
from tests.helpers.forked import run_script
from tests.helpers.thorough import thorough


@thorough
def test_a_short_run(micro: Callable[[str], ModuleType], tmp_path: Path) -> None:
    sizes = ["--quick", "--batch-size", "2", "--variants", "flags"]
    command = [str(MICRO / "task1a_epoch.py"), *sizes, "--save", str(tmp_path)]
    done = run_script(command, timeout_s=240, MLBENCH_TEST_DATA="")
    assert done.returncode == 0, done.stderr
    (run,) = micro("_bench").read(tmp_path / "task1a_epoch.json")["runs"]
    assert "images of random bytes" in run["conditions"]
    names = ["plain PyTorch loop", "task 1a --channels-last --autocast bf16"]
    assert [row["variant"] for row in run["rows"]] == names
    assert all(row["value"] > 0 for row in run["rows"])


def test_command_line(
    micro: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        micro("task1a_epoch").main(["--steps", "0"])
    assert "--steps: must be a whole number of at least 1, not 0" in capsys.readouterr().err
