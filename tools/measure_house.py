"""Measure the order of the source tree: size, private functions, comments, duplicates, prose and
imports.

``python tools/measure_house.py`` prints a table, and ``--json`` the same figures with the places
that they count. Another folder than this repository can be given as an argument.

A code line has a token that is neither a comment nor a docstring. Figures are of the library, the
master and the benchmarks together unless a row says otherwise; those of comments and repeated lines
are of the library and the master. The words of the style guide are counted with regular
expressions, which know no grammar: read such a row as a trend, and its places as a list to look
through."""

from __future__ import annotations

import argparse
import ast
import io
import json
import keyword
import re
import shutil
import subprocess
import sys
import sysconfig
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from import_graph import (
    FACES,
    LAYERS,
    ROOTS,
    circles,
    layer,
    module_name,
    read_imports,
    replaces_itself,
)

PROSE = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "docker/**/*.md")
LONG_FUNCTION, MANY_PARAMETERS, SHORT_BODY, WINDOW = 50, 8, 6, 6

FACE_NAMES = {"util", "utils", "helper", "helpers", "inner", "generic", "wrapper", "base"}

NOT_A_QUESTION = r"(?![^.?!]*\?)"
WORDS = {
    "where (a condition)": (
        r"\b(?:only|except|even|and|but) where\b|\bwhere "
        r"(?:it|there|they|that|possible)\b"
    ),
    "what (relative)": rf"\bwhat\b{NOT_A_QUESTION}",
    (
        "sentence begins with Whether, Where, Whose"
    ): rf"(?:^|[.:;]\s+)(?-i:Whether|Where|Whose)\b{NOT_A_QUESTION}",
    "so many": r"\bso many\b",
    "for ever": r"\bfor ever\b|\bforever\b",
    "beside, next to (parameters)": (
        r"\b(?:beside|next "
        r"to)\b(?=[^.]{0,40}\b(?:parameters?|weights?|model)\b)"
    ),
    "the optimizer inside": r"\b(?:optimizer|scheduler|one) inside\b",
    "sign, tell, heard": (
        r"\b(?:tells?|telling|hears?|heard|hearing)\b|\bsigns? (?:of "
        r"life|that|to)\b"
    ),
    "take for used": r"\b(?:take|takes|taken|took|taking)\b[^.]{0,20} for used\b",
    "anew": r"\banew\b",
    "is no, are no": r"\b(?:is|are|was|were) no\b(?! longer)",
    "see to it": r"\bsees? to it\b",
    "the other way about": r"\bother way (?:about|round)\b",
    "told (settings)": r"\btold\b",
    "stands still": r"\b(?:stands?|stood|standing) still\b",
    "cores each": r"\bcores each\b",
    (
        "lane, card, party, newcomers, ayes, deaf"
    ): r"\b(?:lanes?|cards?|party|parties|newcomers?|ayes?|deaf)\b",
}


@dataclass
class Function:
    """A function or method: where it stands, and what its rows need to know."""

    name: str
    place: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    code_lines: int

    @property
    def parameters(self) -> int:
        found = self.node.args
        names = [argument.arg for argument in (*found.posonlyargs, *found.args, *found.kwonlyargs)]
        return len(names) - (names[:1] in (["self"], ["cls"]))

    @property
    def body_lines(self) -> int:
        statements = [statement for statement in self.node.body if not is_text(statement)]
        return sum((statement.end_lineno or 0) - statement.lineno + 1 for statement in statements)


