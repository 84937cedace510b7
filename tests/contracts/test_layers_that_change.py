"""Rules for layers that are frozen, unfrozen or get gradients by hand, which every distributed
optimizer obeys.

They hold for each member of the table of :mod:`tests.contracts.test_distributed_optimizers`, so a
new optimizer gets them by itself."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch import average_weights, consensus_distance
from tests.contracts.test_distributed_optimizers import (
    MEMBERS,
    Member,
    Net,
    every_member,
    parameters,
    same,
    spread,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import pairs

STEPS = 12
CHANGE, BACK = 4, 8  # steps of a change and of its end, both between two averages
WORLD_SIZE = 3

Change = Callable[[Net, int, int], None]


def freeze(model: Net, step: int, rank: int) -> None:
    if step in (CHANGE, BACK):
        model.first.requires_grad_(step == BACK)


def freeze_alone(model: Net, step: int, rank: int) -> None:
    if rank == 1:
        freeze(model, step, rank)


def freeze_until_the_end(model: Net, step: int, rank: int) -> None:
    if step == CHANGE:
        model.first.requires_grad_(False)


def unfreeze(model: Net, step: int, rank: int) -> None:
    if step in (CHANGE, BACK):
        model.frozen.requires_grad_(step == CHANGE)


def unfreeze_alone(model: Net, step: int, rank: int) -> None:
    if rank == 1:
        unfreeze(model, step, rank)


def lose_a_gradient(model: Net, step: int, rank: int) -> None:
    if step in (CHANGE, BACK) and rank == 1:
        model.first.weight.grad = None
        model.last.zero_grad(set_to_none=True)


def set_gradients_by_hand(model: Net, step: int, rank: int) -> None:
    if step == CHANGE and rank == 1:
        for parameter in (model.unused, model.frozen):
            parameter.grad = torch.ones_like(parameter)


def set_gradients_by_hand_everywhere(model: Net, step: int, rank: int) -> None:
    if step in (CHANGE, BACK):
        for parameter in (model.unused, model.frozen):
            parameter.grad = torch.full_like(parameter, rank + 1)


@dataclass(frozen=True)
class Case:
    """A change of a model in training.

    Args:
        change: Gets the model, the step and the worker's rank.
        is_before: Whether it comes before the backward pass; otherwise between the backward pass
            and the step.
        changes_gradients: Whether it changes gradients by hand. If the backward pass has averaged
            them (overlap), that must be done on all workers alike, as with DistributedDataParallel.
    """

    change: Change
    is_before: bool = False
    changes_gradients: bool = False


CASES = {
    "frozen before the backward pass": Case(freeze, is_before=True),
    "frozen before the step": Case(freeze),
    "frozen by one worker before the backward pass": Case(freeze_alone, is_before=True),
    "frozen by one worker before the step": Case(freeze_alone),
    "unfrozen": Case(unfreeze, is_before=True),
    "unfrozen by one worker": Case(unfreeze_alone, is_before=True),
    "without a gradient on one worker": Case(lose_a_gradient, changes_gradients=True),
    "gradient by hand on one worker": Case(set_gradients_by_hand, changes_gradients=True),
    "gradient by hand on all workers": Case(
        set_gradients_by_hand_everywhere, changes_gradients=True
    ),
    "frozen until the end": Case(freeze_until_the_end),
}
FIRST = [
    position
    for position, (name, _) in enumerate(Net().named_parameters())
    if name.startswith("first.")
]
UNTIL_THE_END = "frozen until the end"
# Two rules look at this case of each member.
PAIRS = pairs(MEMBERS, [case for case in CASES if case != UNTIL_THE_END])
PAIRS += [(name, UNTIL_THE_END) for name in MEMBERS]
every_pair = pytest.mark.parametrize(("name", "case"), PAIRS)


def train(member: Member, case: Case, rank: int, world_size: int) -> dict[str, Any]:
    model = member.model()
    optimizer = member.make(model, rank, world_size)
    history = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        inputs = torch.randn(8, 6, generator=generator).to(model.first.weight.dtype)
        targets = torch.randn(8, 3, generator=generator)
        optimizer.zero_grad()
        if case.is_before:
            case.change(model, step, rank)
        loss = nn.functional.mse_loss(model(inputs, uses_sometimes=True).float(), targets)
        getattr(optimizer, "backward_loss", Tensor.backward)(loss)
        if not case.is_before:
            case.change(model, step, rank)
        optimizer.step()
        history.append(parameters(model))
    distance = consensus_distance(model)
    average_weights(model)
    return {
        "history": history,
        "distance": distance,
        "average": parameters(model),
        "overlaps": optimizer.aggregation.overlap,
    }


def run_all(rank: int, world_size: int) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for name, case in PAIRS:
        try:
            found[name, case] = train(MEMBERS[name], CASES[case], rank, world_size)
        except Exception:
            found[name, case] = {"failure": traceback.format_exc()}
    return found


@functools.cache
def trained() -> list[dict[tuple[str, str], dict[str, Any]]]:
    return run_ranks(WORLD_SIZE, run_all, timeout_s=200)


def results(name: str, case: str) -> list[dict[str, Any]]:
    for rank, found in enumerate(trained()):
        if "failure" in found[name, case]:
            pytest.fail(f"rank {rank}: {found[name, case]['failure']}")
    return [found[name, case] for found in trained()]


def first_layer(result: dict[str, Any], step: int) -> list[Tensor]:
    return [result["history"][step][position] for position in FIRST]


@every_pair
def test_workers_have_one_model_after_an_average(case: str, name: str) -> None:
    member, found = MEMBERS[name], results(name, case)
    if member.without is None and not (CASES[case].changes_gradients and found[0]["overlaps"]):
        for step in range(member.period - 1, STEPS, member.period):
            first, *others = (result["history"][step] for result in found)
            assert all(same(first, other) for other in others), f"after step {step}"


@every_pair
def test_the_distance_and_the_average_cover_all_parameters(case: str, name: str) -> None:
    found = results(name, case)
    first, *others = (result["average"] for result in found)
    assert all(same(first, other) for other in others)
    workers = torch.stack(
        [torch.cat([p.double().reshape(-1) for p in r["history"][-1]]) for r in found]
    )
    expected = float((workers - workers.mean(0)).square().sum(1).mean().sqrt())
    assert all(
        result["distance"] == pytest.approx(expected, rel=1e-6, abs=1e-12) for result in found
    )


# One of three workers is alone in each of NoLoCo's exchanges, and there are only three of them.
@pytest.mark.parametrize(
    "name", [name for name, member in MEMBERS.items() if member.without and name != "no loco"]
)
def test_workers_that_stay_close_agree_more_and_more_on_a_frozen_layer(name: str) -> None:
    found = results(name, UNTIL_THE_END)
    before, after = (
        spread([first_layer(result, step) for result in found]) for step in (CHANGE, -1)
    )
    assert after < max(0.5 * before, 1e-6)  # three workers in a ring are equal up to rounding


@every_member
def test_a_frozen_layer_stays_after_the_next_average(name: str) -> None:
    """A layer that all workers have frozen does not move on, for example by an outer momentum."""
    member = MEMBERS[name]
    # The error memory of SparseLoCo still has a part of its steps. Master weights in float32 get
    # zeros as gradients.
    if member.without is None and name not in ("sparse loco", "fp16", "bf16"):
        for result in results(name, UNTIL_THE_END):
            settled = -(-(CHANGE + 1) // member.period) * member.period - 1
            # An average of three equal values may differ from them in the last bit.
            torch.testing.assert_close(
                first_layer(result, settled), first_layer(result, -1), rtol=1e-6, atol=0
            )
