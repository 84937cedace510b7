"""The complete code blocks of how-to pages run, and print what the pages show."""

from __future__ import annotations

import csv
import doctest
import faulthandler
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.network.parsing import parse_network
from tests.helpers.thorough import thorough

HOWTO = Path(__file__).parent.parent / "docs" / "howto"

PAGES = ("custom_data", "goals", "gpus", "profile", "repeats", "resume", "sinks")
"""Pages whose Python blocks are one script from top to bottom."""

# A block, and the text block that follows it directly: what the block prints.
_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (HOWTO / f"{page}.md").read_text(encoding="utf-8")
    blocks = _BLOCK.findall(text)
    assert len(blocks) == text.count("\n```python\n") > 0
    names = {"__name__": "page"}
    for code, shown in blocks:
        exec(compile(code, f"{page}.md", "exec"), names)
        printed = capsys.readouterr().out
        assert doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS), printed


def script(page: str) -> str:
    """Return the only Python block of a page."""
    ((code, _),) = _BLOCK.findall((HOWTO / f"{page}.md").read_text(encoding="utf-8"))
    return code


def test_the_script_for_the_own_network_turns_measured_times_into_the_text_of_the_page(
    tmp_path: Path,
) -> None:
    """The times are those of two workers in the emulated network that the page names."""
    result = tmp_path / "result.csv"
    with result.open("w", newline="") as file:
        rows = [("size_bytes", "p50_s"), (4_000_000, 0.3735966070089489), (4, 0.02084701200510608)]
        csv.writer(file).writerows(rows)
    names: dict[str, Any] = {"__name__": "page"}
    exec(script("own_network"), names)
    text = names["network_text"](str(result))
    assert f"```text\n{text}\n```" in (HOWTO / "own_network.md").read_text(encoding="utf-8")
    link = parse_network(text).link
    assert link.bandwidth == pytest.approx(100e6, rel=0.02)
    assert link.round_trip_s == pytest.approx(0.02, rel=0.05)


def test_the_script_that_hangs_with_two_workers_ends_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = [f"--root-{name}={tmp_path}" for name in ("dataset", "checkpoint", "output")]
    monkeypatch.setattr("sys.argv", ["hang.py", *folders])
    try:
        exec(script("debug_hanging"), {"__name__": "__main__"})
    finally:
        faulthandler.unregister(signal.SIGUSR1)
    assert capfd.readouterr().out.splitlines() == [f"rank 0 step {step}" for step in range(3)]


@thorough
def test_the_workers_of_the_elastic_script_agree_on_the_rounds_and_the_samples(
    tmp_path: Path,
) -> None:
    path = tmp_path / "elastic.py"
    path.write_text(script("elastic"))
    run = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=600, check=True
    )
    joined, *ends = sorted(run.stdout.splitlines(), key=lambda line: "joined" not in line)
    assert re.fullmatch(r"worker 3 joined after round \d+", joined)
    (samples,) = {end.partition(": ")[2] for end in ends}
    # Three workers in the first 10 rounds, and at least two in the others.
    assert int(re.findall(r"\d+", samples)[1]) >= 10 * 480 + 90 * 320
    assert sorted(end[:8] for end in ends) == ["worker 0", "worker 2", "worker 3"]
