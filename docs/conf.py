"""Sphinx configuration."""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from api_reference import find_origin, handed_on, list_members, public_modules
from docutils.nodes import SkipNode, Text, literal_block
from docutils.utils.math.latex2mathml import tex2mathml
from generated_pages import fill_page
from sphinx.domains.python import PythonDomain

from mlbench_core import __version__

project = "MLBench"
author = project_copyright = "The MLBench developers"
release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
# Sphinx defines tags. A build for the tests needs no pages with source code.
if tags.has("sources"):  # noqa: F821
    extensions.append("sphinx.ext.viewcode")
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"MLBench {release}"
html_favicon = "../mlbench_master/web/static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_math_renderer = "mathml"
if "dev" in release:
    html_theme_options = {"announcement": f"Version {release} is not released yet."}
# Blocks in the language "text" show output, which nobody copies.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
NAVIGATION_DEPTH = 2
folders_with_navigation = set()
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_use_type_comments = False
autodoc_default_options = {"show-inheritance": True, "no-value": True}
autosummary_generate = False
# The documentation is built without TensorFlow, which needs an environment of its own.
autodoc_mock_imports = ["tensorflow"]
exclude_patterns = ["_build"]
napoleon_use_ivar = True


def setup(app: Any) -> None:
    """Fill the generated parts of the reference, limit the navigation, draw formulas and shorten
    diffs."""
    app.add_domain(QuickPythonDomain, override=True)
    app.add_html_math_renderer("mathml", (draw_inline, None), (draw_block, None))
    # Before the theme, which asks for the whole tree.
    app.connect("html-page-context", limit_navigation, priority=400)
    app.connect("source-read", fill_markers)
    app.connect("doctree-read", shorten_diffs)
    app.connect("autodoc-process-docstring", add_summary)
    app.connect("missing-reference", resolve_short_path)


class QuickPythonDomain(PythonDomain):
    """Python's names; a name that no object has is not compared with all objects.

    Without it, the types in signatures, such as ``int``, take a quarter of the time of a build.
    """

    _count = -1

    def find_obj(
        self, env: Any, modname: Any, classname: Any, name: str, type: Any, searchmode: int = 0
    ) -> Any:
        """Return what Sphinx finds: objects whose full names are or end with this name."""
        if len(self.objects) != self._count:
            self._count = len(self.objects)
            self._last_parts = {full_name.rpartition(".")[2] for full_name in self.objects}
        if name.removesuffix("()").rpartition(".")[2] not in self._last_parts:
            return []
        return super().find_obj(env, modname, classname, name, type, searchmode)


def draw_inline(translator: Any, node: Any) -> None:
    """Write a formula of a sentence as MathML, which browsers draw without a script and without a
    network."""
    translator.body.append(to_mathml(node.astext(), as_block=False))
    raise SkipNode


def draw_block(translator: Any, node: Any) -> None:
    """Write a formula of its own paragraph as MathML."""
    formula = to_mathml(node.astext(), as_block=True)
    translator.body.append(f"{translator.starttag(node, 'div', CLASS='math')}{formula}</div>\n")
    raise SkipNode


def to_mathml(formula: str, as_block: bool) -> str:
    r"""Convert LaTeX. docutils knows ``\ldots`` and ``\Bigl``, but not ``\dots`` and ``\Big``."""
    known = re.sub(r"\\([bB]igg?)(?![a-zA-Z])", r"\\\1l", formula.replace(r"\dots", r"\ldots"))
    return tex2mathml(known, as_block=as_block)


def limit_navigation(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Show at most ``NAVIGATION_DEPTH`` levels of pages in the sidebar, which every page
    contains."""
    whole_tree = context.get("toctree")
    folder = posixpath.dirname(page)
    # The links are those of all pages of the folder: one of them is enough for the tests.
    if folder in folders_with_navigation and app.tags.has("quick"):
        context["toctree"] = lambda **options: ""
    elif whole_tree is not None:
        folders_with_navigation.add(folder)
        context["toctree"] = lambda **options: whole_tree(
            **{**options, "maxdepth": NAVIGATION_DEPTH}
        )


def fill_markers(app: Any, page: str, source: list[str]) -> None:
    """Replace the markers of a page by generated text."""
    source[0] = fill_page(source[0])


def shorten_diffs(app: Any, doctree: Any) -> None:
    """Leave only the names of the compared files in the head of a diff, not their paths on this
    machine."""
    for block in doctree.findall(literal_block):
        if block.get("language") == "udiff":
            block.rawsource = re.sub(
                r"^(---|\+\+\+) .*/", r"\1 ", block.astext(), count=2, flags=re.MULTILINE
            )
            block[:] = [Text(block.rawsource)]


def add_summary(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Add a table of a module's members to its docstring."""
    if what == "module":
        lines += list_members(name)


def resolve_short_path(app: Any, env: Any, node: Any, text: Any) -> Any:
    """Resolve a reference to a name by the path of a package that hands it on."""
    module, _, name = node.get("reftarget", "").rpartition(".")
    modules = public_modules()
    if (
        node.get("refdomain") != "py"
        or module not in modules
        or name not in handed_on(modules[module])
    ):
        return None
    origin = find_origin(module, name, modules)
    return env.get_domain("py").resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], origin, node, text
    )
