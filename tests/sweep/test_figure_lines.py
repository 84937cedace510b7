"""The lines of the methods over the number of workers: gaps, misses and colors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from mlbench_core.comparison import figures
from mlbench_core.comparison.figures.canvas import Drawing
from mlbench_core.comparison.prices import Pricing, load_prices
from mlbench_core.errors import ConfigurationError
from mlbench_core.sweep.figures.line_charts import curves, draw_curve, draw_utilization
from mlbench_core.sweep.figures.panels import algorithm_looks
from mlbench_core.sweep.grouped_runs import Outcome
from mlbench_core.sweep.sentences import per_network, summary
from mlbench_core.sweep.toml_file import parse_sweep
from mlbench_core.sweep.utilization import predict_utilization
from tests.sweep.test_modelled import FILE, gathered
from tests.sweep.test_page import cell, outcome

PRICING = Pricing(load_prices()["aws-c5.xlarge"])

pytest.importorskip("matplotlib", reason="needs matplotlib (the extra charts)")


@pytest.fixture(scope="module")
def found() -> Outcome:
    """Method a misses with 4 workers on the slow network, and b has one miss of three."""
    cells = [cell("a", None, 1, 40.0, 44.0), cell("b", None, 1, 50.0, 50.0)]
    for network, late in (("fast", 11.0), ("slow", None)):
        cells += [cell("a", network, 2, 20.0, 20.0), cell("b", network, 2, 24.0, 26.0, None)]
        cells += [cell("a", network, 4, late, late), cell("b", network, 4, 15.0, 15.0)]
        cells += [cell("a", network, 8, 9.0, 9.0), cell("b", network, 8, 9.0, 9.0)]
    return outcome(*cells)


def draw(found: Outcome, index: int, network: str | None = None) -> Drawing:
    with figures.style():
        return draw_curve(found, list(curves(found, PRICING))[index], network)


def lines(axes: Any) -> dict[str, list[float]]:
    return {
        line.get_label(): list(line.get_ydata())
        for line in axes.lines
        if not str(line.get_label()).startswith("_")
    }


def test_a_line_has_a_gap_at_a_miss_and_one_worker_is_in_every_panel(found: Outcome) -> None:
    drawing = draw(found, 0)
    fast, slow = drawing.figure.axes
    assert lines(fast)["a"] == [42.0, 20.0, 11.0, 9.0]
    assert lines(slow)["a"] == pytest.approx([42.0, 20.0, math.nan, 9.0], nan_ok=True)
    assert lines(slow)["b"] == [50.0, 26.0, 15.0, 9.0]
    assert [text.get_text() for text in slow.texts] == ["missed"] and not fast.texts
    assert fast.get_ylim() == slow.get_ylim()
    assert fast.get_xscale() == fast.get_yscale() == "log"
    with figures.style():
        color = algorithm_looks(found)["a"]["color"]
    (hollow,) = [line for line in slow.lines if line.get_fillstyle() == "none"]
    workers: Any = hollow.get_xdata()
    assert (list(workers), hollow.get_color()) == ([4], color)
    assert "Open mark on a line: a run missed the goal." in drawing.caption
    header, *rows = drawing.rows
    late = [row for row in rows if row[:3] == ["slow", "a", 4]]
    assert header[5:] == ["time_by_workers", "low", "high"] and late[0][5:] == [None] * 3
    assert sum(row[2] == 1 for row in rows) == 4, "two methods, two panels"


def test_the_price_is_that_of_a_success(found: Outcome) -> None:
    """The run that missed trained for 110 s, so two successes cost 160 s of two workers."""
    rows = draw(found, 2, "slow").rows
    (price,) = [row[5] for row in rows if row[:3] == ["slow", "b", 2]]
    assert PRICING.per_hour is not None
    assert price == pytest.approx((24 + 26 + 110) / 2 * 2 / 3600 * PRICING.per_hour)
    assert len(list(curves(found, Pricing()))) == 2, "without a price"


def test_steps_have_one_panel_with_the_line_of_perfect_scaling(found: Outcome) -> None:
    """Every run needs 10 steps; with 4 workers, those of the fast network count."""
    drawing = draw(found, 1)
    (axes,) = drawing.figure.axes
    assert lines(axes)["a"] == [10.0] * 4
    assert lines(axes)["perfect scaling of a"] == [10.0, 5.0, 2.5, 1.25]
    assert ["fast", "a", 4, 2, 0] in [row[:5] for row in drawing.rows]


def test_a_sweep_without_any_median_has_no_lines() -> None:
    with pytest.raises(ConfigurationError, match="no run has a value of time to goal"):
        draw(outcome(cell("a", None, 1, None), cell("a", "fast", 2, None)), 0)


def test_a_method_has_one_color_in_all_figures() -> None:
    modelled = gathered(parse_sweep(FILE))
    shares = predict_utilization(modelled, 2)
    assert shares is not None
    with figures.style():
        looks = algorithm_looks(modelled)
        drawings = [draw_curve(modelled, curve) for curve in curves(modelled, PRICING)]
        drawings.append(draw_utilization(modelled, [shares]))
    for drawing in drawings:
        for axes in drawing.figure.axes:
            for line in axes.lines:
                if (label := str(line.get_label())) in looks:
                    assert line.get_color() == looks[label]["color"]
    assert "seconds are modelled" in drawings[0].caption
    assert drawings[0].figure.axes[0].get_ylabel() == "modelled time to the goal in seconds"
    assert drawings[-1].name == "compute_utilization_2"


def test_words_say_what_the_second_machine_buys() -> None:
    alone = [cell("a", None, 1, 40.0, 41.0, 42.0), cell("b", None, 1, 50.0, 51.0, 52.0)]
    pair = [cell("a", "slow", 2, 30.0, 31.0, 32.0), cell("b", "slow", 2, 20.0, 20.5, 21.0)]
    *_, sentence = per_network(outcome(*alone, *pair), "slow")
    assert sentence == (
        "The second machine: one worker needs 41.0 s (a), 2 workers 20.5 s (b): 2.00 times as "
        "fast; a difference is shown."
    )
    *_, sentence = per_network(outcome(*alone, cell("a", "slow", 2, 82.0)), "slow")
    assert sentence.endswith("2 workers 82.0 s (a): 0.50 times as fast; not tested.")
    *_, sentence = per_network(outcome(*alone, cell("a", "slow", 2, None)), "slow")
    assert sentence.endswith("(a), and no algorithm with 2 workers has a median.")


@pytest.mark.parametrize(
    ("workers", "threads", "text"),
    [
        (2, 4, "Workers with more than 4 threads in all shared 4 cores"),
        (8, 1, "More than 4 workers shared 4 cores"),
        (4, 1, ""),
    ],
)
def test_workers_that_share_cores_are_counted_with_their_threads(
    workers: int, threads: int, text: str
) -> None:
    cells = []
    for one in (cell("a", None, 1, 40.0), cell("a", "fast", workers, 30.0)):
        (record,) = one.group.records
        record = dataclasses.replace(record, machine={"cores": 4, "hosts": 1})
        configuration = {**one.group.configuration, "threads": threads}
        group = dataclasses.replace(one.group, configuration=configuration, records=(record,))
        cells.append(dataclasses.replace(one, group=group))
    found = outcome(*cells)
    words, caption = " ".join(summary(found)), draw(found, 0, "fast").caption
    if text:
        assert f" {text}." in words
        assert f" {text}, so their times are longer than those on as many machines." in caption
    else:
        assert " shared " not in words + caption
