"""Twelve methods that are hard to tell apart, in every kind of figure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from mlbench_core.comparison import figures
from mlbench_core.comparison.figures.canvas import Drawing
from mlbench_core.comparison.figures.styles import method_looks
from mlbench_core.comparison.group_repeats import Group, pool
from mlbench_core.comparison.prices import Pricing
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.sweep.fastest_methods import Map, MapCell
from mlbench_core.sweep.figures.line_charts import curves, draw_bytes, draw_curve, draw_utilization
from mlbench_core.sweep.figures.map import draw_map
from mlbench_core.sweep.figures.panels import draw_rows, quantities
from mlbench_core.sweep.grouped_runs import Outcome
from mlbench_core.sweep.utilization import Utilization
from tests.sweep.test_page import GOAL, cell, outcome

pytest.importorskip("matplotlib", reason="needs matplotlib (the extra charts)")

# as-is and bf16 once had the same look. The settings share a color, and three names are black.
NAMES = (
    *("as-is", "bf16", "fp16", "Half", "MyTopK", "diloco:period=50"),
    *("power_sgd", "power_sgd:rank=2", "power_sgd:rank=4"),
    *("streaming_diloco", "centralized_adam", "centralized_sparsified_sgd"),
)


@pytest.fixture(scope="module")
def found() -> Outcome:
    cells = []
    for index, name in enumerate(NAMES):
        cells += [cell(name, "fast", workers, 10.0 + index, 11.0 + index) for workers in (2, 4)]
    return outcome(*cells)


def shown_by_name(drawing: Drawing) -> dict[str, tuple[Any, ...]]:
    """Return what the legend shows of each method: the color, and the mark or the hatch."""
    from matplotlib.lines import Line2D

    (legend,) = drawing.figure.legends
    shown: dict[str, tuple[Any, ...]] = {}
    for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
        if text.get_text() in NAMES:
            if isinstance(handle, Line2D):
                look = (handle.get_color(), handle.get_marker())
            else:
                look = (handle.get_facecolor()[:3], handle.get_hatch())
            shown[text.get_text()] = look
    return shown


def drawn(found: Outcome) -> Iterator[Drawing]:
    rate, trip = [10.0**power for power in range(6, 12)], [1e-4, 1e-3]
    places = zip(itertools.product(trip, rate), NAMES, strict=True)
    cells = [MapCell(one[1], one[0], name, 1.0, "bf16", 3.0) for one, name in places]
    yield draw_map(found, Map(2, tuple(rate), tuple(trip), tuple(cells), ()))
    yield draw_bytes(found, "fast")
    for curve in curves(found, Pricing()):
        yield draw_curve(found, curve, "fast")
    shares = {name: (0.1, 0.5 + 0.01 * index) for index, name in enumerate(NAMES)}
    yield draw_utilization(found, [Utilization(2, (1e6, 1e9), shares, {})])


def test_no_two_methods_look_alike_in_any_figure_of_a_sweep(found: Outcome) -> None:
    with figures.style():
        drawings = list(drawn(found))
    assert len(drawings) >= 4
    for drawing in drawings:
        shown = shown_by_name(drawing)
        assert shown.keys() == set(NAMES), drawing.name
        assert len(set(shown.values())) == len(NAMES), drawing.name


def test_no_two_areas_of_a_map_look_alike(found: Outcome) -> None:
    """A dark hatch on black would not be seen."""
    with figures.style():
        axes = next(drawn(found)).figure.axes[0]
    areas, black = set(), []
    for filled, hatch in itertools.pairwise([*axes.patches, None]):
        assert filled is not None
        color = filled.get_facecolor()
        if color[3] == 0:
            continue
        has_hatch = hatch is not None and hatch.get_facecolor()[3] == 0
        areas.add((color, hatch.get_hatch() if has_hatch else ""))
        if has_hatch and color[:3] == (0, 0, 0):
            black.append(hatch._hatch_color[:3])
    assert len(areas) == len(NAMES) and black == [(1, 1, 1)] * 2


def test_the_rows_of_a_sweep_have_the_names_and_the_colors_of_the_methods(found: Outcome) -> None:
    shown = quantities(found, Pricing())
    assert shown
    for quantity in shown:
        with figures.style():
            looks = method_looks(NAMES)
            axes = draw_rows(found, quantity, "fast").figure.axes[0]
        labels = [text.get_text().replace("\n", "") for text in axes.get_yticklabels()]
        assert sorted(labels) == sorted(NAMES)
        colors = {line.get_color() for line in axes.lines}
        assert {look["color"] for look in looks.values()} <= colors


def runs(names: Iterable[str]) -> list[Group]:
    records = []
    for index, name in enumerate(names):
        for workers in (1, 2):
            time_s = (20.0 + index) / workers
            settings = {"workers": workers, "seed": 1, "goal": GOAL, "algorithm": name}
            record = RunRecord(
                f"r{index}-{workers}", configuration={"program": "train.py", **settings},
                reached=True, time_to_goal_s=time_s, train_s=time_s,
                phases_s={"compute": time_s - 1, "communication": 1.0},
                communication_exposed_s=1.0,
            )  # fmt: skip
            records.append(record)
    return pool(records)


def marks(drawing: Drawing) -> dict[str, tuple[Any, ...]]:
    """Return color and mark of each series with error bars."""
    shown = {}
    for container in drawing.figure.axes[0].containers:
        line = container[0]
        shown[container.get_label().removeprefix("_")] = (line.get_color(), line.get_marker())
    return shown


def test_no_two_methods_look_alike_in_a_comparison_of_runs() -> None:
    groups = runs(NAMES)
    with figures.style():
        drawings = [
            figures.draw_speed_up(groups),
            figures.draw_price_index(groups),
            figures.draw_communication_share(groups),
            figures.draw_time_against_price(groups, 1.0),
        ]
    for drawing in drawings:
        shown = marks(drawing)
        assert shown.keys() == set(NAMES), drawing.name
        assert len(set(shown.values())) == len(NAMES), drawing.name
        assert shown == marks(drawings[0]), "the same look in every figure"


def test_a_look_does_not_depend_on_which_groups_a_figure_can_draw() -> None:
    """Two files have a class of the same name, and the runs of the first missed the goal."""
    first, second = "a.py:Half", "b.py:Half"
    groups = runs([first, second])
    missed = []
    for group in groups:
        if group.label == first:
            late = dataclasses.replace(group.records[0], reached=False, time_to_goal_s=None)
            group = dataclasses.replace(group, records=(late,))
        missed.append(group)
    with figures.style():
        both = marks(figures.draw_time_against_price(groups, 1.0))
        assert marks(figures.draw_time_against_price(missed, 1.0)) == {second: both[second]}
