"""Find an aggregation of the user in its source, without importing it."""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import linecache
import os
import symtable
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlbench_core.arguments import hint_for
from mlbench_core.errors import ConfigurationError
from mlbench_core.files import read_text
from mlbench_core.observe.methods.names import MethodChoice, parse_method

__all__ = ["check_own_class", "class_source", "describe_own_class"]


def check_own_class(choice: MethodChoice, folder: Path) -> None:
    """Refuse a class of the user that its file does not have; nothing is imported.

    Args:
        choice: A method; known ones pass.
        folder: The folder in which the workers start. If it does not exist here, it is one of
            another machine.

    Raises:
        ConfigurationError: The file does not exist or is not Python, or has no such class.
    """
    if choice.own_class is None or not folder.is_dir():
        return
    file, name = choice.own_class
    try:
        tree = ast.parse(read_text(folder / file))
    except OSError as error:
        raise ConfigurationError(
            f"--method must name a file from {folder}, not {file!r}: {error.strerror or error}"
        ) from error
    # A null byte or wrong encoding is a ValueError.
    except (SyntaxError, ValueError) as error:
        raise ConfigurationError(
            f"--method must name a file with Python code, not {file!r}: {error}"
        ) from error
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if name not in classes:
        hint = "it defines none"
        if classes:
            hint = hint_for(name, classes, "its classes are")
        raise ConfigurationError(
            f"--method must name a class that {file} defines, not {name!r}: {hint}"
        )


def describe_own_class(method: Any, folder: Path) -> tuple[str, Path, str]:
    """Return the text of ``--method`` for a class, the path of its module, and its source.

    Args:
        method: A class of an aggregation, a class with its options such as
            ``(Class, {"rank": 4})``, or an object whose class takes no options.
        folder: The folder of the module.

    Raises:
        ConfigurationError: It is something else, or its source cannot be read.
    """
    # Imported here, because names alone do not need torch.
    from mlbench_core.aggregation.pytorch import Aggregation

    options: Any = {}
    if isinstance(method, tuple) and len(method) == 2:
        method, options = method
    if isinstance(method, Aggregation):
        cls = type(method)
        if cls.__init__ is not Aggregation.__init__:
            raise ConfigurationError(
                f"methods must have the class {cls.__name__}, not its object, whose options are "
                f'not known: write ({cls.__name__}, {{"option": value}})'
            )
        method = cls
    if not (isinstance(method, type) and issubclass(method, Aggregation)):
        raise ConfigurationError(
            "methods must be names, or classes of mlbench_core.aggregation.pytorch.Aggregation, "
            f"not {method!r}: derive it from Aggregation"
        )
    source = class_source(method)
    # After an edit it is another file, so that runs of both are not taken for repeats.
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    path = folder / f"{method.__name__.lower()}-{digest}.py"
    choice = MethodChoice(f"{os.path.relpath(path)}:{method.__name__}", options)
    if not isinstance(options, Mapping) or parse_method(str(choice)) != choice:
        raise ConfigurationError(
            f"options of {method.__name__} must be numbers, switches and words by name, "
            f"not {options!r}"
        )
    return str(choice), path, source


def class_source(cls: type) -> str:
    """Return a module with a class: the imports of its cell or file that it uses, and its lines.

    Args:
        cls: A class of a cell of a notebook, or of a file.

    Raises:
        ConfigurationError: Its source is not known, or it uses other names of its cell or file.
    """
    # Of a class in a cell, inspect.getsource knows no file, but its functions have one.
    # inspect.unwrap: a decorator such as torch.no_grad() is defined elsewhere.
    functions = map(inspect.unwrap, filter(inspect.isfunction, vars(cls).values()))
    files = [function.__code__.co_filename for function in functions]
    lines = []
    if files:
        lines = linecache.getlines(files[0])
    body = ast.parse("".join(lines)).body
    found = [node for node in body if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
    if not found:
        raise ConfigurationError(
            f"methods must have a class whose source can be read, not {cls.__name__}: define it, "
            "with a method of its own, at the top level of a cell or a file"
        )
    own = found[-1]
    first = min([own.lineno, *(each.lineno for each in own.decorator_list)])
    source = "".join(lines[first - 1 : own.end_lineno]).rstrip()
    used = set(_globals(symtable.symtable(source, cls.__name__, "exec")))
    used -= {cls.__name__, *vars(builtins)}
    imports = []
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            if names & used or getattr(node, "module", None) == "__future__":
                imports.append(ast.unparse(node))
                used -= names
    if used:
        raise ConfigurationError(
            f"methods must have classes that use imports of their cell or file, but "
            f"{cls.__name__} takes {', '.join(sorted(used))} from elsewhere: import them there, or "
            "move them into the class"
        )
    return "\n".join([*imports, "", "", f"{source}\n"])


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that code takes from its module."""
    is_module = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (is_module or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _globals(child)