@dataclass
class Module:
    """One Python file, read once."""

    path: Path
    file: str
    name: str
    text: str
    tree: ast.Module = field(repr=False)

    @classmethod
    def read(cls, path: Path, root: Path) -> Module:
        text, relative = path.read_text(), path.relative_to(root)
        return cls(path, str(relative), module_name(relative), text, ast.parse(text))

    @property
    def package(self) -> str:
        return ".".join(Path(self.file).parent.parts[:2])

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        skipped = (
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        )
        found = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [token for token in found if token.type not in skipped]

    @cached_property
    def docstring_lines(self) -> set[int]:
        texts = (
            node for node in ast.walk(self.tree) if isinstance(node, ast.stmt) and is_text(node)
        )
        return {
            line
            for node in texts
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }

    @cached_property
    def code_lines(self) -> set[int]:
        spans = (range(t.start[0], t.end[0] + 1) for t in self.tokens if t.type != tokenize.COMMENT)
        return {line for span in spans for line in span} - self.docstring_lines

    @cached_property
    def comments(self) -> list[tuple[int, str]]:
        """Comments for people, not for tools: line and text."""
        texts = (
            (t.start[0], t.string.lstrip("#! ")) for t in self.tokens if t.type == tokenize.COMMENT
        )
        return [
            (line, text)
            for line, text in texts
            if not re.match(r"(noqa|type:|fmt:|pragma|/usr/bin)", text)
        ]

    @property
    def comment_lines(self) -> int:
        """Lines that hold a comment and nothing else."""
        return sum(line not in self.code_lines for line, _ in self.comments)

    @cached_property
    def functions(self) -> list[Function]:
        nodes = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        spans = [set(range(node.lineno, (node.end_lineno or 0) + 1)) for node in nodes]
        return [
            Function(
                node.name,
                f"{self.file}:{node.lineno} {node.name}",
                node,
                len(self.code_lines & span),
            )
            for node, span in zip(nodes, spans, strict=True)
        ]

    @property
    def is_face(self) -> bool:
        """True if it only hands on the names of other modules, or puts another module in its
        place."""
        return replaces_itself(self.tree) or all(
            isinstance(node, (ast.Import, ast.ImportFrom))
            or is_text(node)
            or (
                isinstance(node, ast.Assign)
                and all(re.match(r"__\w+__$", ast.unparse(t)) for t in node.targets)
            )
            for node in self.tree.body
        )

    def prose(self) -> Iterator[tuple[int, str]]:
        """Comments and docstrings; comments on lines that follow one another are one text."""
        groups: list[tuple[int, list[str]]] = []
        for line, text in self.comments:
            if groups and groups[-1][0] + len(groups[-1][1]) == line:
                groups[-1][1].append(text)
            else:
                groups.append((line, [text]))
        yield from ((line, " ".join(texts)) for line, texts in groups)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Expr) and is_text(node):
                text = re.sub(r"^ *(>>>|\.\.\.) .*$", "", node.value.value, flags=re.MULTILINE)  # type: ignore[attr-defined]
                yield node.lineno, re.sub(r"``?[^`]+``?", "x", text)


