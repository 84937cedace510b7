"""Sphinx configuration."""

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
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": True}
exclude_patterns = ["_build"]
napoleon_use_ivar = True
