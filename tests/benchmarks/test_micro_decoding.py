"""The comparison of beam searches: both variants find the same translations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def test_the_loop_and_the_batch_translate_alike(
    micro: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    sizes = ["--sentences", "3", "--beam-size", "3", "--vocabulary", "60", "--blocks", "2"]
    micro("decoding").main([*sizes, "--save", str(tmp_path)])
    (run,) = micro("_bench").read(tmp_path / "decoding.json")["runs"]
    assert [row["variant"] for row in run["rows"]] == [
        micro("decoding").LOOP,
        micro("decoding").BATCHED,
    ]


def test_translations_that_differ_end_the_comparison(micro: Callable[[str], ModuleType]) -> None:
    with pytest.raises(SystemExit, match=r"sentence 1: the loop found \[4, 1\]"):
        micro("decoding").check(
            "batch", [([3, 1], -1.0), ([4, 1], -2.0)], [([3, 1], -1.0), ([5, 1], -2.0)]
        )
