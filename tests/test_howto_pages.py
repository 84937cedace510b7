"""The complete code blocks of how-to pages run, and print what the pages show."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

HOWTO = Path(__file__).parent.parent / "docs" / "howto"

PAGES = ("custom_data", "debug_hanging", "goals", "gpus", "own_network", "profile", "resume", "sinks")
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
