"""The comparison of beam searches: both find the same, and the table goes into the results."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import benchmarks


@pytest.fixture
def script() -> Iterator[ModuleType]:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(benchmarks.__file__).parent / "micro"))
        yield importlib.import_module("decoding")
        patch.delitem(sys.modules, "decoding")
    torch.set_num_threads(before)


def test_the_loop_and_the_batch_translate_alike(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text(f"# Timings\n\n{script.HEADING}\n\nold\n\n## Something else\n\nstays\n")
    monkeypatch.setattr(script, "RESULTS", results)
    sizes = ["--sentences", "3", "--beam-size", "3", "--vocabulary", "60", "--blocks", "2"]
    script.main([*sizes, "--json", str(tmp_path / "seconds.json"), "--append-results"])
    printed, written = capsys.readouterr().out, results.read_text()
    assert script.LOOP in printed
    assert "old" not in written
    assert written.index(script.BATCHED) < written.index("## Something else\n\nstays")
    seconds = json.loads((tmp_path / "seconds.json").read_text())
    assert {name: len(blocks) for name, blocks in seconds.items()} == {script.LOOP: 2, script.BATCHED: 2}


def test_translations_that_differ_end_the_comparison(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"sentence 1: the loop found \[4, 1\]"):
        script.check([([3, 1], -1.0), ([4, 1], -2.0)], [([3, 1], -1.0), ([5, 1], -2.0)])
