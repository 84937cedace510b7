"""The rule for misses: known answers, and a further miss never makes a group look better."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mlbench_core.comparison.figures.numbers import price_index, speed_up
from mlbench_core.comparison.goal_times import compare_times, cost_per_success_s, is_miss, median_s
from mlbench_core.comparison.group_repeats import pool, usable
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.comparison.table import Comparison, compare_groups, compare_runs
from tests.comparison.test_group_repeats import a_record

# The same examples in every run, no database in the folder of the project, and no limit of time.
repeatable = settings(derandomize=True, database=None, deadline=None)
TIMES = st.lists(st.floats(0.5, 500), min_size=1, max_size=6)


def runs(times: list[float], misses: list[float] | None = None, **others: Any) -> list[RunRecord]:
    """Return one run for each time, and one miss for each training time of ``misses``."""
    found = [
        replace(a_record(f"r{seed}", 1, seed, time_s=t, **others), best=95.0)
        for seed, t in enumerate(times)
    ]
    return found + [
        replace(
            a_record(f"m{seed}", 1, seed, time_s=None, **others),
            train_s=paid,
            best=90.0,
            samples_per_s=1e9,
        )
        for seed, paid in enumerate(misses or [], len(times))
    ]


def compare(*groups: list[RunRecord], **options: Any) -> Comparison:
    return compare_groups(pool([record for group in groups for record in group]), **options)


def test_three_misses_in_five_are_not_faster_than_five_of_twenty_seconds() -> None:
    often = runs([10.0, 11.0], [100.0, 100.0, 100.0], algorithm="a")
    always = runs([20.0, 20.5, 21.0, 21.5, 22.0], algorithm="b")
    found = compare(often, always, price=lambda seconds, workers: seconds * workers, baseline="b")
    a, b = found.rows
    assert [
        a[name] for name in ("mean_s", "standard_deviation_s", "median_s", "olympic_mean_s")
    ] == [None] * 4
    assert (a["cost_per_success_s"], a["price"], a["times_as_fast"], a["speedup"]) == (
        160.5,
        160.5,
        None,
        None,
    )
    assert (b["mean_s"], b["median_s"], b["cost_per_success_s"], b["price"]) == (
        21.0,
        21.0,
        21.0,
        21.0,
    )
    (test,) = found.tests
    assert (test["p"], test["verdict"]) == (None, "not tested: a run missed the goal")


def test_four_workers_with_misses_have_no_speed_up() -> None:
    one = runs([100.0, 100.0])
    four = [
        replace(r, configuration={**r.configuration, "workers": 4})
        for r in runs([20.0], [100.0, 100.0])
    ]
    first, second = compare(one, four).rows
    assert (first["speedup"], first["efficiency"]) == (1.0, 1.0)
    assert (second["speedup"], second["efficiency"], second["median_s"]) == (None, None, None)
    assert second["cost_per_success_s"] == 220.0
    groups = pool([*one, *four])
    assert speed_up(groups)[1] is None and price_index(groups)[1] is None


def test_medians_and_costs_of_misses() -> None:
    assert median_s(runs([1.0, 3.0, 2.0], [9.0, 9.0])) == 3.0
    assert median_s(runs([1.0, 3.0], [9.0])) == 3.0
    assert median_s(runs([1.0, 3.0], [9.0, 9.0])) is None, "half of them missed"
    assert median_s(runs([1.0, 3.0]), lost=2) is None and median_s(runs([1.0, 3.0]), lost=1) == 3.0
    assert median_s([]) is None
    assert cost_per_success_s(runs([1.0, 3.0], [9.0])) == 6.5
    assert cost_per_success_s(runs([], [9.0])) is None
    assert cost_per_success_s(runs([1.0]), lost=1) is None, "nobody knows what the lost run took"
    unknown = replace(runs([], [9.0])[0], train_s=None)
    assert cost_per_success_s([*runs([1.0]), unknown]) is None


def test_a_failed_run_counts_as_a_miss_of_its_group() -> None:
    good = runs([10.0, 11.0, 12.0])
    failed = replace(a_record("bad", 1, 9, time_s=None), state="failed", reached=None, train_s=30.0)
    assert is_miss(failed) and not is_miss(replace(failed, reached=True))
    _, found = compare_runs([*good, failed])
    (row,) = found.rows
    assert (row["runs"], row["missed"], row["mean_s"], row["median_s"]) == (4, 1, None, 11.5)
    assert row["cost_per_success_s"] == pytest.approx(21.0)
    assert "bad has the state 'failed': it counts as a run that missed" in found.remarks
    # Alone, it would only be a row without values.
    assert usable([failed])[0] == []
    again = replace(failed, configuration=good[0].configuration)
    assert compare_runs([again, *good])[1].rows[0]["mean_s"] == 11.0, (
        "the run was repeated with its seed"
    )


@repeatable
@given(
    times=TIMES,
    misses=st.lists(st.floats(0.1, 1000), max_size=5),
    paid=st.floats(0.1, 1000),
    other=TIMES,
)
def test_a_further_miss_never_makes_a_group_look_better(
    times: list[float], misses: list[float], paid: float, other: list[float]
) -> None:
    options: dict[str, Any] = {
        "price": lambda seconds, workers: seconds * workers,
        "baseline": "task 1a, b",
    }
    rival = [
        *runs(other, algorithm="b"),
        *runs([1.0], algorithm="a", task="2a"),
        *runs([1.0], algorithm="b", task="2a"),
    ]

    def of(missed: list[float]) -> tuple[dict[str, Any], Comparison]:
        found = compare_groups(pool([*runs(times, missed, algorithm="a"), *rival]), **options)
        mine = [
            row
            for row in found.rows
            if row["runs"] == len(times) + len(missed) and row["label"].endswith("a")
        ]
        return next(row for row in mine if row["workload"].startswith("task 1a")), found

    (before, all_before), (after, all_after) = of(misses), of([*misses, paid])
    smaller = {
        "median_s",
        "mean_s",
        "cost_per_success_s",
        "price",
        "standard_deviation_s",
        "interval_high_s",
    }
    for name in smaller:
        assert (math.inf if after[name] is None else after[name]) >= (before[name] or 0) * (
            1 - 1e-12
        ), name
    neutral = {"label", "workers", "workload", "goal", "names", "runs", "reached", "missed"}
    for name in set(after) - smaller - neutral:
        assert after[name] is None, name
    assert after["reached"] == before["reached"] and after["missed"] == before["missed"] + 1
    assert all(
        test["verdict"].startswith("not tested") for test in all_after.tests if "1a" in test["a"]
    )
    name = "a, 1 worker"
    assert all(
        all_after.profile[name][key] <= share for key, share in all_before.profile[name].items()
    )


@repeatable
@given(st.lists(st.tuples(st.floats(0.5, 500), st.floats(0.5, 500)), min_size=2, max_size=8))
def test_equal_seeds_give_the_paired_test_of_scipy_on_logarithms(
    pairs: list[tuple[float, float]],
) -> None:
    logs = [[math.log(time) for time in side] for side in zip(*pairs, strict=True)]
    if (
        max(x - y for x, y in zip(*logs, strict=True))
        - min(x - y for x, y in zip(*logs, strict=True))
        < 1e-6
    ):
        return
    a, b = (runs(list(side)) for side in zip(*pairs, strict=True))
    found = compare_times(a, list(reversed(b)))
    assert found is not None and found.kind == "paired by seed"
    wanted = stats.ttest_rel(*logs)
    assert found.p == pytest.approx(wanted.pvalue, rel=1e-6, abs=1e-9)
    assert found.ratio == pytest.approx(
        math.exp(sum(x - y for x, y in zip(*logs, strict=True)) / len(pairs))
    )
    assert 0 <= found.interval[0] <= found.ratio <= found.interval[1]


def test_other_seeds_give_welchs_test() -> None:
    a, b = runs([10.0, 11.0, 12.5]), runs([14.0, 15.0, 15.5, 18.0])
    logs = [[math.log(record.total_s or 0) for record in side] for side in (a, b)]
    found = compare_times(a, b)
    assert found is not None and found.kind == "Welch"
    assert found.p == pytest.approx(stats.ttest_ind(*logs, equal_var=False).pvalue)
    unknown = [replace(r, configuration={**r.configuration, "seed": None}) for r in a]
    again = compare_times(unknown, b[:3])
    assert again is not None and again.kind == "Welch", "without seeds there are no pairs"
    assert compare_times(a, runs([1.0], [2.0])) is None and compare_times(a, runs([1.0])) is None
    assert compare_times(a, runs([0.0, 2.0])) is None, "0 has no logarithm"
