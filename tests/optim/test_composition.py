"""One class composes any torch optimizer with any aggregation, and what it refuses."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.aggregation import Aggregation
from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation
from mlbench_core.optim.pytorch import (
    CentralizedSGD,
    CustomCentralizedOptimizer,
    GenericCentralizedOptimizer,
)
from tests.helpers.ranks import run_ranks


class Doubling(Aggregation):
    """Doubles what it gets and counts how often it has seen each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def aggregate(self, tensors: Mapping[str, Tensor], op: str, denom: Any = None) -> None:
        for name, tensor in tensors.items():
            self.seen[name] = self.seen.get(name, 0) + 1
            tensor.mul_(2)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.seen = dict(state_dict)


def ones_gradient() -> nn.Linear:
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def test_any_aggregation_serves_and_its_state_is_kept() -> None:
    model = ones_gradient()
    before = model.weight.detach().clone()
    optimizer = CentralizedSGD(model=model, lr=0.5, aggregation=Doubling())
    optimizer.step()
    torch.testing.assert_close(before - model.weight, torch.ones(1, 2))
    state = optimizer.state_dict()
    assert state["aggregation"] == {"weight": 1, "bias": 1}
    other = CentralizedSGD(model=model, lr=0.5, aggregation=Doubling())
    other.load_state_dict(state)
    assert other.aggregation.seen == {"weight": 1, "bias": 1}


class Negating(Aggregation):
    """The negated average of all that it gets. Its author has not heard of extra tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[list[str]] = []

    def aggregate(self, tensors: Mapping[str, Tensor], op: str, denom: Any = None) -> None:
        self.names.append(list(tensors))
        for tensor in tensors.values():
            dist.all_reduce(tensor)
            tensor.div_(-self.world_size)


def negate(rank: int, world_size: int) -> list[Any]:
    """Worker 1 has no gradient of the bias."""
    model, aggregation, loss = ones_gradient(), Negating(), torch.tensor(float(rank))
    if rank == 1:
        model.bias.grad = None
    aggregation.agg_grad()(model, "avg_world")
    flags_bytes = aggregation.last_bytes
    aggregation.combine({}, "avg_custom", 4, [loss])
    gradients = [parameter.grad.tolist() for parameter in model.parameters()]
    return [aggregation.names, gradients, loss.item(), flags_bytes, aggregation.bytes_sent]


def test_an_aggregation_needs_to_know_nothing_of_flags_and_losses() -> None:
    expected = [[["weight", "bias"], []], [[[-1.0, -1.0]], [-0.5]], 0.25, 8, 12]
    assert run_ranks(2, negate) == [expected, expected]


def test_an_aggregation_may_compute_its_world_size() -> None:
    class Alone(Doubling):
        @property
        def world_size(self) -> int:  # type: ignore[override]
            return 1

    optimizer = CentralizedSGD(model=ones_gradient(), lr=0.5, aggregation=copy.deepcopy(Alone()))
    optimizer.step()
    assert (optimizer.world_size, optimizer.aggregation.seen) == (1, {"weight": 1, "bias": 1})


def test_state_of_another_aggregation_is_refused() -> None:
    model = ones_gradient()
    optimizer = CentralizedSGD(model=model, lr=0.5, aggregation=Doubling())
    optimizer.step()
    with pytest.raises(ValueError, match="AllReduceAggregation keeps no state but was given"):
        CentralizedSGD(model=model, lr=0.5).load_state_dict(optimizer.state_dict())


def test_the_state_of_a_plain_torch_optimizer_fits() -> None:
    model = ones_gradient()
    plain = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
    plain.step()
    optimizer = CentralizedSGD(model=model, lr=0.5)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], torch.ones(1, 2))


def test_the_optimizer_may_be_given_later_as_a_subclass_of_version_3_does() -> None:
    class Mine(GenericCentralizedOptimizer):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(world_size=1, model=model)
            self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    model = ones_gradient()
    before = model.bias.detach().clone()
    Mine(model).step()
    torch.testing.assert_close(before - model.bias, torch.ones(1))


def test_without_an_optimizer_the_step_says_so() -> None:
    optimizer = GenericCentralizedOptimizer(world_size=1, model=ones_gradient())
    assert optimizer.optimizer is None
    with pytest.raises(RuntimeError, match=r"set the attribute \.optimizer"):
        optimizer.step()


def test_a_function_may_make_the_optimizer() -> None:
    optimizer = GenericCentralizedOptimizer(
        None, ones_gradient(), optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=0.1)
    )
    assert isinstance(optimizer.optimizer, torch.optim.RMSprop)
    assert len(optimizer.param_groups[0]["params"]) == 2


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_a_clip_that_is_not_positive_is_refused(value: float) -> None:
    model = ones_gradient()
    with pytest.raises(ValueError, match="grad_clip must be positive, or inf for no clipping"):
        CustomCentralizedOptimizer(
            model, 1, torch.optim.SGD(model.parameters(), lr=1.0), grad_clip=value
        )


def test_two_averages_are_refused() -> None:
    model = ones_gradient()
    inside = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="average_world and average_custom are both True"):
        CustomCentralizedOptimizer(model, 1, inside, average_world=True, average_custom=True)


def test_wrong_types_are_refused() -> None:
    model = ones_gradient()
    with pytest.raises(TypeError, match="aggregation must be of the class Aggregation, not str"):
        CentralizedSGD(model=model, lr=1.0, aggregation="sum")
    with pytest.raises(TypeError, match=r"not ABCMeta: write AllReduceAggregation\(\.\.\.\)$"):
        CentralizedSGD(model=model, lr=1.0, aggregation=AllReduceAggregation)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, not str"):
        CustomCentralizedOptimizer(model, 1, "sgd")
    with pytest.raises(ValueError, match="optimizer is missing"):
        CustomCentralizedOptimizer(model, 1, None)
    with pytest.raises(
        ValueError,
        match="world_size is 2, but the process group has 1 worker, and so the aggregation",
    ):
        CentralizedSGD(2, model, lr=1.0, aggregation=Doubling())
    with pytest.raises(ValueError, match="empty parameter list"):
        CentralizedSGD(1, nn.Tanh(), lr=1.0)


def test_one_worker_divides_by_the_denominator_and_clips() -> None:
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    model.weight.grad = torch.full((1, 4), 6.0)
    inside = torch.optim.SGD(model.parameters(), lr=1.0)
    CustomCentralizedOptimizer(model, 1, inside, average_custom=True).step(denom=torch.tensor([3]))
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 4), -2.0))
    nn.init.zeros_(model.weight)
    CustomCentralizedOptimizer(model, 1, inside, grad_clip=1.0).step()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 4), -0.5))


def test_a_custom_optimizer_says_whether_it_stepped() -> None:
    """``if optimizer.step(): scheduler.step()``, as scripts of version 3.0 have it."""
    model = ones_gradient()
    optimizer = CustomCentralizedOptimizer(
        model, 1, torch.optim.SGD(model.parameters(), lr=1.0), grad_clip=1.0
    )
    assert optimizer.step() is True
    assert optimizer.step(lambda: 7.0) == 7.0, (
        "a closure's loss is returned, as by every torch optimizer"
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    stepped = []
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, model.in_features), factor)).sum()).backward()
        stepped.append(scaler.step(optimizer))
        scaler.update()
    assert stepped == [True, False, True]


def test_a_missing_denominator_is_named() -> None:
    model = ones_gradient()
    inside = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="denom, which is None: give denom"):
        CustomCentralizedOptimizer(model, 1, inside, average_custom=True).step()
