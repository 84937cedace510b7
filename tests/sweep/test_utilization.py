"""The compute utilization over the bandwidth, against numbers computed by hand."""

from __future__ import annotations

import math

import pytest

from mlbench_core.network.description import Link, Network
from mlbench_core.sweep.fastest_methods import some_workers
from mlbench_core.sweep.grouped_runs import gather
from mlbench_core.sweep.result_table import utilization_rows
from mlbench_core.sweep.toml_file import parse_sweep
from mlbench_core.sweep.utilization import (
    bandwidth_needed,
    bandwidth_text,
    predict_utilization,
    utilization,
)
from tests.sweep.test_modelled import FILE, gathered, result

# A step has 20 ms of computing, 1 ms of compressing and an all-reduce of 1 MB. With two workers, it
# takes 2 (R + e): R is the round trip of 1 ms and 0.1 ms of Gloo's work, and e the time of half of
# the payload, with 1514 bytes on the wire for 1448.
HALF_BITS = 1e6 / 2 * 8 * 1514 / 1448
ROUND_TRIP_S = 0.0011


def by_hand(bandwidth: float) -> float:
    return 0.02 / (0.021 + 2 * (ROUND_TRIP_S + HALF_BITS / bandwidth))


@pytest.mark.parametrize("bandwidth", [10**7, 10**8, 10**9])
def test_the_share_of_computation_in_a_step(bandwidth: int) -> None:
    run = result("centralized_sgd", 2)
    share = utilization(run, Network(Link(bandwidth, 0.001)), 2)
    assert share == pytest.approx(by_hand(bandwidth), rel=1e-3)


def test_the_bandwidth_for_a_share() -> None:
    """Half of a step is computing at the bandwidth that is the constant of the law."""
    law = lambda bandwidth: 1.0 if bandwidth is None else bandwidth / (bandwidth + 1e8)  # noqa: E731
    found = [bandwidth_needed(law, target) for target in (0.5, 0.75, 0.9)]
    assert found == pytest.approx([1e8, 3e8, 9e8], rel=2e-3)
    assert bandwidth_needed(law, 0.001) == 1e6, "the lower end is enough"
    assert bandwidth_needed(law, 0.9999) == math.inf, "1000 Gbit/s are above the range"
    assert bandwidth_needed(lambda _: 0.4, 0.5) is None


def test_bandwidths_have_two_digits() -> None:
    texts = list(map(bandwidth_text, (1e6, 1.24e7, 9.99e8, 1.26e9, math.inf, None)))
    assert texts == [
        "1 Mbit/s or less", "12 Mbit/s", "1 Gbit/s", "1.3 Gbit/s", "more than 100 Gbit/s",
        "not at any bandwidth",
    ]  # fmt: skip


def test_the_table_of_a_sweep() -> None:
    """The bandwidth for half of the step is known in closed form.

    For 90 %, communication would have to take 1.2 ms, which is less than two round trips.
    """
    found = predict_utilization(gathered(parse_sweep(FILE)), 2)
    assert found is not None and not found.left_out and set(found.shares) == set(found.needed)
    half = HALF_BITS / ((0.02 / 0.5 - 0.021) / 2 - ROUND_TRIP_S)
    assert found.needed["centralized_sgd"][0] == pytest.approx(half, rel=2e-3)
    (first, second) = utilization_rows([found])
    assert first == {
        "workers": 2, "algorithm": "centralized_sgd", "50%": "500 Mbit/s", "75%": "2.4 Gbit/s",
        "90%": "not at any bandwidth",
    }  # fmt: skip
    assert second["50%"] == "5 Mbit/s"


def test_an_algorithm_without_collectives_is_left_out() -> None:
    lost = {"collectives": None, "collectives_to_goal": None}
    found = predict_utilization(gathered(parse_sweep({**FILE, "time": "measured"}), **lost), 2)
    assert found is not None and set(found.shares) == {"centralized_sgd"}
    (sentence,) = found.left_out
    assert sentence.startswith("power_sgd is not in the figure with 2 workers: run power-sgd-2-")


def test_at_most_three_numbers_of_workers_have_a_figure() -> None:
    assert some_workers((2, 4)) == (2, 4)
    assert some_workers((2, 4, 8, 16, 32)) == (2, 8, 32)
    assert some_workers((2, 4, 8, 16, 32, 64)) == (4, 16, 64)


def test_a_limit_does_not_make_a_step_shorter() -> None:
    """Without processor time, the prediction starts from the measured seconds."""
    sweep = parse_sweep({**FILE, "time": "measured"})
    missed = {"reached": False, "time_to_goal_s": None, "steps_to_goal": None}
    no_cpu = {"compute_cpu_s": None, "communication_cpu_s": None}
    records = {}
    for point in sweep.points():
        records[point.name] = result(point.algorithm, point.workers, **missed, **no_cpu)
    found = []
    for limit_s in (None, 300.0):
        outcome = gather(sweep.points(), records, sweep.networks, limit_s=limit_s)
        found.append(predict_utilization(outcome, 2))
    assert found[0] is not None and found[0] == found[1]
