"""The comparison of task 1a with a plain loop: its arithmetic and its command line."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import benchmarks

FOLDER = Path(benchmarks.__file__).parent / "micro"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("task1a_epoch")
        for name in ("task1a_epoch", "_turns"):
            patch.delitem(sys.modules, name)


def test_ratios_are_those_of_the_same_round(script: ModuleType, tmp_path: Path) -> None:
    result = {
        "workers": 2, "batch_size": 10, "loader_processes": 0, "source": "noise", "steps": 3, "blocks": 3,
        "seconds": {"plain": [1.0, 10.0, 2.0], "flags": [0.5, 4.0, 1.0]},
    }  # fmt: skip
    text = script.table(result)
    assert "| plain PyTorch loop | 2.00 | 1.00 to 10.00 | 30 | 1.00 | 1.00 to 1.00 |" in text
    assert "| task 1a, `--channels-last --autocast bf16` | 1.00 | 0.50 to 4.00 | 60 | 2.00 | 2.00 to 2.50 |" in text
    page = tmp_path / "RESULTS.md"
    page.write_text("# Timings\n\n## `other.py`\n\nold\n")
    script.update_section(page, "first\n")
    script.update_section(page, "second\n")
    assert page.read_text() == f"# Timings\n\n## `other.py`\n\nold\n\n{script.HEADING}\n\nsecond\n"


def test_order_gives_every_way_each_place(script: ModuleType) -> None:
    rounds = [list(script.order(["a", "b", "c"], block)) for block in range(6)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert {names[0] for names in rounds} == {names[-1] for names in rounds} == {"a", "b", "c"}


def test_command_line(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.parse(["--ways", "flags"]).ways == ["plain", "flags"]
    with pytest.raises(SystemExit):
        script.parse(["--steps", "0"])
    assert "--steps must be at least 1, not 0" in capsys.readouterr().err


def test_workers_act_when_told_and_a_failed_one_is_named(script: ModuleType, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys\n"
        "print('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    print(os.environ['RANK'], sys.argv[1], line.strip(), flush=True)\n"
        "    if line == 'end\\n' and os.environ['RANK'] == '1':\n"
        "        sys.exit(3)\n"
    )
    with contextlib.ExitStack() as stack:
        parties = [script.Party(name, worker, [name], 2, stack) for name in ("a", "b")]
        for party in parties:
            party.wait()
            assert party.take_turn("7") == [f"0 {party.name} 7\n", f"1 {party.name} 7\n"]
        parties[0].finish()
        parties[1].take_turn("end")
        with pytest.raises(SystemExit, match="a worker of 'b' failed"):
            parties[1].finish()
    assert all(process.returncode is not None for party in parties for process in party.processes)


def test_the_plain_loop_knows_nothing_of_this_project() -> None:
    source = (FOLDER / "_plain_loop.py").read_text()
    assert "mlbench" not in source
    assert "DistributedDataParallel" in source
