"""Sphinx configuration."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from api_reference import find_origin, handed_on, list_members, public_modules
from generated_pages import fill_page

from mlbench_core import __version__

project = "MLBench"
author = "The MLBench developers"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_heading_anchors = 3
html_theme = "furo"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"show-inheritance": True, "no-value": True}
autosummary_generate = False
exclude_patterns = ["_build"]
napoleon_use_ivar = True


def setup(app: Any) -> None:
    """Fill the generated parts of the reference."""
    app.connect("source-read", fill_markers)
    app.connect("autodoc-process-docstring", add_summary)
    app.connect("missing-reference", resolve_short_path)


def fill_markers(app: Any, page: str, source: list[str]) -> None:
    """Replace the markers of a page by generated text."""
    source[0] = fill_page(source[0])


def add_summary(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Add a table of a module's members to its docstring."""
    if what == "module":
        lines += list_members(name)


def resolve_short_path(app: Any, env: Any, node: Any, text: Any) -> Any:
    """Resolve a reference to a name by the path of a package that hands it on."""
    module, _, name = node.get("reftarget", "").rpartition(".")
    modules = public_modules()
    if node.get("refdomain") != "py" or module not in modules or name not in handed_on(modules[module]):
        return None
    origin = find_origin(module, name, modules)
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, node["reftype"], origin, node, text)
