"""The table of pooled runs: numbers against numbers worked out by hand."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from mlbench_core.comparison.group_repeats import pool
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.comparison.significance import log_interval
from mlbench_core.comparison.table import (
    COLUMNS,
    RATIOS,
    Column,
    Comparison,
    cell,
    compare_groups,
    safe_cell,
    times_to_goal,
)
from mlbench_core.errors import ConfigurationError
from tests.comparison.test_group_repeats import GOAL, a_record


def repeats(times: list[float | None], workers: int = 1, **others: Any) -> list[RunRecord]:
    """Return one run for each time; all times of one call differ from those of another only by
    their seeds."""
    return [
        replace(
            a_record(f"r{seed}", workers, seed, time_s=time_s, **others),
            epochs_to_goal=None if time_s is None else 5,
            communication_exposed_s=None if time_s is None else time_s / 4,
            communication_hidden_s=1.0,
            bytes_sent=2e6,
            samples_per_s=100.0 * workers,
            best=95.0,
        )
        for seed, time_s in enumerate(times)
    ]


def compare(*records: list[RunRecord], **options: Any) -> Comparison:
    return compare_groups(pool([record for each in records for record in each]), **options)


def test_a_row_has_the_statistics_of_its_runs() -> None:
    (row,) = compare(repeats([10.0, 12.0, 11.0, 15.0])).rows
    assert (row["runs"], row["reached"], row["missed"], row["goal"]) == (4, 4, 0, "Prec@1 >= 95")
    assert (row["mean_s"], row["median_s"], row["olympic_mean_s"]) == (12.0, 11.5, 11.5)
    spread = statistics.stdev([10.0, 12.0, 11.0, 15.0])
    assert row["standard_deviation_s"] == pytest.approx(spread)
    logs = [math.log(time) for time in (10.0, 12.0, 11.0, 15.0)]
    half = 3.182446 * statistics.stdev(logs) / 2
    ends = [math.exp(statistics.fmean(logs) + sign * half) for sign in (-1, 1)]
    assert [row["interval_low_s"], row["interval_high_s"]] == pytest.approx(ends)
    assert (row["epochs_to_goal"], row["seconds_per_epoch_s"]) == (5.0, pytest.approx(2.4))
    assert (row["bytes_sent_mb"], row["communication_exposed_s"], row["train_s"]) == (
        2.0,
        3.0,
        20.0,
    )
    assert row["cost_per_success_s"] == 12.0


def test_a_row_with_misses_has_a_median_and_a_cost_and_no_mean() -> None:
    runs = repeats([10.0, 12.0, 11.0, None])
    (row,) = compare(runs, price=lambda seconds, k: seconds * k).rows
    known = ("runs", "reached", "missed", "median_s", "cost_per_success_s", "price")
    assert [row[name] for name in known] == [
        4,
        3,
        1,
        11.5,
        pytest.approx(53 / 3),
        pytest.approx(53 / 3),
    ]
    texts = {"label", "workers", "workload", "goal", "names"}
    assert all(value is None for name, value in row.items() if name not in {*known, *texts})


def test_a_configuration_that_never_reaches_the_goal_has_no_time() -> None:
    comparison = compare(repeats([None, None]), repeats([5.0, 5.0], workers=2))
    first, second = comparison.rows
    assert [
        first[name] for name in ("reached", "mean_s", "speedup", "price_index", "epochs_to_goal")
    ] == [0] + [None] * 4
    assert (second["speedup"], second["efficiency"]) == (None, None), (
        "the fewest workers have no time"
    )


def test_a_program_without_a_goal_has_its_training_times() -> None:
    records = [replace(record, reached=None) for record in repeats([None, None], goal=None)]
    comparison = compare(records)
    (row,) = comparison.rows
    assert "no goal. Times are training times, and" in comparison.notes()[0]
    assert (row["mean_s"], row["reached"], row["missed"], row["goal"]) == (
        20.0,
        None,
        None,
        "no goal",
    )


def test_values_after_a_fixed_time_are_compared_and_times_are_not() -> None:
    goal = {"metric": "val_global_Prec@1", "threshold": None, "minimize": False, "budget_s": 60.0}
    runs = {"sgd": [90.0, 92.0], "adam": [80.0, 81.0]}
    records = [
        replace(record, goal_value=value)
        for name, values in runs.items()
        for record, value in zip(
            repeats([61.0, 62.0], algorithm=name, goal=goal), values, strict=True
        )
    ]
    missed = repeats([None], algorithm="lamb", goal=goal)
    comparison = compare(records, missed)
    rows = {row["label"]: row for row in comparison.rows}
    assert [rows[name]["goal_value"] for name in ("sgd", "adam", "lamb")] == [91.0, 80.5, None]
    assert rows["sgd"]["goal_value_standard_deviation"] == pytest.approx(2**0.5)
    assert (
        rows["sgd"]["mean_s"],
        rows["sgd"]["speedup"],
        comparison.tests,
        comparison.profile,
    ) == (61.5, None, (), {})
    text = comparison.as_markdown()
    assert "| VALUE |" in text and "VALUE is the mean of the best values" in text
    assert "VALUE" not in compare(repeats([9.0, 11.0])).as_markdown()


def test_a_mean_value_needs_the_value_of_every_run() -> None:
    """A metric that is NaN from the first validation has no value, so there is no mean."""
    goal = {"metric": "val_global_PPL", "threshold": None, "minimize": True, "budget_s": 60.0}
    lost = [None, None, 150.0]
    records = []
    for record, value in zip(repeats([61.0, 61.0, 61.0], goal=goal), lost, strict=True):
        records.append(replace(record, goal_value=value, best=value))
    comparison = compare(
        records, repeats([60.0, 60.0, 60.0], goal=goal, algorithm="a"), baseline="sgd"
    )
    rows = {row["label"]: row for row in comparison.rows}
    names = ("runs", "reached", "missed", "goal_value", "goal_value_standard_deviation", "best")
    assert [rows["sgd"][name] for name in names] == [3, 3, 0, None, None, None]
    assert [row["times_as_fast"] for row in comparison.rows] == [None, None], "a fixed time"
    (row,) = compare([replace(record, goal_value=150.0, best=150.0) for record in records]).rows
    assert [row[name] for name in names] == [3, 3, 0, 150.0, 0.0, 150.0]


def test_speed_up_efficiency_and_price() -> None:
    """Two workers take 6 instead of 10 seconds: index (2 / 1) * (6 / 10)^2 = 0.72."""
    comparison = compare(
        repeats([9.0, 11.0]), repeats([6.0], workers=2), price=lambda seconds, k: seconds * k / 100
    )
    one, two = comparison.rows
    assert (one["speedup"], one["price"], one["price_index"]) == (1.0, 0.1, 1.0)
    assert one["speedup_without_communication"] == pytest.approx(10 / 7.5)
    assert (two["speedup"], two["efficiency"]) == pytest.approx((10 / 6, 10 / 12))
    assert two["speedup_without_communication"] == pytest.approx(10 / 4.5)
    assert (two["price"], two["price_index"]) == pytest.approx((0.12, 0.72))


def test_a_series_has_its_own_base() -> None:
    comparison = compare(
        repeats([8.0], workers=4, algorithm="adam"), repeats([10.0]), repeats([5.0], workers=2)
    )
    assert {(row["label"], row["workers"]): row["speedup"] for row in comparison.rows} == {
        ("adam", 4): 1.0,
        ("sgd", 1): 1.0,
        ("sgd", 2): 2.0,
    }


def on_hosts(hosts: int, times: list[float | None], workers: int, **others: Any) -> list[RunRecord]:
    return repeats(times, workers, machine={"cpu": "A", "hosts": hosts}, **others)


def test_equal_workers_on_more_hosts_have_a_speed_up_of_their_own() -> None:
    times = {(1, 1): 100.0, (2, 1): 50.0, (2, 2): 80.0}
    records = [on_hosts(hosts, [time_s], workers) for (workers, hosts), time_s in times.items()]
    comparison = compare(*records, price=lambda seconds, workers: seconds * workers)
    found = {row["mean_s"]: (row["speedup"], row["efficiency"]) for row in comparison.rows}
    assert found == {100.0: (1.0, 1.0), 50.0: (2.0, 1.0), 80.0: (1.25, 0.625)}
    rest = {
        row["mean_s"]: (row["speedup_without_communication"], row["price_index"])
        for row in comparison.rows
    }
    # A quarter of each time is communication.
    expected = {100.0: (4 / 3, 1.0), 50.0: (8 / 3, 0.5), 80.0: (5 / 3, 1.28)}
    assert rest == {mean_s: pytest.approx(pair) for mean_s, pair in expected.items()}


def test_two_rows_of_the_fewest_workers_are_no_base() -> None:
    records = [on_hosts(1, [50.0], 2), on_hosts(2, [80.0], 2), on_hosts(2, [40.0], 4)]
    other = on_hosts(1, [30.0], 2, algorithm="adam")
    rows = compare(*records, other, baseline="sgd").rows
    found = {row["mean_s"]: (row["speedup"], row["times_as_fast"]) for row in rows}
    none = (None, None)
    assert found == {30.0: (1.0, None), 50.0: none, 80.0: none, 40.0: (None, 1.0)}


def test_each_pair_with_the_same_number_of_workers_is_tested() -> None:
    times = {"adam": [8.0, 8.2, 8.1], "sgd": [10.0, 10.4, 10.2], "lamb": [9.9, 10.6, 10.3]}
    records = [
        repeats(list(values), k, algorithm=name) for name, values in times.items() for k in (1, 2)
    ]
    comparison = compare(*records)
    pairs = (("adam", "lamb"), ("adam", "sgd"), ("lamb", "sgd"))
    assert len(comparison.tests) == 6
    assert {(each["a"], each["b"], each["workers"]) for each in comparison.tests} == {
        (*pair, workers) for pair in pairs for workers in ("1", "2")
    }
    test = next(test for test in comparison.tests if (test["a"], test["b"]) == ("adam", "sgd"))
    logs = {name: [math.log(value) for value in values] for name, values in times.items()}
    wanted = stats.ttest_rel(logs["adam"], logs["sgd"])
    low, high = wanted.confidence_interval()
    assert (test["test"], test["p"]) == ("paired by seed", pytest.approx(wanted.pvalue))
    assert test["ratio"] == pytest.approx(
        statistics.geometric_mean([8 / 10, 8.2 / 10.4, 8.1 / 10.2])
    )
    assert (test["ratio_low"], test["ratio_high"]) == pytest.approx((math.exp(low), math.exp(high)))
    adjusted = multipletests([each["p"] for each in comparison.tests], method="holm")[1]
    assert [each["p_holm"] for each in comparison.tests] == pytest.approx(list(adjusted))
    assert test["verdict"] == "yes"
    assert (
        next(each for each in comparison.tests if each["a"] == "lamb")["verdict"]
        == "no difference shown"
    )


def test_a_baseline_is_the_second_of_each_pair() -> None:
    names = ("adam", "lamb", "sgd")
    records = [
        repeats([10.0 + place, 10.2 + place], algorithm=name) for place, name in enumerate(names)
    ]
    tests = compare(*records, baseline="adam").tests
    assert [(test["a"], test["b"], test["verdict"]) for test in tests] == [
        ("lamb", "adam", "no, slower"),
        ("sgd", "adam", "no, slower"),
    ]
    with pytest.raises(
        ConfigurationError, match="baseline must be one of 'adam', 'lamb', 'sgd', not 'x'"
    ):
        compare(*records, baseline="x")


def test_numbers_of_workers_are_tested_if_there_is_nothing_else() -> None:
    (test,) = compare(repeats([10.0, 10.1]), repeats([5.0, 5.1], workers=2)).tests
    assert (test["workers"], test["verdict"]) == ("1 and 2", "no, slower")


def test_a_group_with_a_miss_is_not_tested() -> None:
    (test,) = compare(
        repeats([1.0, 1.1, None]), repeats([5.0, 5.1, 5.2], algorithm="adam"), baseline="adam"
    ).tests
    assert (test["p"], test["verdict"]) == (None, "not tested: a run missed the goal")
    (test,) = compare(repeats([1.0, 1.1]), repeats([5.0, None], algorithm="adam")).tests
    assert (test["p"], test["verdict"]) == (None, "not tested: a run missed the goal")
    (test,) = compare(repeats([1.0]), repeats([5.0, 6.0], algorithm="adam")).tests
    assert (test["p"], test["verdict"]) == (None, "not tested: each needs two runs with a time")


def test_every_row_has_its_ratio_to_the_baseline_at_equal_workers() -> None:
    times = {
        ("adam", 1): [10.0],
        ("adam", 2): [5.0],
        ("sgd", 1): [20.0],
        ("sgd", 2): [15.0],
        ("sgd", 4): [8.0],
    }
    records = [repeats(list(each), k, algorithm=name) for (name, k), each in times.items()]
    rows = {
        (row["label"], row["workers"]): row["times_as_fast"]
        for row in compare(*records, baseline="sgd").rows
    }
    assert rows == {
        ("adam", 1): 2.0,
        ("adam", 2): 3.0,
        ("sgd", 1): 1.0,
        ("sgd", 2): 1.0,
        ("sgd", 4): 1.0,
    }
    assert {row["times_as_fast"] for row in compare(*records).rows} == {None}, "without a baseline"
    late = compare(repeats([10.0, None], algorithm="adam"), repeats([20.0, 20.0]), baseline="sgd")
    assert [row["times_as_fast"] for row in late.rows] == [None, 1.0]


def test_the_price_index_needs_a_price() -> None:
    runs = repeats([9.0]), repeats([6.0], workers=2)
    assert [row["price_index"] for row in compare(*runs).rows] == [None, None]
    assert [row["price_index"] for row in compare(*runs, price=lambda seconds, k: None).rows] == [
        None,
        None,
    ]


@pytest.mark.parametrize(("missed", "solved"), [(1, True), (2, False), (3, False)])
def test_a_task_is_solved_if_more_than_half_of_the_runs_reach_its_goal(
    missed: int, solved: bool
) -> None:
    groups = pool(repeats([9.0, 11.0, *[None] * missed]))
    assert times_to_goal(groups) == {
        "sgd, 1 worker": {"task 1a on digits": 11.0 if solved else None}
    }


def test_workloads_are_never_tested_against_each_other_but_have_a_profile() -> None:
    other = {**GOAL, "threshold": 1.0}
    records = [
        repeats([10.0, 10.1]),
        repeats([20.0, 20.1], algorithm="adam"),
        repeats([9.0, None, None], task="2a", goal=other),
        repeats([8.0, 8.1], algorithm="adam", task="2a", goal=other),
    ]
    comparison = compare(*records)
    assert [(each["a"], each["b"]) for each in comparison.tests] == [
        ("task 1a, adam", "task 1a, sgd"),
        ("task 2a, adam", "task 2a, sgd"),
    ]
    # On task 1a, adam takes twice the time of sgd; on task 2a, most runs of sgd miss the goal.
    assert comparison.profile["sgd, 1 worker"] == {"score": 0.5, **{f"{r:g}": 0.5 for r in RATIOS}}
    shares = {f"{ratio:g}": 1.0 if ratio >= 2 else 0.5 for ratio in RATIOS}
    assert comparison.profile["adam, 1 worker"] == pytest.approx(
        {"score": 5 / 6, **shares}, abs=0.01
    )
    assert compare(*records[:2]).profile == {}


def test_people_get_tables_with_units_and_notes() -> None:
    comparison = compare(
        repeats([10.0, 12.0]), repeats([5.0], algorithm="a|b"), remarks=["x is left out"]
    )
    text = comparison.as_markdown()
    assert "| MEAN (s) | SD (s) | MEDIAN (s) | 95 % FROM (s) | TO (s) |" in text
    assert "| sgd | 1 | 2 | 2 | 0 | 11.00 | 1.41 | 11.00 |" in text
    assert "| WORKERS | TRAINING (s) | SPEED-UP |" in text, "two tables, each with its units"
    assert "| a\\|b | 1 |" in text, "a bar would end the cell"
    assert "PRICE |" not in text, "a column without values is left out"
    assert "The rows differ in algorithm (a\\|b, sgd)." in text
    assert "Goal: task 1a on digits: Prec@1 \\>= 95." in text
    assert text.endswith("x is left out\n")


def test_hashes_are_short_in_the_notes() -> None:
    records = [a_record(commit, software={"commit": commit * 40}) for commit in "ab"]
    assert f"software.commit ({'a' * 12}, {'b' * 12})." in compare(records).notes()[0]


def test_csv_and_json_have_everything() -> None:
    comparison = compare(repeats([10.0, 10.0]), repeats([5.0, 5.0], algorithm="=adam"))
    rows = list(csv.DictReader(io.StringIO(comparison.as_csv())))
    assert list(rows[0]) == [column.key for column in COLUMNS]
    assert rows[0]["label"] == "'=adam", "a spreadsheet would run it"
    assert (float(rows[0]["mean_s"]), rows[0]["price"]) == (5.0, "")
    content = json.loads(json.dumps(comparison.as_json(), allow_nan=False))
    assert [row["names"] for row in content["rows"]] == [["r0", "r1"], ["r0", "r1"]]
    assert (content["tests"][0]["p"], content["tests"][0]["effect"]) == (0.0, None), (
        "JSON has no infinite numbers"
    )
    assert math.isinf(comparison.tests[0]["effect"])
    assert content["differences"] == {"algorithm": ["=adam", "sgd"]}


def test_numbers_have_the_digits_of_their_columns() -> None:
    (row,) = compare(repeats([1.0, 2.0, 4.0])).rows
    shown = {
        column.header: cell(column, row) for column in COLUMNS if row.get(column.key) is not None
    }
    low, high = log_interval([1.0, 2.0, 4.0]) or (0.0, 0.0)
    assert (shown["MEAN (s)"], shown["MEDIAN (s)"], shown["SD (s)"]) == ("2.33", "2.00", "1.53")
    assert (shown["OLYMPIC (s)"], shown["SAMPLES/S"]) == ("2.00", "100")
    assert (shown["95 % FROM (s)"], shown["TO (s)"]) == (f"{low:.2f}", f"{high:.2f}")


def test_cells() -> None:
    assert cell(Column("x", "X", 2), {"x": None}) == "-"
    assert cell(Column("x", "X", 1), {"x": 1234.56}) == "1,234.6"
    for name in ("p", "p_holm"):
        assert cell(Column(name, "P", 4), {name: 3e-7}) == "< 0.0001", "not 0.0000"


def test_no_control_character_gets_into_a_table() -> None:
    comparison = compare(repeats([10.0]), repeats([5.0], algorithm="\x1b[31mred\x9b\r"))
    assert "\x1b" not in comparison.as_csv() + comparison.as_markdown()
    assert comparison.as_csv().splitlines()[1].startswith("[31mred,")
    assert safe_cell("\x1b=1+1") == "'=1+1"
