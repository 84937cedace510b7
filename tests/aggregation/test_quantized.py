"""The all-reduce in few bits: against the reference on 2 and 3 workers, and its invariants."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch import QuantizedAllReduceAggregation
from mlbench_core.aggregation.pytorch.compression import quantized
from mlbench_core.optim.pytorch import QuantizedSGD
from tests.helpers.collectives import recording_collectives
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import some
from tests.optim.weight_averaging import SHAPE, STEPS, Weights, descend, gradient, start
from tests.references.quantized_all_reduce import quantized_all_reduce

Ranks = list[dict[str, Any]]
BLOCK = 8  # a part of 18 or 12 numbers has a shorter last block
SETTINGS: dict[str, dict[str, Any]] = {
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
    "LoCo": {"bits": 4, "error_decay": 0.8},
    "classical feedback": {"bits": 4, "error_decay": 0},
}
every_setting = pytest.mark.parametrize("name", SETTINGS)


def gradients(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.randn(n, generator=generator) for name, n in (("x", 700), ("y", 301))}


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, options in SETTINGS.items():
        model = Weights(x=start())
        aggregation = QuantizedAllReduceAggregation(block=BLOCK, **options)
        optimizer = QuantizedSGD(model=model, lr=0.1, aggregation=aggregation)
        messages: list[tuple[str, int]] = []
        with recording_collectives(lambda op, size: messages.append((op, size))):  # noqa: B023
            history = descend(rank, model, optimizer)
        result[name] = {
            "history": history,
            "state": aggregation.state_dict(),
            "sent": aggregation.last_bytes,
            "messages": messages[-1],
        }
    tensors = gradients(rank)
    QuantizedAllReduceAggregation().aggregate(tensors, "avg_world")
    result["once"] = tensors
    for name, options in SETTINGS.items():
        striped = []
        for stripe in (16, 10_000):
            aggregation = QuantizedAllReduceAggregation(block=BLOCK, **options)
            averaged, flag = gradients(rank), torch.full((), float(rank))
            with mock.patch.object(quantized, "STRIPE", stripe):
                aggregation.aggregate(averaged, "avg_world", extra=[flag])
            striped.append((averaged, flag, aggregation.state_dict(), aggregation.last_bytes))
        result["stripes of " + name] = striped
    rounded = torch.full((1000,), 0.3)
    rounded[::100] = 7  # so that a step is 1 in each block
    random = QuantizedAllReduceAggregation(bits=4, rounding="stochastic", block=1000, error_decay=0)
    random.aggregate({"x": rounded}, "avg_world")
    result["stochastic"] = rounded, random.memory("x")
    # One worker has a value that is not finite, in the first block of the first part.
    tensors = gradients(rank)
    if rank == 1:
        tensors["x"][3] = torch.inf
    feedback = QuantizedAllReduceAggregation(error_decay=0.8)
    feedback.aggregate(tensors, "avg_world")
    result["overflow"] = tensors, feedback.state_dict()
    return result


@pytest.fixture(scope="module", params=some([3, 2]))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return run_ranks(request.param, run_all)


@every_setting
def test_is_the_reference(ranks: Ranks, name: str) -> None:
    options = SETTINGS[name]
    levels, beta = 2 ** (options["bits"] - 1) - 1, options.get("error_decay")
    x, e, epsilon = quantized_all_reduce(
        start(), gradient, len(ranks), 0.1, STEPS, levels, BLOCK, beta
    )
    for result in ranks:
        torch.testing.assert_close(result[name]["history"][-1], x, rtol=0, atol=1e-12)
        assert torch.equal(result[name]["history"][-1], ranks[0][name]["history"][-1])
    states = [result[name]["state"] for result in ranks]
    if beta is None:
        assert states == [{}] * len(ranks)
        return
    for state, e_i in zip(states, e, strict=True):
        torch.testing.assert_close(state["memory"]["x"].view(-1), e_i, rtol=0, atol=1e-12)
    owned = sum(state["owner_memory"]["x"].view(-1) for state in states)
    torch.testing.assert_close(owned, epsilon, rtol=0, atol=1e-12)


@every_setting
def test_bytes_are_those_of_the_formula(ranks: Ranks, name: str) -> None:
    bits, d = SETTINGS[name]["bits"], math.prod(SHAPE)
    p = math.ceil(d / len(ranks))
    if bits == 4:
        p += p % 2
    part = p * bits // 8 + 8 * math.ceil(p / BLOCK)
    for result in ranks:
        # And the flag of the one tensor, which travels with the second message.
        assert result[name]["sent"] == len(ranks) * part + part + 8
        assert result[name]["messages"] == ("all_gather", part + 8)


@every_setting
def test_stripes_change_no_bit_and_no_byte(ranks: Ranks, name: str) -> None:
    for result in ranks:
        striped, whole = result["stripes of " + name]
        torch.testing.assert_close(striped, whole, rtol=0, atol=0)
        assert float(striped[1]) == (len(ranks) - 1) / 2


def test_without_decay_nothing_is_lost(ranks: Ranks) -> None:
    """The sum of all averages is that of the results, plus the errors that are left."""
    history = [start(), *ranks[0]["classical feedback"]["history"]]
    results = [(old - new) / 0.1 for old, new in itertools.pairwise(history)]
    expected = torch.zeros(SHAPE, dtype=torch.float64)
    for rank in range(len(ranks)):
        for t in range(STEPS):
            expected += gradient(rank, history[t], t) / len(ranks)
    left = torch.zeros(SHAPE, dtype=torch.float64)
    for result in ranks:
        state = result["classical feedback"]["state"]
        left += state["memory"]["x"] / len(ranks) + state["owner_memory"]["x"]
    assert left.abs().max() > 0.01
    torch.testing.assert_close(sum(results) + left, expected, rtol=0, atol=1e-12)


def test_the_error_is_at_most_half_a_step_of_each_rounding(ranks: Ranks) -> None:
    k = len(ranks)
    g = [torch.cat([*gradients(rank).values()]) for rank in range(k)]
    mean = torch.stack(g).mean(0)
    found = torch.cat([*ranks[0]["once"].values()])
    p = math.ceil(len(mean) / k)
    for first in range(0, len(mean), p):
        for begin in range(first, min(first + p, len(mean)), 256):
            block = slice(begin, min(begin + 256, first + p, len(mean)))
            steps = [float(g_i[block].abs().max()) / 127 for g_i in g]
            first_error = sum(steps) / k / 2
            # The owner's largest value is that of the mean, up to the first error.
            largest = float(mean[block].abs().max()) + first_error
            most = (first_error + largest / 127 / 2) * (1 + 1e-6)
            assert (found[block] - mean[block]).abs().max() <= most
    assert (found - mean).abs().max() > 1e-3
    for result in ranks:
        assert all(torch.equal(result["once"][n], ranks[0]["once"][n]) for n in ("x", "y"))


def test_workers_draw_apart_and_agree(ranks: Ranks) -> None:
    found, errors = ranks[0]["stochastic"]
    for result, other in (other["stochastic"] for other in ranks[1:]):
        assert torch.equal(found, result)
        # The workers have the same values, and round them to 0 and 1 on their own.
        assert not torch.equal(errors, other)
    assert set(found.tolist()) == {0, 1, 7}


def test_an_overflow_makes_its_block_nan_and_is_not_remembered(ranks: Ranks) -> None:
    for tensors, state in (result["overflow"] for result in ranks):
        assert tensors["x"][:256].isnan().all()
        assert tensors["x"][256:].isfinite().all() and tensors["y"].isfinite().all()
        for memory in state.values():
            assert all(e.isfinite().all() for e in memory.values())


def aggregated(x: Tensor, **options: Any) -> Tensor:
    """The result of one worker, which quantizes twice."""
    result = x.clone()
    QuantizedAllReduceAggregation(**options).aggregate({"x": result}, "avg_world")
    return result


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_multiples_of_the_scale_stay(bits: int, rounding: str) -> None:
    levels = 2 ** (bits - 1) - 1
    x = torch.arange(-levels, levels + 1).float() / 4
    assert torch.equal(aggregated(x, bits=bits, rounding=rounding), x)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_value_of_both_signs_stays(bits: int) -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(0))
    x[10], x[20] = 5.3, -5.3
    found = aggregated(x, bits=bits)[[10, 20]]
    torch.testing.assert_close(found, x[[10, 20]], rtol=3e-7, atol=0)


def test_a_huge_value_leaves_other_blocks_as_they_are() -> None:
    x = torch.arange(-127, 128).float().repeat(3)[:512]
    x[256 + 5] = 3e38
    found = aggregated(x)
    assert torch.equal(found[:256], x[:256]) and not torch.equal(found[256:], x[256:])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_pieces_that_fit_into_the_cache_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, bits: int, rounding: Any
) -> None:
    # The last block is shorter.
    gradient = torch.randn(1203, generator=torch.Generator().manual_seed(0))
    results = []
    for in_cache in (1, 100, 10_000):
        monkeypatch.setattr(quantized, "BLOCK_ELEMENTS", in_cache)
        aggregation = QuantizedAllReduceAggregation(
            bits=bits, block=8, rounding=rounding, error_decay=0.5
        )
        averaged = gradient.clone()
        aggregation.aggregate({"x": averaged}, "avg_world")
        results.append(torch.stack([averaged, aggregation.memory("x")]))
    assert not torch.equal(results[0][0], gradient)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_numbers_whose_scale_is_denormal_become_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    # The smallest draw would round negative numbers to -1.
    monkeypatch.setattr(quantized, "uniform_source", lambda *_: torch.zeros_like)
    assert not aggregated(torch.full((8,), -1e-37), rounding="stochastic").any()


def test_stochastic_rounding_is_right_on_average() -> None:
    x = torch.linspace(-7, 7, 30).repeat(4000)
    # Blocks of 30 have the same values, so their averages show the mean of 4,000 draws.
    mean = aggregated(x, bits=4, block=30, rounding="stochastic").view(-1, 30).mean(0)
    # Five deviations of a mean of draws that are at most a step of 1 apart.
    assert (mean - x[:30]).abs().max() < 5 * 0.5 / 4000**0.5
    nearest = aggregated(x, bits=4, block=30).view(-1, 30).mean(0)
    assert (nearest - x[:30]).abs().max() > 0.2


def test_tensors_of_all_shapes_and_dtypes_find_their_places() -> None:
    tensors = {
        "scalar": torch.tensor(3.0),
        "columns": torch.arange(-3.0, 3.0).view(2, 3).t(),
        "half": torch.tensor([7.0, -1.0]).half(),
        "double": torch.tensor([-7.0, 2.0, 5.0]).double(),
        "seven": torch.tensor([7.0]),
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    QuantizedAllReduceAggregation(bits=4, error_decay=0.5).aggregate(tensors, "avg_world")
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="bits must be 8 or 4, not 3"):
        QuantizedAllReduceAggregation(bits=3)
    with pytest.raises(ValueError, match="rounding must be 'nearest' or 'stochastic', not 'up'"):
        QuantizedAllReduceAggregation(rounding="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="error_decay must be below 1, not 1"):
        QuantizedAllReduceAggregation(error_decay=1)
    with pytest.raises(ValueError, match="block must be"):
        QuantizedAllReduceAggregation(block=0)
    with pytest.raises(ValueError, match="must have the keys"):
        QuantizedAllReduceAggregation().load_state_dict({"errors": {}})
    with pytest.raises(ValueError, match="bits"):
        QuantizedSGD(
            model=Weights(x=start()), lr=0.1, bits=4, aggregation=QuantizedAllReduceAggregation()
        )
