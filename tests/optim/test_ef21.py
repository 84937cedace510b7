"""EF21, EF21-SGDM, EF21-Muon and ARC-Top-K: real processes over Gloo against the references,
closed forms, and the claims of the papers that can be computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch import ARCTopKAggregation, EF21Aggregation
from mlbench_core.optim.pytorch import EF21
from tests.helpers.ranks import run_ranks
from tests.optim import ef21_workers as workers
from tests.optim.weight_averaging import gradient, start
from tests.references.arc_top_k import arc_top_k
from tests.references.ef21 import ef21
from tests.references.muon import newton_schulz

Ranks = list[dict[str, Any]]
MOMENTA = pytest.mark.parametrize("momentum", [0.0, workers.MOMENTUM])


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """The results of each worker, by scenario. One start of the processes serves all tests."""
    return run_ranks(workers.WORKERS, workers.run_all)


def assert_close(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def estimate_of(state: Any) -> Tensor:
    """G_i of a worker."""
    return state["momentum"]["x"] - state["memory"]["x"]


def references(ranks: Ranks, k: int, momentum: float) -> list[dict[str, Any]]:
    return [result[f"references {k}"][str(momentum)] for result in ranks[:k]]


@pytest.mark.parametrize("k", [2, 3])
@MOMENTA
def test_it_is_the_reference(ranks: Ranks, k: int, momentum: float) -> None:
    beta = 1 - momentum
    x, M, G_i, G = ef21(start(), gradient, k, 0.1, workers.STEPS, workers.SIZE, beta)
    found = references(ranks, k, momentum)
    for rank, result in enumerate(found):
        assert_close(result["x"], x)
        assert torch.equal(result["x"], found[0]["x"])
        assert_close(result["state"]["momentum"]["x"], M[rank])
        assert_close(estimate_of(result["state"]), G_i[rank])
        assert_close(result["state"]["estimates"]["x"], G)
    assert_close(sum(estimate_of(result["state"]) for result in found) / k, G)


@pytest.mark.parametrize("k", [2, 3])
@MOMENTA
def test_with_muon_it_is_ef21_muon(ranks: Ranks, k: int, momentum: float) -> None:
    """To the precision of bfloat16, in which torch iterates."""

    def direction(G: Tensor) -> Tensor:
        return 0.2 * max(G.shape) ** 0.5 * newton_schulz(G)

    x, *_ = ef21(start(), gradient, k, 0.05, workers.STEPS, workers.SIZE, 1 - momentum, direction)
    for result in references(ranks, k, momentum):
        assert (result["muon"] - x).norm() < 0.01 * (x - start()).norm()


@pytest.mark.parametrize("k", [2, 3])
@MOMENTA
def test_messages_have_the_documented_bytes(ranks: Ranks, k: int, momentum: float) -> None:
    for result in references(ranks, k, momentum):
        later = (8 + 4) * workers.SIZE
        assert result["sent"] == [8 * 35 + 8] + [later + 8] * (workers.STEPS - 1)  # and a flag


@pytest.mark.parametrize("k", [2, 3])
@MOMENTA
def test_a_resumed_run_has_the_same_bits(ranks: Ranks, k: int, momentum: float) -> None:
    for result in references(ranks, k, momentum):
        assert torch.equal(result["resumed"], result["x"])


@pytest.mark.parametrize("k", [2, 3])
def test_with_all_coordinates_it_is_sgd_with_momentum(ranks: Ranks, k: int) -> None:
    """SGD's dampening makes its momentum an average; its first momentum is the gradient, too."""
    for result in ranks[:k]:
        assert_close(*result[f"whole {k}"])
        assert_close(*result[f"all rows {k}"])


def test_it_converges_where_averaged_top_k_grows(ranks: Ranks) -> None:
    """The largest coordinate of each worker is -3, which points away from the optimum."""
    growth = (1 + 11 * workers.GROWTH_LR / 6) ** 10
    for result in ranks[:3]:
        assert_close(result["growth"]["plain"], torch.full((3,), growth, dtype=torch.float64))
        assert result["growth"]["ef21"].norm() < 1e-4


def test_it_reaches_the_optimum_of_different_functions(ranks: Ranks) -> None:
    curvatures, optima = zip(*map(workers.far_problem, range(workers.WORKERS)), strict=True)
    weighted = sum(c * o for c, o in zip(curvatures, optima, strict=True))
    optimum = weighted / sum(curvatures)
    zeros = torch.zeros(10, dtype=torch.float64)
    x, *_ = ef21(zeros, workers.far, workers.WORKERS, workers.FAR_LR, workers.FAR_STEPS, K=1)
    for result in ranks:
        assert_close(result["far_optima"]["ef21"], x)
        assert (x - optimum).norm() < 1e-5
        assert (result["far_optima"]["classical"] - optimum).norm() > 0.5
    x, *_ = ef21(zeros, workers.far, workers.WORKERS, workers.FAR_LR, 3 * workers.FAR_STEPS, K=1)
    assert (x - optimum).norm() < 1e-14


