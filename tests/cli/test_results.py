"""Results, charts and comparisons: figures against figures worked out by hand."""

from __future__ import annotations

import csv
import json
import statistics
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.cli import charts
from mlbench_core.cli._results import RunResult, Setup, labels, load_folder, save
from mlbench_core.cli.compare import confidence_95
from mlbench_core.evaluation.goals import time_to_accuracy_goal
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
    assert (result.workers, result.total_s, result.goal_reached) == (None, 50.0, None)
    metrics["TaskResult @ 0"] = [entry(45.0)]
    result = RunResult.from_metrics(metrics, {"name": "a", "state": "finished"})
    assert (result.total_s, result.goal_reached) == (45.0, True)


def reached(train_s: float, accuracy: float = 80.2) -> str:
    """What a script of version 3.0 posts as ``TaskResult``: its goal's text."""

    class Clock:
        get_total_train_time = staticmethod(lambda: train_s)
        get_total_compute_time = staticmethod(lambda: 300.0)
        get_total_communication_time = staticmethod(lambda: 80.5)
        get_total_metrics_time = staticmethod(lambda: 20.0)
        get_total_preprocess_time = staticmethod(lambda: 6.5)

    text = time_to_accuracy_goal(80)("val_global_Prec@1", accuracy, Clock())  # type: ignore[arg-type]
    assert text is not None
    return text


def test_the_text_of_a_goal_counts_as_reached() -> None:
    metrics: dict[str, list[dict[str, object]]] = {"TaskResult @ 0": [entry(reached(407.123))]}
    result = RunResult.from_metrics(metrics, {"name": "a", "num_workers": 2, "state": "finished"})
    assert (result.goal_reached, result.time_to_goal_s, result.samples_per_s) == (True, 407.123, None)
    assert result.phases_s == {"compute": 300.0, "communication": 80.5, "metrics": 20.0, "data": 6.5}
    metrics |= {"TotalCumulativeTrainTime @ 0": [entry(407.1234)], "global_cum_agg @ 0": [entry(80.0)]}
    result = RunResult.from_metrics(metrics, {"name": "a", "num_workers": 2, "state": "finished"})
    assert (result.time_to_goal_s, result.train_s, result.phases_s) == (407.123, 407.1234, {"communication": 80.0})
    after = [entry("71.5% Top 1 Validation Accuracy after 7201.5 seconds, Compute: 1.0 seconds")]
    assert RunResult.from_metrics({"TaskResult @ 0": after}, {"name": "a"}).time_to_goal_s == 7201.5


def test_the_text_of_a_goal_of_ones_own_counts_as_reached() -> None:
    metrics = {"TaskResult @ 0": [entry("done")], "TotalCumulativeTrainTime @ 0": [entry(12.5)]}
    result = RunResult.from_metrics(metrics, {"name": "a", "state": "finished"})
    assert (result.goal_reached, result.time_to_goal_s, result.total_s) == (True, 12.5, 12.5)
    assert RunResult.from_metrics({"TaskResult @ 0": [entry("")]}, {"name": "a"}).goal_reached is None


def test_cumulative_times_fill_in_for_a_goal_that_was_not_reached() -> None:
    metrics = {"cum_agg @ 0": [entry(4.0), entry(8.0)], "cum_fwd_pass @ 0": [entry(5.0), entry(10.0)]}
    result = RunResult.from_metrics(metrics | {"cum_agg @ 1": [entry(9.0)]}, {"name": "a"})
    assert (result.phases_s, result.total_s) == ({"compute": 10.0, "communication": 8.0}, 18.0)
    assert result.workers == 2, "each worker sends its own"


@pytest.mark.parametrize("name", ["exp-2024", "a-4", "run"])
def test_the_number_of_workers_is_never_read_from_the_name(name: str) -> None:
    assert RunResult.from_metrics({}, {"name": name}).workers is None
    assert RunResult.from_metrics({}, {"name": name, "num_workers": 3}).workers == 3


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


