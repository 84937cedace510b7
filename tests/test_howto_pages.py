"""The scripts on the how-to pages run, and print what the pages show."""

from __future__ import annotations

import csv
import doctest
import re
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.network.parsing import parse_network

HOWTO = Path(__file__).parents[1] / "docs" / "howto"

# Pages whose Python blocks, one after the other, are one complete script.
SCRIPTS = ("custom_data", "goals", "gpus", "profile", "repeats", "resume", "sinks")

# A Python block, and the block that shows its output, which follows after at most one paragraph.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n(?:[^`\n][^\n]*\n){0,3}\n?```text\n(.*?)^```\n)?", re.M | re.S)


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the Python blocks of a page, each with the output that the page shows."""
    text = (HOWTO / f"{page}.md").read_text(encoding="utf-8")
    found = BLOCK.findall(text)
    assert len(found) == text.count("```python\n") > 0
    return found


def run(code: str, names: dict[str, Any]) -> None:
    exec(compile(code, "page", "exec"), names)


@pytest.mark.parametrize("page", SCRIPTS)
def test_the_script_of_a_page_prints_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if page == "sinks":
        pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for code, shown in blocks(page):
        run(code, names)
        printed = capfd.readouterr().out
        assert shown, f"the page does not show the output of: {code[:80]}"
        # Times differ from run to run, so only the rest of a line with a time must be equal.
        expected = re.sub(r"\d+\.\d+(?= (ms|seconds)\b)|(?<=: )\d+\.\d+(?=ms$)", "...", shown, flags=re.M)
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert doctest.OutputChecker().check_output(expected, printed, options), printed


def test_the_script_that_measures_a_network_prints_its_text(tmp_path: Path) -> None:
    """The times are those of two workers in the emulated network that the page names."""
    result = tmp_path / "result.csv"
    with result.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("size_bytes", "p50_s"), (4_000_000, 0.3735966070089489), (4, 0.02084701200510608)])
    ((code, _),) = blocks("own_network")
    names: dict[str, Any] = {"__name__": "page"}
    run(code, names)
    text = names["network_text"](str(result))
    assert f"```text\n{text}\n```" in (HOWTO / "own_network.md").read_text(encoding="utf-8")
    assert parse_network(text).link.bandwidth == pytest.approx(100e6, rel=0.02)


def test_the_script_that_hangs_trains_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker has nobody to wait for, so the script of the page ends."""
    ((code, _),) = blocks("debug_hanging")
    monkeypatch.setattr(
        "sys.argv", ["hang.py", *(f"--root-{n}={tmp_path}" for n in ("dataset", "checkpoint", "output"))]
    )
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    run(code, {"__name__": "__main__"})
