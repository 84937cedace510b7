"""PowerSGD: real processes over Gloo against the reference, exact ranks and what must hold for
every compression."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some, thorough
from tests.optim import power_workers as workers
from tests.references.acp_sgd import acp_sgd
from tests.references.power_sgd import compress, power_sgd

Ranks = list[dict[str, Any]]
PRECISION = {
    "fp16 model": 2e-2,
    "bf16 model": 1e-1,
    "float64": 1e-12,
    "in turns": 1e-12,
    "in turns, bf16 on the wire": 1e-2,
    "in turns, bf16 model": 1e-1,
}


@pytest.fixture(scope="module", params=some([2, 4]))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """What each worker returned, by scenario. One start of the processes serves all tests."""
    return run_ranks(request.param, workers.run_all)


@pytest.mark.parametrize("by_layer", [False, True])
def test_it_is_the_reference(ranks: Ranks, by_layer: bool) -> None:
    k = len(ranks)
    x = workers.Matrices(workers.SHAPE).items[0].detach()
    gradients = [
        [workers.gradient(rank, step) for rank in range(k)] for step in range(workers.STEPS)
    ]
    drawn = torch.randn(
        workers.RANK, 9, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    expected, errors = power_sgd(x, gradients, drawn.T, lr=0.1, momentum=0.9)
    for rank, result in enumerate(ranks):
        (weight, _), error = result["like_the_reference"][by_layer]
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-11)
        torch.testing.assert_close(error, errors[rank], rtol=0, atol=1e-11)


def test_turns_are_the_reference(ranks: Ranks) -> None:
    k = len(ranks)
    gradients = [
        [workers.gradient(rank, step) for rank in range(k)] for step in range(workers.STEPS)
    ]
    drawn = torch.randn(
        workers.RANK, 9, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    expected, _, errors = acp_sgd(gradients, drawn.T)
    for rank, result in enumerate(ranks):
        x = workers.Matrices(workers.SHAPE).items[0].detach()
        for step, (out, error, weight) in enumerate(zip(*result["in_turns"], strict=True)):
            x = x - 0.1 * expected[step]
            torch.testing.assert_close(out, expected[step], rtol=0, atol=1e-11)
            torch.testing.assert_close(error, errors[step][rank], rtol=0, atol=1e-11)
            torch.testing.assert_close(weight, x, rtol=0, atol=1e-11)


def test_two_turns_of_a_constant_gradient_send_all_of_it(ranks: Ranks) -> None:
    for case, (average, steps) in ranks[0]["constant_in_turns"].items():
        _, is_same = case
        of_workers = [result["constant_in_turns"][case][1] for result in ranks]
        for step in range(1, len(steps), 2):
            pair = steps[step - 1][0] + steps[step][0]
            torch.testing.assert_close(pair, 2 * average, rtol=0, atol=1e-11)
            errors = torch.stack([run[step][1] for run in of_workers])
            zeros = torch.zeros_like(average)
            torch.testing.assert_close(errors.mean(0), zeros, rtol=0, atol=1e-11)
            if is_same:
                torch.testing.assert_close(errors[0], zeros, rtol=0, atol=1e-11)
            else:
                assert errors.norm() > 1


def test_the_gradient_is_the_average_of_gradient_and_error_less_the_average_error(
    ranks: Ranks,
) -> None:
    for name, first in ranks[0]["average_and_error"].items():
        for step, (_, out, _) in enumerate(first):
            workers_of_step = [result["average_and_error"][name][step] for result in ranks]
            delta = torch.stack([delta.double() for delta, _, _ in workers_of_step]).mean(0)
            error = torch.stack([error.double() for _, _, error in workers_of_step]).mean(0)
            tolerance = PRECISION.get(name, 1e-5)
            torch.testing.assert_close(out.double() + error, delta, rtol=0, atol=tolerance)
            assert error.norm() > 0.1 * delta.norm()  # there is something to remember


def test_all_workers_get_the_same_bits(ranks: Ranks) -> None:
    for result in ranks[1:]:
        for name, steps in result["average_and_error"].items():
            for (_, mine, _), (_, first, _) in zip(
                steps, ranks[0]["average_and_error"][name], strict=True
            ):
                assert torch.equal(mine, first)
        for name in ("like_the_reference", "unusual"):
            assert result[name].keys() == ranks[0][name].keys()
        for by_layer, run in result["unusual"].items():
            for name, mine in run["gradients"].items():
                assert torch.equal(mine, ranks[0]["unusual"][by_layer]["gradients"][name]), name
        for by_layer, run in result["missing_gradients"].items():
            for mine, first in zip(
                run["weights"], ranks[0]["missing_gradients"][by_layer]["weights"], strict=True
            ):
                assert torch.equal(mine, first)


def test_a_rank_that_suffices_gives_the_average(ranks: Ranks) -> None:
    for result in ranks:
        for (actual, dtype, reuse_query, shape), error in result["exact_ranks"].items():
            limit = 1e-6 if dtype == torch.float32 else 1e-12
            assert error <= limit, (actual, dtype, reuse_query, shape)


def test_a_warm_start_recovers_from_gradients_of_lower_rank(ranks: Ranks) -> None:
    for result in ranks:
        assert max(result["growing_rank"]) <= 1e-12


def test_two_messages_of_the_size_in_the_formula(ranks: Ranks) -> None:
    flags = 6
    uncompressed = 2 * 2 + 10 + 1
    left, right = 2 * (10 + 6 + 10), 2 * (8 + 12 + 8)
    original = 80 + 72 + 80 + uncompressed
    for result in ranks:
        runs = result["messages"]
        assert runs["whole"]["sizes"] == [4 * (left + uncompressed + flags), 4 * right]
        assert sorted(runs["bf16"]["sizes"]) == sorted(
            [2 * left, 4 * (uncompressed + flags), 2 * right]
        )
        matrices = [4 * (20 + 1), 4 * 16, 4 * (12 + 1), 4 * 24, 4 * (20 + 1), 4 * 16]
        assert runs["by layer"]["sizes"] == [*matrices, 4 * (4 + 1), 4 * (10 + 1), 4 * (1 + 1)]
        assert runs["not yet"]["sizes"] == [4 * (original + flags)]
        assert runs["in turns"]["sizes"] == [4 * (left + uncompressed + flags)]
        assert runs["in turns"]["second sizes"] == [4 * (right + uncompressed + flags)]
        by_layer = [4 * (4 + 1), 4 * (10 + 1), 4 * (1 + 1)]
        assert runs["in turns, by layer"]["sizes"] == [*matrices[::2], *by_layer]
        odd = [4 * (2 * columns + 1) for columns in (8, 12, 8)]
        assert runs["in turns, by layer"]["second sizes"] == [*odd, *by_layer]
        for run in runs.values():
            assert run["last_bytes"] == run["bytes_sent"] == sum(run["sizes"])
        assert runs["whole"]["ratio"] == pytest.approx(original / (left + right + uncompressed))
        assert runs["bf16"]["ratio"] == pytest.approx(
            4 * original / (2 * (left + right) + 4 * uncompressed)
        )
        assert runs["not yet"]["ratio"] == 1


@pytest.mark.parametrize("by_layer", [False, True])
def test_parameters_without_gradient(ranks: Ranks, by_layer: bool) -> None:
    k = len(ranks)
    for result in ranks:
        run = result["missing_gradients"][by_layer]
        on_rank_0, on_all, _, on_none = run["first"]
        drawn = torch.randn(1, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        only = [workers.gradient(0, 0)] + [torch.zeros(workers.SHAPE, dtype=torch.float64)] * (
            k - 1
        )
        left, right = compress(only, drawn.T)
        torch.testing.assert_close(on_rank_0, left @ right.T, rtol=0, atol=1e-12)
        assert on_all.any()
        assert on_none is None
        assert torch.equal(run["weights"][3], run["before"][3])
        assert run["still None"]
        assert run["weight kept"]
        assert run["error kept"]


@pytest.mark.parametrize("name", workers.WITHOUT_GRADIENT)
def test_steps_without_gradient_are_alike_for_one_worker_and_several(
    ranks: Ranks, name: str
) -> None:
    """One worker with the gradient that all have: the same weights, memories, warm starts and
    counts."""
    alone = workers.steps_without_gradient(0, 1)[name]
    for result in ranks:
        for (weights, state), (expected, its_state) in zip(
            result["steps_without_gradient"][name], alone, strict=True
        ):
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(state, its_state, rtol=0, atol=1e-10)


def test_a_warm_start_stays_where_no_worker_has_a_gradient(ranks: Ranks) -> None:
    for result in ranks:
        states = [state for _, state in result["steps_without_gradient"]["warm"]]
        assert "items.0" not in states[1]["queries"], "two steps without a gradient are no start"
        (before, at_step_3, after) = (states[step]["queries"]["items.0"] for step in (2, 3, 4))
        assert torch.equal(before, at_step_3)
        assert not torch.equal(before, after)


@pytest.mark.parametrize("by_layer", [False, True])
def test_unusual_parameters(ranks: Ranks, by_layer: bool) -> None:
    for result in ranks:
        run = result["unusual"][by_layer]
        assert run["channels_last"]
        assert run["gradients"].keys() == run["averages"].keys()
        for name, average in run["averages"].items():
            gradient = run["gradients"][name]
            assert gradient.shape == average.shape
            tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[
                gradient.dtype
            ]
            torch.testing.assert_close(gradient.double(), average, rtol=0, atol=tolerance, msg=name)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(ranks: Ranks) -> None:
    for result in ranks:
        for case, (through, resumed) in result["resume"].items():
            assert all(torch.equal(a, b) for a, b in zip(through, resumed, strict=True)), case


def test_sums_and_custom_denominators_scale_the_average(ranks: Ranks) -> None:
    k = len(ranks)
    for result in ranks:
        run = result["sums_and_denominators"]
        torch.testing.assert_close(run["sum"], k * run["average"], rtol=0, atol=1e-12)
        torch.testing.assert_close(run["by 10"], k / 10 * run["average"], rtol=0, atol=1e-12)
        torch.testing.assert_close(run["by tensor"], k / 10 * run["average"], rtol=0, atol=1e-12)


def test_an_overflow_is_seen_by_all_and_forgotten(ranks: Ranks) -> None:
    for result in ranks:
        for (_, bad), steps in result["overflow"].items():
            finite = [math.isfinite(out.sum()) for out, _ in steps]
            assert finite == [step != bad for step in range(5)]
            assert all(out.any() for out, _ in steps)
            assert not steps[bad][1].any(), "the error memory starts again from zero"


def test_the_preset_is_sgd_with_the_aggregation(ranks: Ranks) -> None:
    for result in ranks:
        preset, composed = result["composed"]
        assert all(torch.equal(a, b) for a, b in zip(preset, composed, strict=True))


def test_a_world_size_left_out_does_not_train_apart(ranks: Ranks) -> None:
    k = len(ranks)
    for result in ranks:
        run = result["world_sizes"]
        assert run["None"] == str(k)
        assert f"world_size is 1, but the process group has {k} workers" in run["default"]
        assert f"world_size is {k + 1}, but the process group has {k} workers" in run["wrong"]


@thorough
def test_it_learns_digits_as_well_as_sgd() -> None:
    datasets = pytest.importorskip(
        "sklearn.datasets", reason="scikit-learn, which has the digits, is not installed"
    )
    digits = datasets.load_digits()
    shuffled = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[shuffled] / 16
    first, second = run_ranks(
        2, workers.digits_accuracy, images, torch.tensor(digits.target)[shuffled], timeout_s=240
    )
    assert first == second
    sgd = first.pop("sgd")
    assert sgd > 0.93
    for name, accuracy in first.items():
        assert accuracy >= sgd - 0.02, (name, accuracy, sgd)
