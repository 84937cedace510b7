"""Write the pages of the API reference from the public modules.

A page of ``docs/reference/api`` names a package in the marker ``{modules} mlbench_core.optim``, an
empty code block. When Sphinx reads the page, the marker becomes a table of the public modules of
this package, and a section for each of them. A package below it that has a page of its own is left
out. No list is kept by hand, so no module can be forgotten.

A module is public if no part of its name begins with an underscore and if it has or hands on public
names. The import paths of version 3.0 (``utils`` and ``api``) are not part of the reference."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from import_graph import FACES, layer, read_trees

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference" / "api"
LONGEST_VALUE = 100
MARKER = re.compile(r"^```\{modules\} (\S+)\n```$", re.MULTILINE)


def own_names(tree: ast.Module) -> list[str]:
    """Return the public names that a module defines: those of ``__all__``, or without it all
    functions and classes."""
    defined: dict[str, bool] = {}
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            defined[node.name] = not node.name.startswith("_")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            # "A, B = 1, 2" has one target, a tuple.
            names = (name for target in targets for name in getattr(target, "elts", [target]))
            defined.update((name.id, False) for name in names if isinstance(name, ast.Name))
    exported = all_names(tree)
    return [name for name in defined if (defined[name] if exported is None else name in exported)]


def all_names(tree: ast.Module) -> list[str] | None:
    """Return the names that are written in ``__all__``; None if a module has no such list."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [
                str(item.value) for item in ast.walk(node.value) if isinstance(item, ast.Constant)
            ]
    return None


def handed_on(tree: ast.Module) -> dict[str, str]:
    """Return the full names that a module imports and lists in ``__all__``, by short name."""
    exported = all_names(tree) or []
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if (alias.asname or alias.name) in exported
    }


def find_origin(module: str, name: str, modules: dict[str, ast.Module]) -> str:
    """Return the full name of a name that a module hands on, from the module that defines it."""
    target = handed_on(modules[module])[name]
    origin, _, name = target.rpartition(".")
    is_passed = origin != module and origin in modules and name in handed_on(modules[origin])
    return find_origin(origin, name, modules) if is_passed else target


@cache
def public_modules(root: Path = ROOT) -> dict[str, ast.Module]:
    """Return the syntax trees of all public modules of library and master, by full name."""
    return {
        name: tree
        for name, (_, tree) in read_trees(root).items()
        if name.startswith("mlbench_")
        and layer(name) not in FACES
        and not re.search(r"(^|\.)_", name)
        if own_names(tree) or handed_on(tree)
    }


def page_packages() -> dict[str, str]:
    """Return the package of each page, by the name of the page without its ending."""
    found = {page.stem: MARKER.search(page.read_text()) for page in sorted(PAGES.glob("*.md"))}
    return {page: marker[1] for page, marker in found.items() if marker is not None}


def modules_of(package: str, packages: set[str], modules: dict[str, ast.Module]) -> list[str]:
    """List the modules of a page.

    Args:
        package: Package of the page.
        packages: Packages of all pages.
        modules: All public modules.

    Returns:
        The public modules of which ``package`` is the innermost package with a page, in the order
        of their names.
    """

    def owner(module: str) -> str:
        return max(
            (other for other in packages if f"{module}.".startswith(f"{other}.")),
            key=len,
            default="",
        )

    return sorted(module for module in modules if owner(module) == package)


def write_reference(package: str) -> str:
    """Write the text that replaces the marker of a page.

    Args:
        package: Package of the page.

    Returns:
        Markdown: a table of the modules with their summaries, and a section for each module.
    """
    modules = public_modules()
    names = modules_of(package, {package, *page_packages().values()}, modules)
    rows = [f"| [{short(name, package)}](#{name}) | {summary(modules[name])} |" for name in names]
    text = ["| module | contents |", "|---|---|", *rows, ""]
    for name in names:
        source = read_trees(ROOT)[name][0]
        text += [f"({name})=", f"## {short(name, package)}", "", f"Source: `{source}`", ""]
        text += ["```{eval-rst}", f".. automodule:: {name}"]
        own = own_names(modules[name])
        text += [f"   :members: {', '.join(own)}" if own else "   :no-members:", ""]
        text += [
            line for entry in left_out(modules[name]) for line in write_entry(name, *entry)
        ] + ["```", ""]
        others = [
            f"{{py:obj}}`~{find_origin(name, other, modules)}`"
            for other in sorted(handed_on(modules[name]))
        ]
        text += ["Can also be imported from here: " + ", ".join(others) + ".", ""] if others else []
    return "\n".join(text)


def left_out(tree: ast.Module) -> list[tuple[str, str]]:
    """Return the public names that autodoc leaves out: constants without a docstring, and commands
    of click.

    Returns:
        Pairs of the name and its description in reStructuredText: the value, or the summary of the
        command.
    """
    public, found = own_names(tree), []
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node, after in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and not is_text(after):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in getattr(target, "elts", [target])]
            # autodoc has an entry for another name of a class.
            is_alias = {
                ast.unparse(value) for value in getattr(node.value, "elts", [node.value]) if value
            } <= classes
            listed = [
                name.id
                for name in names
                if isinstance(name, ast.Name) and name.id in public and not is_alias
            ]
            found += [(name, describe_value(node.value)) for name in listed]
        elif isinstance(node, ast.FunctionDef) and node.name in public and is_command(node):
            found.append((node.name, (ast.get_docstring(node) or "").partition("\n")[0]))
    return found


def describe_value(value: ast.expr | None) -> str:
    """Return the value of a constant in reStructuredText; the place of the code if it is long."""
    text = "" if value is None else ast.unparse(value)
    return (
        f"Value: ``{text}``"
        if 0 < len(text) <= LONGEST_VALUE and "`" not in text
        else "See the source."
    )


def is_command(node: ast.FunctionDef) -> bool:
    """Return True if click makes a command or a group of a function."""
    return any(
        re.match(r"\w+\.(command|group)\b", ast.unparse(decorator))
        for decorator in node.decorator_list
    )


def is_text(node: ast.stmt) -> bool:
    """Return True if a statement is a text, such as the docstring of the constant before it."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def write_entry(module: str, name: str, text: str) -> list[str]:
    """Return the lines, in reStructuredText, of an entry of a name that autodoc leaves out."""
    return [f".. py:data:: {name}", f"   :module: {module}", "", f"   {text}", ""]


def short(module: str, package: str) -> str:
    """Return the name of a module without that of the page's package, or the whole name of the
    package itself."""
    return module.removeprefix(f"{package}.").replace("_", r"\_")


def summary(tree: ast.Module) -> str:
    """Return the first line of a module's docstring as Markdown."""
    line = (ast.get_docstring(tree) or "").partition("\n")[0].replace("|", r"\|")
    line = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", line)  # a role of reStructuredText
    return re.sub(r"``([^`]+)``", r"`\1`", line)


def list_members(module: str) -> list[str]:
    """Return the lines, in reStructuredText, of the table of the functions and classes of a public
    module.

    Constants are left out: their docstring is that of their type.
    """
    tree = public_modules().get(module, ast.Module([], []))
    functions = {
        node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    rows = [f"   {name}" for name in own_names(tree) if name in functions]
    return ["", ".. autosummary::", "   :nosignatures:", "", *rows, ""] if rows else []
