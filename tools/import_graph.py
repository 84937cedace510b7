"""Read which module imports which, and judge each import by the layers of the house.

Every layer may import the ground floor; every other layer names the layers that it may import. A
face is an import path of version 3.0: it only hands on the names of other modules, and nothing in
the library imports it. An import inside a function counts as any other import."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOTS = ("mlbench_core", "mlbench_master", "mlbench_cli", "benchmarks")
GROUND = {
    "", "addresses", "arguments", "calling_environment", "checkpoint_names", "errors", "files",
    "install_cuda_extensions", "paths", "processor_time", "run_terms", "running_statistics",
    "tasks", "torch_private", "wire_bytes", "_optional",
}  # fmt: skip
# Layers that have faces only; `find_faces` finds the others by their code.
FACES = {"utils", "api", "cli"}
SIDE_BY_SIDE = {"tracking", "client", "dataset", "evaluation", "models", "network", "ops"}
LAYERS: dict[str, set[str]] = {name: set() for name in GROUND}
LAYERS |= {name: {"distributed"} for name in SIDE_BY_SIDE}
LAYERS |= {
    "distributed": set(),
    "results": set(),
    "comparison": {"results"},
    "aggregation": {"distributed"},
    "optim": {"aggregation", "distributed"},
    "lr_scheduler": {"optim"},

    # A model calls operators, which know no models.
    "models": {"distributed", "ops"},
    # As in version 3.0, a Tracker reports to the master. It also writes the result folder of a run.
    "tracking": {"distributed", "client", "results"},
    "controlflow": {
        "distributed", "aggregation", "optim", "lr_scheduler", "results", *SIDE_BY_SIDE,
    },
    "observe": {
        "distributed", "aggregation", "optim", "controlflow", "results", *SIDE_BY_SIDE,
    },
    "prediction": {"comparison", "network"},
    # Only the names of the methods and the options of a script.
    "sweep": {"client", "results", "comparison", "network", "observe", "prediction"},
    # One call for a sweep. The aggregations only to judge a class of the user.
    "experiments": {"sweep", "comparison", "observe", "aggregation"},
    # It reads the outboxes of workers that have ended, proves its identity to clients, emulates
    # networks of runs, and holds the store of elastic runs.
    "mlbench_master": {"client", "results", "comparison", "network", "observe", "distributed"},
    # `mlbench master` runs the master in its own process.
    "mlbench_cli": {
        "client", "dataset", "results", "comparison", "network", "observe", "prediction", "sweep",
        "experiments", "mlbench_master",
    },
}  # fmt: skip
LAYERS["benchmarks"] = set(LAYERS)


@dataclass(frozen=True)
class Import:
    """One import of a module of the tree.

    Attributes:
        file: The file of the importing module.
        line: The line of the import.
        source: Full name of the importing module.
        target: Full name of the imported module.
        takes_a_face: True if the import is of a face, by a module that is not a face.
    """

    file: str
    line: int
    source: str
    target: str
    takes_a_face: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.target}"

    @property
    def layers(self) -> tuple[str, str]:
        return layer(self.source), layer(self.target)

    @property
    def goes_up(self) -> bool:
        """True if the importing layer may not import the other one."""
        source, target = self.layers
        if source not in LAYERS or target not in LAYERS:
            return False
        return target not in {source} | GROUND | LAYERS[source]


def layer(module: str) -> str:
    """Return the layer of a module.

    It is the package or module below ``mlbench_core``, "" for ``mlbench_core`` itself, and the top
    package for all others.
    """
    first, *rest = module.split(".")
    if first != "mlbench_core":
        return first
    return rest[0] if rest else ""


def module_name(file: Path) -> str:
    """Return the full name of a module from its file, relative to the root of the tree."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


@cache
def read_trees(root: Path) -> dict[str, tuple[str, ast.Module]]:
    """Parse all modules of a tree.

    Args:
        root: The folder that has ``mlbench_core``, ``mlbench_master`` and ``benchmarks``.

    Returns:
        File, relative to ``root``, and syntax tree of each module, by its full name.
    """
    trees = {}
    for name in ROOTS:
        for path in sorted((root / name).rglob("*.py")):
            file = path.relative_to(root)
            trees[module_name(file)] = str(file), ast.parse(path.read_text())
    return trees


def replaces_itself(tree: ast.Module) -> bool:
    """Return True if a module puts another one in its place: ``sys.modules[__name__] = ...``."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets = map(ast.unparse, node.targets)
            if "sys.modules[__name__]" in targets:
                return True
    return False


def find_faces(trees: Mapping[str, ast.Module]) -> set[str]:
    """Find the modules that are faces.

    Args:
        trees: Syntax tree of each module, by its full name.

    Returns:
        The full names of modules in a layer of faces, of modules that put another one in their
        place, and of packages all of whose modules are faces.
    """
    faces = {name for name, tree in trees.items() if layer(name) in FACES or replaces_itself(tree)}
    # In this order, packages inside a package come before it.
    for name in sorted(trees, reverse=True):
        modules = [other for other in trees if other.startswith(f"{name}.")]
        if modules and faces.issuperset(modules):
            faces.add(name)
    return faces


def read_imports(trees: Mapping[str, tuple[str, ast.Module]]) -> list[Import]:
    """List the imports that modules make of one another.

    Args:
        trees: File and syntax tree of each module, by its full name.

    Returns:
        Every import, in the order of ``trees``. ``from package import module`` imports the module.
    """
    imports = []
    faces = find_faces({name: tree for name, (_, tree) in trees.items()})
    for source, (file, tree) in trees.items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    # The name is that of a module, or of a part of one.
                    name = f"{node.module}.{alias.name}"
                    names.append(name if name in trees else node.module)
            for name in dict.fromkeys(names):
                # A script of a task imports the modules beside it by their last name.
                beside = f"{source.rpartition('.')[0]}.{name.partition('.')[0]}"
                target = name if name in trees else beside
                if target in trees and target != source:
                    takes_a_face = target in faces and source not in faces
                    imports.append(Import(file, node.lineno, source, target, takes_a_face))
    return imports


def circles(edges: Iterable[tuple[str, str]]) -> list[str]:
    """Return the groups of names that reach one another along the edges, each as one line."""
    graph: dict[str, set[str]] = defaultdict(set)
    for source, target in edges:
        graph[source].add(target)
    reached: dict[str, set[str]] = {}
    for start in list(graph):
        seen: set[str] = set()
        left = [start]
        while left:
            new = graph.get(left.pop(), set()) - seen
            seen |= new
            left += new
        reached[start] = seen
    groups = set()
    for start, seen in reached.items():
        group = [other for other in seen if start in reached.get(other, ())]
        if len(group) > 1:
            groups.add(" ".join(sorted(group)))
    return sorted(groups)
