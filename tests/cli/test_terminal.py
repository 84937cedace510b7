"""``mlbench`` on a real terminal: prompts, progress and Ctrl-C."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.fake_master import FakeMaster
from tests.cli.terminal import CTRL_C, on_terminal

RUN = ("run", "demo", "1", "2", "--task", "1a", "--wait", "--output")
QUESTION = "Stop the runs, too?"
CONTINUE = "stopped waiting; the runs continue ('mlbench stop demo-1 demo-2' stops them)"


@pytest.fixture
def endless(fake: FakeMaster, patch: pytest.MonkeyPatch) -> FakeMaster:
    """A master whose runs do not end by themselves."""
    fake.final_state = "started"
    return fake


@pytest.mark.parametrize(
    ("answer", "end", "stopped"),
    [
        ("y\n", "stopped the runs demo-1 demo-2; their metrics are kept", ["failed", "failed"]),
        ("\n", CONTINUE, ["started", "started"]),
        (CTRL_C, CONTINUE, ["started", "started"]),
    ],
)
def test_ctrl_c_asks_if_the_runs_should_stop(
    answer: str, end: str, stopped: list[str], endless: FakeMaster, tmp_path: Path
) -> None:
    with on_terminal(*RUN, str(tmp_path)) as terminal:
        terminal.read_until("Prec@1 60")
        terminal.type(CTRL_C)
        terminal.read_until("[y/N]")
        assert QUESTION in terminal.shown
        terminal.type(answer)
        assert terminal.end() == 1
    assert f"mlbench: {end}" in terminal.shown
    assert "Traceback" not in terminal.shown
    assert [run["state"] for run in endless.runs.values()] == stopped
