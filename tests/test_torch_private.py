"""The private parts of torch that the library uses: the installed torch has them, and all of them are listed."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
import torch._dynamo  # the table looks into the compiler

from mlbench_core import torch_private
from mlbench_core.torch_private import PARTS

LIBRARY = Path(torch_private.__file__).parent

# Private names of the standard library that the library uses.
OF_PYTHON = {"_exit", "_fields", "_get_option_tuples", "_replace"}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_installed_torch_has_the_part(part: torch_private.Part) -> None:
    problem = part.problem()
    assert problem is None, problem


def test_a_missing_part_is_named_with_its_user_and_its_reason() -> None:
    part = dataclasses.replace(PARTS[0], name="torch._gone", find=lambda: torch._gone)
    assert part.problem() == (
        f"torch {torch.__version__} no longer has torch._gone, which mlbench_core.aggregation.pytorch.overlap uses for "
        "telling one backward pass from another that runs inside it; without it: overlap=True raises an AttributeError "
        "in the first backward pass. torch says: module 'torch' has no attribute '_gone'"
    )


def _own_names(trees: list[ast.Module]) -> set[str]:
    """Every name that the library defines or assigns itself."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node, ast.Name) or (isinstance(node.value, ast.Name) and node.value.id == "self")
            if is_own:
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def test_no_other_module_touches_a_private_part_of_torch() -> None:
    files = [file for file in LIBRARY.rglob("*.py") if file.name != "torch_private.py"]
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    own = _own_names(list(trees.values())) | OF_PYTHON
    found = [
        f"{file.relative_to(LIBRARY)}:{node.lineno} {ast.unparse(node)}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in own
    ]
    assert found == []
