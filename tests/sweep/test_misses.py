"""A miss never makes a method look better in anything that a sweep says, draws or writes."""

from __future__ import annotations

import csv
import functools
import io
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbench_core.comparison import figures
from mlbench_core.comparison.prices import Pricing, load_prices
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError
from mlbench_core.network.description import Link, Network
from mlbench_core.sweep.fastest_methods import Map, predict_map
from mlbench_core.sweep.figures.line_charts import curves, draw_bytes, draw_curve
from mlbench_core.sweep.figures.panels import draw_rows, quantities
from mlbench_core.sweep.grouped_runs import Outcome, gather
from mlbench_core.sweep.result_table import as_csv, table_rows
from mlbench_core.sweep.sentences import per_network, summary
from mlbench_core.sweep.toml_file import Point
from tests.helpers.thorough import examples

repeatable = settings(derandomize=True, database=None, deadline=None)

GOAL = {"metric": "val_global_Prec@1", "threshold": 95.0, "minimize": False}
NETWORKS = {"fast": Network(Link(10**9, 0.0005)), "slow": Network(Link(10**7, 0.02))}
PLACES = ((None, 1), ("fast", 2), ("slow", 2))
ALGORITHMS = ("a", "b", "c")
LIMIT_S = 100.0
PRICING = Pricing(load_prices()["aws-c5.xlarge"])
SMALLER = (
    "median_s",
    "interval_high_s",
    "cost_per_success_s",
    "sent_mb",
    "exchanges",
    "epochs_to_goal",
    "price",
)
LARGER = ("times_as_fast", "times_low", "times_high", "best")
RATIOS = ("times_as_fast", "times_low", "times_high")
# Runs that differ by 1 % show a difference, those that differ by half do not.
FACTORS = (0.98, 0.99, 1.0, 1.01, 0.985, 0.995, 1.5)

Place = tuple[str | None, int]
Cells = dict[tuple[str, Place], list[float | str]]
"""For each run of a method in a place, its seconds to the goal or the kind of its miss."""

MISSES = ("stopped", "ended", "ended early", "failed")


@st.composite
def sweeps(draw: Callable[..., Any]) -> tuple[str, Place, Cells, Cells]:
    """Return a method, the place of its miss, and the runs before and after it."""
    patterns = st.lists(st.sampled_from((*FACTORS, *MISSES[:2])), min_size=2, max_size=4)
    before: Cells = {}
    for place in PLACES:
        for algorithm in ALGORITHMS:
            usual_s = draw(st.sampled_from([5.0, 10.0, 30.0]))
            before[algorithm, place] = [
                x if isinstance(x, str) else usual_s * x for x in draw(patterns)
            ]
    algorithm, place = (
        draw(st.sampled_from(ALGORITHMS)),
        draw(st.sampled_from((*PLACES, *PLACES[1:]))),
    )
    runs = before[algorithm, place]
    lost = draw(
        st.sampled_from([len(runs), *(at for at, run in enumerate(runs) if isinstance(run, float))])
    )
    # A run that misses its goal trains for longer than if it had reached it. A further one may end
    # at any time.
    kind = draw(
        st.sampled_from([kind for kind in MISSES if lost == len(runs) or kind != "ended early"])
    )
    return (
        algorithm,
        place,
        before,
        {**before, (algorithm, place): [*runs[:lost], kind, *runs[lost + 1 :]]},
    )


def outcome_of(cells: Cells) -> Outcome:
    points: list[Point] = []
    records: dict[str, RunRecord] = {}
    for (algorithm, (network, workers)), runs in cells.items():
        for seed, run in enumerate(runs):
            points.append(
                Point(f"{algorithm}-{network}-{seed}", algorithm, workers, network, seed, {})
            )
            if run != "failed":
                records[points[-1].name] = result(points[-1], run)
    failed = {point.name for point in points} - records.keys()
    return gather(points, records, NETWORKS, failed=failed, limit_s=LIMIT_S)