def is_text(node: ast.stmt) -> bool:
    """Return True for a statement that is a string on its own: a docstring of something."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def hidden_one_liners(modules: list[Module]) -> list[str]:
    """Private functions with a short body that one place calls and no other place names.

    A method is sought in the whole tree if no other class has a method of its name, else in its own
    module only; a function in its own module and in modules that import it by name. Generators and
    decorated functions do not count: they cannot be written out at the call."""
    uses: dict[str, list[tuple[Module, ast.AST, bool]]] = defaultdict(list)
    for module in modules:
        called = {id(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.Name, ast.Attribute)):
                name = node.id if isinstance(node, ast.Name) else node.attr
                uses[name].append((module, node, id(node) in called))
    defined = Counter(function.name for module in modules for function in module.functions)
    found = []
    for module in modules:
        for function in module.functions:
            node = function.node
            plain = {ast.unparse(decorator) for decorator in node.decorator_list} <= {
                "staticmethod",
                "classmethod",
            }
            yields = any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node))
            if (
                not re.match(r"_[^_]", function.name)
                or function.body_lines >= SHORT_BODY
                or not plain
                or yields
            ):
                continue
            own = {id(inner) for inner in ast.walk(node)}
            places = [
                is_call
                for user, use, is_call in uses[function.name]
                if id(use) not in own and (user is module or defined[function.name] == 1)
            ]
            if places == [True]:
                found.append(function.place)
    return found


def repeated_lines(modules: list[Module]) -> list[str]:
    """Code lines in a window of six lines whose shape stands elsewhere too: names are kept, values
    are not.

    Imports, ``__all__`` and lines without a name (brackets alone) do not count.
    """
    windows: dict[tuple[str, ...], list[tuple[Module, tuple[int, ...]]]] = defaultdict(list)
    for module in modules:
        skipped: set[int] = set()
        for node in ast.walk(module.tree):
            is_list = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            if is_list or isinstance(node, (ast.Import, ast.ImportFrom)):
                skipped |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        shapes: dict[int, str] = defaultdict(str)
        named: set[int] = set()
        for token in module.tokens:
            line = token.start[0]
            if line in module.code_lines - skipped and token.type != tokenize.COMMENT:
                is_value = token.type in (tokenize.STRING, tokenize.NUMBER)
                shapes[line] += ("v" if is_value else token.string) + " "
                if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                    named.add(line)
        lines = [line for line in sorted(shapes) if line in named]
        for start in range(len(lines) - WINDOW + 1):
            span = tuple(lines[start : start + WINDOW])
            windows[tuple(shapes[line] for line in span)].append((module, span))
    places = {
        (m.file, line)
        for found in windows.values()
        if len(found) > 1
        for m, span in found
        for line in span
    }
    return [f"{file}:{line}" for file, line in sorted(places)]


def not_imperative(modules: list[Module], root: Path) -> list[str] | None:
    """Public functions whose summary does not begin with a verb in the imperative (ruff's D401);
    None without ruff."""
    beside = Path(sysconfig.get_path("scripts"), "ruff")
    ruff = str(beside) if beside.exists() else shutil.which("ruff")
    if ruff is None or not modules:
        return None
    command = [
        ruff,
        "check",
        "--isolated",
        "--no-cache",
        "--select",
        "D401",
        "--output-format",
        "json",
        "--exit-zero",
    ]
    done = subprocess.run(
        [*command, *(m.file for m in modules)], cwd=root, capture_output=True, text=True, check=True
    )
    public = {
        (str(module.path), node.lineno)
        for module in modules
        for node in (
            function.node for function in module.functions if not function.name.startswith("_")
        )
        for node in node.body[:1]
    }
    reports = [(item["filename"], item["location"]["row"]) for item in json.loads(done.stdout)]
    return [
        f"{Path(file).relative_to(root)}:{row}" for file, row in reports if (file, row) in public
    ]


def dialect(modules: list[Module], root: Path) -> dict[str, list[str]]:
    """Places of each entry of the style guide's left column, in docstrings, comments and pages."""
    texts = [(module.file, line, text) for module in modules for line, text in module.prose()]
    for page in sorted({page for pattern in PROSE for page in root.glob(pattern)}):
        if page.name != "CHANGELOG.md" and "_build" not in page.parts:
            text = re.sub(
                r"```.*?```",
                lambda code: "\n" * code[0].count("\n"),
                page.read_text(),
                flags=re.DOTALL,
            )
            texts.append((str(page.relative_to(root)), 1, re.sub(r"`[^`\n]*`", "x", text)))
    found: dict[str, list[str]] = {name: [] for name in WORDS}
    for name, pattern in WORDS.items():
        for file, line, text in texts:
            for match in re.finditer(pattern, text, re.IGNORECASE | re.MULTILINE):
                found[name].append(f"{file}:{line + text[: match.start()].count(chr(10))}")
    return found


def measure(root: Path) -> dict[str, Any]:
    """Take all figures of a tree.

    Args:
        root: The folder that has ``mlbench_core``, ``mlbench_master``, ``mlbench_cli`` and
            ``benchmarks``.

    Returns:
        ``figures`` by name (a number, or None if it could not be measured), ``packages`` with their
        files, code lines and comment lines, and ``places``, for each figure that counts places.
    """
    paths = sorted(path for name in ROOTS for path in (root / name).rglob("*.py"))
    modules = [Module.read(path, root) for path in paths]
    house = [module for module in modules if module.name.startswith("mlbench_")]
    functions = [function for module in modules for function in module.functions]
    imports = read_imports({module.name: (module.file, module.tree) for module in modules})
    between = [found.layers for found in imports if "" not in found.layers]
    no_summary = [
        m.file for m in modules if not (ast.get_docstring(m.tree) or "").strip() and m.text.strip()
    ]
    words = dialect(modules, root)
    places: dict[str, list[str] | None] = {
        f"functions over {LONG_FUNCTION} code lines": [
            f.place for f in functions if f.code_lines > LONG_FUNCTION
        ],
        f"functions over {MANY_PARAMETERS} parameters": [
            f.place for f in functions if f.parameters > MANY_PARAMETERS
        ],
        f"private functions, one caller, under {SHORT_BODY} lines": hidden_one_liners(modules),
        "repeated code lines": repeated_lines(house),
        "modules without a docstring summary": no_summary,
        "public functions without an imperative (D401)": not_imperative(modules, root),
        "modules with a name only faces may have": [
            m.file
            for m in modules
            if not m.is_face and FACE_NAMES & {part.strip("_") for part in m.name.split(".")}
        ],
        "import circles of modules": circles((found.source, found.target) for found in imports),
        "import circles of packages": circles(between),
        "imports that go up": [str(found) for found in imports if found.goes_up],
        "imports of faces from within": [str(found) for found in imports if found.takes_a_face],
        "modules that are in no layer": [
            m.file for m in modules if layer(m.name) not in {*LAYERS, *FACES}
        ],
        **{f"words: {name}": found for name, found in words.items()},
    }
    packages: dict[str, Counter[str]] = defaultdict(Counter)
    for m in modules:
        packages[m.package].update(files=1, code=len(m.code_lines), comments=m.comment_lines)
    code = {
        name: sum(len(m.code_lines) for m in modules if m.name.split(".")[0] == name)
        for name in ROOTS
    }
    figures: dict[str, float | None] = {
        "code lines: library": code["mlbench_core"],
        "code lines: master": code["mlbench_master"],
        "code lines: command": code["mlbench_cli"],
        "code lines: library, master and command": code["mlbench_core"]
        + code["mlbench_master"]
        + code["mlbench_cli"],
        "code lines: benchmarks": code["benchmarks"],
        "files": len(modules),
        "functions": len(functions),
        "private functions": sum(bool(re.match(r"_[^_]", function.name)) for function in functions),
        "comment lines per 100 code lines": per_100(sum(m.comment_lines for m in house), house),
        "comments behind code per 100 code lines": per_100(
            sum(len(m.comments) - m.comment_lines for m in house), house
        ),
        **{name: None if found is None else len(found) for name, found in places.items()},
        "words: all": sum(map(len, words.values())),
    }
    return {
        "figures": figures,
        "packages": {name: dict(packages[name]) for name in sorted(packages)},
        "places": places,
    }


def per_100(count: int, modules: list[Module]) -> float:
    """Relate a count to the lines of code of modules."""
    return round(100 * count / max(sum(len(module.code_lines) for module in modules), 1), 2)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument(
        "--json", action="store_true", help="figures and the places that they count, as JSON"
    )
    args = parser.parse_args()
    found = measure(args.root.resolve())
    if args.json:
        json.dump(found, sys.stdout, indent=1)
        return
    print(f"{'package':<32} {'files':>6} {'code lines':>11} {'comment lines':>14}")
    for name, row in found["packages"].items():
        print(f"{name:<32} {row['files']:>6} {row['code']:>11} {row['comments']:>14}")
    print()
    for name, value in found["figures"].items():
        print(f"{name:<60} {'not measured' if value is None else value:>12}")


if __name__ == "__main__":
    main()
