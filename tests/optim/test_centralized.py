"""k workers with centralized optimizers: real processes over Gloo against independent
computations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some
from tests.optim import workers

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=some([2, 4]))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """What each worker returned, by scenario. One start of the processes serves all tests."""
    return run_ranks(request.param, workers.run_all)


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right) > 0
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("name", workers.OPTIMIZERS)
def test_k_workers_on_shares_are_one_worker_on_the_whole_batch(
    ranks: Ranks, name: str, by_layer: bool
) -> None:
    expected = workers.train_on_whole_batches(name)
    for result in ranks:
        history = result["train_on_shares"][name, by_layer]
        assert len(history) == workers.STEPS
        for actual, value in zip(history[-1], expected, strict=True):
            assert actual.dtype == torch.float64
            torch.testing.assert_close(actual, value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", workers.OPTIMIZERS)
def test_all_workers_have_the_same_bits_after_each_step(ranks: Ranks, name: str) -> None:
    first = ranks[0]["train_on_shares"][name, False]
    for result in ranks[1:]:
        for step, other in zip(first, result["train_on_shares"][name, False], strict=True):
            assert_same(step, other)


@pytest.mark.parametrize("by_layer", [False, True])
def test_weights_are_averaged_after_the_step(ranks: Ranks, by_layer: bool) -> None:
    expected = workers.average_weights_alone(len(ranks))
    for result in ranks:
        for actual, value in zip(result["average_weights"][by_layer], expected, strict=True):
            torch.testing.assert_close(actual, value, rtol=0, atol=1e-10)


def test_float32_has_the_bits_of_all_reduce_division_and_torch_sgd(ranks: Ranks) -> None:
    for result in ranks:
        ours, by_hand = result["float32_like_by_hand"]
        if len(ranks) == 2:
            assert_same(ours, by_hand)
        else:
            # With more workers, Gloo's order of summation depends on a number's place in a message.
            for a, b in zip(ours, by_hand, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("by_layer", [False, True])
def test_unusual_parameters(ranks: Ranks, by_layer: bool) -> None:
    k = len(ranks)
    mean_rank = (k - 1) / 2
    for result in ranks:
        odd = result["odd_gradients"][by_layer]
        gradients, steps = odd["gradients"], odd["steps"]
        assert gradients["frozen.weight"] is None
        assert not steps["frozen.weight"].any()
        assert gradients["unused"] is None
        assert not steps["unused"].any()
        assert torch.equal(gradients["only_on_rank_0"], torch.full((2, 3), 4.0 / k))
        assert torch.equal(steps["only_on_rank_0"], torch.full((2, 3), 4.0 / k))
        assert gradients["scalar"].item() == 1 + mean_rank
        assert gradients["scalar"].shape == ()
        assert gradients["fine"].dtype == torch.float64
        assert gradients["fine"][0].item() == pytest.approx(1e-12 + mean_rank, rel=0, abs=1e-15)
        weight = gradients["conv.weight"]
        counting = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape)
        assert torch.equal(weight, counting * (1 + mean_rank))
        assert odd["conv_is_channels_last"]
        assert torch.equal(gradients["conv.bias"], torch.full((4,), mean_rank))


def test_one_message_per_dtype_or_per_layer_and_its_bytes_are_counted(ranks: Ranks) -> None:
    for result in ranks:
        whole, layers = result["odd_gradients"][False], result["odd_gradients"][True]
        # unused 3, only_on_rank_0 6, scalar 1, conv 108 + 4 in float32; fine 2 in float64; a flag
        # for each
        assert whole["sizes"] == [4 * (3 + 6 + 1 + 108 + 4 + 5), 8 * (2 + 1)]
        assert layers["sizes"] == [4 * 3, 4 * 6, 4 * 1, 4 * 108, 4 * 4, 4 * 5, 8 * 2, 8 * 1]
        for run in (whole, layers):
            assert run["last_bytes"] == run["bytes_sent"] == sum(run["sizes"])


def test_batch_norm_statistics_are_averaged_with_the_weights(ranks: Ranks) -> None:
    for name in ("1.running_mean", "1.running_var"):
        before = torch.stack([result["batch_norm"][False]["before"][name] for result in ranks])
        assert not torch.equal(before[0], before[1])
        for result in ranks:
            after = result["batch_norm"][False]["after"][name]
            torch.testing.assert_close(after, before.mean(0), rtol=0, atol=1e-6)
    for result in ranks:
        counter = result["batch_norm"][False]["after"]["1.num_batches_tracked"]
        assert counter.item() == 1
        assert counter.dtype == torch.int64


def test_batch_norm_statistics_stay_local_with_averaged_gradients(ranks: Ranks) -> None:
    for result in ranks:
        run = result["batch_norm"][True]
        assert all(torch.equal(run["before"][name], run["after"][name]) for name in run["before"])


def test_denominators_clipping_and_division_before(ranks: Ranks) -> None:
    k = len(ranks)
    total = k * (k + 1) / 2
    ones = torch.ones(3, dtype=torch.float64)
    for result in ranks:
        updates = result["custom"]
        for name in ("default", "average_world", "not clipped"):
            torch.testing.assert_close(updates[name], ones * total / k)
        for name in ("average_custom", "tensor denom", "custom divided before", "weights by denom"):
            torch.testing.assert_close(updates[name], ones * total / 10)
        for name in ("clipped", "clipped by layer"):
            assert updates[name].norm().item() == pytest.approx(0.5, rel=1e-5)
        assert updates["half divided before"].tolist() == pytest.approx(
            [12000 * total / k] * 3, rel=1e-3
        )
    if k == 4:
        assert torch.isinf(ranks[0]["custom"]["half overflows"]).all()


def test_a_closure_is_evaluated_before_its_gradients_are_aggregated(ranks: Ranks) -> None:
    for result in ranks:
        run = result["closures"]
        assert_same(run["losses"], run["expected"])
        assert_same(run["weights"], run["by_hand"])
    assert not torch.equal(ranks[0]["closures"]["losses"][0], ranks[1]["closures"]["losses"][0])


def test_an_optimizer_that_searches_along_the_loss_decides_alike_everywhere(ranks: Ranks) -> None:
    expected = workers.line_search_alone()
    for result in ranks:
        assert_same(result["line_search"]["weights"], ranks[0]["line_search"]["weights"])
        for actual, value in zip(result["line_search"]["weights"], expected, strict=True):
            torch.testing.assert_close(actual, value, rtol=0, atol=1e-9)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(ranks: Ranks) -> None:
    for result in ranks:
        assert_same(*result["resume"])


def test_parameters_beside_the_model_are_aggregated_too(ranks: Ranks) -> None:
    mean_rank = (len(ranks) - 1) / 2
    for result in ranks:
        in_model, beside = result["beside_the_model"]
        torch.testing.assert_close(in_model, torch.full((1, 2), 2 * mean_rank))
        torch.testing.assert_close(beside, torch.full((2,), 0.1 * 4 * mean_rank))


def test_a_wrong_world_size_names_both_numbers(ranks: Ranks) -> None:
    k = len(ranks)
    for result in ranks:
        messages = result["errors"]
        for wrong in (0, 1, k + 1):
            assert (
                f"world_size is {wrong}, but the process group has {k} workers"
                in messages[str(wrong)]
            )
        assert messages["taken from the group"] == str(k)
