"""Rules for torch's functions for distributed checkpoints: with every optimizer they are exact, or
an error."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from tests.contracts.test_distributed_optimizers import (
    MEMBERS,
    Member,
    every_member,
    parameters,
    same,
    take_step,
)
from tests.helpers.collectives import recording_collectives
from tests.helpers.ranks import run_ranks

STEPS, HALF = 7, 4
EXACT = {
    name
    for name, member in MEMBERS.items()
    if name.startswith(
        ("sgd", "adam", "lars", "muon", "normuon", "dion2", "dion3", "custom", "ring", "quantized")
    )
}
"""The members whose communication keeps no state; muloco does."""


def resume(member: Member, rank: int, world_size: int) -> Any:
    """Return the weights of a run that was saved and restored half way, and of one that was not; or
    the error."""
    model = member.model()
    optimizer = member.make(model, rank, world_size)
    options = StateDictOptions(strict=False)  # a parameter that had no gradient has no state
    for step in range(HALF):
        take_step(model, optimizer, step, rank)
    optimizer.zero_grad()
    messages: list[str] = []
    before = parameters(model)
    try:
        with recording_collectives(lambda name, size_bytes: messages.append(name)):
            saved = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    except RuntimeError as error:
        refused = str(error)
        with pytest.raises(RuntimeError, match="would lose"):
            set_state_dict(
                model,
                optimizer,
                model_state_dict={},
                optim_state_dict={"state": {}, "param_groups": []},
            )
        return refused
    assert same(before, parameters(model))
    resumed_model = member.model()
    resumed = member.make(resumed_model, rank, world_size)
    with recording_collectives(lambda name, size_bytes: messages.append(name)):
        set_state_dict(
            resumed_model,
            resumed,
            model_state_dict=saved[0],
            optim_state_dict=saved[1],
            options=options,
        )
    for step in range(HALF, STEPS):
        take_step(model, optimizer, step, rank)
        take_step(resumed_model, resumed, step, rank)
    return parameters(model), parameters(resumed_model), messages


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    return {name: resume(member, rank, world_size) for name, member in MEMBERS.items()}


@functools.cache
def resumed() -> list[dict[str, Any]]:
    return run_ranks(2, run_all, timeout_s=200)


@every_member
def test_a_run_resumes_exactly_or_the_call_is_refused(name: str) -> None:
    for result in resumed():
        found = result[name]
        if name not in EXACT:
            assert "save optimizer.state_dict() on every worker" in found
            continue
        straight, again, messages = found
        assert same(straight, again)
        assert messages == []
