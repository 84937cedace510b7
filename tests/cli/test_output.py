"""What commands write to a terminal, to a pipe and to files."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path

import pytest

from mlbench_cli import _output
from mlbench_cli.commands.runs import _cell
from mlbench_core.comparison.load_results import save

LONG = '{"mean": 1.0, "spread": 0.5, "values": [' + ", ".join(map(str, range(100))) + "]}"


def test_a_terminal_gets_no_line_wider_than_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "72")
    rows = [
        ("summary @ 0", LONG, "2026-01-01 00:00:00"),
        ("loss @ 0", "0.5", "2026-01-01 00:00:00"),
    ]
    _output.print_table(("METRIC", "LATEST", "DATE"), rows)
    _output.print_field("command", f"python main.py {'--option value ' * 30}")
    _output.print_field("image", "task1a")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 72
    assert "..." in lines[1] and lines[2] == f"loss @ 0     {'0.5':38}  2026-01-01 00:00:00"
    assert lines[4].startswith(" " * 14) and lines[-1] == "image:        task1a"


def test_a_pipe_gets_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    _output.print_table(("METRIC", "LATEST"), [("summary @ 0", LONG)])
    assert LONG in capsys.readouterr().out


def test_files_of_results_have_the_mode_of_other_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(tmp_path / "result.json", {"name": "r", "id": 1}, {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "result.json").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("zone", "text"),
    [("UTC", "2026-01-31 12:00:00 +00:00"), ("IST-5:30", "2026-01-31 17:30:00 +05:30")],
)
def test_dates_in_tables_are_local_with_their_offset(
    zone: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert _cell("2026-01-31T12:00:00.500000Z") == text
        assert _cell("2026-01-31T12:00:00Z") == text
        # Only dates of the master, not texts that begin like one.
        assert _cell("2026-01-31T12:00:00Z-run") == "2026-01-31T12:00:00Z-run"
    finally:
        monkeypatch.undo()
        time.tzset()
