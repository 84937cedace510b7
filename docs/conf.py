"""Sphinx configuration."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from api_reference import MARKER, find_origin, handed_on, list_members, public_modules, write_reference

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
    """Fill the pages of the API reference."""
    app.connect("source-read", fill_reference)
    app.connect("autodoc-process-docstring", add_summary)
    app.connect("missing-reference", resolve_short_path)


def fill_reference(app: Any, page: str, source: list[str]) -> None:
    """Replace the marker of a page of the API reference."""
    source[0] = MARKER.sub(lambda marker: write_reference(marker[1]), source[0])


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
