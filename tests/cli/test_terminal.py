"""``mlbench`` on a real terminal: prompts, progress and Ctrl-C."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlbench_cli._wait import Progress, live_table
from tests.cli.fake_master import FakeMaster
from tests.cli.terminal import CTRL_C, on_terminal
from tests.helpers.processes import wait_for

RUN = ("run", "demo", "1", "2", "--task", "1a", "--wait", "--output")
QUICK = "import mlbench_cli._wait as w; w.POLL_S = 0.3"
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
        # Python misses a Ctrl-C in the instant between the question and its wait for the answer.
        process = psutil.Process(terminal.process.pid)
        wait_for(lambda: process.status() == psutil.STATUS_SLEEPING, 60, "its wait")
        time.sleep(0.3)
        terminal.type(answer)
        assert terminal.end() == 1
    assert f"mlbench: {end}" in terminal.shown
    assert "Traceback" not in terminal.shown
    assert [run["state"] for run in endless.runs.values()] == stopped


def test_progress_is_a_live_table(
    fake: FakeMaster, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    fake.states = {}
    create = fake._create

    def create_with_dates(body: dict[str, Any]) -> tuple[int, Any]:
        answer = create(body)
        run_id = answer[1]["id"]
        dates = [{"date": f"2024-05-01T10:00:{s:02d}.500000Z"} for s in (0, 30)]
        name = "val_global_Prec@1 @ 0"
        fake.metrics[run_id][name] = [
            {**a, **b} for a, b in zip(fake.metrics[run_id][name], dates, strict=True)
        ]
        return answer

    patch.setattr(fake, "_create", create_with_dates)
    arguments = ("--", "--epochs", "4")
    with on_terminal(*RUN, str(tmp_path), *arguments, setup=QUICK) as seen:
        seen.read_until("<= 1:00 left")
        assert seen.end() == 0
    header, first, second = [line.split() for line in seen.shown.replace("\r", "").splitlines()[:3]]
    assert header == ["RUN", "GOAL", "METRIC", "EPOCH", "S/EPOCH", "TIME", "STATE"]
    assert [first[0], second[0]] == ["demo-1", "demo-2"]
    last = next(
        line for line in reversed(seen.shown.splitlines()) if "demo-1" in line and "Prec@1" in line
    )
    assert last.split()[-1] == "finished"
    assert "Prec@1 60 of 80" in last and "2/4" in last and "30.0" in last
    assert "demo-1: started" not in seen.shown, "no plain lines"


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    fake: FakeMaster, tmp_path: Path
) -> None:
    with on_terminal(
        *RUN, str(tmp_path), setup=f"import os; os.environ['TERM'] = 'dumb'; {QUICK}"
    ) as seen:
        assert seen.end() == 0
    assert "demo-1: started, 2 epochs done" in seen.shown


def test_prompts_ask_for_everything_that_is_missing(fake: FakeMaster) -> None:
    with on_terminal("run") as seen:
        for question, answer in (
            ("Name", "demo"),
            ("Number of workers", "1 2"),
            ("Task", "1"),
            ("Backend", "gloo"),
        ):
            seen.read_until(f"{question}")
            seen.read_until(": ")
            seen.type(f"{answer}\n")
        assert seen.end() == 0
    assert [(r["name"], r["task"], r["backend"]) for r in fake.requests] == [
        ("demo-1", "1a", "gloo"),
        ("demo-2", "1a", "gloo"),
    ]


def test_the_reason_of_a_waiting_run_is_above_the_live_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    waiting = Progress("a-1", reason="waits for run b-1, which is exclusive")
    with live_table() as show:
        show([waiting])
        show([waiting])
    assert capsys.readouterr().err.count("a-1 waits for run b-1, which is exclusive\n") == 1
