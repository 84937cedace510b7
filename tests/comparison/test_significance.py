"""Intervals, tests and profiles agree with scipy and statsmodels, and are defined where those
divide by zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st
from statsmodels.stats.meta_analysis import effectsize_smd
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

from mlbench_core.comparison.significance import (
    confidence_interval,
    describe,
    log_interval,
    olympic_mean,
    paired_test,
    performance_profile,
    performance_score,
    student_cdf,
    student_quantile,
    welch_test,
)

# The same examples in every run, and no database in the folder of the project.
repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=60)
# Like seconds to a goal. Whole milliseconds: scipy gives up on samples that differ in the last bits
# only.
seconds = st.integers(1, 10**7).map(lambda number: number / 1000)
degrees = st.one_of(st.floats(0.3, 60), st.floats(1, 9).map(lambda exponent: 10**exponent))


def samples(least: int) -> st.SearchStrategy[list[float]]:
    """Samples of at least ``least`` values that vary."""
    return st.lists(seconds, min_size=least, max_size=12).filter(
        lambda values: len(set(values)) > 1
    )


@repeatable
@given(t=st.one_of(st.floats(-8, 8), st.floats(-1e6, 1e6)), df=degrees)
@example(t=2.0, df=2000.0)  # large, but not yet almost normal
def test_the_distribution_is_scipys(t: float, df: float) -> None:
    assert student_cdf(t, df) == pytest.approx(scipy.stats.t.cdf(t, df), abs=1e-9, rel=0)


@repeatable
@given(p=st.floats(1e-6, 1 - 1e-6), df=degrees)
def test_the_quantile_is_scipys(p: float, df: float) -> None:
    assert student_quantile(p, df) == pytest.approx(scipy.stats.t.ppf(p, df), abs=1e-9, rel=1e-9)


@pytest.mark.parametrize("df", [0.01, 1, 1.5, 2, 39.9, 40.1, 0.999e6, 1.001e6, 1e12])
def test_the_quantile_is_the_inverse_of_the_distribution(df: float) -> None:
    """Also on both sides of the degrees of freedom at which the formulas change."""
    for p in (0.3, 0.5, 0.6, 0.7):
        assert student_cdf(student_quantile(p, df), df) == pytest.approx(p, abs=1e-12)


def test_the_ends_of_the_distribution() -> None:
    assert (student_cdf(-math.inf, 3), student_cdf(0, 3), student_cdf(math.inf, 3)) == (0, 0.5, 1)
    # Cauchy: P(T > t) is nearly 1 / (pi t), and P(T > 1e300) is still above 0.
    assert student_cdf(-1e300, 1) == pytest.approx(1 / (math.pi * 1e300), rel=1e-9)
    assert student_quantile(0.9999, 0.01) == math.inf
    assert student_quantile(0.0001, 0.01) == -math.inf


@repeatable
@given(values=samples(2), level=st.sampled_from([0.5, 0.9, 0.95, 0.999]))
def test_the_interval_is_that_of_scipy_and_statsmodels(values: list[float], level: float) -> None:
    found = confidence_interval(values, level)
    scale = scipy.stats.sem(values)
    expected = scipy.stats.t.interval(level, len(values) - 1, loc=np.mean(values), scale=scale)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9 * scale)
    assert found == pytest.approx(
        DescrStatsW(values).tconfint_mean(alpha=1 - level), rel=1e-9, abs=1e-9 * scale
    )


def test_the_interval_on_the_scale_of_logarithms() -> None:
    values = [0.25, 0.5, 1.0]
    logs = np.log(values)
    low, high = scipy.stats.t.interval(0.9, 2, loc=logs.mean(), scale=scipy.stats.sem(logs))
    assert log_interval(values, 0.9) == pytest.approx((math.exp(low), math.exp(high)))
    assert log_interval([0.0, 1.0]) is None, "0 has no logarithm"


@repeatable
@given(a=samples(2), b=samples(2), level=st.sampled_from([0.9, 0.95]))
def test_welchs_test_is_that_of_scipy_and_statsmodels(
    a: list[float], b: list[float], level: float
) -> None:
    found = welch_test(a, b, level)
    expected = scipy.stats.ttest_ind(a, b, equal_var=False)
    assert found.difference == pytest.approx(np.mean(a) - np.mean(b), abs=1e-9 * max(*a, *b))
    assert found.t == pytest.approx(expected.statistic, rel=1e-9, abs=1e-9)
    assert found.df == pytest.approx(expected.df, rel=1e-9)
    close = {"rel": 1e-7, "abs": 1e-9}
    assert found.p == pytest.approx(expected.pvalue, **close)
    less, greater = (
        scipy.stats.ttest_ind(a, b, equal_var=False, alternative=side)
        for side in ("less", "greater")
    )
    assert (found.p_less, found.p_greater) == pytest.approx((less.pvalue, greater.pvalue), **close)
    interval = expected.confidence_interval(level)
    near = 1e-9 * max(map(abs, interval))
    assert found.interval == pytest.approx((interval.low, interval.high), abs=near)
    compared = CompareMeans(DescrStatsW(a), DescrStatsW(b))
    assert found.interval == pytest.approx(
        compared.tconfint_diff(alpha=1 - level, usevar="unequal"), abs=near
    )


@repeatable
@given(a=samples(2), b=samples(2))
def test_the_effect_is_that_of_statsmodels(a: list[float], b: list[float]) -> None:
    expected, _ = effectsize_smd(
        np.mean(a), np.std(a, ddof=1), len(a), np.mean(b), np.std(b, ddof=1), len(b)
    )
    assert welch_test(a, b).effect == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_samples_that_do_not_vary_are_compared_by_their_means() -> None:
    same = welch_test([3, 3], [3.0, 3.0, 3.0])
    assert (same.difference, same.t, same.effect, same.interval) == (0, 0, 0, (0, 0))
    assert (same.df, same.p, same.p_less, same.p_greater) == (3, 1, 0.5, 0.5)
    faster = welch_test([2, 2], [3, 3])
    assert (faster.difference, faster.t, faster.effect, faster.interval) == (
        -1,
        -math.inf,
        -math.inf,
        (-1, -1),
    )
    assert (faster.p, faster.p_less, faster.p_greater) == (0, 0, 1)
    # Only one of the two varies: the degrees of freedom are those of the other one.
    assert welch_test([1, 2, 3], [5, 5, 5, 5]).df == pytest.approx(2)


def test_samples_that_nearly_do_not_vary_are_still_compared() -> None:
    """The fourth power of their standard errors is 0 as a float."""
    tiny = welch_test([1e-100, 2e-100, 3e-100], [1e-100, 2e-100, 6e-100])
    usual = welch_test([1, 2, 3], [1, 2, 6])
    assert (tiny.t, tiny.df, tiny.p) == pytest.approx((usual.t, usual.df, usual.p), rel=1e-12)


@repeatable
@given(values=samples(3))
def test_the_olympic_mean_is_a_trimmed_mean(values: list[float]) -> None:
    assert olympic_mean(values) == pytest.approx(np.mean(sorted(values)[1:-1]), rel=1e-12)


def test_a_description_has_no_statistic_that_needs_more_values() -> None:
    empty, one, two = describe([]), describe([4]), describe([4, 6])
    assert (empty.n, empty.mean, empty.median, empty.interval) == (0, None, None, None)
    assert (one.mean, one.median, one.standard_deviation, one.interval) == (4, 4, None, None)
    assert (two.mean, two.median, two.standard_deviation, two.olympic_mean) == (
        5,
        5,
        math.sqrt(2),
        None,
    )
    three = describe([4, 6, 20])
    assert (three.n, three.mean, three.median, three.olympic_mean) == (3, 10, 6, 6)
    assert three.interval == confidence_interval([4, 6, 20])


TIMES = {
    "sgd": {"1a": 10.0, "2a": 40.0, "3a": 9.0, "4a": None},
    "adam": {"1a": 15.0, "2a": 20.0, "3a": None, "4a": None},
    "lbfgs": {"2a": 81.0},
}


def test_a_performance_profile_by_hand() -> None:
    """Ratios: sgd 1, 2, 1, never; adam 1.5, 1, never, never; lbfgs never, 4.05, never, never."""
    assert performance_profile(TIMES, [1, 1.5, 2, 4, 4.05]) == {
        "sgd": [0.5, 0.5, 0.75, 0.75, 0.75],
        "adam": [0.25, 0.5, 0.5, 0.5, 0.5],
        "lbfgs": [0, 0, 0, 0, 0.25],
    }
    scores = performance_score(TIMES)
    assert scores == pytest.approx({"sgd": (3 + 2 + 3) / 12, "adam": (2.5 + 3) / 12, "lbfgs": 0})
    assert performance_score(TIMES, tau_max=5)["lbfgs"] == pytest.approx(0.95 / 16)


@repeatable
@given(
    st.integers(1, 4).flatmap(
        lambda tasks: st.lists(
            st.lists(st.one_of(st.none(), st.floats(0.5, 100)), min_size=tasks, max_size=tasks),
            min_size=1,
            max_size=4,
        )
    )
)
def test_the_score_is_the_area_below_the_profile(table: list[list[float | None]]) -> None:
    """AlgoPerf integrates numerically; a fine grid of midpoints comes as close as its steps
    allow."""
    times = {
        f"a{row}": {f"t{task}": time for task, time in enumerate(each)}
        for row, each in enumerate(table)
    }
    grid = 1 + 3 * (np.arange(600) + 0.5) / 600
    profile = performance_profile(times, grid)
    for name, score in performance_score(times).items():
        assert sorted(profile[name]) == profile[name]
        assert score == pytest.approx(np.mean(profile[name]), abs=1 / 600)


WELCH_NAN = r"b\[1\] must be finite, not nan: leave out"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: student_cdf(math.nan, 3), ValueError, "t must be a number, not nan"),
        (lambda: student_cdf(1, 0), ValueError, "df must be finite and positive, not 0"),
        (
            lambda: student_quantile(0.9, math.inf),
            ValueError,
            "df must be finite and positive, not inf",
        ),
        (lambda: student_quantile(1, 3), ValueError, "p must be above 0 and below 1, not 1"),
        (lambda: student_quantile("0.9", 3), TypeError, "p must be a number, not '0.9'"),
        (
            lambda: confidence_interval([1, math.inf]),
            ValueError,
            r"values\[1\] must be finite, not inf",
        ),
        (
            lambda: confidence_interval([1, 2], 95),
            ValueError,
            "level must be above 0 and below 1, not 95",
        ),
        (lambda: olympic_mean([1, None, 2]), TypeError, r"values\[1\] must be a number, not None"),
        (lambda: describe([math.nan]), ValueError, r"values\[0\] must be finite, not nan"),
        (
            lambda: welch_test([1], [1, 2]),
            ValueError,
            "a must have at least 2 values, not 1: repeat the run",
        ),
        (lambda: welch_test([1, 2], [1, math.nan]), ValueError, WELCH_NAN),
        (lambda: welch_test([1, 2], [1, 2], level=0), ValueError, "level must be above 0"),
        (lambda: paired_test([1, 2], [1, 2], level=1), ValueError, "level must be above 0"),
        (
            lambda: performance_profile({}, [1]),
            ValueError,
            "times must have at least one algorithm and one task",
        ),
        (
            lambda: performance_profile({"sgd": {}}, [1]),
            ValueError,
            "times must have at least one algorithm",
        ),
        (
            lambda: performance_profile({"sgd": {"1a": 0}}, [1]),
            ValueError,
            "the time of sgd on 1a must be finite",
        ),
        (
            lambda: performance_profile({"sgd": {"1a": 1}}, [0.5]),
            ValueError,
            "ratios must be finite and at least 1",
        ),
        (
            lambda: performance_score({"sgd": {"1a": math.inf}}),
            ValueError,
            "the time of sgd on 1a must be finite",
        ),
        (
            lambda: performance_score({"sgd": {"1a": 1}}, 1),
            ValueError,
            "tau_max must be finite and above 1, not 1",
        ),
    ],
)
def test_wrong_input_is_named(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call()


@pytest.mark.parametrize("values", [[], [5.0]])
def test_too_few_values_have_no_interval(values: Sequence[float]) -> None:
    assert confidence_interval(values) is None
    assert olympic_mean([*values, 1.0]) is None
