"""The results below docs/results: every folder is sound, and the tables follow from the folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlbench_core.results.collection import runs_csv
from mlbench_core.results.folder import find_folders, verify_folder
from mlbench_core.results.load import load
from mlbench_core.results.pool import pool
from mlbench_core.results.rules import check_rules
from mlbench_core.results.table import compare_groups, escape
from mlbench_core.sweep.file import load_sweep
from mlbench_core.sweep.page import read_outcome
from mlbench_core.sweep.tables import as_csv, table_rows
from mlbench_core.sweep.words import per_network

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SWEEPS = sorted(path.parent for path in RESULTS.glob("*/sweep.toml"))
COLLECTIONS = sorted({path.parent for path in RESULTS.glob("*/index.md")} - set(SWEEPS))


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


@pytest.mark.parametrize("published", SWEEPS, ids=lambda path: path.name)
def test_a_sweep_has_all_runs_and_its_table_and_words_follow_from_them(published: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(published / "runs.tar.xz", tmp_path, filter="data")
    sweep = load_sweep(published / "sweep.toml")
    runs = tmp_path / "runs"
    assert sorted(folder.name for folder in runs.iterdir()) == sorted(point.name for point in sweep.points())
    assert [problem for folder in find_folders(runs) for problem in verify_folder(folder)] == []
    outcome = read_outcome(tmp_path, sweep)
    table = as_csv(table_rows(outcome, sweep.price))
    assert table == (published / "table.csv").read_text(encoding="utf-8")
    page = (published / "index.md").read_text(encoding="utf-8")
    words = [escape(sentence) for network in outcome.networks for sentence in per_network(outcome, network)]
    assert words and [sentence for sentence in words if sentence not in page] == []
