"""The parts of the tests of EDiT's penalty that run in each worker process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from mlbench_core.aggregation.pytorch import DiLoCoAggregation, OutlierPenalty
from tests.helpers.collectives import recording_collectives

SHAPE = (3, 2)
ROUNDS = 40
FIRST = 20
LARGEST = 1.5
WRONG = {25: 1, 30: 0}
"""The worker whose change is 100 times as long, by round."""


def change(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    delta = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    return delta * (100 if WRONG.get(step) == rank else 1)


def make(penalty: OutlierPenalty | None) -> tuple[nn.Module, DiLoCoAggregation]:
    model = nn.Linear(2, 3, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    aggregation = DiLoCoAggregation(partial(SGD, lr=1.0), penalty=penalty)
    aggregation.start(model)
    return model, aggregation


def take(model: nn.Module, aggregation: DiLoCoAggregation, delta: Tensor) -> Tensor:
    """Return the outer gradient of a round with a change of this worker."""
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight -= delta
    aggregation.agg_model()(model, "avg_world")
    return before - model.weight.detach()


def rounds(rank: int, world_size: int) -> dict[str, Any]:
    """Outer gradients of each round, and those of a run that was resumed in the middle."""
    model, aggregation = make(OutlierPenalty(FIRST, LARGEST))
    found = []
    for step in range(ROUNDS):
        if step == 27:
            resumed_model, resumed = make(OutlierPenalty(FIRST, LARGEST))
            resumed_model.load_state_dict(model.state_dict())
            resumed.load_state_dict(copy.deepcopy(aggregation.state_dict()))
        found.append(take(model, aggregation, change(rank, step)))
        if step >= 27:
            take(resumed_model, resumed, change(rank, step))
    return {"found": found, "resumed": torch.equal(resumed_model.weight, model.weight)}


def equal_norms(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    """Outer gradients with a penalty and without, if the norms of the workers are equal."""
    with_penalty, plain = make(OutlierPenalty(FIRST)), make(None)
    pairs = []
    for step in range(3):
        delta = change(0, step).roll(rank, 0)  # the same numbers in another order
        pairs.append((take(*with_penalty, delta), take(*plain, delta)))
    return pairs


def special(rank: int, world_size: int) -> dict[str, Tensor]:
    """Outer gradients if all workers are outliers, and if the change of one is infinite."""
    pair = make(OutlierPenalty(FIRST))
    for step in range(FIRST):
        take(*pair, change(rank, step))
    all_outliers = take(*pair, 1000 * change(rank, FIRST))
    infinite = torch.full(SHAPE, torch.inf, dtype=torch.float64)
    overflow = take(*pair, infinite if rank == 0 else change(rank, 0))
    return {"all outliers": all_outliers, "overflow": overflow}


def messages(rank: int, world_size: int) -> tuple[list[tuple[str, int]], int]:
    """Messages of a round, and the bytes that were counted."""
    model, aggregation = make(OutlierPenalty(FIRST))
    sent: list[tuple[str, int]] = []
    with recording_collectives(lambda name, size_bytes: sent.append((name, size_bytes))):
        take(model, aggregation, change(rank, 0))
    return sent, aggregation.bytes_sent


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    scenarios = (rounds, equal_norms, special, messages)
    return {scenario.__name__: scenario(rank, world_size) for scenario in scenarios}
