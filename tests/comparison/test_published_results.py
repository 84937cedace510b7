"""The results below docs/results: every folder is sound, and the tables follow from the folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbench_core.comparison.group_repeats import pool
from mlbench_core.comparison.load_results import load
from mlbench_core.comparison.results_page import runs_csv
from mlbench_core.comparison.submission_rules import check_rules
from mlbench_core.comparison.table import compare_groups, escape
from mlbench_core.results.folder import RESULT, find_folders, verify_folder
from mlbench_core.sweep.page import read_outcome
from mlbench_core.sweep.result_table import as_csv, table_rows
from mlbench_core.sweep.sentences import per_network
from mlbench_core.sweep.sweep_folder import SweepFolder, stopped_at_limit
from mlbench_core.sweep.toml_file import load_sweep
from tests.helpers.archives import unpack
from tests.helpers.thorough import THOROUGH, some

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = sorted(path.parent for path in RESULTS.glob("*/runs.tar.xz"))
SWEEPS = [path for path in PAGES if (path / "sweep.toml").exists()]
COLLECTIONS = [path for path in PAGES if path not in SWEEPS]


@pytest.mark.parametrize("collection", COLLECTIONS, ids=lambda path: path.name)
def test_the_runs_are_verified_and_the_tables_follow_from_them(
    collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack(collection / "runs.tar.xz", tmp_path)
    monkeypatch.chdir(tmp_path)
    folders = list(find_folders(Path("runs")))
    assert len(folders) >= 4
    assert [problem for folder in folders for problem in verify_folder(folder)] == []

    records = load([Path("runs")])
    failed = [str(finding) for finding in check_rules(records) if finding.status == "fail"]
    # A page that goes on growing says that it has too few seeds for a result.
    if "of five seeds" in (collection / "index.md").read_text(encoding="utf-8"):
        failed = [finding for finding in failed if "at least 5 are required" not in finding]
    assert failed == []
    groups = pool(records)
    assert compare_groups(groups).as_csv() == (collection / "table.csv").read_text(encoding="utf-8")
    written = (collection / "runs.csv").read_text(encoding="utf-8")
    assert runs_csv([record for group in groups for record in group.records]) == written


@pytest.mark.parametrize("page", some(SWEEPS), ids=lambda path: path.name)
def test_a_sweep_is_complete_and_its_page_follows_from_its_runs(page: Path, tmp_path: Path) -> None:
    unpack(page / "runs.tar.xz", tmp_path)
    sweep = load_sweep(page / "sweep.toml")
    state = SweepFolder(tmp_path)
    failures = state.failures(state.planned(sweep))
    runs = {
        point.name: state.run_folder(point)
        for point in state.planned(sweep)
        # Only a trial of the tuning may have failed.
        if point.trial is None or point.name not in failures
    }
    folders = [*tmp_path.glob("runs/*"), *tmp_path.glob("tuning/*")]
    assert set(folders) == set(runs.values())
    # A run without a result counts as one that missed the goal, so nothing but the limit may be its
    # reason.
    without = {name for name, folder in runs.items() if not (folder / RESULT).exists()}
    assert all(stopped_at_limit(runs[name]) for name in without)
    verified = sorted(runs.keys() - without)
    # They were all written by the same program, and each takes a tenth of a second.
    assert [
        problem
        for name in (verified if THOROUGH else verified[::8])
        for problem in verify_folder(runs[name])
    ] == []

    outcome = read_outcome(tmp_path, sweep)
    assert as_csv(table_rows(outcome, sweep.price)) == (page / "table.csv").read_text(
        encoding="utf-8"
    )
    text = (page / "index.md").read_text(encoding="utf-8")
    for network in outcome.networks:
        assert [
            sentence for sentence in per_network(outcome, network) if escape(sentence) not in text
        ] == []
