"""The table of benchmarks/micro/_transports.py: medians of the slowest worker, ratios block by block."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "micro"


def test_the_table_compares_with_shared_memory_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("_transports", "_variants"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    table = importlib.import_module("_transports").table
    first = {"shared memory": [[0.1, 0.05], [0.1, 0.05], [0.1, 0.05]], "MPI": [[0.1, 0.1], [0.2, 0.1], [0.1, 0.1]]}
    second = {"shared memory": [[0.2, 0.15], [0.1, 0.15], [0.1, 0.15]], "MPI": [[0.2, 0.3], [0.3, 0.3], [0.2, 0.3]]}
    for name in ("_transports", "_variants"):
        monkeypatch.delitem(sys.modules, name)
    assert table([first, second]).splitlines()[2:] == [
        "| shared memory | 100.0 | 1.00 | 1.00 to 1.00 | 100.0 |",
        "| MPI | 200.0 | 2.00 | 1.00 to 3.00 | 200.0 |",
    ]
