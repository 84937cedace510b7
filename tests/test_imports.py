"""What an import may load: nothing heavy, and no framework outside the ``pytorch`` folders."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORK_FREE = [
    "mlbench_core",
    "mlbench_core.api",
    "mlbench_core.cli",
    "mlbench_core.dataset.util.tools",
    "mlbench_core.errors",
    "mlbench_core.evaluation.goals",
    "mlbench_core.evaluation.latency",
    "mlbench_core.evaluation.latency_report",
    "mlbench_core.network.emulated",
    "mlbench_core.ops",
    "mlbench_core.tasks",
    "mlbench_core.utils",
    "mlbench_core.utils.task_args",
    "mlbench_core.utils.tracker",
    "mlbench_master",
]


@pytest.mark.parametrize("module", FRAMEWORK_FREE)
def test_imports_no_torch_and_prints_nothing(module: str) -> None:
    code = f"import sys, threading, {module}; assert 'torch' not in sys.modules; assert threading.active_count() == 1"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr == ""


def test_subpackages_load_on_first_use() -> None:
    code = (
        "import sys, mlbench_core; assert 'mlbench_core.evaluation' not in sys.modules; "
        "print(mlbench_core.evaluation.goals.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "mlbench_core.evaluation.goals"


def test_parts_of_utils_load_on_first_use() -> None:
    code = (
        "import sys, mlbench_core; mlbench_core.utils.task_args.task_main; mlbench_core.utils.paths; "
        "assert 'torch' not in sys.modules; print(mlbench_core.utils.pytorch.topology.FCGraph.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "FCGraph"), done.stderr


def test_unknown_attribute_is_an_attribute_error() -> None:
    import mlbench_core

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = mlbench_core.nonsense
