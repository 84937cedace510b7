"""Statistics, bandwidths and the fit of latency and bandwidth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from latency import (
    BUS_FACTORS,
    Measurement,
    algorithm_bandwidth,
    bus_bandwidth,
    bus_factor,
    element_counts,
    fit_latency,
    summarize,
)

SIZES = [4 * count for count in element_counts()]


@pytest.mark.parametrize("count", [1, 2, 99, 100, 1001])
def test_statistics_are_numpys(count: int) -> None:
    times = np.random.default_rng(count).lognormal(size=count)
    found = summarize(times)
    assert found.count == count
    assert found.mean_s == pytest.approx(np.mean(times))
    assert found.p50_s == pytest.approx(np.median(times))
    assert found.p99_s == pytest.approx(np.percentile(times, 99))
    assert (found.min_s, found.max_s) == (times.min(), times.max())


@pytest.mark.parametrize(
    ("times", "message"), [([], "at least one time"), ([1.0, -2.0], r"-2\.0"), ([math.nan], "nan")]
)
def test_statistics_refuse_what_is_no_time(times: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        summarize(times)


@pytest.mark.parametrize(
    ("collective", "workers", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 2 * 7 / 8),
        ("all_gather", 4, 3 / 4),
        ("reduce_scatter", 4, 3 / 4),
        ("all_to_all", 8, 7 / 8),
        ("broadcast", 8, 1.0),
        ("reduce", 8, 1.0),
        ("send_recv", 2, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(collective: str, workers: int, factor: float) -> None:
    assert bus_factor(collective, workers) == pytest.approx(factor)
    assert bus_bandwidth(collective, 1e6, 0.5, workers) == pytest.approx(2e6 * factor)


def test_bandwidths_refuse_bad_input() -> None:
    with pytest.raises(ValueError, match=r"one of all_reduce, .*, not 'gossip'"):
        bus_factor("gossip", 2)
    with pytest.raises(ValueError, match="world_size must be at least 1, not 0"):
        bus_factor("all_reduce", 0)
    with pytest.raises(ValueError, match="must be finite and positive"):
        algorithm_bandwidth(1.0, 0.0)


@pytest.mark.parametrize("alpha_s", [5e-6, 200e-6])
@pytest.mark.parametrize("beta", [1e8, 5e9, 2e11])
def test_the_fit_finds_latency_and_bandwidth_in_noise(alpha_s: float, beta: float) -> None:
    noise = np.random.default_rng(0).lognormal(sigma=0.1, size=len(SIZES))
    fit = fit_latency(
        SIZES, [(alpha_s + n / beta) * factor for n, factor in zip(SIZES, noise, strict=True)]
    )
    assert fit.alpha_s == pytest.approx(alpha_s, rel=0.1)
    assert fit.beta_bytes_per_s == pytest.approx(beta, rel=0.1)
    assert 0.05 < fit.relative_error < 0.2
    assert fit.seconds(0) == fit.alpha_s
    assert fit.seconds(beta) == pytest.approx(1 + alpha_s, rel=0.1)


def test_a_plain_least_squares_would_lose_the_latency() -> None:
    """The reason for relative deviations: 1 % of noise in the largest times makes the latency
    negative."""
    noise = np.random.default_rng(1).normal(1, 0.01, size=len(SIZES))
    times = [(2e-6 + n / 1e9) * factor for n, factor in zip(SIZES, noise, strict=True)]
    plain = np.polynomial.polynomial.polyfit(SIZES, times, 1)[0]
    assert plain < 0
    assert fit_latency(SIZES, times).alpha_s == pytest.approx(2e-6, rel=0.02)


def test_the_fit_stays_physical() -> None:
    falling = fit_latency([1, 10, 100], [3.0, 2.0, 1.0])
    assert falling.beta_bytes_per_s == math.inf
    assert 1.0 < falling.alpha_s < 2.0
    convex = fit_latency([1, 10, 100], [1e-9, 1e-3, 1.0])
    assert convex.alpha_s >= 0
    assert convex.beta_bytes_per_s > 0
    assert str(fit_latency([0, 1e9], [1e-4, 1.0001])) == "100 µs + n / (1 GB/s)"


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ([1, 2], [1.0], "one time for each size"),
        ([2, 2], [1.0, 1.0], "at least 2 different sizes .* not 1"),
        ([1, 2], [1.0, 0.0], "finite and positive"),
        ([1, 2], [1.0, math.inf], "inf"),
    ],
)
def test_the_fit_refuses_bad_input(sizes: list[float], times: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_latency(sizes, times)


def test_sizes_are_the_specified_ones_each_once() -> None:
    expected = sorted(set(np.rint(np.logspace(0, 8, num=80)).astype(int).tolist()))
    assert element_counts() == expected
    assert (len(expected), expected[0], expected[-1]) == (77, 1, 10**8)
    with pytest.raises(ValueError, match="num must be at least 1, not 0"):
        element_counts(0)


def test_a_measurement_as_a_row() -> None:
    measured = Measurement(
        "all_reduce", "gloo", "cpu", "float32", 4, 250, 1000, 7, (0.001, 0.002, 0.006)
    )
    row = measured.row()
    assert (row["mean_s"], row["p50_s"], row["min_s"]) == (pytest.approx(0.003), 0.002, 0.001)
    assert row["algorithm_bandwidth_bytes_per_s"] == pytest.approx(500_000)
    assert row["bus_bandwidth_bytes_per_s"] == pytest.approx(750_000)
    assert (row["repetitions"], row["operations"], row["wrong_elements"]) == (3, 7, 0)
    assert set(BUS_FACTORS) >= {row["collective"]}