def write_zip(
    path: Path, run: dict[str, object] | None, metrics: Mapping[str, object], result: str = "", pods: int = 2
) -> None:
    """A download; ``run=None`` is one of an earlier version."""
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        if run is not None:
            archive.writestr("run.json", json.dumps(run))
        for name, entries in metrics.items():
            archive.writestr(f"result_{name}.json", json.dumps(entries))
        for rank in range(pods):
            archive.writestr(f"pod_x-worker-{rank}.json", "{}")
        archive.writestr("official_result.txt", result)


def test_zip_and_json_give_the_same_result(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "zips"
    run = {"name": "demo-2", "num_workers": 2, "state": "finished"}
    write_zip(target / "any name.zip", run, metrics_of(2, 40.0, 8.0))
    assert load_folder(target) == [result for result in load_folder(folder) if result.name == "demo-2"]


def test_a_zip_tells_the_state_of_its_run(tmp_path: Path, call: Call) -> None:
    times: dict[str, object] = {"cum_agg @ 0": [entry(8.0)], "cum_fwd_pass @ 0": [entry(40.0)]}
    write_zip(tmp_path / "a.zip", {"name": "bad", "num_workers": 1, "state": "failed"}, times)
    write_zip(tmp_path / "b.zip", {"name": "good", "num_workers": 2, "state": "finished"}, times)
    shown = call("charts", str(tmp_path))
    table = [line.split()[:4] for line in shown.stdout.splitlines()]
    assert table[1:3] == [["bad", "1", "failed", "48.0"], ["good", "2", "-", "48.0"]]
    assert "bad is failed and not finished: left out of the charts" in shown.stderr
    assert [row["workers"] for row in rows(tmp_path / "speedup.csv")] == ["2"]


def test_a_zip_of_version_3_0_has_a_file_for_each_metric_of_a_worker(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "results.zip", "w") as archive:
        for pod in ("rel-mlbench-worker-0", "rel-mlbench-worker-1", "rel-mlbench-worker-12"):
            for metric in ("cpu", "mem_ory"):
                archive.writestr(f"{pod}_{metric}.json", "[]")
        archive.writestr("result_TaskResult @ 0.json", json.dumps([entry(reached(407.123))]))
    (result,) = load_folder(tmp_path)
    assert (result.workers, result.state, result.time_to_goal_s) == (3, "unknown", 407.123)


def test_a_zip_without_a_record_is_honest(tmp_path: Path, call: Call) -> None:
    times: dict[str, object] = {"cum_agg @ 0": [entry(8.0)]}
    write_zip(tmp_path / "exp-2024.zip", None, times)
    write_zip(tmp_path / "results.zip", None, times, reached(407.123))
    write_zip(tmp_path / "none.zip", None, times, pods=0)
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("me.png", "")
    shown = call("charts", str(tmp_path))
    table = [line.split()[:4] for line in shown.stdout.splitlines()]
    assert table[1:4] == [
        ["none", "-", "unknown", "8.0"],
        ["exp-2024", "2", "unknown", "8.0"],
        ["results", "2", "yes", "407.1"],
    ]
    assert "none does not say how many workers it had: left out of the charts" in shown.stderr
    written = [(row["setup"], row["runs"]) for row in rows(tmp_path / "total_time_by_phase.csv")]
    assert written == [("exp-2024", "1"), ("results", "1")], "unknown runs of other names are never averaged"


TASK = "/opt/benchmarks/task1a_resnet20_cifar10/main.py --run_id {run_id} --backend {backend}"


def a_run(name: str, workers: int, command: str = TASK, **fields: object) -> dict[str, object]:
    fields = {
        "backend": "gloo",
        "gpu_enabled": False,
        "light_target": False,
        "num_cpus": 1.0,
        "state": "finished",
    } | fields
    return {"name": name, "num_workers": workers, "command": command, "image": "task1a_resnet20_cifar10", **fields}


def test_charts_average_only_what_is_comparable(tmp_path: Path, call: Call) -> None:
    runs = [
        (a_run("a-1", 1), 80.0),
        (a_run("again-1", 1, f"{TASK} --seed 7", image="other/name"), 90.0),
        (a_run("a-2", 2), 40.0),
        (a_run("ddp-1", 1, f"{TASK} --optimizer ddp"), 60.0),
        (a_run("ddp-2", 2, f"{TASK} --optimizer ddp"), 20.0),
        (a_run("mpi-2", 2, backend="mpi"), 30.0),
        (a_run("light-2", 2, f"{TASK} --light", light_target=True), 10.0),
        (a_run("own-2", 2, "python own.py --depth 3", image="custom_image"), 5.0),
        (a_run("cores-2", 2, num_cpus=4.0), 25.0),
    ]
    for run, compute in runs:
        save(tmp_path / f"{run['name']}.json", run, metrics_of(int(str(run["num_workers"])), compute, 0.0))
    call("charts", str(tmp_path))
    plain = "task 1a, gloo, CPU, 1 core"
    phases = {(row["setup"], row["workers"]): row for row in rows(tmp_path / "total_time_by_phase.csv")}
    assert {key: (row["runs"], float(row["compute_s"])) for key, row in phases.items()} == {
        (plain, "1"): ("2", 85.0),
        (plain, "2"): ("1", 40.0),
        ("task 1a, --optimizer ddp, gloo, CPU, 1 core", "1"): ("1", 60.0),
        ("task 1a, --optimizer ddp, gloo, CPU, 1 core", "2"): ("1", 20.0),
        ("task 1a, mpi, CPU, 1 core", "2"): ("1", 30.0),
        ("task 1a, gloo, CPU, light goal, 1 core", "2"): ("1", 10.0),
        ("own.py, --depth 3, gloo, CPU, 1 core", "2"): ("1", 5.0),
        ("task 1a, gloo, CPU, 4 cores", "2"): ("1", 25.0),
    }
    gains = {(row["setup"], row["workers"]): float(row["speedup"]) for row in rows(tmp_path / "speedup.csv")}
    assert gains[plain, "2"] == pytest.approx(86.5 / 41.5)
    assert gains["task 1a, --optimizer ddp, gloo, CPU, 1 core", "2"] == pytest.approx(61.5 / 21.5)
    assert gains["task 1a, mpi, CPU, 1 core", "2"] == 1.0, "a series of its own starts at its fewest workers"


def test_labels_name_what_differs() -> None:
    setups = [Setup.of(a_run("a", 1)), Setup.of(a_run("b", 1, f"{TASK} --optimizer ddp --epochs 3", backend="mpi"))]
    assert list(labels(setups).values()) == ["--optimizer ddp, --epochs 3, mpi", "gloo"]
    assert list(labels(setups[:1]).values()) == ["default"]
    assert str(Setup.of(a_run("a", 1, "''", image="custom_image"))) == "gloo, CPU, 1 core"
    assert str(Setup.of({"name": "a-2"}, 2)) == "a"
    twice = [Setup("/a/x.py"), Setup("/b/x.py")]
    assert sorted(labels(twice).values()) == ["default", "default #2"]


def test_charts_ask_the_master_when_the_folder_has_no_results(fake: FakeMaster, call: Call, tmp_path: Path) -> None:
    fake.add("a-1", 1, summary=json.dumps(summary(1, 80.0, 0.0)))
    fake.add("a-2", 2, summary=json.dumps(summary(2, 40.0, 8.0)))
    fake.add("bad-2", 2, "failed", summary=json.dumps(summary(2, 1.0, 1.0)))
    fake.add("b-4", 4, summary=json.dumps(summary(4, 2.0, 2.0)))
    folder = tmp_path / "new" / "charts"
    told = call("charts", str(folder), "-f", "a-").stdout
    assert [line.split()[0] for line in told.splitlines()[1:3]] == ["a-1", "a-2"]
    assert [float(row["speedup"]) for row in rows(folder / "speedup.csv")] == pytest.approx([1.0, 81.5 / 49.5])
    call("charts", str(folder), "-u", fake.url)
    assert [row["workers"] for row in rows(folder / "speedup.csv")] == ["1", "2", "4"], "failed runs are not asked for"
    error = call("charts", str(folder), "-f", "bad", code=1).stderr
    assert error == "mlbench: no run that matches 'bad' at the master has finished: nothing to draw\n"


def test_an_address_wins_over_the_results_in_the_folder(fake: FakeMaster, call: Call, folder: Path) -> None:
    fake.add("a-8", 8, summary=json.dumps(summary(8, 80.0, 0.0)))
    call("charts", str(folder))
    assert [row["workers"] for row in rows(folder / "speedup.csv")] == ["1", "2", "4"]
    call("charts", str(folder), "-u", fake.url)
    assert [row["workers"] for row in rows(folder / "speedup.csv")] == ["8"]


def test_no_results_and_no_master(call: Call, tmp_path: Path) -> None:
    error = call("charts", str(tmp_path / "none"), code=1).stderr
    assert "no result in" in error and "and no master is running: start one with 'mlbench master'" in error
    assert not (tmp_path / "none").exists()


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


@pytest.mark.parametrize("draw", [charts._draw_phases, charts._draw_steps, charts._draw_speedup, charts._draw_price])
def test_a_legend_covers_nothing_and_leaves_room_for_the_chart(draw: Any) -> None:
    setups = [Setup("task 1a", ("--optimizer " + name * 12,)) for name in ("a", "b", "c")]
    phases, steps = dict.fromkeys(charts.PHASES, 10.0), dict.fromkeys(charts.STEPS, 5.0)
    results = [
        RunResult("run", workers, setup=setup, train_s=40.0, phases_s=phases, steps_s=steps)
        for setup in setups
        for workers in (1, 2, 4)
    ]
    every = charts.in_series(results)
    figure = charts._figure(charts._width(every) + 1.0)
    axes = figure.subplots()
    draw(axes, every)
    figure.draw_without_rendering()
    legend = axes.get_legend()
    assert legend is not None
    box = legend.get_window_extent()
    assert box.x0 >= axes.get_window_extent().x1, "beside the axes, so that no bar or line is covered"
    assert box.x1 <= figure.bbox.x1
    assert axes.get_window_extent().width > figure.bbox.width / 2


def test_published_price_index() -> None:
    """Task 4a: 4 workers 2.56 times faster; at equal prices a worker the index is 4 / 2.56^2."""
    points = charts.summarize([RunResult("a-1", 1, train_s=256.0), RunResult("a-4", 4, train_s=100.0)])
    assert charts.price_index(points) == pytest.approx([1.0, 4 / 2.56**2])


def test_filter_and_output(folder: Path, call: Call, tmp_path: Path) -> None:
    call("charts", str(folder), "--filter", "demo-[12]", "--output", str(tmp_path / "c"))
    assert [row["workers"] for row in rows(tmp_path / "c" / "speedup.csv")] == ["1", "2"]
    assert "no run that matches 'x' in" in call("charts", str(folder), "--filter", "x", code=1).stderr


def test_damaged_zip(tmp_path: Path, call: Call) -> None:
    (tmp_path / "a-1.zip").write_bytes(b"PK\x03\x04 broken")
    assert "a-1.zip is damaged" in call("charts", str(tmp_path), code=1).stderr


def test_results_without_times(tmp_path: Path, call: Call) -> None:
    save(tmp_path / "a.json", {"name": "a", "num_workers": 1}, {"x @ 0": [entry(1)]})
    assert "none of the runs reported a time" in call("charts", str(tmp_path), code=1).stderr


def test_missing_matplotlib_has_the_pip_line(folder: Path, call: Call, patch: pytest.MonkeyPatch) -> None:
    import sys

    patch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'mlbench-core[charts]'" in call("charts", str(folder), code=1).stderr


def test_repeats_are_averaged() -> None:
    points = charts.summarize(
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
    assert "bad-1 is failed and not finished: left out" in result.stderr
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
