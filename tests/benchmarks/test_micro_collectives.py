"""The comparison of Task 0's measuring with a bare loop, and of task 1a with a plain one."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.conftest import MICRO
from tests.helpers.forked import run_script
from tests.helpers.thorough import thorough


@pytest.mark.parametrize("name", ["_bare_loop", "_plain_loop"])
def test_the_loops_without_this_project_import_nothing_of_it(name: str) -> None:
    tree = ast.parse((MICRO / f"{name}.py").read_text())
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in names}
    assert roots <= {
        "__future__",
        "collections",
        "numpy",
        "time",
        "torch",
        "torchvision",
        "typing",
        "PIL",
    }


@pytest.mark.parametrize("script", ["collectives", "optimizers"])
def test_one_worker_is_refused(
    micro: Callable[[str], ModuleType], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        micro(script).main(["--workers", "2", "1"])
    assert "--workers: must be at least 2, not 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--blocks", "0"], ["--elements", "5", "0"], ["--repetitions", "x"]]
)
def test_numbers_below_one_are_refused(
    micro: Callable[[str], ModuleType], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        micro("collectives").main(arguments)
    assert "must be a whole number of at least 1, not" in capsys.readouterr().err


def test_a_short_run_of_collectives(micro: Callable[[str], ModuleType], tmp_path: Path) -> None:
    done = run_script(
        [str(MICRO / "collectives.py"), "--quick", "--save", str(tmp_path)], timeout_s=240
    )
    assert done.returncode == 0, done.stderr
    rows = micro("_bench").read(tmp_path / "collectives.json")["runs"][0]["rows"]
    has_mpi = micro("_workers").mpirun_command(2) is not None
    assert [(row["case"][:4], row["variant"]) for row in rows] == [
        ("gloo", "bare loop"),
        ("gloo", "Task 0"),
        *(
            [("mpi,", name) for name in ("bare loop", "Task 0", "Task 0 over Gloo")]
            if has_mpi
            else []
        ),
    ]
    assert all(row["value"] > 0 and "bare loop" in row["ratios"] for row in rows)


@thorough
def test_sums_in_both_ways(micro: Callable[[str], ModuleType], tmp_path: Path) -> None:
    done = run_script(
        [str(MICRO / "shared_memory.py"), "--quick", "--save", str(tmp_path)], timeout_s=240
    )
    assert done.returncode == 0, done.stderr
    rows = micro("_bench").read(tmp_path / "shared_memory.json")["runs"][0]["rows"]
    assert [row["variant"] for row in rows] == ["Gloo", "shared memory"]
    assert all(row["extra"]["CPU ms"] > 0 for row in rows)


@thorough
def test_a_short_run_of_transports(micro: Callable[[str], ModuleType], tmp_path: Path) -> None:
    if micro("_workers").mpirun_command(2) is None:
        pytest.skip("needs mpi4py and mpirun")
    done = run_script(
        [str(MICRO / "transports.py"), "--quick", "--save", str(tmp_path)], timeout_s=240
    )
    assert done.returncode == 0, done.stderr
    rows = micro("_bench").read(tmp_path / "transports.json")["runs"][0]["rows"]
    assert [row["variant"] for row in rows] == [*micro("transports").VARIANTS]
    assert all("error" not in row and "shared memory, overlap" in row["ratios"] for row in rows)
