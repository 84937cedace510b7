"""Write the pages of the API reference from the public modules.

A page of ``docs/reference/api`` names a package in the marker ``{modules} mlbench_core.optim``, an
empty code block. When Sphinx reads the page, the marker becomes a table of the public modules of
this package, and a section for each of them. A package below it with a separate page is left out.
No list is kept by hand, so no module can be forgotten.

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
    """Return the public names that a module defines.

    They are those of ``__all__``, or without it all functions and classes.
    """
    is_public: dict[str, bool] = {}
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            is_public[node.name] = not node.name.startswith("_")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            is_public.update(dict.fromkeys(assigned_names(node), False))
    exported = all_names(tree)
    if exported is not None:
        return [name for name in is_public if name in exported]
    return list(filter(is_public.get, is_public))


def assigned_names(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the variables that a statement assigns to."""
    names = []
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        # "A, B = 1, 2" has one target, a tuple.
        for item in getattr(target, "elts", [target]):
            if isinstance(item, ast.Name):
                names.append(item.id)
    return names


def all_names(tree: ast.Module) -> list[str] | None:
    """Return the names that are written in ``__all__``; None if a module has no such list."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            items = ast.walk(node.value)
            return [str(item.value) for item in items if isinstance(item, ast.Constant)]
    return None


def handed_on(tree: ast.Module) -> dict[str, str]:
    """Return the full names that a module imports and lists in ``__all__``, by short name."""
    exported = all_names(tree) or []
    full_names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = alias.asname or alias.name
                if name in exported:
                    full_names[name] = f"{node.module}.{alias.name}"
    return full_names


def find_origin(module: str, name: str, modules: dict[str, ast.Module]) -> str:
    """Return the full name of a name that a module hands on, from the module that defines it."""
    target = handed_on(modules[module])[name]
    origin, _, name = target.rpartition(".")
    if origin != module and origin in modules and name in handed_on(modules[origin]):
        return find_origin(origin, name, modules)
    return target


@cache
def public_modules(root: Path = ROOT) -> dict[str, ast.Module]:
    """Return the syntax trees of all public modules of library and master, by full name."""
    modules = {}
    for name, (_, tree) in read_trees(root).items():
        if not name.startswith("mlbench_") or layer(name) in FACES:
            continue
        is_private = re.search(r"(^|\.)_", name)
        if not is_private and (own_names(tree) or handed_on(tree)):
            modules[name] = tree
    return modules


def page_packages() -> dict[str, str]:
    """Return the package of each page, by the name of the page without its ending."""
    packages = {}
    for page in sorted(PAGES.glob("*.md")):
        marker = MARKER.search(page.read_text())
        if marker is not None:
            packages[page.stem] = marker[1]
    return packages


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
        owners = [other for other in packages if f"{module}.".startswith(f"{other}.")]
        return max(owners, key=len, default="")

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
        own = ", ".join(own_names(modules[name]))
        text += [f"   :members: {own}" if own else "   :no-members:", ""]
        for entry in left_out(modules[name]):
            text += write_entry(name, *entry)
        text += ["```", ""]
        others = []
        for other in sorted(handed_on(modules[name])):
            others.append(f"{{py:obj}}`~{find_origin(name, other, modules)}`")
        if others:
            text += ["Can also be imported from here: " + ", ".join(others) + ".", ""]
    return "\n".join(text)


def left_out(tree: ast.Module) -> list[tuple[str, str]]:
    """Return the public names that autodoc leaves out.

    They are constants without a docstring, and commands of click.

    Returns:
        Pairs of the name and its description in reStructuredText: the value, or the summary of the
        command.
    """
    public, entries = own_names(tree), []
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node, after in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and not is_text(after):
            values = filter(None, getattr(node.value, "elts", [node.value]))
            # autodoc has an entry for another name of a class.
            if classes.issuperset(map(ast.unparse, values)):
                continue
            for name in assigned_names(node):
                if name in public:
                    entries.append((name, describe_value(node.value)))
        elif isinstance(node, ast.FunctionDef) and node.name in public and is_command(node):
            entries.append((node.name, (ast.get_docstring(node) or "").partition("\n")[0]))
    return entries


def describe_value(value: ast.expr | None) -> str:
    """Return the value of a constant in reStructuredText; a reference to the code if it is long."""
    text = "" if value is None else ast.unparse(value)
    if 0 < len(text) <= LONGEST_VALUE and "`" not in text:
        return f"Value: ``{text}``"
    return "See the source."


def is_command(node: ast.FunctionDef) -> bool:
    """Return True if click makes a command or a group of a function."""
    decorators = map(ast.unparse, node.decorator_list)
    return any(re.match(r"\w+\.(command|group)\b", decorator) for decorator in decorators)


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
    """Return the name of a module below the page's package; that of the package itself as it is."""
    return module.removeprefix(f"{package}.").replace("_", r"\_")


def summary(tree: ast.Module) -> str:
    """Return the first line of a module's docstring as Markdown."""
    line = (ast.get_docstring(tree) or "").partition("\n")[0].replace("|", r"\|")
    # A role of reStructuredText becomes code.
    line = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", line)
    return re.sub(r"``([^`]+)``", r"`\1`", line)


def list_members(module: str) -> list[str]:
    """Return the table of the functions and classes of a public module, in reStructuredText.

    Constants are left out: their docstring is that of their type.
    """
    tree = public_modules().get(module, ast.Module([], []))
    own = own_names(tree)
    documented = set()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            documented.add(node.name)
    rows = [f"   {name}" for name in own if name in documented]
    return ["", ".. autosummary::", "   :nosignatures:", "", *rows, ""] if rows else []
