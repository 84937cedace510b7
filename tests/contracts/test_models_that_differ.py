"""Rules for workers with different models: every distributed optimizer refuses them, on all
workers."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn

from tests.contracts.test_distributed_optimizers import (
    MEMBERS,
    Member,
    Net,
    every_member,
    take_step,
)
from tests.helpers.ranks import run_ranks

DIFFERENCES = {
    "name": "worker 0 has 'unused', and worker 1 does not",
    "shape": r"'unused' has the shape \(5,\) on worker 0 and \(6,\) on worker 1",
    "dtype": r"'unused' is torch\.\w+ on worker 0 and torch\.float(64|32) on worker 1",
    "requires_grad": "requires_grad of 'unused' is True on worker 0 and False on worker 1",
    "order": "parameter number 2 is 'unused' on worker 0 and 'frozen' on worker 1",
}
NAMELESS = ("sparsified", "random-k")
"""Members that are given parameters without names."""


def change(model: Net, what: str) -> None:
    parameter = model.unused
    del model.unused
    if what == "name":
        model.renamed = parameter
        return
    if what == "order":
        model.unused = parameter
        return
    dtype = (
        parameter.dtype
        if what != "dtype"
        else (torch.float64 if parameter.dtype == torch.float32 else torch.float32)
    )
    changed = torch.zeros(6 if what == "shape" else 5, dtype=dtype)
    model.unused = nn.Parameter(changed, requires_grad=what != "requires_grad")
    # The order of the parameters stays.
    frozen = model.frozen
    del model.frozen
    model.frozen = frozen


def train(member: Member, what: str, rank: int, world_size: int) -> str:
    model = member.model()
    if rank == 1:
        change(model, what)
    optimizer = member.make(model, rank, world_size)
    try:
        for step in range(2 * member.period):
            take_step(model, optimizer, step, rank)
    except ValueError as error:
        return str(error)
    return "no error"


def run_all(rank: int, world_size: int, what: str) -> dict[str, str]:
    # Messages with a delay are on their way when the workers compare their models, and may have
    # another size.
    return {
        name: train(member, what, rank, world_size)
        for name, member in MEMBERS.items()
        if not is_late(name)
    }


def run_late(rank: int, world_size: int, name: str, what: str) -> str:
    return train(MEMBERS[name], what, rank, world_size)


def is_late(name: str) -> bool:
    return name in ("local delayed", "streaming")


@functools.cache
def trained(what: str) -> list[dict[str, str]]:
    return run_ranks(3, run_all, what, timeout_s=200)


@every_member
@pytest.mark.parametrize("what", DIFFERENCES)
def test_all_workers_name_the_difference(what: str, name: str) -> None:
    if is_late(name):
        found = run_ranks(2, run_late, name, what, timeout_s=120)
    else:
        found = [result[name] for result in trained(what)]
    assert len(set(found)) == 1
    if name in (
        "fp16",
        "bf16",
    ):  # which aggregate the parameters that are trainable at the start, in the same order
        assert what == "order" or re.search(
            (
                "model must have the same parameters on all workers, but "
                ".*'(unused|frozen|first.weight)'"
            ),
            found[0],
        )
    elif name in NAMELESS:
        assert "model must have the same parameters on all workers, but" in found[0]
    else:
        assert re.search(DIFFERENCES[what], found[0])
