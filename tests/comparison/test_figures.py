"""Figures: what is drawn against numbers worked out by hand, and the files."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbench_core.comparison import figures
from mlbench_core.comparison.figures import numbers
from mlbench_core.comparison.group_repeats import pool, series
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.comparison.significance import confidence_interval, log_interval, student_quantile
from mlbench_core.errors import ConfigurationError, MissingDependencyError
from tests.helpers.thorough import examples

pytest.importorskip("matplotlib", reason="needs matplotlib (the extra charts)")

METRIC = "val_global_Prec@1"
GOAL = {"metric": METRIC, "threshold": 90.0, "minimize": False}
MACHINE = {"cpu": "Model 7", "cores": 4, "hosts": 1, "gpus": 0}


def record(
    workers: int = 1, seed: int = 1, compute: float = 80.0, communication: float = 0.0,
    hidden: float = 0.0,
    reached: bool = True, folder: Path | None = None, **configuration: Any,
) -> RunRecord:  # fmt: skip
    """A run with its computation, its communication and 2 s that belong to no phase."""
    total = compute + communication + 2.0
    settings = {
        "task": "1a",
        "dataset": "digits",
        "algorithm": "sgd",
        "workers": workers,
        "seed": seed,
        "goal": GOAL,
    }
    return RunRecord(
        f"run-{workers}-{seed}",
        configuration=settings | configuration,
        machine=MACHINE,
        reached=reached,
        time_to_goal_s=total if reached else None,
        train_s=total if not reached else total + 30.0,
        phases_s={"compute": compute, "communication": communication},
        communication_exposed_s=communication,
        communication_hidden_s=hidden,
        steps_s={"fwd_pass": compute / 4, "backprop": compute / 2, "agg": communication},
        folder=folder,
    )


def repeats(workers: int, computes: tuple[float, ...], **fields: Any) -> list[RunRecord]:
    return [record(workers, seed, compute, **fields) for seed, compute in enumerate(computes)]


def drawing(make: Any, *arguments: Any) -> figures.Drawing:
    with figures.style():
        drawn: figures.Drawing = make(*arguments)
    return drawn


def columns(drawn: figures.Drawing) -> dict[str, list[Any]]:
    header, *rows = drawn.rows
    return dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))


def lines(axes: Any) -> dict[str, Any]:
    """Return the lines with error bars by label: x, y, and the ends of each error bar."""
    found = {}
    for container in axes.containers:
        line, _, bars = container
        ends = [[point[1] for point in path] for path in bars[0].get_segments()] if bars else None
        found[container.get_label()] = (list(line.get_xdata()), list(line.get_ydata()), ends)
    return found


def test_a_ratio_has_the_interval_of_the_delta_method() -> None:
    above, below = [10.0, 12.0, 11.0], [4.0, 5.0]
    errors = [statistics.variance(v) / len(v) / statistics.fmean(v) ** 2 for v in (above, below)]
    freedom = sum(errors) ** 2 / (errors[0] ** 2 / 2 + errors[1] ** 2)
    factor = math.exp(student_quantile(0.975, freedom) * math.sqrt(sum(errors)))
    found = numbers.ratio(above, below)
    assert found is not None
    assert (found.value, found.low, found.high, found.runs) == pytest.approx(
        (11 / 4.5, 11 / 4.5 / factor, 11 / 4.5 * factor, 2)
    )
    squared = numbers.ratio(above, below, power=2)
    assert squared is not None and squared.high == pytest.approx((11 / 4.5 * factor) ** 2)
    assert numbers.ratio([10.0], [4.0, 5.0]) == numbers.Estimate(10 / 4.5, runs=1)
    assert numbers.ratio([], [1.0]) is None and numbers.ratio([1.0], [0.0]) is None


def test_the_interval_of_a_ratio_covers_it_in_95_percent() -> None:
    import random

    chance, covered = random.Random(3), 0
    for _ in range(1000):
        found = numbers.ratio(
            *([chance.gauss(mean, 0.1 * mean) for _ in range(5)] for mean in (20.0, 10.0))
        )
        covered += (
            found is not None
            and found.low is not None
            and found.high is not None
            and found.low < 2 < found.high
        )
    assert 0.93 < covered / 1000 < 0.97


def test_a_band_ends_with_the_shortest_run_and_keeps_the_tails() -> None:
    both = numbers.band([[(1, 10.0), (2, 20.0)], [(1, 30.0), (2, 40.0), (3, 60.0)], []])
    assert both is not None
    assert (both.x, both.mean, both.low, both.high) == (
        (1, 2),
        (20.0, 30.0),
        (10.0, 20.0),
        (30.0, 40.0),
    )
    assert (both.tails, both.ends) == ((((2, 40.0), (3, 60.0)),), (2, 3))
    between = numbers.band([[(0.0, 0.0), (4.0, 40.0)], [(1.0, 0.0), (6.0, 50.0)]], places=4)
    assert between is not None
    assert (between.x, between.mean) == (
        pytest.approx((1, 2, 3, 4)),
        pytest.approx((5, 15, 25, 35)),
    )
    assert between.tails == (((4.0, 30.0), (6.0, 50.0)),)
    apart = numbers.band([[(0.0, 1.0), (1.0, 2.0)], [(5.0, 3.0), (6.0, 4.0)]])
    assert apart is not None and apart.x == () and len(apart.tails) == 2, (
        "no common range, nothing invented"
    )
    assert numbers.band([[], []]) is None


def test_the_time_by_phase_is_stacked_and_hidden_communication_is_beside_it() -> None:
    groups = pool(
        [*repeats(1, (80.0, 84.0)), *repeats(2, (40.0, 42.0, 44.0), communication=8.0, hidden=5.0)]
    )
    drawn = drawing(figures.draw_phases, groups)
    (axes,) = drawn.figure.axes
    bars = {
        c.get_label(): [(b.get_x(), b.get_width()) for b in c]
        for c in axes.containers
        if hasattr(c, "patches")
    }
    assert bars["compute"] == [(0.0, 82.0), (0.0, 42.0)]
    assert bars["communication (waited for)"] == [(82.0, 0.0), (42.0, 8.0)]
    assert bars["other"] == [(82.0, pytest.approx(2.0)), (50.0, pytest.approx(2.0))], (
        "the total is complete"
    )
    assert bars["communication (hidden)"] == [(0.0, 0.0), (0.0, 5.0)], (
        "it begins with the computation and adds nothing"
    )
    (intervals,) = [c for c in axes.containers if not hasattr(c, "patches")][1:]
    ((start, _), (end, _)) = intervals[2][0].get_segments()[0]
    assert (start, end) == pytest.approx(log_interval([50.0, 52.0, 54.0]))
    assert [text.get_text() for text in axes.get_yticklabels()] == ["1", "2"]
    assert [text.get_text() for text in axes.texts if text.get_text()[:1].isdigit()] == [
        "84.0",
        "52.0",
    ]
    table = columns(drawn)
    assert (table["runs"], table["total_s"], table["communication_hidden_s"]) == (
        [2, 3],
        [84.0, 52.0],
        [0.0, 5.0],
    )
    assert "Hatched below a bar: hidden communication." in drawn.caption
    assert "an interval that leaves the axes is cut" not in drawn.caption
    assert "so the bars can exceed the totals" not in drawn.caption
    slowest = dataclasses.replace(
        record(2, communication=8.0), phases_s={"compute": 85.0, "communication": 9.0}
    )
    longer = drawing(figures.draw_phases, pool([slowest]))
    assert "so the bars can exceed the totals" in longer.caption
    (total,) = [text for text in longer.figure.axes[0].texts if text.get_text() == "90.0"]
    assert total.xy[0] == 94.0, "beside the bar, not on it"
    wide = drawing(figures.draw_phases, pool(repeats(1, (78.0, 86.0))))
    assert (
        "an interval that leaves the axes is cut" in wide.caption
        and wide.figure.axes[0].get_xlim()[1] < 200
    )


def test_a_group_with_a_miss_has_its_cost_per_success_or_the_time_of_all_runs() -> None:
    runs = [
        *repeats(1, (80.0, 84.0)),
        record(1, 9, 200.0, reached=False),
        *repeats(2, (50.0, 54.0), reached=False),
    ]
    groups = pool(runs)
    drawn = drawing(figures.draw_phases, pool([*runs, *repeats(4, (30.0, 34.0))]))
    assert [text.get_text() for text in drawn.figure.axes[0].get_yticklabels()] == [
        "1*",
        "2**",
        "4",
    ]
    table = columns(drawn)
    # All time of the three runs with one worker is 82 + 86 + 202 s, for two that reached the goal.
    assert (table["workers"], table["total_s"], table["missed"]) == (
        [1, 2, 4],
        [185.0, 108.0, 34.0],
        [1, 2, 0],
    )
    assert table["total_low_s"][:2] == [None, None], "means only have intervals"
    wanted = "* some runs missed the goal: time of all runs, divided by the number that reached it."
    assert drawn.caption.endswith(
        f"{wanted} ** all runs missed the goal: sum of the times of all runs."
    )
    # A whole training time and a time to the goal give no speed-up.
    with pytest.raises(
        ConfigurationError, match="no configuration was run with several numbers of workers"
    ):
        drawing(figures.draw_speed_up, groups)


def test_two_groups_of_the_fewest_workers_are_no_reference() -> None:
    more_hosts = dataclasses.replace(record(1, 2), machine={**MACHINE, "hosts": 2})
    with pytest.raises(
        ConfigurationError, match="no configuration was run with several numbers of workers"
    ):
        drawing(figures.draw_speed_up, pool([record(1), more_hosts, record(2)]))


def test_steps_are_stacked() -> None:
    drawn = drawing(figures.draw_steps, pool(repeats(2, (40.0, 44.0), communication=8.0)))
    bars = {
        c.get_label(): [(b.get_x(), b.get_width()) for b in c]
        for c in drawn.figure.axes[0].containers
    }
    assert bars == {
        "forward": [(0.0, 10.5)],
        "backward": [(10.5, 21.0)],
        "aggregation": [(31.5, 8.0)],
    }


def test_the_speed_up_with_and_without_communication() -> None:
    one, two = (78.0, 80.0, 82.0), (38.0, 40.0, 42.0)
    groups = pool([*repeats(1, one), *repeats(2, two, communication=8.0)])
    drawn = drawing(figures.draw_speed_up, groups)
    measured, without = drawn.figure.axes
    x, y, ends = lines(measured)["sgd"]
    assert (x, y) == ([1, 2], [1.0, pytest.approx(82 / 50)])
    expected = numbers.ratio([80.0, 82.0, 84.0], [48.0, 50.0, 52.0])
    assert expected is not None and ends[1] == pytest.approx([expected.low, expected.high])
    assert all(math.isnan(end) for end in ends[0]), "the reference has no error"
    assert lines(without)["sgd"][1] == [1.0, pytest.approx(82 / 42)]
    ideal = next(line for line in measured.lines if line.get_label() == "ideal")
    assert (list(ideal.get_xdata()), list(ideal.get_ydata())) == ([1, 2], [1.0, 2.0])
    assert (
        "Error bars: 95 % confidence interval of the ratio of means (delta method" in drawn.caption
    )
    spread = pool([record(workers, 1, 160.0 / workers) for workers in (2, 4, 32)])
    axes = drawing(figures.draw_speed_up, spread).figure.axes[0]
    ideal = next(line for line in axes.lines if line.get_label() == "ideal")
    assert (list(ideal.get_xdata()), list(ideal.get_ydata())) == ([2, 32], [1.0, 16.0])
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log"), (
        "the ideal stays a straight line"
    )


def test_the_communication_share_and_the_price_index() -> None:
    groups = pool([*repeats(1, (80.0, 84.0)), *repeats(2, (40.0, 44.0), communication=8.0)])
    drawn = drawing(figures.draw_communication_share, groups)
    share = statistics.fmean((800 / 50, 800 / 54))
    x, y, ends = lines(drawn.figure.axes[0])["sgd"]
    assert (x, y) == ([1, 2], [0.0, pytest.approx(share)])
    assert ends[1] == pytest.approx(confidence_interval([800 / 50, 800 / 54]))
    with pytest.raises(ConfigurationError, match="no run waited for communication"):
        drawing(figures.draw_communication_share, pool(repeats(1, (80.0,))))
    # Task 4a as published: 4 workers are 2.56 times faster; at equal prices of a worker, the index
    # is 4 / 2.56^2.
    published = pool([record(1, 1, 254.0), record(4, 1, 98.0)])
    drawn = drawing(figures.draw_price_index, published, 3.6)
    assert lines(drawn.figure.axes[0])["sgd"][1] == [1.0, pytest.approx(4 / 2.56**2)]
    assert columns(drawn)["price"] == pytest.approx([256.0 / 1000, 4 * 100.0 / 1000])


def test_the_pareto_front_has_only_what_reached_the_goal() -> None:
    runs = [
        *repeats(1, (98.0, 98.0)),
        *repeats(2, (38.0, 38.0)),
        *repeats(4, (58.0, 58.0)),
        *[record(1, seed, 18.0, reached=seed == 0, algorithm="partly") for seed in range(2)],
        *repeats(1, (3.0, 3.0), reached=False, algorithm="never"),
    ]
    drawn = drawing(figures.draw_time_against_price, pool(runs), 36.0)
    (axes,) = drawn.figure.axes
    # The two repeats are equal, so the error bars have no length.
    points = sorted(
        (x, y)
        for container in axes.containers
        for x, y in zip(*container[0].get_data(), strict=True)
    )
    assert points == [pytest.approx(point) for point in ((0.8, 40.0), (1.0, 100.0), (2.4, 60.0))]
    front = next(line for line in axes.lines if line.get_label() == "Pareto front")
    assert (list(front.get_xdata()), list(front.get_ydata())) == ([pytest.approx(0.8)], [40.0])
    table = dict(
        zip(
            map(tuple, zip(*(columns(drawn)[n] for n in ("setup", "workers")), strict=True)),
            columns(drawn)["front"],
            strict=True,
        )
    )
    assert table == {("sgd", 1): False, ("sgd", 2): True, ("sgd", 4): False}
    for name in ("never with 1 worker (2 of 2)", "partly with 1 worker (1 of 2)"):
        assert name in drawn.caption.partition("Not drawn, because a run missed the goal")[2]
    with pytest.raises(ConfigurationError, match="no task and goal in common"):
        drawing(figures.draw_time_against_price, pool([*runs, record(task="1b")]), 1.0)


def with_curve(
    folder: Path, values: list[float], epoch_s: float = 10.0, megabytes: float = 0.0, **fields: Any
) -> RunRecord:
    found = record(folder=folder / f"{fields}", **fields)
    assert found.folder is not None
    found.folder.mkdir()
    rows: list[dict[str, Any]] = []
    for epoch, value in enumerate(values):
        place = {"rank": 0, "epoch": epoch, "step": 5 * (epoch + 1), "time_s": 99.0 * epoch}
        sums = {
            "train_s": epoch_s * (epoch + 1),
            "communication_wire_bytes": 1e6 * megabytes * (epoch + 1),
        }
        rows += [
            {"kind": "stat", "name": METRIC, "value": value, **place},
            {"kind": "epoch", "totals": sums, **place},
        ]
    (found.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def test_learning_curves_have_bands_and_count_the_runs_that_remain(tmp_path: Path) -> None:
    runs = [
        with_curve(tmp_path, [60.0, 80.0, 91.0], seed=1),
        with_curve(tmp_path, [70.0, 92.0], 20.0, seed=2),
    ]
    drawn = drawing(figures.draw_learning_curves, pool(runs), "epochs")
    curve, count = drawn.figure.axes
    mean, tail, goal = curve.lines
    assert (list(mean.get_xdata()), list(mean.get_ydata())) == ([1, 2], [65.0, 86.0])
    assert (list(tail.get_xdata()), list(tail.get_ydata())) == ([2, 3], [80.0, 91.0])
    assert set(goal.get_ydata()) == {90.0}
    (area,) = curve.collections
    assert {tuple(point) for point in area.get_paths()[0].vertices} == {
        (1, 60),
        (1, 70),
        (2, 80),
        (2, 92),
    }
    assert (list(count.lines[0].get_xdata()), list(count.lines[0].get_ydata())) == (
        [1, 2, 3],
        [2, 1, 0],
    )
    assert columns(drawn)["runs"] == [2, 2]
    assert (
        "Line: mean over the runs; band: minimum to "
        "maximum. Mean and band end with the shortest run"
    ) in drawn.caption
    budget = {"metric": METRIC, "threshold": None, "minimize": None, "budget_s": 60.0}
    runs_with_budget = [
        with_curve(tmp_path, [60.0, 80.0], seed=seed, goal=budget) for seed in (1, 2)
    ]
    (curve,) = drawing(figures.draw_learning_curves, pool(runs_with_budget), "epochs").figure.axes
    assert len(curve.lines) == 1, "the goal of a fixed training time has no threshold to draw"
    timed = drawing(figures.draw_learning_curves, pool(runs), "time")
    mean = timed.figure.axes[0].lines[0]
    assert (mean.get_xdata()[0], mean.get_xdata()[-1]) == (20.0, 30.0), (
        "the times that both runs cover"
    )
    assert mean.get_ydata()[-1] == pytest.approx((91.0 + 81.0) / 2)
    with pytest.raises(
        ConfigurationError, match="no run recorded val_global_Prec@1 with its bytes on the wire"
    ):
        drawing(figures.draw_learning_curves, pool(runs), "bytes")
    with pytest.raises(
        ConfigurationError,
        match="against must be one of epochs, steps, tokens, time, bytes, not 'x'",
    ):
        drawing(figures.draw_learning_curves, pool(runs), "x")


def test_learning_curves_against_bytes_have_a_panel_for_each_number_of_workers(
    tmp_path: Path,
) -> None:
    runs = [
        with_curve(tmp_path, [60.0, 95.0], megabytes=3.0, workers=workers) for workers in (2, 4)
    ]
    drawn = drawing(figures.draw_learning_curves, pool([*runs, record(1)]), "bytes")
    assert [list(axes.lines[0].get_xdata()) for axes in drawn.figure.axes] == [
        [3e6, 6e6],
        [3e6, 6e6],
    ]
    ticks = drawn.figure.axes[-1].xaxis
    assert (ticks.get_major_formatter()(3e6, 0), ticks.get_label_text()) == (
        "3",
        "MB put on the wire by all workers",
    )
    assert (
        "Not drawn, because nothing was sent or there are no raw lines: sgd with 1 worker."
        in drawn.caption
    )


def test_the_performance_profile_counts_tasks() -> None:
    times = {("sgd", "1a"): 98.0, ("sgd", "1b"): 98.0, ("adam", "1a"): 198.0, ("adam", "1b"): 48.0}
    groups = pool(
        [record(1, 1, time, task=task, algorithm=name) for (name, task), time in times.items()]
    )
    drawn = drawing(figures.draw_performance_profile, groups)
    shares = {
        line.get_label(): dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in drawn.figure.axes[0].lines
    }
    assert (shares["sgd, 1 worker"][1.0], shares["adam, 1 worker"][1.0]) == (0.5, 0.5)
    assert shares["sgd, 1 worker"][1.99] == 0.5 and shares["sgd, 1 worker"][2.005] == 1.0
    with pytest.raises(ConfigurationError, match="at least two tasks"):
        drawing(figures.draw_performance_profile, groups[:1])


def test_captions_say_task_goal_machine_and_runs() -> None:
    groups = pool([*repeats(1, (80.0, 84.0)), *repeats(2, (40.0,), reached=False)])
    assert figures.caption(groups) == (
        "Task 1a (digits). Goal: Prec@1 >= 90. Machine: Model 7, 4 cores. n = 1 to 2 runs of each "
        "configuration. Missed the goal: sgd with 2 workers (1 of 1)."
    )
    bare = pool(
        [
            RunRecord(
                "a", configuration={"program": "python -u /x/own.py", "workers": 1}, train_s=1.0
            )
        ]
    )
    assert figures.caption(bare) == "own.py. No goal recorded. Machine not recorded. n = 1 run."
    mixed = pool([record(goal=None), record(task="1b", algorithm="b")])
    assert figures.caption(mixed).startswith("Tasks 1a, 1b (digits). Several goals.")


@pytest.mark.parametrize(
    ("dataset", "shown"),
    [
        ("digits", "Task 1a (digits), goal: Prec@1 >= 90"),
        ("d" * 40, "Task 1a, goal: Prec@1 >= 90"),
    ],
)
def test_the_line_below_a_title_keeps_the_goal(dataset: str, shown: str) -> None:
    drawn = drawing(figures.draw_phases, pool([record(dataset=dataset)]))
    assert shown in [text.get_text() for text in drawn.figure.axes[0].texts]


def many() -> list[RunRecord]:
    """Four algorithms with long names, three numbers of workers, three runs, and missed goals."""
    names = ["sgd", "PowerSGD with a long name and $many$ options" * 2, "sign", "local"]
    return [
        record(
            workers,
            seed,
            (80.0 + 3 * seed) / workers,
            4.0 * (workers - 1),
            2.0,
            name != "sign",
            algorithm=name,
        )
        for name in names
        for workers in (1, 2, 4)
        for seed in range(3)
    ]


@pytest.mark.parametrize("name", ["overview", "total_time_by_phase", "time_to_goal_against_price"])
def test_nothing_is_cut_and_nothing_overlaps(name: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    groups = pool(many())
    makers = {
        "overview": lambda: figures.draw_overview(groups),
        "total_time_by_phase": lambda: figures.draw_phases(groups),
        "time_to_goal_against_price": lambda: figures.draw_time_against_price(groups, 1.0),
    }
    with figures.style():
        drawn = makers[name]()
        figure = drawn.figure
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw_without_rendering()
    (legend,), (note,) = figure.legends, figure.texts
    axes = [one.get_tightbbox(renderer) for one in figure.axes]
    boxes = [*axes, legend.get_window_extent(renderer), note.get_window_extent(renderer)]
    for index, box in enumerate(boxes):
        assert (
            box.x0 >= -1
            and box.y0 >= -1
            and box.x1 <= figure.bbox.x1 + 1
            and box.y1 <= figure.bbox.y1 + 1
        )
        assert not any(box.overlaps(other) for other in boxes[index + 1 :])
    assert note.get_text().replace("\n", " ") == drawn.caption


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    import matplotlib

    def write(folder: Path) -> list[Path]:
        return figures.save(drawing(figures.draw_speed_up, pool(many()[:9])), folder)

    first = write(tmp_path / "a")
    # Settings of the user and the clock change nothing.
    with matplotlib.rc_context(
        {"font.size": 30, "axes.facecolor": "black", "svg.fonttype": "path"}
    ):
        second = write(tmp_path / "b")
    assert [path.name for path in first] == ["speedup.png", "speedup.svg", "speedup.csv"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    svg = first[1].read_text()
    assert "without communication</text>" in svg and "<dc:date>" not in svg
    with first[2].open(newline="") as file:
        assert [row["workers"] for row in csv.DictReader(file)] == ["1", "2", "4"]


def test_the_numbers_of_a_figure_hold_no_formula(tmp_path: Path) -> None:
    drawn = dataclasses.replace(
        drawing(figures.draw_speed_up, pool(many()[:9])), rows=[["label"], ["=now()"], [-1.5]]
    )
    assert figures.save(drawn, tmp_path)[2].read_text().splitlines() == ["label", "'=now()", "-1.5"]


def test_draw_all_writes_what_it_can_and_says_what_is_missing(tmp_path: Path) -> None:
    said: list[str] = []
    written = figures.draw_all(pool(repeats(1, (80.0,))), tmp_path, report=said.append)
    names = {"overview": ("png", "svg")}
    names |= dict.fromkeys(("total_time_by_phase", "time_all_phases"), ("png", "svg", "csv"))
    assert {path.name for path in written} == {
        f"{name}.{end}" for name, ends in names.items() for end in ends
    }
    assert all(path.is_file() for path in written)
    assert [text.partition(" is not drawn: ")[0] for text in said] == [
        *("speedup", "price_index", "communication_share"),
        *("learning_curves_epochs", "learning_curves_time", "learning_curves_bytes"),
    ]
    with pytest.raises(ConfigurationError, match="none of the runs reported a time"):
        figures.draw_all(pool([RunRecord("a", configuration={"workers": 1})]), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "backend", ["module://matplotlib_inline.backend_inline", "nonsense", "qtagg", ""]
)
def test_the_backend_of_a_notebook_does_not_matter(backend: str, tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom mlbench_core.comparison import figures\nwith "
        "figures.style():\n    drawn = figures.canvas.new_figure(2, 2)\n    "
        "drawn.subplots().plot([1, 2])\nfigures.save(figures.Drawing('a', drawn, "
        "''), __import__('pathlib').Path(sys.argv[1]))\nimport matplotlib\nassert "
        "'matplotlib.pyplot' not in sys.modules\nprint(os.environ['MPLBACKEND'], "
        "matplotlib.rcParams._get('backend'))\n"
    )
    environment = {**os.environ, "MPLBACKEND": backend}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    # pyplot of the process still has the user's choice.
    assert done.stdout.split()[0] == (backend or done.stdout.split()[0])
    assert backend != "qtagg" or done.stdout.split() == ["qtagg", "qtagg"]


def test_a_figure_that_fails_does_not_take_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("a fault\nof matplotlib")

    monkeypatch.setattr(figures, "draw_steps", fail)
    said: list[str] = []
    written = figures.draw_all(pool(repeats(1, (80.0,))), tmp_path, report=said.append)
    assert "time_all_phases is not drawn: IndexError: a fault of matplotlib" in said
    assert {"overview.png", "total_time_by_phase.png"} <= {path.name for path in written}


def test_a_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'mlbench-core\[charts\]'"):
        figures.draw_all(pool(repeats(1, (80.0,))), tmp_path)


def test_looks_of_many_series_differ_in_more_than_the_color() -> None:
    from mlbench_core.comparison.figures.canvas import series_looks

    with figures.style():
        looks = series_looks(12)
    for index, one in enumerate(looks):
        for other in looks[index + 1 :]:
            assert sum(one[name] != other[name] for name in one) >= 2
    assert len(series(pool(many()))) == 4


TIMES = st.lists(st.sampled_from([10.0, 20.0, 30.0, 50.0]), min_size=1, max_size=3)


@given(
    times=TIMES,
    misses=st.lists(st.just(60.0), max_size=2),
    turned=st.booleans(),
    workers=st.sampled_from([1, 2]),
)
@settings(derandomize=True, database=None, deadline=None, max_examples=examples(8))
def test_a_miss_never_makes_a_number_of_a_figure_better(
    times: list[float], misses: list[float], turned: bool, workers: int
) -> None:
    def table(reached: list[float], missed: list[float]) -> dict[tuple[Any, ...], Any]:
        """Return the numbers of the group by figure and column."""
        runs = repeats(3 - workers, (40.0, 44.0)) + repeats(
            workers, (25.0, 30.0), algorithm="rival"
        )
        seeds = itertools.count()
        runs += [record(workers, next(seeds), time, time / 10) for time in reached]
        runs += [record(workers, next(seeds), time, time / 10, reached=False) for time in missed]
        found = {}
        for make in (
            figures.draw_phases,
            figures.draw_steps,
            figures.draw_price_index,
            figures.draw_speed_up,
        ):
            with contextlib.suppress(ConfigurationError):  # nothing remains to be drawn
                drawn = drawing(make, pool(runs))
                for row in (
                    dict(zip(drawn.rows[0], values, strict=True)) for values in drawn.rows[1:]
                ):
                    if row["setup"] == "sgd" and row["workers"] == workers:
                        found.update({(drawn.name, name): value for name, value in row.items()})
        return found

    before = table(times, misses)
    # A further run that missed may have ended early; one that would have reached its goal trains
    # for longer.
    after = table(times[:-1], [*misses, 60.0]) if turned else table(times, [*misses, 1.0])
    neutral = {"setup", "workers", "runs", "missed", "ideal", "total_low_s", "price_index_low"}
    for key, value in before.items():
        if key[1] not in neutral and value is not None and after.get(key) is not None:
            assert key[0] != "speedup", "it has none after a miss"
            assert after[key] >= value * (1 - 1e-12), key
    assert not [
        key for key, value in after.items() if value is not None and before.get(key) is None
    ]
