"""The page of a sweep: what it says, draws and never claims."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.comparison import figures, html_page
from mlbench_core.comparison.figures.styles import METHODS
from mlbench_core.comparison.group_repeats import Group
from mlbench_core.comparison.prices import Pricing, load_prices
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError
from mlbench_core.network.description import Link, Network
from mlbench_core.sweep import page
from mlbench_core.sweep.fastest_methods import predict_map
from mlbench_core.sweep.figures import panels as rows_figures
from mlbench_core.sweep.figures.map import draw_map
from mlbench_core.sweep.grouped_runs import Cell, Outcome, duration, gather, sent_per_worker
from mlbench_core.sweep.html_page import inline_svg
from mlbench_core.sweep.result_table import known_columns, table_rows
from mlbench_core.sweep.sentences import per_network, summary
from mlbench_core.sweep.toml_file import Point, Sweep, parse_sweep
from tests.sweep import trials

GOAL = {"metric": "val_global_Prec@1", "threshold": 95.0, "minimize": False}
FILE = """
title = "Methods & <networks>"
task = "1a"
workers = [1, 2]
networks = ["mobile-lte"]
seeds = 3
limit = "1min"
algorithms = ["centralized_sgd", "power_sgd", "local_sgd"]
"""


def run(seed: int, time_s: float | None, workers: int = 2, sent: float = 2e6) -> RunRecord:
    """Return a run that reached its goal after some seconds, or missed it."""
    return RunRecord(
        f"r{seed}", configuration={"workers": workers, "seed": seed, "goal": GOAL},
        reached=time_s is not None,
        time_to_goal_s=time_s, train_s=time_s or 110.0, bytes_sent=sent / 2, bytes_on_wire=sent,
        best=96.0,
        steps_to_goal=10,
    )  # fmt: skip


def cell(algorithm: str, network: str | None, workers: int, *times: float | None) -> Cell:
    records = tuple(run(seed, time_s, workers) for seed, time_s in enumerate(times))
    return Cell(network, Group(algorithm, workers, {"goal": GOAL}, records), planned=len(times))


def outcome(*cells: Cell, limit_s: float = 120) -> Outcome:
    networks = {"fast": Network(Link(10**9, 0.0005)), "slow": Network(Link(10**7, 0.02))}
    names = tuple(dict.fromkeys(one.algorithm for one in cells))
    workers = tuple(sorted({one.workers for one in cells}))
    planned = sum(one.planned for one in cells)
    return Outcome("t", names, networks, workers, cells, limit_s, planned, is_tuned=True)


def test_a_missed_run_is_longer_than_any_other_and_never_in_an_interval() -> None:
    one = cell("a", "fast", 2, 10.0, 30.0, None)
    assert (one.median_s, one.interval_s, one.missed) == (30.0, None, 1), (
        "the mean of the others would be 20"
    )
    assert cell("a", "fast", 2, 10.0, None).median_s is None, "half of the runs missed"
    whole = cell("a", "fast", 2, 9.0, 10.0, 11.0)
    assert whole.median_s == 10.0 and whole.interval_s == pytest.approx((7.767, 12.789), abs=0.001)
    failed = dataclasses.replace(whole, failed=1)
    assert (failed.median_s, failed.interval_s, failed.cost_per_success_s) == (10.5, None, None)
    assert one.cost_per_success_s == 75.0


def test_limits_are_short_texts() -> None:
    assert [duration(s) for s in (120, 90, 5400, 45)] == ["2 min", "90 s", "1.5 h", "45 s"]


def test_the_time_of_all_runs_has_the_unit_that_suits() -> None:
    assert [page._long_time(s) for s in (4.24, 59.0, 90.0, 1700.0, 1800.0, 5800.0)] == [
        "4.2 s",
        "59.0 s",
        "1.5 min",
        "28.3 min",
        "0.5 h",
        "1.6 h",
    ]


def test_the_bytes_of_a_worker_are_known_only_until_a_goal() -> None:
    assert sent_per_worker(run(1, 10.0, workers=4)) == 5e5
    assert sent_per_worker(run(1, None)) is None


def test_words_name_the_fastest_its_factor_and_what_is_shown() -> None:
    base, quick = (
        cell("centralized_sgd", "slow", 2, 40.0, 41.0, 42.0),
        cell("x", "slow", 2, 20.0, 20.5, 21.0),
    )
    (sentence,) = per_network(outcome(base, quick), "slow")
    assert sentence.startswith(
        "With 2 workers: x was fastest, 20.5 s (median of 3 runs), 2.00 times ("
    )
    assert (
        "2.00 times (ratio of the geometric means: 2.00 to 2.00) as fast as centralized_sgd."
        in sentence
    )
    assert sentence.endswith("a difference is shown.")
    near = cell("y", "slow", 2, 20.6, 20.7, 20.8)
    (sentence,) = per_network(outcome(base, quick, near), "slow")
    assert "Second: y, 1.01 times as long; no difference is shown." in sentence
    single = outcome(cell("centralized_sgd", "slow", 2, 40.0), cell("x", "slow", 2, 20.0))
    assert "not tested" in per_network(single, "slow")[0], "one run has no interval"


def test_words_say_what_was_not_reached_and_when_more_workers_do_not_help() -> None:
    lone = cell("centralized_sgd", None, 1, 30.0, 30.0)
    found = outcome(
        lone,
        cell("centralized_sgd", "fast", 2, 20.0, 20.0),
        cell("centralized_sgd", "slow", 2, None, None),
    )
    text = " ".join(summary(found))
    assert (
        "More workers had a lower median on fast (2 workers). One machine is enough on slow "
        "(2 workers): no algorithm had a lower median there."
    ) in text
    late = outcome(
        lone,
        cell("centralized_sgd", "slow", 2, 50.0, None, None),
        cell("x", "slow", 2, 60.0, 61.0, None),
    )
    text = " ".join([*summary(late), *per_network(late, "slow")])
    assert "centralized_sgd: not within 2 min on slow with 2 workers (2 of 3)." in text
    assert (
        "x had the least median, 61.0 s (median of 3 runs, 1 not within 2 min)" in text
        and "fastest, 61" not in text
    )
    assert "No other algorithm reached the goal in more than half of its runs." in text
    none = outcome(cell("centralized_sgd", "slow", 2, None, None))
    assert per_network(none, "slow") == [
        (
            "With 2 workers: no algorithm reached the goal in more "
            "than half of its runs (not within 2 min)."
        )
    ]


def test_a_goal_whose_metric_was_never_printed_is_not_called_missed() -> None:
    reason = "val_global_Prec@1: no line of the output has 'acc ([0-9.]+)'"
    base, other = cell("as-is", "fast", 2, None, None), cell("bf16", "fast", 2, None, 30.0)

    def without(found: Cell) -> Cell:
        records = []
        for record in found.group.records:
            name = f"{found.algorithm}-{record.name}"
            records.append(dataclasses.replace(record, name=name, not_measured=(reason,)))
        return dataclasses.replace(
            found, group=dataclasses.replace(found.group, records=tuple(records))
        )

    for limit_s in (None, 120.0):
        none = dataclasses.replace(outcome(without(base)), limit_s=limit_s)
        text = " ".join([*summary(none), *per_network(none, "fast")])
        assert f"Not measured in 2 of 2 runs (as-is): {reason}." in text
        assert "as-is: goal not measured on fast with 2 workers (2 of 2)." in text
        assert "no algorithm has a time to the goal, because the goal was not measured." in text
        assert "reached" not in text and "not within" not in text
        assert page._no_map(none, 2) == "the goal was not measured"
        limit = "" if limit_s is None else ", limit 2 min"
        assert page._runs_text(none, 0).startswith(
            f"2 of 2 planned; 0 runs missed the goal{limit}; in 2 runs, the goal was not measured"
        )
    # Only one of the two printed it.
    mixed = dataclasses.replace(outcome(base, without(other)), limit_s=None)
    text = " ".join([*summary(mixed), *per_network(mixed, "fast")])
    assert "Not measured in 2 of 4 runs (bf16)" in text
    assert "as-is: goal not reached on fast with 2 workers (2 of 2)." in text
    assert "bf16: goal not measured on fast with 2 workers (1 of 2)." in text
    assert page._no_map(mixed, 2) == "no algorithm reached the goal in more than half of its runs"
    assert page._no_map(outcome(base, cell("x", "fast", 2, 9.0)), 2).endswith("a prediction")


def test_only_cases_that_were_tested_are_counted() -> None:
    def sentence(*cells: Cell) -> str:
        found = outcome(*cells)
        return next(text for text in summary(found) if "had the least median time" in text)

    quick, slow = ("x", 20.0, 20.5, 21.0), ("y", 40.0, 41.0, 42.0)
    pair = [cell(name, "fast", 2, *times) for name, *times in (quick, slow)]
    start = "x had the least median time on fast (2 workers"
    tested = "The difference from the second is significant in 1 of 1 cases"
    assert sentence(*pair) == f"{start}). {tested}."
    single = [cell(name, "fast", 2, time_s) for name, time_s in (("x", 20.0), ("y", 40.0))]
    not_tested = "The difference from the second is not tested: "
    assert sentence(*single) == f"{start}). {not_tested}one run each."
    missed = cell("y", "fast", 2, 40.0, 41.0, None)
    assert sentence(pair[0], missed) == (
        f"{start}). {not_tested}that needs two runs of each, and no missed ones."
    )
    assert sentence(pair[0]) == f"{start}).", "there is no second"
    more = [cell(name, "slow", 2, time_s) for name, time_s in (("x", 20.0), ("y", 40.0))]
    assert sentence(*pair, *more).endswith(f"{tested} that were tested, of 2.")
    (alone,) = per_network(outcome(pair[0]), "fast")
    assert "Second" not in alone and "other algorithm" not in alone


def test_the_best_value_is_in_the_table_if_the_goal_was_missed() -> None:
    def best(*values: float | None, failed: int = 0, minimize: bool = False) -> float | None:
        one = cell("x", "fast", 2, *[None] * len(values))
        records = []
        for record, value in zip(one.group.records, values, strict=True):
            configuration = {**record.configuration, "goal": {**GOAL, "minimize": minimize}}
            records.append(dataclasses.replace(record, best=value, configuration=configuration))
        group = dataclasses.replace(one.group, records=tuple(records))
        one = dataclasses.replace(one, group=group, failed=failed)
        (row,) = table_rows(outcome(one), Pricing())
        assert ("best" in [column.key for column in known_columns([row])]) == bool(row["best"])
        value: float | None = row["best"]
        return value

    assert best(0.6) == 0.6 and best(0.6, 0.7, 0.9) == 0.7
    assert best(None) is None
    # A run that failed or printed no value is the worst, so it never helps its method.
    assert best(0.6, 0.7, 0.9, failed=1) == pytest.approx(0.65)
    assert best(0.6, 0.7, 0.9, failed=1, minimize=True) == pytest.approx(0.8)
    assert best(0.9, None, failed=1) is None


def test_the_map_counts_a_missed_run_as_the_longest() -> None:
    """The mean of the two runs that reached the goal would make x the fastest."""
    found = outcome(
        cell("centralized_sgd", "slow", 2, 20.0, 20.0, 20.0), cell("x", "slow", 2, 10.0, 28.0, None)
    )
    drawn = predict_map(found, 2, lambda record, network, workers: record.time_to_goal_s or 0.0)
    assert drawn is not None and drawn.shares == {"centralized_sgd": 1.0}


def test_runs_of_one_worker_have_words_too() -> None:
    found = outcome(cell("centralized_sgd", None, 1, None, None, 30.0))
    assert summary(found) == ["centralized_sgd: not within 2 min on 1 worker (2 of 3)."]


def test_a_missed_run_is_an_open_mark_with_a_text() -> None:
    found = outcome(cell("a", "fast", 2, 10.0, 12.0, None), cell("b", "fast", 2, 5.0, 6.0, 7.0))
    (time, *_) = rows_figures.quantities(found, Pricing())
    with figures.style():
        drawn = rows_figures.draw_rows(found, time, "fast")
    (axes,) = drawn.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "a"], (
        "the fastest is at the top"
    )
    assert [text.get_text() for text in axes.texts] == ["6", "12.0  not within 2 min: 1 of 3"]
    marks = [line for line in axes.lines if line.get_linestyle() == "None"]
    assert [list(line.get_xdata()) for line in marks] == [[6.0], [12.0], []], "the last: legend"
    assert len({line.get_color() for line in marks}) == 3, "the color is that of the method"
    intervals = [
        line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 0.9
    ]
    assert len(intervals) == 1, "no interval without all runs"
    assert drawn.rows[1:4] == [
        ["fast", "a", 2, f"r{i}", t is not None, t] for i, t in enumerate((10.0, 12.0, None))
    ]


def test_the_map_has_the_predicted_winners_and_the_measured_points() -> None:
    cells = [cell(name, net, 2, 10.0, 10.0) for net in ("fast", "slow") for name in ("a", "b")]
    found = outcome(*cells, cell("c", "fast", 2, None, None))

    def predict(record: RunRecord, network: Network, workers: int) -> float:
        # Chatty a pays for the round trip, and bulky b for the bandwidth.
        return 1 + (
            300 * network.link.round_trip_s
            if record in cells[0].group.records
            else 1e8 / network.link.bandwidth
        )

    for one in (cells[0], cells[2]):
        object.__setattr__(one.group, "records", tuple(run(9, 8.0) for _ in range(2)))
    known = predict_map(found, 2, predict)
    assert known is not None and {c.first for c in known.cells} == {"a", "b"}
    assert (known.cells[0].first, known.cells[-1].first) == ("a", "b"), (
        "narrow and near, wide and far"
    )
    assert all(c.ratio is not None and c.ratio >= 1 for c in known.cells)
    assert [(p.network, p.measured, p.predicted) for p in known.points] == [
        ("fast", "a", "b"),
        ("slow", "a", "a"),
    ]
    assert "1 of 2 networks" in summary(found, [known])[-2] and known.left_out[0].startswith(
        "c is not on the map"
    )
    with figures.style():
        drawn = draw_map(found, known)
    assert drawn.figure.axes[0].get_title("left") == "Fastest method with 2 workers: predicted"
    hatched = [patch for patch in drawn.figure.axes[0].patches if patch.get_hatch()]
    assert hatched and any(c.ratio is not None and c.ratio < 1.1 for c in known.cells)
    assert len(drawn.rows) == 1 + len(known.cells) + 2


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    trials.make(folder, FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "predict_time_to_goal", trials.predict)
        page.write_page(folder, Pricing(load_prices()["aws-c5.xlarge"]))
    return folder


def test_the_page_is_one_file_that_loads_nothing(written: Path) -> None:
    text = (written / "index.html").read_text(encoding="utf-8")
    assert "<title>Methods &amp; &lt;networks&gt;</title>" in text and "<networks>" not in text
    assert not re.search(r"<script|<img|<link|@import|url\((?!#)", text)
    assert not re.search(r'(?:src|href)="(?!#)', text)
    assert text.count("<svg") == 4 + 1 + 3, (
        "time, bytes, accuracy, price, the map, and three over the number of workers"
    )
    identifiers = re.findall(r'\bid="([^"]+)"', text)
    assert len(identifiers) == len(set(identifiers))
    assert {"time_to_goal.png", "map_2.svg", "bytes_to_goal.csv", "best.png", "price.png"} <= {
        path.name for path in written.iterdir()
    }


def test_a_sweep_that_is_not_tuned_calls_no_method_the_fastest(written: Path) -> None:
    """In the whole folder: pages, tables, and the figures, whose SVG has their texts."""
    kinds = set()
    for path in written.rglob("*"):
        if path.suffix in (".html", ".md", ".json", ".csv", ".svg") and "runs" not in path.parts:
            kinds.add(path.suffix)
            text = path.read_text(encoding="utf-8")
            assert not re.search("fastest|winner|wins|runner-up", text, re.IGNORECASE), path
    assert kinds == {".html", ".md", ".json", ".csv", ".svg"}
    assert "Least time with 2 workers" in (written / "map_2.svg").read_text(encoding="utf-8")
    words = json.loads((written / "results.json").read_text(encoding="utf-8"))["words"]
    assert words[""][0].startswith("The methods are not tuned: ")


def test_runs_that_are_left_out_are_counted_apart(tmp_path: Path) -> None:
    def first_of_the_slow(point: Point, sweep: Sweep) -> float | None:
        time_s = trials.time_of(point, sweep)
        return None if time_s > 60 and point.seed > 42 else time_s

    sweep = trials.make(tmp_path, FILE + "repeat_stopped = false\n", first_of_the_slow)
    found = page.read_outcome(tmp_path, sweep)
    assert (found.ended, found.planned) == (16, 16)
    late = found.cell("centralized_sgd", "mobile-lte", 2)
    assert late is not None and (late.runs, late.missed, late.planned) == (1, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_figures", lambda *_: ([], {}, []))
        page.write_page(tmp_path, sweep=sweep)
    text = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "16 of 16 planned; 1 run missed the goal, limit 1 min; " in text
    assert "; 2 runs left out, because that with the first seed was" in text


def test_all_runs_are_judged_up_to_the_least_time_at_which_one_was_stopped() -> None:
    """x is stopped after 5 s of training, so SGD must not have 13 s."""

    def one(
        algorithm: str, seed: int, time_s: float | None, train_s: float
    ) -> tuple[Point, RunRecord]:
        name = f"{algorithm}-{seed}"
        state = "finished" if time_s else "unfinished"
        return (
            Point(name, algorithm, 2, "fast", seed, {}),
            dataclasses.replace(run(seed, time_s), name=name, state=state, train_s=train_s),
        )

    runs = [
        one("sgd", 1, 4.0, 4.0),
        one("sgd", 2, 4.5, 4.5),
        one("sgd", 3, 12.0, 12.0),
        one("sgd", 4, None, 13.0),
    ]
    runs += [one("x", 1, 3.0, 3.0), one("x", 2, None, 5.0)]
    found = gather(
        [point for point, _ in runs],
        {point.name: record for point, record in runs},
        {},
        limit_s=60.0,
    )
    assert found.judged_s == {("fast", 2): 5.0} and found.not_within("fast", 2) == "not within 5 s"
    assert found.not_within("slow", 2) == "not within 1 min", "no run was stopped there"
    sgd, x = found.cells
    assert (sgd.missed, sgd.median_s, sgd.cost_per_success_s) == (
        2,
        None,
        (4.0 + 4.5 + 5.0 + 5.0) / 2,
    )
    assert (x.missed, x.cost_per_success_s) == (1, 8.0)
    whole = gather(
        [point for point, _ in runs[:3]], {point.name: record for point, record in runs[:3]}, {}
    )
    assert not whole.judged_s and whole.cells[0].median_s == 4.5, "no run was stopped"


def test_a_run_that_was_stopped_in_its_first_epoch_has_an_unknown_time(tmp_path: Path) -> None:
    """It has no line with times. It is not a free miss, and does not end the others at 0 s."""
    sweep = trials.make(tmp_path, FILE, lambda point, sweep: 10.0)
    stopped = next(p for p in sweep.points() if (p.algorithm, p.workers) == ("power_sgd", 2))
    (tmp_path / "runs" / stopped.name / "result.json").unlink()
    found = page.read_outcome(tmp_path, sweep)
    mine = found.cell("power_sgd", "mobile-lte", 2)
    other = found.cell("local_sgd", "mobile-lte", 2)
    assert mine is not None and other is not None
    assert (mine.runs, mine.missed, mine.median_s, mine.cost_per_success_s) == (3, 1, 10.0, None)
    assert (other.missed, other.cost_per_success_s) == (0, 10.0)
    assert found.judged_s == {} and found.missed_text(mine) == "not within 1 min"


def test_tables_have_the_runs_and_the_words(written: Path) -> None:
    with (written / "table.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 + 3
    late = next(
        row
        for row in rows
        if (row["network"], row["algorithm"]) == ("mobile-lte", "centralized_sgd")
    )
    assert (late["runs"], late["reached"], late["missed"], late["median_s"]) == ("3", "0", "3", "")
    content = json.loads((written / "results.json").read_text(encoding="utf-8"))
    with (written / "time_to_goal.csv").open(encoding="utf-8") as file:
        assert {row["run"] for row in csv.DictReader(file)} <= {
            path.name for path in (written / "runs").iterdir()
        }
    assert content["facts"]["Time of all runs"].endswith(" min")
    assert content["facts"]["Runs"] == (
        "18 of 18 planned; 3 runs missed the goal, limit 1 min; all runs of a "
        "network and a number of workers are judged up to the least training time "
        "at which one of them was stopped, and a run that reached the goal later "
        "counts as missed: 60 s (mobile-lte, 2 workers)"
    )
    markdown = (written / "index.md").read_text(encoding="utf-8")
    assert (
        "![map 2](map_2.png)" in markdown
        and "centralized\\_sgd: not within 1 min on mobile-lte with 2 workers (3 of 3)." in markdown
    )


def test_an_unfinished_sweep_without_matplotlib_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_seed(point: Any, sweep: Any) -> float | None:
        return trials.time_of(point, sweep) if point.seed == 42 else None

    trials.make(tmp_path, FILE, first_seed)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said: list[str] = []
    page.write_page(tmp_path, report=said.append)
    assert said[0] == "the map for 2 workers is not drawn: no algorithm has a prediction", (
        "no collectives are recorded"
    )
    assert any("pip install 'mlbench-core[charts]'" in sentence for sentence in said)
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "6 of 18 planned runs have ended" in text and "<svg" not in text
    assert not list(tmp_path.glob("*.png"))


def test_a_sweep_without_runs_has_no_page(tmp_path: Path) -> None:
    trials.make(tmp_path, FILE, lambda *_: None)
    with pytest.raises(ConfigurationError, match="has no runs that have ended"):
        page.write_page(tmp_path)


def test_an_inline_figure_has_the_colors_of_the_page() -> None:
    names = METHODS[:7]
    cells = [cell(name, "fast", 2, 10.0, 12.0, None) for name in names]
    found = outcome(cell(names[0], None, 1, 20.0), *cells)
    (time, *_) = rows_figures.quantities(found, Pricing())
    with figures.style():
        drawing = rows_figures.draw_rows(found, time, "fast")
        whole = io.StringIO()
        drawing.figure.savefig(whole, format="svg")
        svg = inline_svg(drawing, 'a "label"')
    assert 'aria-label="a &quot;label&quot;"' in svg and "width=" not in svg.partition(">")[0]
    assert not re.search(r"[:\"] ?#[0-9a-fA-F]{3}", re.sub(r'href="#', "", svg)), (
        "a color that would stay in the dark"
    )
    used = set(re.findall(r"var\((--[\w-]+)\)", svg))
    assert used >= {"--ink", "--grid", "--faint", *(f"--c{number}" for number in range(1, 7))}
    page_style = Path(html_page.__file__).with_name("page.css").read_text(encoding="utf-8")
    assert all(page_style.count(f"{name}:") == 2 for name in used), (
        "each color is defined for light and for dark"
    )
    assert re.search(r"\nsvg \{[^}]*fill: var\(--ink\)", page_style), "marks in black, the default"
    assert "Mark and number: median" in whole.getvalue() and "Mark and number" not in svg
    _, height = re.findall(r'viewBox="0 0 (\S+) (\S+)"', svg)[0]
    assert float(height) < 72 * drawing.figure.get_size_inches()[1] - 10, (
        "the caption is text of the page"
    )


def test_runs_without_a_goal_have_the_time_of_the_whole_training() -> None:
    """Scripts that are measured unchanged need no goal, and know steps and no epochs."""
    sweep = parse_sweep(
        {"script": "a.py", "methods": ["as-is", "bf16"], "workers": [2], "networks": ["lan-1g"]}
    )
    records = {}
    for point, seconds in zip(sweep.points(), (8.0, 4.0), strict=True):
        records[point.name] = RunRecord(
            point.name,
            configuration={"workers": 2, "unit": "steps"},
            train_s=seconds,
            batches=20,
        )
    rows = table_rows(gather(sweep.points(), records, sweep.networks), Pricing())
    assert [(row["algorithm"], row["median_s"], row["reached"]) for row in rows] == [
        ("bf16", 4.0, 1),
        ("as-is", 8.0, 1),
    ]
    assert rows[0]["times_as_fast"] == 2
    assert [(row["epochs_to_goal"], row["steps_to_goal"]) for row in rows] == [(None, 20)] * 2
    assert "Steps to goal" in [column.header for column in known_columns(rows)]


def test_the_seconds_of_a_step_are_not_cut_at_the_limit() -> None:
    """Of 20 steps of 2 s, one run reached its goal after 15, and the other one did not."""
    whole: dict[str, Any] = {"train_s": 40.0, "batches": 20}
    runs = [
        dataclasses.replace(run(1, None), **whole, communication_exposed_s=10.0),
        dataclasses.replace(run(2, 30.0), **whole, communication_exposed_s=7.5, steps_to_goal=15),
    ]
    points = [Point(record.name, "sgd", 2, "fast", seed, {}) for seed, record in enumerate(runs)]
    records = {record.name: record for record in runs}
    found = gather(points, records, outcome().networks, limit_s=25.0)
    (cell,) = found.cells
    assert cell.missed == 2 and [record.train_s for record in cell.group.records] == [25.0, 25.0]
    for entry in page._records_json(found):
        assert (entry["reached"], entry["time_to_goal_s"]) == (False, None)
        numbers = ("step_s", "compute_s", "exposed_s", "compute_share")
        assert [entry[name] for name in numbers] == [2.0, 1.5, 0.5, 0.75]


def test_times_of_a_fixed_training_time_are_not_compared(tmp_path: Path) -> None:
    """All of them are equal by definition."""
    sweep = trials.make(tmp_path, FILE)
    aim = {**GOAL, "threshold": None, "budget_s": 60.0}
    for path in tmp_path.glob("runs/*/result.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        content["configuration"]["goal"] = aim
        content["goal"].update(aim)
        path.write_text(json.dumps(content), encoding="utf-8")
    message = (
        r"must have a value as its goal, not 'Prec@1 after 60 s of training': .* mlbench compare "
    )
    with pytest.raises(ConfigurationError, match=message):
        page.read_outcome(tmp_path, sweep)
