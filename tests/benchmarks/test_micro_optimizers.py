"""The comparison of the optimizers: its arithmetic, and a run in which one variant kills its workers."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  the first optimizer would import it inside a test, and it sets a variable

import benchmarks
from tests.helpers.forked import run_script

FOLDER = Path(benchmarks.__file__).parent / "micro"
NAMES = ("_variants", "_worker", "_sections", "_report", "_turns", "optimizers")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The script's files, which find one another by lying in one folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield {name: importlib.import_module(name) for name in NAMES}
        for name in NAMES:
            patch.delitem(sys.modules, name)


def finding(seconds: list[float], exposed_s: list[float], bytes_per_step: float = 0.0) -> dict[str, Any]:
    return {"seconds": seconds, "exposed_s": exposed_s, "bytes_per_step": bytes_per_step}


@pytest.fixture
def result(modules: dict[str, ModuleType]) -> dict[str, Any]:
    """Three blocks of two steps, by two workers."""
    zeros = [0.0, 0.0, 0.0]
    workers = [
        {
            "findings": {
                "alone": finding([1.0, 1.0, 1.0], zeros),
                "ddp": finding([2.0, 4.0, 1.0], zeros, 800.0),
                "sgd": finding([1.0, 1.0, 1.0], [0.2, 0.4, 0.3], 800.0),
                "power2": finding([0.5, 1.0, 1.0], zeros, 10.0),
            }
        },
        {
            "findings": {
                "alone": finding([1.0, 0.5, 1.0], zeros),
                "ddp": finding([1.0, 4.0, 2.0], zeros, 800.0),
                "sgd": finding([0.5, 2.0, 1.5], zeros, 800.0),
                "power2": finding([0.25, 0.5, 0.5], zeros, 20.0),
            }
        },
    ]
    merged = {"launches": [workers], "errors": {"sign": "ValueError: a | b"}}
    rows = modules["_report"].rows(merged, steps=2)
    head = {"model": "mlp", "workers": 2, "network": None, "steps": 2, "blocks": 3, "machine": "m", "date": "d"}
    return {**head, "rows": rows}


def test_a_blocks_time_is_the_slowest_workers_and_ratios_are_by_block(result: dict[str, Any]) -> None:
    row = {row["variant"]: row for row in result["rows"]}
    assert list(row) == ["alone", "ddp", "sgd", "power2", "sign"]
    assert row["sgd"]["block_seconds"] == [1.0, 2.0, 1.5]
    assert row["sgd"]["steps_per_s"] == pytest.approx(2 / 1.5)
    assert row["sgd"]["times_ddp"] == 2.0
    assert (row["sgd"]["times_ddp_min"], row["sgd"]["times_ddp_max"]) == (pytest.approx(4 / 3), 2.0)
    assert row["sgd"]["exposed_ms"] == pytest.approx(150.0)  # the median block's 0.3 s are 2 steps'
    assert row["ddp"]["exposed_ms"] == pytest.approx(500.0)  # blocks of 2, 4, 2 s, without communication 1 s
    assert row["power2"]["bytes_per_step"] == 20.0


def test_the_table_has_a_line_for_each_variant_and_names_errors(
    modules: dict[str, ModuleType], result: dict[str, Any]
) -> None:
    text = modules["_report"].table(result)
    assert "| CentralizedSGD | 1.33 | 2.00 | 1.33 to 2.00 | 0.67 | 750.0 | 150.0 | 0.001 |" in text
    assert "| SignSGD | failed: ValueError: a / b |" in text
    assert "PowerSGD, rank 2: 2.00 (1.50 to 2.00) times CentralizedSGD." in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_files_and_the_section_of_the_results_are_written_and_replaced(
    modules: dict[str, ModuleType], result: dict[str, Any], tmp_path: Path
) -> None:
    report = modules["_report"]
    (tmp_path / "mlp-2.json").write_text(json.dumps(result))
    results = report.load(tmp_path)
    assert results == [result]
    report.write_csv(results, tmp_path / "optimizers.csv")
    assert (tmp_path / "optimizers.csv").read_text().count("\n") == 1 + len(result["rows"])
    pytest.importorskip("matplotlib", reason="the plot needs the extra 'charts'")
    report.plot(results, tmp_path / "optimizers.png")
    assert (tmp_path / "optimizers.png").stat().st_size > 5000
    notes = tmp_path / "RESULTS.md"
    notes.write_text("# Timings\n\n## first\n\n1\n")
    report.update_section(notes, results)
    once = notes.read_text()
    assert once.startswith("# Timings\n\n## first\n\n1\n\n## `optimizers.py`")
    notes.write_text(once + "\n## last\n\n2\n")
    report.update_section(notes, [{**result, "date": "another day"}])
    again = notes.read_text()
    assert again.count("## `optimizers.py`") == 1
    assert "another day" in again
    assert again.endswith("\n## last\n\n2\n")


def test_variants_are_split_by_memory_with_the_references_in_each_launch(modules: dict[str, ModuleType]) -> None:
    names = ["sign", "ef_sign", "sgd", "ddp_fused", "ddp", "alone"]
    groups = modules["optimizers"].groups
    assert groups(names, "resnet20", 2, 1e12) == [["alone", "ddp", "sgd", "ddp_fused", "sign", "ef_sign"]]
    size = 4 * 272_282
    split = groups(names, "resnet20", 2, 2 * modules["optimizers"].COPIES * size * 4.5)
    assert split == [["alone", "ddp", "sgd", "ddp_fused"], ["alone", "ddp", "sign", "ef_sign"]]
    assert groups(["ddp"], "resnet20", 2, 1.0) == [["alone", "ddp"]]


def test_every_block_has_all_variants_in_another_order(modules: dict[str, ModuleType]) -> None:
    names = ["a", "b", "c", "d"]
    orders = [[name for _, name in modules["_worker"].rotated(names, block)] for block in range(4)]
    assert all(sorted(order) == names for order in orders)
    assert len({order[0] for order in orders}) > 1
    assert len(set(map(tuple, orders))) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--variants sgd_step_kept", "sgd_step_kept: only with --apart"),
        ("--apart --network 100mbit", "--apart is for loopback; leave --network out"),
    ],
)
def test_what_needs_processes_of_its_own_is_told(
    modules: dict[str, ModuleType], options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        modules["optimizers"].parse(options.split())
    assert message in capsys.readouterr().err
    assert modules["optimizers"].parse(["--variants", "sgd_step_kept", "--apart"]).apart


def test_the_variant_that_was_reached_first_is_blamed(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    progress = modules["_worker"].Progress
    progress(tmp_path / "progress0.json").at(0, 3, "sign", "RuntimeError: connection closed")
    progress(tmp_path / "progress1.json").at(0, 2, "power2")
    blame = modules["optimizers"].blame
    assert blame(tmp_path, {0: "exit code 1: x", 1: "exit code -6: abort"}) == ("power2", "exit code -6: abort")
    assert blame(tmp_path, {2: "exit code 1: no such model"}) == (None, "exit code 1: no such model")


def test_a_run_goes_on_without_a_variant_that_kills_its_worker(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(FOLDER)!r})
import _variants
from torch import nn
_variants.WORKLOADS["mlp"] = _variants.Workload("tiny", lambda: nn.Linear(4, 10), (2, 4), 1)
_variants.VARIANTS["sign"] = _variants.Variant("gone", lambda context: os.abort())
_variants.VARIANTS["ef_sign"] = _variants.Variant("refused", lambda context: 1 / 0)
"""
    for name in ("optimizers", "_worker"):  # the worker is started as a file, and must see the same table
        (tmp_path / f"{name}.py").write_text(f"{code}\nexec(open({str(FOLDER / f'{name}.py')!r}).read())\n")
    options = f"--models mlp --workers 2 --blocks 2 --steps 1 --output {tmp_path / 'out'} --variants sgd sign ef_sign"
    done = run_script([str(tmp_path / "optimizers.py"), *options.split()], timeout_s=200)
    assert done.returncode == 0, done.stderr
    assert "| gone | failed: exit code -6" in done.stdout
    assert "| refused | failed: ZeroDivisionError: division by zero |" in done.stdout
    rows = json.loads((tmp_path / "out" / "mlp-2.json").read_text())["rows"]
    row = {row["variant"]: row for row in rows}
    assert row["sgd"]["bytes_per_step"] == 4 * (50 + 2)  # the gradient and who has one
    assert len(row["sgd"]["block_seconds"]) == 2
