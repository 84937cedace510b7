"""The plain versions of the algorithms are short and stand alone, and the pages that show them are
true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo

ROOT = Path(__file__).parent.parent
REFERENCES = sorted(
    p for p in (ROOT / "tests" / "references").glob("*.py") if p.name != "__init__.py"
)
PAGES = sorted(p for p in (ROOT / "docs" / "algorithms").glob("*.md") if p.name != "index.md")


def test_there_are_references_and_pages() -> None:
    assert len(REFERENCES) >= 10
    assert len(PAGES) >= 9


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_a_reference_is_short_and_imports_nothing_of_the_library(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    imported = {
        name
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not [name for name in imported if name.startswith(("mlbench", "tests"))]
    assert "arXiv" in text
    assert any(f"references/{path.name}" in page.read_text() for page in PAGES)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_listed_and_its_examples_run(path: Path) -> None:
    text = path.read_text()
    assert re.search(
        rf"^{path.stem}$", (ROOT / "docs" / "algorithms" / "index.md").read_text(), re.MULTILINE
    )
    for target in re.findall(r"\{literalinclude\} (\S+)", text):
        assert (path.parent / target).is_file()
    examples = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert examples
    with torch.random.fork_rng():
        exec(compile("\n".join(examples), str(path), "exec"), {"__name__": "example"})
