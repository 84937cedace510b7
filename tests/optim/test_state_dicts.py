"""States of optimizers: names of parameters, and what is restored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mlbench_core.aggregation.pytorch import ChocoAggregation
from mlbench_core.aggregation.pytorch.compression.power import PowerAggregation
from mlbench_core.aggregation.pytorch.compression.sign import SignAggregation
from mlbench_core.aggregation.pytorch.compression.sparsified import SparsifiedAggregation
from mlbench_core.optim.pytorch import (
    CentralizedSGD,
    ChocoSGD,
    DiLoCo,
    EFSignSGD,
    GenericCentralizedOptimizer,
    LocalSGD,
    PowerSGD,
    SparsifiedSGD,
)

Make = Callable[[nn.Module], Optimizer]

MAKERS: dict[str, Make] = {
    "sgd": lambda m: CentralizedSGD(model=m, lr=0.1, momentum=0.9),
    "power": lambda m: PowerSGD(m, 0.1, momentum=0.9, reuse_query=True),
    "ef sign": lambda m: EFSignSGD(m.named_parameters(), 0.1, momentum=0.9),
    "top-k": lambda m: SparsifiedSGD(m.named_parameters(), 0.1, sparse_grad_size=2),
    "top-k composed": lambda m: GenericCentralizedOptimizer(
        None,
        m,
        optimizer=partial(SGD, lr=0.1),
        aggregation=SparsifiedAggregation(m, size=2, random=True),
    ),
    "local": lambda m: LocalSGD(model=m, lr=0.1, period=3),
    "diloco": lambda m: DiLoCo(model=m, lr=0.1, period=3),
}
BY_NAME = ("power", "top-k composed", "local", "diloco")  # torch's own states go by position


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    for i, parameter in enumerate(model.parameters()):
        nn.init.uniform_(parameter, generator=torch.Generator().manual_seed(i))
    return model


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        for parameter in model.parameters():
            generator = torch.Generator().manual_seed(100 * step + parameter.numel())
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("was_compiled", [False, True])
def test_a_model_may_be_compiled_or_no_longer(make: Make, was_compiled: bool) -> None:
    first, second = make_model(), make_model()
    seen = [
        torch.compile(model, backend="eager") if compiled is was_compiled else model
        for model, compiled in ((first, True), (second, False))
    ]
    optimizer = make(seen[0])  # type: ignore[arg-type]
    train(first, optimizer, range(4))
    second.load_state_dict(first.state_dict())
    resumed = make(seen[1])  # type: ignore[arg-type]
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for ours, theirs in zip(
        train(first, optimizer, range(4, 9)), train(second, resumed, range(4, 9)), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", BY_NAME)
def test_other_names_are_refused(name: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = make_model()

    model, other = make_model(), Wrapped()
    optimizer = MAKERS[name](model)
    train(model, optimizer, range(4))
    resumed = MAKERS[name](other)
    before = train(other, resumed, range(1))
    expected = copy.deepcopy(resumed.state_dict())
    with pytest.raises(ValueError, match=r"\('inside\.0\.bias', .*\), not '0\.(bias|weight)'"):
        resumed.load_state_dict(optimizer.state_dict())
    assert str(resumed.state_dict()) == str(expected)  # nothing was loaded
    assert all(torch.equal(p, q) for p, q in zip(other.parameters(), before, strict=True))


def test_choco_refuses_other_names() -> None:
    state = ChocoSGD(0, [], make_model(), lr=0.1).state_dict()
    state["aggregation"]["copies"] = state["aggregation"]["sums"] = {"elsewhere": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"those of parameters \('0\.bias', .*\), not 'elsewhere'"):
        ChocoSGD(0, [], make_model(), lr=0.1).load_state_dict(state)


def test_an_aggregation_that_knows_its_model_refuses_other_names() -> None:
    state = {
        "errors": {"elsewhere": torch.zeros(2, 2)},
        "queries": {},
        "uncompressed_steps": {},
        "generator": torch.Generator().get_state(),
    }
    with pytest.raises(ValueError, match="not 'elsewhere'"):
        PowerAggregation(make_model()).load_state_dict(state)
    with pytest.raises(ValueError, match="not 'elsewhere'"):
        SparsifiedAggregation(make_model()).load_state_dict(
            {"memory": {"elsewhere": torch.zeros(2)}}
        )


def test_names_of_compiled_models_in_states_of_earlier_versions() -> None:
    model = make_model()
    memory = torch.full((5, 6), 3.0)
    aggregation = SparsifiedAggregation(model)
    aggregation.load_state_dict({"memory": {"_orig_mod.0.weight": memory}})
    assert list(aggregation.state_dict()["memory"]) == ["0.weight"]
    optimizer = EFSignSGD(torch.compile(model, backend="eager").named_parameters(), 0.1)
    state = optimizer.state_dict()
    optimizer.load_state_dict({**state, "aggregation": {"memory": {"_orig_mod.0.weight": memory}}})
    error = optimizer.aggregation.memory("0.weight")
    assert error is not None
    assert torch.equal(error, memory)


def test_parameters_without_names_and_with() -> None:
    model = make_model()
    nameless, named = EFSignSGD(model.parameters(), 0.1), EFSignSGD(model.named_parameters(), 0.1)
    train(model, nameless, range(2))
    with pytest.raises(ValueError, match=r"parameters \('0\.bias', .*\), not 'group0\.0'"):
        named.load_state_dict(nameless.state_dict())
    assert not named.aggregation.state_dict()
    train(model, named, range(2))
    resumed_model = make_model()
    resumed_model.load_state_dict(model.state_dict())
    resumed = EFSignSGD(resumed_model.parameters(), 0.1)
    resumed.load_state_dict(
        copy.deepcopy(named.state_dict())
    )  # as in torch, names come with the state
    ours, theirs = train(model, named, range(2, 5)), train(resumed_model, resumed, range(2, 5))
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_parameters_outside_the_model_are_known() -> None:
    def make() -> tuple[nn.Module, nn.Parameter, PowerSGD]:
        model, outside = make_model(), nn.Parameter(torch.ones(7, 6))
        optimizer = PowerSGD(model, 0.1)
        optimizer.add_param_group({"params": [outside]})
        return model, outside, optimizer

    model, outside, optimizer = make()
    outside.grad = torch.rand(7, 6, generator=torch.Generator().manual_seed(1))
    train(model, optimizer, range(1))
    _, _, resumed = make()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    error = resumed.aggregation.state_dict()["errors"]["group1.0"]
    assert torch.equal(error, optimizer.aggregation.state_dict()["errors"]["group1.0"])
    with pytest.raises(ValueError, match=r"not 'group1\.0'"):
        PowerSGD(make_model(), 0.1).load_state_dict(optimizer.state_dict())


def test_options_of_the_outer_optimizer_are_restored() -> None:
    model, second = make_model(), make_model()
    optimizer, resumed = (
        DiLoCo(model=model, lr=0.1, period=2),
        DiLoCo(model=second, lr=0.1, period=2),
    )
    optimizer.outer_optimizer.param_groups[0]["lr"] = 0.25
    train(model, optimizer, range(3))
    second.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.outer_optimizer.param_groups[0]["lr"] == 0.25
    ours, theirs = train(model, optimizer, range(3, 8)), train(second, resumed, range(3, 8))
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_votes_for_zeros_go_on_in_turn() -> None:
    aggregation = SignAggregation()
    aggregation.load_state_dict({"votes_held": {"weight": 3}})
    assert aggregation.state_dict() == {"votes_held": {"weight": 3}}


def test_the_shared_part_of_a_state() -> None:
    model = make_model()
    own: dict[str, set[str]] = {
        "power": {"errors"},
        "ef sign": {"memory"},
        "top-k composed": {"memory"},
        "diloco": set(),
    }
    for name, keys in own.items():
        optimizer: Any = MAKERS[name](model)
        train(model, optimizer, range(4))
        state = optimizer.state_dict()
        shared = optimizer.shared_state_dict(state)
        dropped = {
            key
            for key, value in shared["aggregation"].items()
            if str(value) != str(state["aggregation"][key])
        }
        assert dropped == keys
        assert not any(shared["aggregation"][key] for key in keys)
    assert ChocoAggregation(0, None).shared_state(
        {"copies": {"a": 1}, "sums": {"a": 1}, "origin": 3}
    ) == {
        "copies": {},
        "sums": {},
        "origin": 3,
    }
