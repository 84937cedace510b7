"""``make demo`` stops the master that it started, and no other one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("exit_status", [0, 3])
@pytest.mark.parametrize("ran_before", [True, False])
def test_only_the_own_master_is_stopped(ran_before: bool, exit_status: int, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "mlbench"
    program.parent.mkdir()
    calls = tmp_path / "calls"
    # It stands for the command, and notes how it is called.
    program.write_text(
        f'#!/bin/sh\necho "$1 $2" >>{calls}\n'
        "case $1 in get-dashboard-url) exit "
        f"{int(not ran_before)};; run) exit {exit_status};; esac\n"
    )
    program.chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to("/bin/true")
    (tmp_path / ".installed").touch()
    done = subprocess.run(
        ["make", "demo", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode != 0) == (exit_status != 0), done.stderr
    end = [] if ran_before else ["master --stop"]
    assert calls.read_text().splitlines() == ["get-dashboard-url ", "run demo", *end]
