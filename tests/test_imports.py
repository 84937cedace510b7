"""Imports load nothing heavy, and no framework outside the folders ``pytorch`` and
``tensorflow``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import mlbench_core

FRAMEWORK_FREE = [
    "mlbench_core",
    "mlbench_core.client.api",
    "mlbench_cli",
    "mlbench_core.dataset.download",
    "mlbench_core.dataset.preparation",
    "mlbench_core.dataset.verification",
    "mlbench_core.errors",
    "mlbench_core.evaluation.goals",
    "mlbench_core.files",
    "mlbench_core.install_cuda_extensions",
    "mlbench_core.network.emulated",
    "mlbench_core.ops",
    "mlbench_core.tasks",
    "mlbench_core.utils",
    "mlbench_core.controlflow.run_results",
    "mlbench_core.controlflow.task_arguments",
    "mlbench_core.controlflow.validation_stats",
    "mlbench_core.dataset.imagerecognition.arrays",
    "mlbench_core.distributed.worker_addresses",
    "mlbench_core.tracking.tracker",
    "mlbench_master",
]


@pytest.mark.parametrize("module", FRAMEWORK_FREE)
def test_imports_no_torch_and_prints_nothing(module: str) -> None:
    code = (
        f"import sys, threading, {module}; assert not "
        f"{{'torch', 'tensorflow'}}.intersection(sys.modules); assert threading.active_count() == 1"
    )
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


def test_every_subpackage_that_loads_on_first_use_exists() -> None:
    for path in sorted(Path(mlbench_core.__file__).parent.rglob("__init__.py")):
        # `make test-tensorflow` imports the packages that need TensorFlow.
        if "lazy_subpackages(" in path.read_text() and "tensorflow" not in path.parts:
            name = ".".join(
                ["mlbench_core", *path.parent.relative_to(Path(mlbench_core.__file__).parent).parts]
            )
            package = importlib.import_module(name)
            load = getattr(package, "_subpackage", package.__getattr__)
            lazy = inspect.getclosurevars(load).nonlocals["names"]
            assert [
                one for one in lazy if importlib.util.find_spec(f"{name}.{one}") is None
            ] == [], name


def test_parts_of_utils_load_on_first_use() -> None:
    code = (
        "import sys, mlbench_core; mlbench_core.utils.task_args.task_main; "
        "mlbench_core.utils.tracker; assert 'torch' not in sys.modules; "
        "print(mlbench_core.utils.pytorch.topology.FCGraph.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "FCGraph"), done.stderr


@pytest.mark.parametrize(
    ("framework", "folder", "example"),
    [
        ("torch", "pytorch", "mlbench_core.optim.pytorch"),
        ("tensorflow", "tensorflow", "mlbench_core.models.tensorflow"),
    ],
)
def test_without_its_framework_every_package_names_the_extra(
    framework: str, folder: str, example: str
) -> None:
    root = Path(mlbench_core.__file__).parent
    packages = [
        ".".join(path.relative_to(root.parent).parts) for path in sorted(root.rglob(folder))
    ]
    assert example in packages
    code = (
        f"import importlib, sys\nsys.modules[{framework!r}] = None\nfor name in "
        f"{packages!r}:\n    try:\n        importlib.import_module(name)\n    except "
        "ImportError as error:\n        print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    line = (
        f"this needs the package '{framework}', which is not "
        f"installed: pip install 'mlbench-core[{framework}]'"
    )
    assert done.stdout.splitlines() == [line] * len(packages), done.stderr


def test_unknown_attribute_is_an_attribute_error() -> None:
    import mlbench_core

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = mlbench_core.nonsense


def test_names_that_version_3_exported_from_packages() -> None:
    from mlbench_core.dataset.util.pytorch import DataPartitioner, Partitioner
    from mlbench_core.utils import pytorch
    from mlbench_core.utils.pytorch import helpers

    assert issubclass(DataPartitioner, Partitioner)
    with pytest.raises(TypeError, match="abstract"):
        Partitioner()  # type: ignore[abstract]
    for name in ("config_logging", "config_path", "config_pytorch"):
        assert getattr(pytorch, name) is getattr(helpers, name)
