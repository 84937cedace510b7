"""An aggregation of the user: found in its source, and made in a worker."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mlbench_core.aggregation.pytorch import AllReduceAggregation
from mlbench_core.errors import ConfigurationError
from mlbench_core.observe.methods.apply import make_method
from mlbench_core.observe.methods.names import parse_method
from mlbench_core.observe.methods.own_class import check_own_class, describe_own_class

CELL = """\
from __future__ import annotations
import math, os
import torch
import torch.distributed as dist
from collections.abc import Mapping
from mlbench_core.aggregation.pytorch import Aggregation as Base

factor = 3

class Plain(Base):
    def aggregate(self, tensors, op, denom=None):
        for tensor in tensors.values():
            tensor *= 2

class Scaled(Base):
    @torch.no_grad()
    def aggregate(self, tensors: Mapping[str, object], op, denom=None):
        for factor in [math.sqrt(4)]:
            print([each for each in tensors], factor)

class Taking(Base):
    def __init__(self, model, rank=1, *, process_group=None):
        super().__init__(process_group=process_group)
        self.given = [model, rank]

    def aggregate(self, tensors, op, denom=None):
        pass

class Outside(Base):
    def aggregate(self, tensors, op, denom=None):
        return factor * helper(tensors)
"""


@pytest.fixture
def cell() -> Iterator[dict[str, Any]]:
    """The names of a cell of a notebook, whose source only :mod:`linecache` has."""
    name = "/tmp/ipykernel_1/123.py"
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
    names = {"__name__": "__main__"}
    exec(compile(CELL, name, "exec"), names)
    yield names
    del linecache.cache[name]


def test_the_module_has_the_class_and_the_imports_that_it_uses(cell: dict[str, Any]) -> None:
    text, path, source = describe_own_class(cell["Scaled"], Path("out"))
    assert source == (
        "from __future__ import annotations\n"
        "import math, os\n"
        "import torch\n"
        "from collections.abc import Mapping\n"
        "from mlbench_core.aggregation.pytorch import Aggregation as Base\n\n\n"
        + CELL[CELL.index("class Scaled") : CELL.index("\nclass Taking")]
    )
    assert text == f"{path}:Scaled"
    assert path.parent == Path("out") and path.name.startswith("scaled-")


def test_another_source_is_another_file_and_an_equal_one_the_same(cell: dict[str, Any]) -> None:
    first, second = (
        describe_own_class(cell["Plain"], Path()),
        describe_own_class(cell["Plain"](), Path()),
    )
    assert first == second
    assert describe_own_class(cell["Scaled"], Path())[1] != first[1]


def test_a_class_has_options_and_its_object_cannot_tell_them(cell: dict[str, Any]) -> None:
    text, path, _ = describe_own_class((cell["Taking"], {"rank": 4, "exact": True}), Path())
    assert text == f"{path}:Taking:rank=4,exact=true"
    with pytest.raises(ConfigurationError, match=r"write \(Taking, \{\"option\": value\}\)"):
        describe_own_class(cell["Taking"](nn.Linear(1, 1)), Path())
    with pytest.raises(ConfigurationError, match="options of Taking must be numbers, switches and"):
        describe_own_class((cell["Taking"], {"rank": [4]}), Path())


def test_names_of_other_cells_are_refused(cell: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="but Outside takes factor, helper from elsewhere"):
        describe_own_class(cell["Outside"], Path())


def test_only_aggregations_whose_source_is_known_are_taken() -> None:
    for other in (int, 3, (int, {})):
        with pytest.raises(ConfigurationError, match="methods must be names, or classes of"):
            describe_own_class(other, Path())

    class Inside(AllReduceAggregation):
        def agg_grad(self, by_layer: bool = False) -> Any:
            return super().agg_grad(by_layer)

    with pytest.raises(ConfigurationError, match="source can be read, not Inside: define it"):
        describe_own_class(Inside, Path())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("none.py:Plain", "--method must name a file from .*, not 'none.py': No such file"),
        ("own.py:Plane", "--method must name a class that own.py defines, not 'Plane': did you"),
        (
            "own.py:torch",
            "--method must name a class that own.py defines, not 'torch': its classes",
        ),
        ("bad.py:Plain", "--method must name a file with Python code, not 'bad.py': "),
    ],
)
def test_a_missing_class_is_refused_before_a_run(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.py").write_text(CELL)
    (tmp_path / "bad.py").write_text("class Plain(")
    check_own_class(parse_method("own.py:Plain"), tmp_path)
    check_own_class(parse_method(text), tmp_path / "on another machine")
    with pytest.raises(ConfigurationError, match=message):
        check_own_class(parse_method(text), tmp_path)


def test_a_worker_makes_the_class_with_what_its_constructor_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(CELL)
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 1)
    method: Any = make_method(parse_method("own.py:Taking:rank=4"))
    made = method._make(model, process_group=None, **method.choice.options)
    assert made.given == [model, 4]
    plain = make_method(parse_method("own.py:Plain"))
    assert plain is not None
    gradient = torch.ones(2)
    plain._make(model, process_group=None).aggregate({"weight": gradient}, "avg_world")  # type: ignore[attr-defined]
    assert gradient.tolist() == [2, 2]
    del sys.modules["mlbench_own_method"]


def test_a_worker_refuses_a_class_that_is_not_an_aggregation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("class Plain: pass")
    (tmp_path / "broken.py").write_text("import nowhere\nclass Plain: pass")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"not Plain of own.py: derive it from Aggregation"
    ):
        make_method(parse_method("own.py:Plain"))
    with pytest.raises(ConfigurationError, match=r"broken.py cannot be imported: ModuleNotFound"):
        make_method(parse_method("broken.py:Plain"))
    del sys.modules["mlbench_own_method"]