def result(point: Point, run: float | str) -> RunRecord:
    """Return a run that reached its goal after some seconds, or missed it; slow runs also send
    more."""
    reached = isinstance(run, float)
    train_s = (
        run
        if isinstance(run, float)
        else {"stopped": LIMIT_S, "ended": 60.0, "ended early": 1.0}[run]
    )
    return RunRecord(
        point.name, state="unfinished" if run == "stopped" else "finished",
        configuration={"workers": point.workers, "seed": point.seed, "goal": GOAL,
        "algorithm": point.algorithm},
        reached=reached, time_to_goal_s=train_s if reached else None, train_s=train_s,
        best=96.0 if reached else 90.0,
        epochs_to_goal=round(train_s) if reached else None, epochs=round(train_s),
        bytes_on_wire=1e5 * train_s,
        exchanges=round(train_s),
    )  # fmt: skip


def map_of(outcome: Outcome) -> Map | None:
    def predict(record: RunRecord, network: Network, workers: int) -> float:
        # Each method has its own price for the round trip and for the bytes.
        kind = ALGORITHMS.index(record.configuration["algorithm"])
        link = network.path(0, workers - 1)
        return (
            (record.time_to_goal_s or 0.0)
            + kind * 100 * link.round_trip_s
            + (2 - kind) * 1e7 / link.bandwidth
        )

    return predict_map(outcome, 2, predict)


def rank(outcome: Outcome, algorithm: str, place: Place) -> float:
    row = outcome.row(*place)
    return next(
        (at for at, c in enumerate(row) if c.algorithm == algorithm and c.median_s is not None),
        math.inf,
    )


def counts(outcome: Outcome, algorithm: str) -> tuple[int, int]:
    """Return in how many cases a method had the least median, and in how many of them a difference
    is shown."""
    text = " ".join(summary(outcome))
    found = re.search(
        rf"\b{algorithm} had the least median time on [^.]*\. [^.]*? in (\d+) of (\d+) cases", text
    )
    return (int(found[2]), int(found[1])) if found else (0, 0)


def praise(outcome: Outcome, algorithm: str) -> set[tuple[str | None, str]]:
    """Return where a sentence calls a method the fastest, or shows a difference in favor of it;
    None is one worker."""
    found: set[tuple[str | None, str]] = set()
    for network in outcome.networks:
        for sentence in per_network(outcome, network):
            if re.match(
                rf"With 2 workers: {algorithm} (was fastest|had the least median),", sentence
            ):
                found |= {
                    (network, text)
                    for text in ("fastest", "a difference is shown")
                    if text in sentence
                }
    if f"({algorithm}, the fastest)" in " ".join(summary(outcome)):
        found.add((None, "fastest"))
    return found


def loss(row: dict[str, str], name: str) -> float:
    """Return a number of a row so that less is better; a number that is absent is the worst."""
    if row[name] == "":
        return math.inf
    return -float(row[name]) if name in LARGER else float(row[name])


def rows_of(outcome: Outcome) -> dict[tuple[str, str, str], dict[str, str]]:
    rows = csv.DictReader(io.StringIO(as_csv(table_rows(outcome, PRICING))))
    return {(row["algorithm"], row["network"], row["workers"]): row for row in rows}


@given(sweeps())
@settings(repeatable, max_examples=examples(100))
def test_a_miss_never_makes_the_words_or_the_table_of_its_method_better(
    case: tuple[str, Place, Cells, Cells],
) -> None:
    algorithm, place, *both = case
    before, after = map(outcome_of, both)
    for each in PLACES:
        assert rank(after, algorithm, each) >= rank(before, algorithm, each)
    assert praise(after, algorithm) <= praise(before, algorithm)
    assert place[0] not in {network for network, _ in praise(after, algorithm)}
    assert all(
        new <= old
        for new, old in zip(counts(after, algorithm), counts(before, algorithm), strict=True)
    )
    mine = (algorithm, place[0] or "", str(place[1]))
    old_rows, new_rows = rows_of(before), rows_of(after)
    for name in (*SMALLER, *LARGER):
        new, old = loss(new_rows[mine], name), loss(old_rows[mine], name)
        assert new >= old or math.isclose(new, old, rel_tol=1e-12), name
    for key in old_rows.keys() - {mine}:
        # Without a mean of the baseline there is no ratio to it.
        unknown = dict.fromkeys(RATIOS, "") if mine == (before.baseline, *key[1:]) else {}
        assert new_rows[key] in (old_rows[key], {**old_rows[key], **unknown}), "another method"


