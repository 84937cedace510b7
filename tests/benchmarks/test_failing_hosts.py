"""The experiment with hosts that fail: its table and its figure."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import benchmarks
from mlbench_core.network.description import RandomOutages
from mlbench_core.network.parsing import parse_network

FOLDER = Path(benchmarks.__file__).parent / "experiments"
PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "failing_hosts"


def load(name: str) -> ModuleType:
    """Return a script of the experiments as a module; it imports others of its folder."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


def line(method: str, mean_s: float | None, seconds: float | None, **values: Any) -> dict[str, Any]:
    useful = None if seconds is None else 90
    found = {"method": method, "mean_s": mean_s, "seed": 1, "lr": 0.1, "seconds": seconds}
    return {**found, "useful": useful, "paid": 100, "failures": 2, "starts": 1, **values}


LINES = [
    line("diloco", None, 40.0),
    line("sgd", None, 20.0),
    *(line("diloco", 60.0, seconds) for seconds in (50.0, 60.0, 90.0)),
    *(line("sgd", 60.0, seconds) for seconds in (80.0, None, None)),
    line("sgd", 120.0, 30.0, useful=50),
    line("diloco", 120.0, None),
]


def test_a_missed_goal_counts_as_the_longest_time_and_has_no_goodput() -> None:
    rows = load("failing_hosts_page").table_rows(LINES)
    assert rows == [
        ["none", "DiLoCo, elastic", "40", "40 to 40", "1.00", "90 %", "2"],
        ["none", "SGD with checkpoints", "20", "20 to 20", "1.00", "90 %", "2"],
        ["every 120 s", "DiLoCo, elastic", "missed", "missed to missed", "missed",
         "not measured", "2"],
        ["every 120 s", "SGD with checkpoints", "30", "30 to 30", "1.50", "50 %", "2"],
        ["every 60 s", "DiLoCo, elastic", "60", "50 to 90", "1.50", "90 %", "2"],
        ["every 60 s", "SGD with checkpoints", "missed", "80 to missed", "missed", "90 %", "2"],
    ]  # fmt: skip


def test_the_page_has_a_figure_and_the_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs.jsonl"
    runs.write_text("".join(json.dumps(each) + "\n" for each in LINES))
    load("failing_hosts_page").main([str(runs), "-o", str(tmp_path / "page")])
    names = {file.name for file in (tmp_path / "page").iterdir()}
    assert names == {"runs.jsonl", *(f"failing_hosts.{kind}" for kind in ("png", "svg", "csv"))}
    assert capsys.readouterr().out.count("| DiLoCo, elastic |") == 3


def test_a_restart_has_other_times_of_failures() -> None:
    script = load("failing_hosts")
    assert parse_network(script.network_text(None, 1)).kills is None
    networks = [parse_network(script.network_text(60.0, seed)) for seed in (1000, 1001)]
    assert [network.kills for network in networks] == [
        RandomOutages(60, 5, 1000),
        RandomOutages(60, 5, 1001),
    ]


def test_runs_that_are_done_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load("failing_hosts")
    calls: list[tuple[Any, ...]] = []

    def run(*key: Any) -> dict[str, Any]:
        calls.append(key)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return dict(zip(("method", "mean_s", "seed", "lr"), key, strict=True))

    monkeypatch.setattr(script, "run", run)
    with pytest.raises(KeyboardInterrupt):
        script.main([str(tmp_path), "--seeds", "1"])
    script.main([str(tmp_path), "--seeds", "1"])
    # The third one was interrupted, and is the only one that runs twice.
    means = [None, None, 240, 240, 240, 120, 120, 60, 60]
    assert [key[1] for key in calls] == means
    assert calls[2] == calls[3]


@pytest.mark.skipif(not PUBLISHED.exists(), reason="not measured yet")
def test_the_published_table_follows_from_the_lines() -> None:
    page = load("failing_hosts_page")
    lines = load("_lines").read_lines(PUBLISHED / "runs.jsonl")
    assert page.table(lines) in (PUBLISHED / "index.md").read_text(encoding="utf-8")