@pytest.mark.parametrize("scenario", ["overflow", "overflow of rows"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_after_an_overflow_the_estimate_is_still_the_average(
    ranks: Ranks, value: float, scenario: str
) -> None:
    # A nan is not equal to itself, and its key in a result of another process is another object.
    found = []
    for result in ranks:
        entries = [v for (kind, _), v in result[scenario].items() if str(kind) == str(value)]
        assert entries[:2] == [False, False]
        found.append(entries[2])
    G = found[0]["estimates"]["x"]
    assert G.isfinite().all()
    assert_close(sum(map(estimate_of, found)) / len(found), G)


def test_denominators_that_change_divide_the_result_alone(ranks: Ranks) -> None:
    for result in ranks:
        assert_close(*result["denominators"])


def test_workers_without_a_state_of_their_own_start_from_the_estimate(ranks: Ranks) -> None:
    states = [result["joined"] for result in ranks]
    average = sum(map(estimate_of, states)) / len(states)
    for state in states:
        assert_close(state["estimates"]["x"], average, atol=1e-5)
        assert torch.equal(state["estimates"]["x"], states[0]["estimates"]["x"])


class TestARCTopK:
    @pytest.mark.parametrize("k", [2, 3])
    @MOMENTA
    def test_it_is_the_reference(self, ranks: Ranks, k: int, momentum: float) -> None:
        generator = torch.Generator().manual_seed(workers.ARC["seed"])

        def draw() -> Tensor:
            return torch.randn(7, workers.ARC["rank"], generator=generator, dtype=torch.float64)

        beta = 1 - momentum
        x, M, G_i, G = arc_top_k(
            start(), gradient, k, 0.1, workers.STEPS, workers.ARC["size"], draw, beta
        )
        found = [result[f"arc {k}"][str(momentum)] for result in ranks[:k]]
        for rank, result in enumerate(found):
            assert_close(result["x"], x)
            assert torch.equal(result["x"], found[0]["x"])
            assert_close(result["state"]["momentum"]["x"], M[rank])
            assert_close(estimate_of(result["state"]), G_i[rank])
            assert_close(result["state"]["estimates"]["x"], G)

    @pytest.mark.parametrize("k", [2, 3])
    @MOMENTA
    def test_a_vector_is_sent_whole(self, ranks: Ranks, k: int, momentum: float) -> None:
        def of_row(rank: int, y: Tensor, step: int) -> Tensor:
            return gradient(rank, y.expand(5, 7), step)[0]

        y, *_ = ef21(start()[0], of_row, k, 0.1, workers.STEPS, 7, 1 - momentum)
        for result in ranks[:k]:
            assert_close(result[f"arc {k}"][str(momentum)]["y"], y)

    @pytest.mark.parametrize("k", [2, 3])
    @MOMENTA
    def test_messages_and_resumed_runs(self, ranks: Ranks, k: int, momentum: float) -> None:
        for result in ranks[:k]:
            found = result[f"arc {k}"][str(momentum)]
            # The sketch and the rows of x, y, and two flags, in float64.
            later = 8 * (5 * workers.ARC["rank"] + workers.ARC["size"] * 7 + 7 + 2)
            assert found["sent"] == [8 * (35 + 7 + 2)] + [later] * (workers.STEPS - 1)
            assert torch.equal(found["resumed"][0], found["x"])
            assert torch.equal(found["resumed"][1], found["y"])

    @pytest.mark.parametrize("k", [2, 3])
    def test_the_only_row_that_is_not_zero_is_found(self, ranks: Ranks, k: int) -> None:
        for result in ranks[:k]:
            for row, x in enumerate(result[f"one row {k}"]):
                expected = torch.zeros(5, 7, dtype=torch.float64)
                expected[row] = (k + 1) / 2 * torch.arange(7)
                assert_close(x, expected)

    def test_wrong_arguments_are_named(self) -> None:
        with pytest.raises(ValueError, match="rank must be"):
            ARCTopKAggregation(None, rank=0)
        with pytest.raises(ValueError, match="seed must be"):
            ARCTopKAggregation(None, seed=-1)
        with pytest.raises(ValueError, match="ARCTopKAggregation must have the keys"):
            ARCTopKAggregation(None).load_state_dict({"memory": {}})


@pytest.mark.parametrize("K", [1, 3, 10])
def test_of_a_fixed_gradient_the_error_shrinks(K: int) -> None:
    """By a factor of at most 1 - K / d in each step, for the square of its length."""
    aggregation, d = EF21Aggregation(None, size=K, momentum=0), 20
    aggregation.aggregate({"x": torch.zeros(d, dtype=torch.float64)}, "avg_world")
    g = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = g.square().sum()
    for _ in range(8):
        x = g.clone()
        aggregation.aggregate({"x": x}, "avg_world")
        smaller = (x - g).square().sum()
        assert smaller <= (1 - K / d) * error
        error = smaller
    assert bool(error == 0) is (d <= 8 * K)


def test_wrong_arguments_are_named() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="momentum must be below 1, not 1"):
        EF21(model=model, lr=0.1, momentum=1)
    with pytest.raises(ValueError, match="size must be an integer from 1"):
        EF21(model=model, lr=0.1, size=0.0)
    with pytest.raises(ValueError, match=r"momentum must be left out or 0\.9, not 0"):
        EF21(model=model, lr=0.1, momentum=0, aggregation=EF21Aggregation(model))
    with pytest.raises(ValueError, match="EF21Aggregation must have the keys"):
        EF21Aggregation(model).load_state_dict({"memory": {}})
