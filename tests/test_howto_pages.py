"""The complete code blocks of how-to pages run, and print what the pages show."""

from __future__ import annotations

import csv
import doctest
import faulthandler
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.network.parsing import parse_network
from mlbench_core.run_terms import WorkerRange
from mlbench_master.engines.interface import Job
from mlbench_master.engines.local.engine import LocalEngine
from tests.helpers.thorough import thorough
from tests.master.helpers import wait_for

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
    """Return the first Python block of a page."""
    (code, _), *_ = _BLOCK.findall((HOWTO / f"{page}.md").read_text(encoding="utf-8"))
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
    engine = LocalEngine(tmp_path / "runs", cores=3)
    job_id = engine.start(Job(1, "elastic", str(path), 3, elastic=WorkerRange(2, 3)))
    wait_for(lambda: engine.poll(job_id).state != "running", 600, "the end of the run")
    status, log = engine.poll(job_id), engine.logs(job_id).lines
    assert status.state == "finished", log
    died, joined = status.changes
    assert died == "worker 1 failed: exit status 1"
    match = re.fullmatch(r"worker 3 joined after round (\d+)", joined)
    assert match is not None
    # The last ones are those of the joiner, which has weight 0 in its first round.
    two = int(match[1]) + 1 - 10
    ends = {line["rank"]: line["text"] for line in log if "samples" in line["text"]}
    samples = 10 * 480 + two * 320 + (90 - two) * 480
    assert ends == dict.fromkeys((0, 2, 3), f"100 rounds, {samples} samples")
