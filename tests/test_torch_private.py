"""The private parts of torch that the library uses: the installed torch has them, and all of them
are listed."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import torch

from mlbench_core import torch_private
from mlbench_core.torch_private import PARTS

LIBRARY = Path(torch_private.__file__).parent

# Private names of the standard library that the library uses.
OF_PYTHON = {"_asdict", "_exit", "_fields", "_get_option_tuples", "_replace"}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: ",".join(part.names))
def test_the_installed_torch_has_the_part(part: torch_private.Part) -> None:
    problem = part.problem()
    assert problem is None, problem


def test_a_missing_part_is_named_with_its_user_and_its_reason() -> None:
    part = dataclasses.replace(PARTS[0], names=("_foreach_copy_", "_C._gone", "_gone"))
    assert part.problem() == (
        f"torch {torch.__version__} no longer has _C._gone, _gone, which "
        "mlbench_core.aggregation.pytorch.transport.overlap uses "
        "for distinguishing a backward pass from another that runs inside it, and acting at its end"
    )


@pytest.mark.parametrize("file", ["optim/optimizer.py", "optim/gone.py"])
def test_a_name_that_is_missing_in_a_file_of_torch_is_named_with_the_file(file: str) -> None:
    part = dataclasses.replace(PARTS[0], names=("_optimizer_hooks",), file=file)
    assert f"no longer has _optimizer_hooks in torch/{file}, which" in str(part.problem())


def test_no_other_module_touches_a_private_part_of_torch() -> None:
    texts = {
        file: file.read_text(encoding="utf-8")
        for file in LIBRARY.rglob("*.py")
        if file.stem != "torch_private"
    }
    whole = "\n".join(texts.values())
    # Names that the library defines or assigns itself.
    own = {*OF_PYTHON, *re.findall(r"\b(?:def|class) (_\w+)", whole)}
    own |= set(re.findall(r"(?:^ *|\bself\.|, )(_\w+)(?=,|:| =)", whole, re.MULTILINE))
    found = []
    for file, text in texts.items():
        # Parsing takes long, so only modules are parsed whose text has such a name, perhaps in a
        # docstring.
        if set(re.findall(r"\.(_[a-zA-Z]\w*)", text)) <= own:
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Attribute)
                and re.match("_[^_]", node.attr)
                and node.attr not in own
            ):
                found.append(f"{file.relative_to(LIBRARY)}:{node.lineno} {ast.unparse(node)}")
    assert found == []
