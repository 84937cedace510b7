"""The comparison of image loading with torchvision's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.benchmarks.conftest import MICRO
from tests.helpers.processes import environment


def test_a_short_run(micro: Callable[[str], ModuleType], tmp_path: Path) -> None:
    # Not forked from the server: its processes may not start the loader's.
    command = [sys.executable, str(MICRO / "jpeg_loading.py"), "--quick", "--save", str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (run,) = micro("_bench").read(tmp_path / "jpeg_loading.json")["runs"]
    assert "1 blocks of 8 generated images of" in run["conditions"]
    assert [row["variant"] for row in run["rows"]] == [
        "ImageFolder, DataLoader", "JpegBatches, files", "JpegBatches, tar file"
    ]  # fmt: skip
    assert all(row["value"] > 0 for row in run["rows"])
