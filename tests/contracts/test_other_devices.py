"""Every distributed optimizer resumes on another device than that of the checkpoint.

The other device is ``meta``, whose tensors have no values. An operation with tensors of two devices
is an error there, as on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contracts.test_distributed_optimizers import MEMBERS, Net, every_member, take_step

READ_VALUES = {
    *(
        "fp16",
        "bf16",
        "power 1",
        "power 2 warm",
        "power by layer",
        "power in turns",
        "qsgd",
        "quantized",
        "loco",
        "ef sign",
        "sparsified",
        "top-k",
        "random-k",
        "ef21",
        "ef21 muon",
    ),
    "one-bit adam",
    "edit",
    "diloco quantized",
}
"""The members whose update needs values."""


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested dictionaries and lists, without numbers of steps, which torch
    keeps on the CPU."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [
            t
            for key, item in value.items()
            if key not in ("step", "generator")
            for t in tensors(item)
        ]
    return [t for item in value for t in tensors(item)] if isinstance(value, list | tuple) else []


@every_member
def test_the_state_moves_to_the_device_of_the_parameters(name: str) -> None:
    member = MEMBERS[name]
    if name in READ_VALUES or member.needs_cpu:
        pytest.skip("its update needs values in the host's memory")
    model = member.model()
    optimizer = member.make(model, 0, 1)
    for step in range(2 * member.period + 1):
        take_step(model, optimizer, step, 0)
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        group["fused"] = None  # torch has no fused update on meta
    moved = Net(member.dtype).to("meta")
    resumed = member.make(moved, 0, 1)
    resumed.load_state_dict(state)
    for _ in range(2 * member.period):
        for parameter in moved.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        resumed.step()
    assert all(tensor.is_meta for tensor in tensors(resumed.state_dict()))


@every_member
def test_the_state_moves_to_the_dtype_of_the_parameters(name: str) -> None:
    member = MEMBERS[name]
    if member.dtype != torch.float32:
        pytest.skip("its master weights are float32 in any case")
    model = member.model()
    optimizer = member.make(model, 0, 1)
    for step in range(2 * member.period + 1):
        take_step(model, optimizer, step, 0)
    state = copy.deepcopy(optimizer.state_dict())
    wide = member.model()
    wide.load_state_dict(model.state_dict())
    wide.double()
    resumed = member.make(wide, 0, 1)
    resumed.load_state_dict(state)
    for step in range(3 * member.period):
        take_step(wide, resumed, step, 0)
    found = tensors(resumed.state_dict())
    assert {tensor.dtype for tensor in found if tensor.is_floating_point()} <= {torch.float64}
