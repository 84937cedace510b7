"""PowerSGD's aggregation in a world of one: kernels, arguments and state."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.centralized import AVG_CUSTOM, AVG_WORLD, PowerAggregation
from mlbench_core.aggregation.pytorch.compression import power


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_model(rows: int = 10, columns: int = 8) -> nn.Module:
    return nn.Linear(columns, rows, dtype=torch.float64)


def step(aggregation: PowerAggregation, seed: int = 0) -> Tensor:
    model = aggregation.model
    model.weight.grad, model.bias.grad = (
        draw(*model.weight.shape, seed=seed),
        torch.ones_like(model.bias),
    )
    aggregation.agg_grad()(model, AVG_WORLD)
    return model.weight.grad


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_warm_start_goes_on_from_a_query_that_says_nothing(bad: float) -> None:
    aggregation = PowerAggregation(make_model(), rank=2, reuse_query=True)
    step(aggregation)
    aggregation.state_dict()["queries"]["weight"][:] = bad
    aggregation.state_dict()["errors"]["weight"].zero_()
    exact = draw(10, 2, seed=1) @ draw(2, 8, seed=2)
    result = {"weight": exact.clone()}
    aggregation.aggregate(result, AVG_WORLD)
    torch.testing.assert_close(result["weight"], exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_blocks_do_not_change_the_result(
    monkeypatch: pytest.MonkeyPatch, rank: int, alternate: bool
) -> None:
    results = []
    for block in (1, 24, 10**6):
        monkeypatch.setattr(power, "BLOCK_ELEMENTS", block)
        aggregation = PowerAggregation(
            make_model(), rank=rank, reuse_query=True, alternate=alternate
        )
        results.append(
            [step(aggregation, seed) for seed in range(3)]
            + [aggregation.state_dict()["errors"]["weight"]]
        )
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_product_does_not_depend_on_the_number_of_threads(rank: int) -> None:
    left, right, threads = draw(rank, 10).float(), draw(rank, 2048).float(), torch.get_num_threads()
    products = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            products.append(torch.empty(10, 2048))
            power._multiply(left, right, products[-1])
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(products[0], left.t() @ right)
    assert torch.equal(products[0], products[1])
    assert torch.equal(products[0], products[2])


@pytest.mark.parametrize("rank", [4, 5])
def test_every_rank_gives_the_same_product_and_the_rest_of_it(rank: int) -> None:
    exact = draw(40, 30)
    aggregation = PowerAggregation(nn.Linear(30, 40, bias=False).double(), rank=rank)
    tensors = {"weight": exact.clone()}
    aggregation.aggregate(tensors, AVG_WORLD)
    assert torch.linalg.matrix_rank(tensors["weight"]) == rank
    torch.testing.assert_close(
        tensors["weight"] + aggregation.memory("weight"), exact, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_turns_go_on_from_a_factor_that_says_nothing(bad: float) -> None:
    """Rows that are drawn again are made orthonormal, so that the result is a projection."""
    aggregation = PowerAggregation(make_model(), rank=2, alternate=True)
    for turn in range(4):
        step(aggregation, seed=turn)
        state = aggregation.state_dict()
        (factor,) = [*state["queries"].values(), *state["bases"].values()]
        factor[0] = bad
        error = state["errors"]["weight"].clone()
        result = {"weight": draw(10, 8, seed=10 + turn)}
        given = result["weight"] + error
        aggregation.aggregate(result, AVG_WORLD)
        after = aggregation.state_dict()["errors"]["weight"]
        torch.testing.assert_close(result["weight"] + after, given, rtol=0, atol=1e-12)
        assert torch.linalg.matrix_rank(result["weight"]) == 2
        # The rest of a projection is orthogonal to it.
        product = (result["weight"] * after).sum()
        torch.testing.assert_close(product, torch.zeros_like(product), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("error_feedback", [True, False])
def test_half_precision_is_rounded_once(dtype: torch.dtype, error_feedback: bool) -> None:
    gradient = draw(10, 8, dtype=torch.float32).to(dtype)
    half, wide = {"weight": gradient.clone()}, {"weight": gradient.float()}
    for tensors in (half, wide):
        PowerAggregation(make_model(), rank=2, error_feedback=error_feedback).aggregate(
            tensors, AVG_WORLD
        )
    assert torch.equal(half["weight"], wide["weight"].to(dtype))


def test_a_better_rank_leaves_less_out() -> None:
    errors = []
    for rank in (1, 2, 3, 4):
        aggregation = PowerAggregation(make_model(), rank=rank)
        step(aggregation)
        errors.append(float(aggregation.state_dict()["errors"]["weight"].norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] > 0


def test_a_warm_start_converges_to_the_best_approximation() -> None:
    exact = draw(10, 8)
    left, values, right = torch.linalg.svd(exact, full_matrices=False)
    best = left[:, :2] * values[:2] @ right[:2]
    aggregation = PowerAggregation(make_model(), rank=2, reuse_query=True, error_feedback=False)
    for _ in range(200):
        result = {"weight": exact.clone()}
        aggregation.aggregate(result, AVG_WORLD)
    torch.testing.assert_close(result["weight"], best, rtol=0, atol=1e-6)


def test_without_error_feedback_nothing_is_remembered() -> None:
    aggregation = PowerAggregation(make_model(), error_feedback=False)
    first = step(aggregation)
    assert first.any()
    state = aggregation.state_dict()
    assert state["errors"] == state["queries"] == {}


def test_what_compression_would_not_make_smaller_is_left_alone() -> None:
    aggregation = PowerAggregation(make_model(), rank=5)  # 5 (10 + 8) > 10 8
    assert torch.equal(step(aggregation), draw(10, 8))
    assert aggregation.state_dict()["errors"] == {}


def test_extra_tensors_are_never_compressed() -> None:
    flags = draw(20, 20)
    given = flags.clone()
    aggregation = PowerAggregation(make_model())
    aggregation.aggregate({}, AVG_WORLD, extra=[flags])
    assert torch.equal(flags, given)
    assert aggregation.state_dict()["errors"] == {}


def test_the_first_steps_are_uncompressed() -> None:
    aggregation = PowerAggregation(make_model(), start_after_steps=2)
    is_exact = [torch.equal(step(aggregation, seed), draw(10, 8, seed=seed)) for seed in range(4)]
    assert is_exact == [True, True, False, False]


def test_the_seed_decides_and_the_global_generator_does_not() -> None:
    before = torch.get_rng_state()
    results = [step(PowerAggregation(make_model(), seed=seed)) for seed in (1, 1, 2)]
    torch.manual_seed(5)
    again = step(PowerAggregation(make_model(), seed=1))
    torch.set_rng_state(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], again)
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_go_on_alike(duplicate: Any) -> None:
    aggregation = PowerAggregation(make_model())
    step(aggregation)
    other = duplicate(aggregation)
    assert torch.equal(step(other, 1), step(aggregation, 1))


def test_arguments_are_checked() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="rank must be at least 1, not 0"):
        PowerAggregation(model, rank=0)
    with pytest.raises(TypeError, match=r"rank must be an integer, not 1\.5"):
        PowerAggregation(model, rank=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start_after_steps must be at least 0, not -1"):
        PowerAggregation(model, start_after_steps=-1)
    with pytest.raises(
        ValueError, match=r"comm_dtype must be one of None, torch\.float16, .*, not torch\.int8"
    ):
        PowerAggregation(model, comm_dtype=torch.int8)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not list"):
        PowerAggregation([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="world_size is 2, but there is 1 process"):
        PowerAggregation(model, world_size=2)


def test_a_wrong_operation_changes_nothing() -> None:
    aggregation = PowerAggregation(make_model())
    step(aggregation)
    error = aggregation.state_dict()["errors"]["weight"].clone()
    weight = draw(10, 8)
    for kind in (ValueError, NotImplementedError):
        with pytest.raises(kind, match="op must be 'avg_world' or 'avg_custom', not 'max'"):
            aggregation.aggregate({"weight": weight}, "max")
        with pytest.raises(
            kind, match="would destroy weights: build the optimizer with agg_grad=True"
        ):
            aggregation.agg_model()
    with pytest.raises(ValueError, match="denom, which is None"):
        aggregation.aggregate({"weight": weight}, AVG_CUSTOM)
    assert torch.equal(weight, draw(10, 8))
    assert torch.equal(error, aggregation.state_dict()["errors"]["weight"])


def test_a_state_that_does_not_fit_is_refused() -> None:
    aggregation = PowerAggregation(make_model(), rank=2, reuse_query=True)
    step(aggregation)
    state = aggregation.state_dict()
    with pytest.raises(
        ValueError,
        match=r"errors\['weight'\] of the state must have shape \(9, 7\) .*, not \(10, 8\)",
    ):
        PowerAggregation(make_model(9, 7), rank=2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"must have shape \(3, 8\) for rank 3 .*, not \(2, 8\)"):
        PowerAggregation(make_model(), rank=3).load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"not \['memory'\]: the checkpoint was written with another"
    ):
        aggregation.load_state_dict({"memory": {}})
    assert aggregation.state_dict()["errors"]["weight"] is state["errors"]["weight"]


def test_turns_go_on_from_a_state_of_power_sgd_but_not_the_reverse() -> None:
    aggregation = PowerAggregation(make_model(), rank=2, reuse_query=True)
    step(aggregation)
    in_turns = PowerAggregation(make_model(), rank=2, alternate=True)
    in_turns.load_state_dict(aggregation.state_dict())
    given = draw(10, 8, seed=1) + aggregation.memory("weight")
    torch.testing.assert_close(
        step(in_turns, seed=1) + in_turns.memory("weight"), given, rtol=0, atol=1e-12
    )
    state = in_turns.state_dict()
    with pytest.raises(ValueError, match=r"must have the keys .*, not \['bases', 'errors'"):
        aggregation.load_state_dict(state)
    with pytest.raises(ValueError, match=r"bases\['weight'\] .* \(3, 10\) for rank 3"):
        state["queries"] = state["errors"] = {}
        PowerAggregation(make_model(), rank=3, alternate=True).load_state_dict(state)
