"""The comparison of the optimizers: its arithmetic, and a run in which one variant kills its
workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.conftest import MICRO
from tests.helpers.forked import run_script
from tests.helpers.thorough import thorough


def test_variants_are_split_by_memory_with_the_references_in_each_launch(
    micro: Callable[[str], ModuleType],
) -> None:
    names = ["sign", "ef_sign", "sgd", "ddp_fused", "ddp", "alone"]
    script = micro("optimizers")
    assert script.groups(names, "resnet20", 2, 1e12) == [
        ["alone", "ddp", "sign", "ef_sign", "sgd", "ddp_fused"]
    ]
    size = 4 * 272_282
    split = script.groups(names, "resnet20", 2, 2 * script.COPIES * size * 4.5)
    assert split == [["alone", "ddp", "sign", "ef_sign"], ["alone", "ddp", "sgd", "ddp_fused"]]
    assert script.groups(["ddp"], "resnet20", 2, 1.0) == [["alone", "ddp"]]
    # Processes of their own take more memory, so a launch has fewer variants.
    assert len(script.groups(names, "resnet20", 2, 4 * script.PROCESS_BYTES, apart=True)) == 4


def test_variants_that_return_memory_need_processes_of_their_own(
    micro: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        micro("optimizers").read_arguments(["--variants", "ddp_returned"])
    assert "ddp_returned must run in separate processes: add --apart" in capsys.readouterr().err
    assert micro("optimizers").read_arguments(["--variants", "ddp_returned", "--apart"]).apart


@pytest.fixture
def script(tmp_path: Path) -> str:
    """The script with a tiny network and two variants that fail."""
    code = f"""
import os, sys
sys.path.insert(0, {str(MICRO)!r})
import _variants
from torch import nn
_variants.WORKLOADS["mlp"] = _variants.Workload("tiny", lambda: nn.Linear(4, 10), (2, 4), 1)
_variants.VARIANTS["sign"] = _variants.Variant("gone", lambda context: os.abort())
_variants.VARIANTS["ef_sign"] = _variants.Variant("refused", lambda context: 1 / 0)
"""
    path = tmp_path / "optimizers.py"  # workers run the same file, and so see the same variants
    path.write_text(f"{code}\nexec(open({str(MICRO / 'optimizers.py')!r}).read())\n")
    return str(path)


OPTIONS = ["--models", "mlp", "--workers", "2", "--blocks", "2", "--steps", "1"]


@thorough
def test_a_run_goes_on_without_a_variant_that_kills_its_worker(
    micro: Callable[[str], ModuleType], script: str, tmp_path: Path
) -> None:
    options = [*OPTIONS, "--save", str(tmp_path), "--variants", "sgd", "sign", "ef_sign"]
    done = run_script([script, *options], timeout_s=250)
    assert done.returncode == 0, done.stderr
    rows = micro("_bench").read(tmp_path / "optimizers.json")["runs"][0]["rows"]
    row = {row["variant"]: row for row in rows}
    assert list(row) == [
        "no communication",
        "DDP + SGD (both default)",
        "CentralizedSGD",
        "gone",
        "refused",
    ]
    assert row["gone"]["error"].startswith("exit code -6")
    assert "ZeroDivisionError: division by zero" in row["refused"]["error"]
    assert (
        row["CentralizedSGD"]["extra"]["MB/step"] == 4 * (50 + 2) / 1e6
    )  # the gradient, and a flag per parameter
    assert row["CentralizedSGD"]["value"] > 0
    assert row["CentralizedSGD"]["ratios"].keys() == {
        "DDP + SGD (both default)",
        "no communication",
        "CentralizedSGD",
    }
    assert row["DDP + SGD (both default)"]["extra"]["exposed ms"] >= 0


@thorough
def test_variants_in_processes_of_their_own(
    micro: Callable[[str], ModuleType], script: str, tmp_path: Path
) -> None:
    done = run_script(
        [script, *OPTIONS, "--apart", "--save", str(tmp_path), "--variants", "sign"], timeout_s=250
    )
    assert done.returncode == 0, done.stderr
    rows = micro("_bench").read(tmp_path / "optimizers.json")["runs"][0]["rows"]
    assert {row["case"] for row in rows} == {"tiny, 2 workers, own processes"}
    assert [row["variant"] for row in rows if "error" in row] == ["gone"]


def test_a_profile_lists_the_operations_of_a_step(script: str) -> None:
    done = run_script([script, *OPTIONS, "--profile", "--variants", "sgd"], timeout_s=250)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^tiny, 2 workers, CentralizedSGD: [\d.]+ ms per step$", done.stdout, re.MULTILINE
    )
    assert re.search(r"^\| aten::addmm \| [\d.]+ \| [\d.]+ \| 1 \|$", done.stdout, re.MULTILINE)
    assert "| no operation | " in done.stdout
