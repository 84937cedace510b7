"""The layers of the source tree: which package may import which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from import_graph import FACES, LAYERS, Import, circles, find_faces, layer, read_imports, read_trees

ROOT = Path(__file__).resolve().parents[1]
TREES = read_trees(ROOT)
IMPORTS = read_imports(TREES)


def test_the_imports_are_found() -> None:
    """The other tests would pass on an empty list."""
    assert len(TREES) > 200
    assert len(IMPORTS) > 500
    task = "benchmarks.task1a_resnet20_cifar10"
    assert (f"{task}.main", f"{task}.variants") in {(each.source, each.target) for each in IMPORTS}


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circles((found.source, found.target) for found in IMPORTS) == []


def test_no_packages_import_one_another_in_a_circle() -> None:
    """The package ``mlbench_core`` itself is left out: importing any module of it runs it first."""
    assert circles(found.layers for found in IMPORTS if "" not in found.layers) == []


def test_no_import_goes_up() -> None:
    assert [str(found) for found in IMPORTS if found.goes_up] == []


def test_nothing_imports_the_import_paths_of_version_3() -> None:
    assert [str(found) for found in IMPORTS if found.takes_a_face] == []


def test_the_import_paths_of_version_3_are_found_in_every_package() -> None:
    faces = find_faces({name: tree for name, (_, tree) in TREES.items()})
    assert {"mlbench_core.api", "mlbench_core.utils.tracker"} < faces
    assert {name for name in faces if ".dataset." in name} == {
        "mlbench_core.dataset.imagerecognition.tensorflow.cifar10",
        "mlbench_core.dataset.nlp.pytorch.wmt16.batching",
        "mlbench_core.dataset.nlp.pytorch.wmt16.utils",
        "mlbench_core.dataset.nlp.pytorch.wmt17.batching",
        "mlbench_core.dataset.nlp.pytorch.wmt17.collate",
        "mlbench_core.dataset.util",
        "mlbench_core.dataset.util.pytorch",
        "mlbench_core.dataset.util.pytorch.libsvm",
        "mlbench_core.dataset.util.pytorch.partition",
        "mlbench_core.dataset.util.tools",
    }


def test_every_module_is_in_a_layer() -> None:
    assert sorted(name for name in TREES if layer(name) not in {*LAYERS, *FACES}) == []


@pytest.mark.parametrize(
    ("source", "line", "goes_up", "takes_a_face"),
    [
        ("aggregation.power", "from mlbench_core.optim import sgd", True, False),
        ("optim.sgd", "from mlbench_core.aggregation import power", False, False),
        ("client.rest", "def post():\n    import mlbench_core.tracking.tracker", True, False),
        ("tracking.tracker", "import mlbench_core.client.rest", False, False),
        ("optim.sgd", "from mlbench_core.utils import old", False, True),
        ("utils.old", "from mlbench_core.utils import old, tracker", False, False),
        ("errors", "from mlbench_core.optim import sgd", True, False),
        ("dataset.download", "from mlbench_core.dataset.util import tools", False, True),
        ("dataset.download", "import mlbench_core.dataset.util", False, True),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(
    source: str, line: str, goes_up: bool, takes_a_face: bool
) -> None:
    names = [
        "errors",
        "aggregation.power",
        "optim.sgd",
        "client.rest",
        "tracking.tracker",
        "utils.old",
        "utils.tracker",
        "dataset.download",
        "dataset.util",
    ]
    trees = {
        f"mlbench_core.{name}": ("", ast.parse(line if name == source else "")) for name in names
    }
    trees["mlbench_core.dataset.util.tools"] = ("", ast.parse("sys.modules[__name__] = download"))
    found: list[Import] = read_imports(trees)
    assert [(each.goes_up, each.takes_a_face) for each in found] == [(goes_up, takes_a_face)]
