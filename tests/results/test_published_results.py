"""The results below docs/results: every folder is sound, and the tables follow from the folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbench_core.results.collection import runs_csv
from mlbench_core.results.folder import find_folders, verify_folder
from mlbench_core.results.load import load
from mlbench_core.results.pool import pool
from mlbench_core.results.rules import check_rules
from mlbench_core.results.table import compare_groups

RESULTS = Path(__file__).parents[2] / "docs" / "results"
COLLECTIONS = sorted(path.parent for path in RESULTS.glob("*/index.md"))


@pytest.mark.parametrize("collection", COLLECTIONS, ids=lambda path: path.name)
def test_every_run_is_verified(collection: Path) -> None:
    folders = list(find_folders(collection / "runs"))
    assert len(folders) >= 40
    assert [problem for folder in folders for problem in verify_folder(folder)] == []


@pytest.mark.parametrize("collection", COLLECTIONS, ids=lambda path: path.name)
def test_the_tables_follow_from_the_runs(collection: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RESULTS.parents[1])
    groups = pool(load([(collection / "runs").relative_to(RESULTS.parents[1])]))
    assert compare_groups(groups).as_csv() == (collection / "table.csv").read_text(encoding="utf-8")
    written = (collection / "runs.csv").read_text(encoding="utf-8")
    assert runs_csv([record for group in groups for record in group.records]) == written


@pytest.mark.parametrize("collection", COLLECTIONS, ids=lambda path: path.name)
def test_the_rules_are_kept(collection: Path) -> None:
    assert [str(finding) for finding in check_rules(load([collection / "runs"])) if finding.status == "fail"] == []
