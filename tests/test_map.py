"""The map of the source tree: the page about the architecture with its figure, and the pages of the
API reference."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import draw_architecture
from api_reference import (
    MARKER,
    left_out,
    modules_of,
    own_names,
    page_packages,
    public_modules,
    write_reference,
)
from import_graph import FACES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ARCHITECTURE = DOCS / "explanation" / "architecture.md"
REFERENCES = re.findall(r"`([\w/]+\.(?:py|cu|cpp))(?:::([\w.]+))?`", ARCHITECTURE.read_text())


def has_name(tree: ast.Module | ast.ClassDef, name: str) -> bool:
    """Whether a module defines a name, or a class in it the rest of a dotted name."""
    first, _, rest = name.partition(".")
    for node in tree.body:
        if getattr(node, "name", None) == first:
            return not rest or (isinstance(node, ast.ClassDef) and has_name(node, rest))
    return False


def test_the_files_and_names_on_the_page_about_the_architecture_exist() -> None:
    missing = []
    for file, name in REFERENCES:
        path = next(
            (
                folder / file
                for folder in (ROOT / "mlbench_core", ROOT)
                if (folder / file).is_file()
            ),
            None,
        )
        if path is None or (name and not has_name(ast.parse(path.read_text()), name)):
            missing.append(f"{file}::{name}")
    assert missing == []


def test_the_page_about_the_architecture_follows_six_journeys_by_file_names() -> None:
    journeys = re.findall(r"^## (An? .*)$", ARCHITECTURE.read_text(), re.MULTILINE)
    assert journeys == [
        "A gradient",
        "A metric",
        "A batch",
        "A run",
        "A result",
        "An attention call",
    ]
    assert len(REFERENCES) > 60


def test_the_figure_of_the_packages_is_current() -> None:
    assert draw_architecture.FIGURE.read_text() == draw_architecture.draw(), (
        "run: python tools/draw_architecture.py"
    )


def test_the_page_about_the_architecture_describes_every_package_of_the_figure() -> None:
    packages, _, _ = draw_architecture.read_packages(ROOT)
    rows = re.findall(r"^\| `(\w+)` \|", ARCHITECTURE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(packages)


def test_the_figure_leaves_out_implied_arrows_and_puts_importing_packages_above() -> None:
    edges = {("a", "b"), ("b", "c"), ("c", "d"), ("a", "c"), ("a", "d"), ("e", "d")}
    drawn = draw_architecture.without_detours(edges)
    assert drawn == {("a", "b"), ("b", "c"), ("c", "d"), ("e", "d")}
    rows = draw_architecture.find_rows("abcde", drawn)
    assert rows == {"a": 0, "b": 1, "c": 2, "d": 3, "e": 0}
    paths = draw_architecture.bend(rows, drawn)
    assert paths[-1] == ["e", "e>d>1", "e>d>2", "d"]
    x = draw_architecture.place(rows, paths)
    width = draw_architecture.BOX_WIDTH + draw_architecture.GAP
    assert abs(x["a"] - x["e"]) >= width
    assert abs(x["b"] - x["e>d>1"]) >= width // 2


def test_every_package_has_a_page_of_the_api_reference_and_every_public_module_is_on_one() -> None:
    pages = page_packages()
    contents = (DOCS / "reference" / "api" / "index.md").read_text()
    assert sorted(re.findall(r"^(\w+)$", contents, re.MULTILINE)) == sorted(pages)
    packages = {path.parent.name for path in ROOT.glob("mlbench_core/[!_]*/__init__.py")} - FACES
    names = {f"mlbench_core.{name}" for name in packages} | {
        "mlbench_core",
        "mlbench_master",
        "mlbench_cli",
    }
    assert names <= set(pages.values())
    modules = public_modules()
    assert len(modules) > 150
    listed = [
        name
        for package in pages.values()
        for name in modules_of(package, set(pages.values()), modules)
    ]
    assert sorted(listed) == sorted(modules)
    assert all(
        MARKER.search((DOCS / "reference" / "api" / f"{page}.md").read_text()) for page in pages
    )


def test_a_page_of_the_api_reference_has_a_section_for_each_module_with_what_it_defines() -> None:
    text = write_reference("mlbench_core.lr_scheduler")
    assert "| [pytorch.lr](#mlbench_core.lr_scheduler.pytorch.lr) |" in text
    assert ".. automodule:: mlbench_core.lr_scheduler.pytorch.lr\n   :members: " in text
    assert "Source: `mlbench_core/lr_scheduler/pytorch/lr.py`" in text
    assert "Can also be imported from here: " in text
    assert "{py:obj}`~mlbench_core.lr_scheduler.pytorch.lr.TimeDecayLR`" in text
    assert "TimeDecayLR" in own_names(public_modules()["mlbench_core.lr_scheduler.pytorch.lr"])


def test_constants_without_a_docstring_and_commands_of_click_have_entries() -> None:
    code = """
__all__ = ["A", "B", "C", "D", "E", "F", "Own", "shown"]
A, B = 1, 2
C = 3
'''The docstring of C.'''
class Own: ...
D = Own
E: int = compute("%s")
_F = 5
@click.command()
def shown():
    '''Show runs.'''
def plain(): ...
"""
    tree = ast.parse(code % ("x" * 100))
    long = [("E", "See the source."), ("shown", "Show runs.")]
    assert left_out(tree) == [("A", "Value: ``(1, 2)``"), ("B", "Value: ``(1, 2)``"), *long]
    assert ".. py:data:: MAX_BATCH\n   :module: mlbench_master.api.schemas\n" in write_reference(
        "mlbench_master"
    )


def test_private_modules_and_import_paths_of_version_3_are_not_part_of_the_api_reference() -> None:
    hidden = (
        "mlbench_core.utils",
        "mlbench_core.api",
        "mlbench_core._optional",
        "mlbench_cli._wait",
    )
    assert not [name for name in public_modules() if name.startswith(hidden)]
