"""``mlbench charts``: which runs are drawn, and what is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.comparison import figures
from mlbench_core.comparison.group_repeats import Group
from mlbench_core.comparison.load_results import save
from tests.cli.conftest import Call
from tests.cli.fake_master import FakeMaster, entry, summary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One worker takes 80 + 1.5 s, two 40 + 8 + 1.5 s, four 20 + 12 + 1.5 s."""
    for workers, compute, communication in ((1, 80.0, 0.0), (2, 40.0, 8.0), (4, 20.0, 12.0)):
        run = {"name": f"demo-{workers}", "num_workers": workers, "state": "finished"}
        metrics = {"summary @ 0": [entry(json.dumps(summary(workers, compute, communication)))]}
        save(tmp_path / f"demo-{workers}.json", run, metrics)
    return tmp_path


@pytest.fixture
def drawn(patch: pytest.MonkeyPatch) -> list[tuple[list[str], Path, float | None]]:
    """Names, folder and price of each call to draw; drawing itself takes seconds."""
    calls: list[tuple[list[str], Path, float | None]] = []

    def draw_all(groups: Sequence[Group], folder: Path, price: float | None, *_: Any) -> list[Path]:
        calls.append(([record.name for group in groups for record in group.records], folder, price))
        return [folder / "overview.png"]

    patch.setattr(figures, "draw_all", draw_all)
    return calls


def test_charts_ask_the_master_when_the_folder_has_no_results(
    fake: FakeMaster, call: Call, tmp_path: Path, drawn: list[Any]
) -> None:
    fake.add("a-1", 1, summary=json.dumps(summary(1, 80.0, 0.0)))
    fake.add("a-2", 2, summary=json.dumps(summary(2, 40.0, 8.0)))
    fake.add("bad-2", 2, "failed", summary=json.dumps(summary(2, 1.0, 1.0)))
    fake.add("b-4", 4, summary=json.dumps(summary(4, 2.0, 2.0)))
    folder = tmp_path / "new"
    error = call("charts", str(folder), code=1).stderr
    assert error == (
        f"mlbench: {folder} does not exist: name a folder with results, or make "
        "it to draw the runs of the master into it\n"
    )
    assert not drawn
    folder.mkdir()
    told = call("charts", str(folder), "-f", "a-").stdout
    assert [line.split()[0] for line in told.splitlines()[1:3]] == ["a-1", "a-2"]
    call("charts", str(folder), "-u", fake.url)
    assert [sorted(names) for names, _, _ in drawn] == [["a-1", "a-2"], ["a-1", "a-2", "b-4"]], (
        "bad-2 has failed"
    )
    error = call("charts", str(folder), "-f", "bad", code=1).stderr
    assert (
        error == "mlbench: no run that matches 'bad' at the master has finished: nothing to draw\n"
    )


def test_an_address_wins_over_the_results_in_the_folder(
    fake: FakeMaster, call: Call, folder: Path, drawn: list[Any]
) -> None:
    fake.add("a-8", 8, summary=json.dumps(summary(8, 80.0, 0.0)))
    call("charts", str(folder))
    call("charts", str(folder), "-u", fake.url)
    assert [names for names, _, _ in drawn] == [["demo-1", "demo-2", "demo-4"], ["a-8"]]


def test_no_results_and_no_master(call: Call, tmp_path: Path) -> None:
    error = call("charts", str(tmp_path), code=1).stderr
    assert (
        "no result in" in error
        and "and no master is running: start one with 'mlbench master'" in error
    )


def test_charts_are_written(folder: Path, call: Call) -> None:
    told = json.loads(call("charts", str(folder), "--filter", "demo-[12]", "--json").stdout)
    written = {Path(path).name for path in told["files"]}
    assert {
        "overview.png",
        "overview.svg",
        "speedup.png",
        "speedup.csv",
        "price_index.csv",
    } <= written
    assert [result["name"] for result in told["results"]] == ["demo-1", "demo-2"]
    assert (folder / "overview.png").read_bytes().startswith(b"\x89PNG")


def test_filter_output_and_price(
    folder: Path, call: Call, tmp_path: Path, drawn: list[Any]
) -> None:
    shown = call(
        "charts",
        str(folder),
        "--filter",
        "demo-[12]",
        "--output",
        str(tmp_path / "c"),
        "--price-per-hour",
        "3.6",
    )
    assert drawn == [(["demo-1", "demo-2"], tmp_path / "c", 3.6)]
    assert str(tmp_path / "c" / "overview.png") in shown.stdout
    assert (
        "no run that matches 'x' in" in call("charts", str(folder), "--filter", "x", code=1).stderr
    )


def test_runs_that_cannot_be_drawn_are_named(folder: Path, call: Call, drawn: list[Any]) -> None:
    save(folder / "bad.json", {"name": "bad", "num_workers": 1, "state": "failed"}, {})
    assert (
        "bad has the state 'failed': left out of the charts" in call("charts", str(folder)).stderr
    )
    assert drawn[0][0] == ["demo-1", "demo-2", "demo-4"]


def test_damaged_zip(tmp_path: Path, call: Call) -> None:
    (tmp_path / "a-1.zip").write_bytes(b"PK\x03\x04 broken")
    assert "a-1.zip is damaged" in call("charts", str(tmp_path), code=1).stderr


def test_results_without_times(tmp_path: Path, call: Call) -> None:
    save(tmp_path / "a.json", {"name": "a", "num_workers": 1}, {"x @ 0": [entry(1)]})
    assert "none of the runs reported a time" in call("charts", str(tmp_path), code=1).stderr


def test_missing_matplotlib_has_the_pip_line(
    folder: Path, call: Call, patch: pytest.MonkeyPatch
) -> None:
    import sys

    patch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'mlbench-core[charts]'" in call("charts", str(folder), code=1).stderr
