"""The comparison of Task 0's measuring with a bare loop: its arithmetic, and a short run of all of it."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import benchmarks
from tests.helpers.forked import run_script

FOLDER = Path(benchmarks.__file__).parent / "micro"
NAMES = ("_sections", "_bare_loop", "_collectives_worker", "collectives")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script, whose files find one another by lying in one folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        modules = {name: importlib.import_module(name) for name in NAMES}
        yield modules["collectives"]
        for name in NAMES:
            patch.delitem(sys.modules, name)


def test_the_bare_loop_imports_nothing_of_the_project() -> None:
    tree = ast.parse((FOLDER / "_bare_loop.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"__future__", "time", "torch", "torch.distributed"}


def test_ratios_are_of_medians_and_their_range_is_of_blocks(script: ModuleType) -> None:
    seconds = {"ours": {"1": [[1.0, 3.0, 2.0], [4.0, 4.0, 9.0]]}, "bare": {"1": [[1.0, 1.0, 1.0], [8.0, 8.0, 8.0]]}}
    (row,) = script.compare(seconds, "ours", "bare")
    assert row == {"elements": 1, "ours_s": 3.5, "theirs_s": 4.5, "ratio": 3.5 / 4.5, "least": 0.5, "most": 2.0}
    assert script.verdict([row]) == "Beyond 10 % of the bare loop: 1 (0.778) elements.\n"
    assert script.verdict([{**row, "ratio": 1.099}]) == "All within 10 % of the bare loop.\n"


def test_the_section_is_replaced_and_the_others_stay(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text(f"# Title\n\n{script.HEADING}\n\nold\n\n## Another\n\nkept\n")
    script.update_section(path, script.HEADING, "new \\1")
    assert path.read_text() == f"# Title\n\n{script.HEADING}\n\nnew \\1\n\n## Another\n\nkept\n"
    script.update_section(path, "## Third", "added")
    assert path.read_text().endswith("## Another\n\nkept\n\n## Third\n\nadded\n")


@pytest.mark.parametrize("arguments", [["--workers", "1"], ["--blocks", "0"], ["--elements", "5", "0"]])
def test_bad_arguments(script: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse(arguments)
    assert "must be at least" in capsys.readouterr().err


def test_a_short_run(script: ModuleType) -> None:
    command = [str(FOLDER / "collectives.py"), "--workers", "2", "--elements", "1000"]
    done = run_script([*command, "--blocks", "1", "--repetitions", "2"], timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert "### Gloo, 2 workers" in done.stdout
    assert done.stdout.count("| 1,000 |") == (3 if script.mpirun() else 1)
