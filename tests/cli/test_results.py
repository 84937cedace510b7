"""Results, charts and comparisons: figures against figures worked out by hand."""

from __future__ import annotations

import csv
import json
import statistics
import zipfile
from pathlib import Path

import pytest

from mlbench_core.cli import _plots
from mlbench_core.cli._results import RunResult, load_folder, save
from mlbench_core.cli.compare import confidence_95
from tests.cli.conftest import Call
from tests.cli.fake_master import FakeMaster, entry, summary


def metrics_of(workers: int, compute: float, communication: float) -> dict[str, list[dict[str, object]]]:
    return {"summary @ 0": [entry(json.dumps(summary(workers, compute, communication)))]}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One worker takes 80 + 1.5 s, two 40 + 8 + 1.5 s, four 20 + 12 + 1.5 s."""
    for workers, compute, communication in ((1, 80.0, 0.0), (2, 40.0, 8.0), (4, 20.0, 12.0)):
        run = {"name": f"demo-{workers}", "num_workers": workers, "state": "finished"}
        save(tmp_path / f"demo-{workers}.json", run, metrics_of(workers, compute, communication))
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "notes.json").write_text("{broken")
    return tmp_path


def test_summary_is_believed_first() -> None:
    metrics = metrics_of(2, 40.0, 8.0) | {"global_cum_agg @ 0": [entry(99.0)]}
    result = RunResult.from_metrics(metrics, {"name": "a-2", "num_workers": 2})
    assert result.phases_s == {"compute": 40.0, "communication": 8.0, "metrics": 0.5, "data": 1.0}
    assert (result.total_s, result.without_communication_s) == (49.5, 41.5)
    assert (result.goal_reached, result.samples_per_s, result.epochs) == (True, 800.0, 3)
    assert result.steps_s == {"agg": 99.0}


def test_steps_fill_in_for_a_missing_summary() -> None:
    steps = {"agg": 8.0, "fwd_pass": 10.0, "comp_loss": 1.0, "backprop": 20.0, "opt_step": 9.0, "batch_load": 2.0}
    metrics = {f"global_cum_{step} @ 0": [entry(value / 2), entry(value)] for step, value in steps.items()}
    metrics["TotalCumulativeTrainTime @ 0"] = [entry(50.0)]
    result = RunResult.from_metrics(metrics, {"name": "a-2", "state": "finished"})
    assert result.phases_s == {"compute": 40.0, "communication": 8.0, "data": 2.0}
    assert (result.workers, result.total_s, result.goal_reached) == (2, 50.0, None)
    metrics["TaskResult @ 0"] = [entry(45.0)]
    result = RunResult.from_metrics(metrics, {"name": "a", "state": "finished"})
    assert (result.workers, result.total_s, result.goal_reached) == (1, 45.0, True)


def test_flat_summary_of_the_tracker() -> None:
    flat = {
        "train_s": 50.0,
        "compute_s": 40.0,
        "communication_s": 8.0,
        "communication_exposed_s": 6.0,
        "preprocess_s": 2.0,
        "best_metric_value": 95.0,
        "goal_reached": False,
        "time_to_goal_s": None,
    }
    result = RunResult.from_metrics({"summary @ 0": [entry(json.dumps(flat))]}, {"name": "a-2"})
    assert result.phases_s == {"compute": 40.0, "communication": 8.0, "data": 2.0}
    assert (result.total_s, result.without_communication_s, result.best) == (50.0, 44.0, 95.0)


@pytest.mark.parametrize("damaged", ["{", "null", "7", '{"total_s": 3, "best": "x", "goal_reached": 1}', "NaN"])
def test_damaged_summary_counts_as_missing(damaged: str) -> None:
    result = RunResult.from_metrics({"summary @ 0": [entry(damaged)]}, {"name": "a"})
    assert result.phases_s == {}
    assert result.best is None
    assert result.total_s is None


def test_zip_and_json_give_the_same_result(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "zips"
    target.mkdir()
    with zipfile.ZipFile(target / "demo-2.zip", "w") as archive:
        archive.writestr("result_summary @ 0.json", json.dumps(metrics_of(2, 40.0, 8.0)["summary @ 0"]))
        archive.writestr("pod_demo-2-worker-0.json", "{}")
        archive.writestr("official_result.txt", "49.5")
    assert load_folder(target) == load_folder(folder, "demo-2")


def test_charts_are_written_with_their_figures(folder: Path, call: Call) -> None:
    told = json.loads(call("charts", str(folder), "--price-per-hour", "3.6", "--json").stdout)
    names = ("total_time_by_phase", "speedup", "time_all_phases", "price_index")
    written = {Path(path).name for path in told["files"]}
    assert written == {"overview.png", *(f"{n}.png" for n in names), *(f"{n}.csv" for n in names)}
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    gains = rows(folder / "speedup.csv")
    assert [float(row["speedup"]) for row in gains] == pytest.approx([1.0, 81.5 / 49.5, 81.5 / 33.5])
    assert [float(row["speedup_without_communication"]) for row in gains] == pytest.approx(
        [1.0, 81.5 / 41.5, 81.5 / 21.5]
    )
    prices = rows(folder / "price_index.csv")
    assert float(prices[1]["price"]) == pytest.approx(2 * 49.5 / 3600 * 3.6)
    assert float(prices[1]["price_index"]) == pytest.approx((2 * 49.5 / 81.5) / (81.5 / 49.5))
    phases = rows(folder / "total_time_by_phase.csv")
    assert [row["compute_s"] for row in phases] == ["80.0", "40.0", "20.0"]


def test_published_price_index() -> None:
    """Task 4a: 4 workers 2.56 times faster; at equal prices a worker the index is 4 / 2.56^2."""
    points = _plots.summarize([RunResult("a-1", 1, train_s=256.0), RunResult("a-4", 4, train_s=100.0)])
    assert _plots.price_index(points) == pytest.approx([1.0, 4 / 2.56**2])


def test_filter_and_output(folder: Path, call: Call, tmp_path: Path) -> None:
    call("charts", str(folder), "--filter", "demo-[12]", "--output", str(tmp_path / "c"))
    assert [row["workers"] for row in rows(tmp_path / "c" / "speedup.csv")] == ["1", "2"]
    assert "no result of a run that matches 'x'" in call("charts", str(folder), "--filter", "x", code=1).stderr
    call("charts", str(folder / "missing"), code=2)


def test_damaged_zip(tmp_path: Path, call: Call) -> None:
    (tmp_path / "a-1.zip").write_bytes(b"PK\x03\x04 broken")
    assert "a-1.zip is damaged" in call("charts", str(tmp_path), code=1).stderr


def test_results_without_times(tmp_path: Path, call: Call) -> None:
    save(tmp_path / "a.json", {"name": "a"}, {"x @ 0": [entry(1)]})
    assert "none of the runs reported a time" in call("charts", str(tmp_path), code=1).stderr


def test_missing_matplotlib_has_the_pip_line(folder: Path, call: Call, patch: pytest.MonkeyPatch) -> None:
    import sys

    patch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'mlbench-core[charts]'" in call("charts", str(folder), code=1).stderr


def test_repeats_are_averaged() -> None:
    points = _plots.summarize(
        [RunResult("a-1", 1, train_s=8.0, goal_reached=True), RunResult("b-1", 1, train_s=10.0, goal_reached=False)]
    )
    assert [(p.runs, p.total_s, p.reached) for p in points] == [(2, 9.0, False)]


def test_compare_sums_repeats_up(fake: FakeMaster, call: Call) -> None:
    for index, compute in enumerate((40.0, 42.0, 44.0)):
        fake.add(f"r{index}-2", 2, summary=json.dumps(summary(2, compute, 8.0)))
    fake.add("one-1", 1, summary=json.dumps(summary(1, 80.0, 0.0)))
    fake.add("bad-1", 1, state="failed")
    result = call("compare", "r*", "one-1", "bad-1", "--json")
    single, repeats = json.loads(result.stdout)
    assert "bad-1 is failed, which is no result: left out" in result.stderr
    assert (single["workers"], single["seconds"]["spread"], single["seconds"]["confidence_95"]) == (1, None, None)
    seconds = repeats["seconds"]
    assert (seconds["n"], seconds["mean"], seconds["spread"]) == (3, 51.5, 2.0)
    half = 4.303 * 2.0 / 3**0.5
    assert seconds["confidence_95"] == pytest.approx([51.5 - half, 51.5 + half])
    assert "46.5 .. 56.5" in call("compare", "r*").stdout
    assert "nothing to compare" in call("compare", "bad-1", code=1).stderr


def test_confidence_needs_two_values_and_narrows() -> None:
    assert confidence_95([1.0]) is None
    values = [float(i % 5) for i in range(100)]
    low, high = confidence_95(values) or (0.0, 0.0)
    assert (high - low) / 2 == pytest.approx(1.984 * statistics.stdev(values) / 10, rel=2e-3)