@given(sweeps())
@settings(repeatable, max_examples=examples(80))
def test_a_miss_never_makes_the_map_of_its_method_better(
    case: tuple[str, Place, Cells, Cells],
) -> None:
    algorithm, _, *both = case
    before, after = (map_of(outcome_of(cells)) for cells in both)

    def share(found: Map | None) -> float:
        return 0.0 if found is None else found.shares.get(algorithm, 0.0)

    def named(found: Map | None) -> Iterator[tuple[str, str]]:
        for point in found.points if found is not None else ():
            yield from (
                (point.network, kind)
                for kind in ("measured", "second")
                if getattr(point, kind) == algorithm
            )

    assert share(after) <= share(before)
    # The first one of a network may become its second.
    assert {network for network, _ in named(after)} <= {network for network, _ in named(before)}
    assert {each for each in named(after) if each[1] == "measured"} <= set(named(before))


def test_a_second_with_a_miss_does_not_share_the_point_of_the_first() -> None:
    """It has no test, which is not the same as a difference that is not shown."""

    def second(*runs: float | str) -> str | None:
        found = map_of(
            outcome_of({("a", ("fast", 2)): [5.0, 5.05, 5.1], ("b", ("fast", 2)): list(runs)})
        )
        assert found is not None
        return found.points[0].second

    assert (second(9.0, 9.05, 9.1), second(9.0, 9.05, 9.1, "stopped")) == (None, None)
    assert (second(4.0, 9.05, 20.0), second(5.2, 5.2, 5.2, "stopped")) == ("b", "b"), (
        "not shown, and within 10 %"
    )


@pytest.mark.parametrize("kind", ["stopped", "failed"])
def test_a_prediction_starts_from_the_fastest_network_or_not_at_all(kind: str) -> None:
    cells: Cells = {
        ("a", ("fast", 2)): [30.0, 30.0],
        ("b", ("fast", 2)): [20.0, 20.0],
        ("a", ("slow", 2)): [5.0, 5.0],
    }
    before, after = (
        map_of(outcome_of(cells)),
        map_of(outcome_of({**cells, ("a", ("fast", 2)): [kind, kind]})),
    )
    assert before is not None and before.shares["a"] < 0.5
    assert after is not None and after.shares == {"b": 1.0}, "5 s on the slow network would win"
    assert after.left_out == (
        "a is not on the map: half of its runs or more missed the goal on fast.",
    )


def drawn(outcome: Outcome, algorithm: str) -> dict[tuple[Any, ...], float]:
    """Return the numbers of a method in the CSV files of the figures, and its places in the panels:
    less is better."""
    found: dict[tuple[Any, ...], float] = {}
    makers = {
        each.name: functools.partial(draw_rows, outcome, each)
        for each in quantities(outcome, PRICING)
    }
    others = {"bytes_to_goal": functools.partial(draw_bytes, outcome)}
    for curve in curves(outcome, PRICING):
        # The steps are those of the network with the fewest misses, so a miss can change it.
        if curve.has_networks:
            others[curve.name] = functools.partial(draw_curve, outcome, curve)
    for name, make in {**makers, **others}.items():
        try:
            with figures.style():
                drawing = make()
        except ConfigurationError:  # no run has the quantity
            continue
        header, *rows = drawing.rows
        for row in (dict(zip(header, values, strict=True)) for values in rows):
            if row["algorithm"] == algorithm:
                for column in {name, "bytes_per_worker", "time_to_goal_s"} & row.keys():
                    value = row[column]
                    key = (name, row["network"], row["workers"], row.get("run"), column)
                    found[key] = math.inf if value is None else -value if name == "best" else value
        for axes in drawing.figure.axes if name in makers else ():
            labels = [label.get_text() for label in axes.get_yticklabels()]
            found[name, axes.get_title(), "place"] = labels.index(algorithm)
    return found


@given(sweeps())
@settings(repeatable, max_examples=examples(6))
def test_a_miss_never_makes_the_figures_of_its_method_better(
    case: tuple[str, Place, Cells, Cells],
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra charts)")
    algorithm, _, before, after = case
    old, new = (drawn(outcome_of(cells), algorithm) for cells in (before, after))
    for key, value in old.items():
        assert new.get(key, math.inf) >= value, key
    # Of a further run that missed, only the best value is known.
    assert all(math.isinf(new[key]) for key in new.keys() - old.keys() if key[0] != "best")
