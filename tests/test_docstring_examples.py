"""The examples in docstrings give what they show."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import mlbench_cli
import mlbench_core
import mlbench_master

PACKAGES = (mlbench_core, mlbench_master, mlbench_cli)


def with_examples(package: ModuleType) -> list[str]:
    """Names of a package's modules whose source has examples."""
    names = [
        module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    return [
        name
        for name in names
        if ">>> " in Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8")
    ]


SCRIPTS = ("latency", "latency_report", "measure_collectives")  # of task 0, in pytest's path


@pytest.mark.parametrize(
    "name", [*SCRIPTS, *(name for package in PACKAGES for name in with_examples(package))]
)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    assert any(test.examples for test in doctest.DocTestFinder().find(module))
    assert doctest.testmod(module).failed == 0
