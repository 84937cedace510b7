"""DiLoCo whose outer gradients are quantized: real processes over Gloo against the reference of the
quantized all-reduce, which is DiLoCo with outer SGD without momentum."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from mlbench_core.aggregation.pytorch import (
    DiLoCoAggregation,
    OutlierPenalty,
    QuantizedAllReduceAggregation,
    SignAggregation,
)
from tests.aggregation.eager_workers import BUFFER, change
from tests.helpers.ranks import run_ranks
from tests.optim.weight_averaging import start
from tests.references.quantized_all_reduce import quantized_all_reduce

ROUNDS, HALF, OUTER_LR = 6, 3, 0.7
DECAYS = {8: None, 4: 0.8}
"""The error decay by the number of bits."""

Ranks = list[dict[int, dict[str, Any]]]


def make(bits: int) -> DiLoCoAggregation:
    compressed = QuantizedAllReduceAggregation(bits=bits, error_decay=DECAYS[bits])
    aggregation = DiLoCoAggregation(partial(SGD, lr=OUTER_LR), compressed=compressed)
    aggregation.start({"x": nn.Parameter(start())})
    return aggregation


def take(aggregation: DiLoCoAggregation, x: Tensor, rank: int, step: int) -> Tensor:
    """Return the average of a buffer that travels with x in a round."""
    x -= change(rank, step)
    buffer = torch.full((1,), float(rank), dtype=x.dtype)
    aggregation.aggregate({"x": x, BUFFER: buffer}, "avg_world")
    return buffer


def run_all(rank: int, world_size: int) -> dict[int, dict[str, Any]]:
    """A run with each number of bits, and one that is resumed from its middle."""
    found = {}
    for bits in DECAYS:
        aggregation, x = make(bits), start()
        for step in range(ROUNDS):
            if step == HALF:
                resumed, y = make(bits), x.clone()
                resumed.load_state_dict(copy.deepcopy(aggregation.state_dict()))
            buffer = take(aggregation, x, rank, step)
            if step >= HALF:
                take(resumed, y, rank, step)
        found[bits] = {
            "x": x,
            "resumed": y,
            "buffer": buffer,
            "bytes": aggregation.bytes_sent,
            "ratio": aggregation.compression_ratio,
            "state": aggregation.state_dict()["compressed"],
        }
    return found


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return run_ranks(request.param, run_all, timeout_s=120)


@pytest.mark.parametrize("bits", DECAYS)
def test_it_is_the_reference(ranks: Ranks, bits: int) -> None:
    expected, errors, owners = quantized_all_reduce(
        start(),
        lambda rank, x, step: change(rank, step),
        len(ranks),
        OUTER_LR,
        ROUNDS,
        L=2 ** (bits - 1) - 1,
        beta=DECAYS[bits],
    )
    memories = []
    for rank, result in enumerate(ranks):
        torch.testing.assert_close(result[bits]["x"], expected, rtol=0, atol=1e-6)
        if DECAYS[bits] is not None:
            memory = result[bits]["state"]["memory"]["x"].view(-1)
            torch.testing.assert_close(memory, errors[rank], rtol=0, atol=1e-6)
            memories.append(result[bits]["state"]["owner_memory"]["x"].view(-1))
    if memories:
        torch.testing.assert_close(sum(memories), owners, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", DECAYS)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(ranks: Ranks, bits: int) -> None:
    for result in ranks:
        assert torch.equal(result[bits]["resumed"], result[bits]["x"])


@pytest.mark.parametrize("bits", DECAYS)
def test_buffers_are_averaged_as_they_are_and_all_bytes_count(ranks: Ranks, bits: int) -> None:
    k = len(ranks)
    numbers = -(-35 // k)
    if bits == 4:
        numbers += numbers % 2
    part = numbers * bits // 8 + 8  # the scale is float64
    for result in ranks:
        assert result[bits]["buffer"].item() == (k - 1) / 2
        assert result[bits]["bytes"] == ROUNDS * ((k + 1) * part + 8)
        assert result[bits]["ratio"] == pytest.approx(35 * 8 / ((k + 1) * part))


def test_the_error_memory_belongs_to_a_worker() -> None:
    aggregation, x = make(4), start()
    take(aggregation, x, 0, 0)
    state = aggregation.state_dict()
    assert state["compressed"]["memory"]["x"].any()
    assert aggregation.shared_state(state)["compressed"] == {"memory": {}, "owner_memory": {}}
    with pytest.raises(ValueError, match=r"must have the keys .*, not \['compressed'"):
        DiLoCoAggregation().load_state_dict(state)


def test_what_cannot_be_combined_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"compressed must be .*, not SignAggregation"):
        DiLoCoAggregation(compressed=SignAggregation())
    compressed = QuantizedAllReduceAggregation()
    with pytest.raises(ValueError, match="compressed must be None with a penalty"):
        DiLoCoAggregation(compressed=compressed, penalty=OutlierPenalty())
    monkeypatch.setattr(compressed, "group", "another")
    with pytest.raises(ValueError, match="process_group must be that of compressed"):
        DiLoCoAggregation(compressed=compressed)
