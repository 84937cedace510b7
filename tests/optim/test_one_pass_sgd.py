"""The SGD inside the optimizers has the bits of torch's plain SGD, whatever its tensors look
like."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from mlbench_core.optim.pytorch import CentralizedSGD
from mlbench_core.optim.pytorch.updates.one_pass_sgd import OnePassSGD

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"weight_decay": 1e-2},
    {"momentum": 0.9, "weight_decay": 1e-2},
    {"momentum": 0.9, "dampening": 0.1, "maximize": True},
    {"momentum": 0.9, "nesterov": True},
)


def make_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(300, 400, generator=generator, dtype=dtype)
    images = torch.randn(64, 40, 3, 3, generator=generator, dtype=dtype).contiguous(
        memory_format=torch.channels_last
    )
    odd, scalar = torch.randn(20_011, generator=generator, dtype=dtype), torch.ones((), dtype=dtype)
    gaps = torch.randn(200, 300, generator=generator, dtype=dtype)
    tensors = (table, images, odd, scalar, gaps[:, :200])
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    assert not parameters[-1].is_contiguous()
    return parameters


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
            parameter.dtype
        )
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    # Strides unlike those of the parameter, and a parameter that joins later.
    parameters[0].grad = (
        parameters[0].grad.t().contiguous().t() if step == 1 else parameters[0].grad
    )
    parameters[2].grad = None if step == 0 else parameters[2].grad


def train(optimizer: SGD, steps: range) -> None:
    for step in steps:
        set_gradients(optimizer.param_groups[0]["params"], step)
        optimizer.step()


def assert_equal(left: SGD, right: SGD) -> None:
    assert left.state_dict()["param_groups"] == right.state_dict()["param_groups"]
    for a, b in zip(left.param_groups[0]["params"], right.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)
        states = [
            optimizer.state.get(p, {}).get("momentum_buffer")
            for optimizer, p in ((left, a), (right, b))
        ]
        assert (states[0] is None and states[1] is None) or torch.equal(*states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_weights_and_momentum_have_the_bits_of_torch(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    ours, plain = (kind(make_parameters(dtype), lr=0.1, **options) for kind in (OnePassSGD, SGD))
    for optimizer in (ours, plain):
        train(optimizer, range(4))
    assert_equal(ours, plain)


def test_large_tensors_go_through_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    updated: list[int] = []
    kernel = torch._fused_sgd_

    def count(parameters: list[Tensor], *args: Any, **kwargs: Any) -> None:
        updated.extend(p.numel() for p in parameters)
        kernel(parameters, *args, **kwargs)

    monkeypatch.setattr(torch, "_fused_sgd_", count)
    parameters = make_parameters(torch.float32)
    set_gradients(parameters, 3)
    CentralizedSGD(1, nn.ParameterList(parameters), lr=0.1).step()
    assert sorted(updated) == [20_011 // 64 * 64, 64 * 40 * 9, 300 * 400]


@pytest.mark.parametrize("kinds", [(OnePassSGD, SGD), (SGD, OnePassSGD)])
def test_states_of_torch_and_of_this_class_are_interchangeable(
    kinds: tuple[type[SGD], type[SGD]],
) -> None:
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    whole = SGD(make_parameters(torch.float32), **options)
    train(whole, range(5))
    first = kinds[0](make_parameters(torch.float32), **options)
    train(first, range(2))
    second = kinds[1](copy.deepcopy(first.param_groups[0]["params"]), **options)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, range(2, 5))
    assert_equal(second, whole)


def test_it_keeps_hooks_closures_and_pickles_and_leaves_other_implementations_to_torch() -> None:
    calls: list[str] = []
    parameter = nn.Parameter(torch.ones(200, 200))
    optimizer = OnePassSGD([parameter], lr=0.5)
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = parameter.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 40_000
    copied = pickle.loads(pickle.dumps(optimizer))
    assert isinstance(copied, OnePassSGD) and calls == ["hook"]
    assert torch.equal(parameter, torch.full((200, 200), 0.5))
    # With foreach a group keeps torch's own way, which handles sparse gradients too.
    for group in ({"foreach": True}, {}):
        rows = nn.Parameter(torch.ones(200, 200))
        rows.grad = torch.sparse_coo_tensor(
            torch.tensor([[3]]), torch.ones(1, 200), (200, 200), check_invariants=True
        )
        OnePassSGD([{"params": [rows], **group}], lr=1.0).step()
        assert rows.sum().item() == 199 * 200


@pytest.mark.parametrize("foreach", [False, True])
def test_hooks_run_once(foreach: bool) -> None:
    """Torch adds hooks to SGD's own step when the process makes the first SGD."""
    SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer, calls = OnePassSGD([parameter], lr=0.5, foreach=foreach), []
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    optimizer.step()
    assert calls == ["hook"] and parameter.tolist() == [0.5, 0.5]


def test_overlap_updates_all_elements_in_half_precision() -> None:
    # torch 2.13's fused SGD leaves most of them as they are.
    model = nn.Linear(64, 64).bfloat16()
    optimizer = CentralizedSGD(1, model, lr=1.0, overlap=True)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(p, torch.full_like(p, -1)) for p in model.parameters())
