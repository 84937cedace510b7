"""The scenarios of the tests of methods that average a part of the state at a time, in each of
three worker processes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

# The first optimizer would import it inside a test, and it sets an environment variable.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from mlbench_core.aggregation.pytorch import DESLOCAggregation, SPARTAAggregation
from mlbench_core.optim.pytorch import DESLOC, SPARTA
from tests.optim.weight_averaging import Weights, descend, gradient, start

WORKERS, STEPS = 3, 15
# Kx, Ku and Kv. The third and the fourth have moments that are due when the weights are not.
PERIODS = ((4, 4, 4), (2, 6, 12), (4, 2, 3), (5, 7, 2))
SHARE, SEED = 0.2, 3


def train(rank: int, steps: range, model: nn.Module, optimizer: Any) -> tuple[Tensor, ...]:
    """The weights, the first and the second moments after some steps."""
    descend(rank, model, optimizer, steps)
    state = optimizer.state[model.x]
    return model.x.detach(), state["exp_avg"], state["exp_avg_sq"]


def des_loc(rank: int, group: Any) -> dict[Any, Any]:
    """Against the reference, with its bytes, resumed, and with the data of worker 0 on all."""
    result: dict[Any, Any] = {}
    for periods in PERIODS:
        names = ("period", "first_moment_period", "second_moment_period")
        options: dict[str, Any] = dict(zip(names, periods, strict=True))
        exchange = partial(DESLOCAggregation, process_group=group, **options)
        make = partial(DESLOC, lr=0.05)
        model = Weights(x=start())
        optimizer, sent = make(model=model, aggregation=exchange()), []
        for step in range(STEPS):
            if step == 5:
                other = copy.deepcopy(model)
                resumed = make(model=other, aggregation=exchange())
                resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            found = train(rank, range(step, step + 1), model, optimizer)
            sent.append(optimizer.aggregation.last_bytes)
        result[periods] = {
            "found": found,
            "sent": sent,
            "resumed": train(rank, range(5, STEPS), other, resumed),
        }
        same = Weights(x=start())
        optimizer = make(model=same, aggregation=exchange())
        result[periods]["same data"] = train(0, range(STEPS), same, optimizer)
    return result


def one_without_gradients(rank: int) -> dict[str, Any]:
    """Worker 0 alone has gradients of y, and a buffer differs: the state after two steps."""
    model = Weights(x=start(), y=torch.ones(3))
    model.register_buffer("statistic", torch.tensor([float(rank)]))
    optimizer = DESLOC(model=model, lr=0.1, period=2, first_moment_period=2)
    for _ in range(2):
        model.x.grad = gradient(rank, model.x.detach(), 0)
        if rank == 0:
            model.y.grad = torch.ones(3)
        optimizer.step()
    return {"statistic": model.statistic, "y": model.y.detach(), **optimizer.state.get(model.y, {})}


def rare_gradient(rank: int, x: Tensor, step: int) -> Tensor:
    """A gradient that is zero in a third of the coordinates, those of the worker."""
    found = gradient(rank, x, step)
    found.view(-1)[rank::3] = 0
    return found


def rare(rank: int) -> list[Tensor]:
    """The weights after each step with coordinates that a worker has no gradient of."""
    model = Weights(x=start())
    optimizer = DESLOC(model=model, lr=0.05, period=2)
    history = [start()]
    for step in range(STEPS):
        model.x.grad = rare_gradient(rank, model.x.detach(), step)
        optimizer.step()
        history.append(model.x.detach().clone())
    return history


def frozen(rank: int) -> Tensor:
    """The weights of a model with a frozen parameter that the optimizer leaves out."""
    model = Weights(x=start(), y=torch.ones(3))
    model.y.requires_grad_(False)
    adam = AdamW([model.x], lr=0.05)
    aggregation = DESLOCAggregation(period=2)
    aggregation.watch(dict(model.named_parameters()), adam)
    average = aggregation.agg_model()
    for step in range(6):
        model.x.grad = gradient(rank, model.x.detach(), step)
        adam.step()
        average(model, "avg_world")
    return model.x.detach()


def sparta(rank: int, group: Any) -> dict[str, Any]:
    """Against the reference, with its bytes, and resumed."""

    def make(model: Weights) -> SPARTA:
        exchange = SPARTAAggregation(share=SHARE, seed=SEED, process_group=group)
        return SPARTA(model=model, lr=0.05, aggregation=exchange)

    model = Weights(x=start())
    optimizer, sent = make(model), []
    for step in range(STEPS):
        if step == 5:
            other = copy.deepcopy(model)
            resumed = make(other)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        x = descend(rank, model, optimizer, range(step, step + 1))[-1]
        sent.append(optimizer.aggregation.last_bytes)
    return {"x": x, "sent": sent, "resumed": descend(rank, other, resumed, range(5, STEPS))[-1]}


def spread(rank: int) -> list[Tensor]:
    """Tensors that start apart, as one, before and after each average of 5 % of them."""
    generator = torch.Generator().manual_seed(rank)
    tensors = {
        "x": torch.randn(100, 99, generator=generator, dtype=torch.float64).t(),
        "y": torch.randn(100, generator=generator, dtype=torch.float64),
    }
    aggregation, history = SPARTAAggregation(share=0.05), []
    for _ in range(21):
        history.append(torch.cat([x.flatten() for x in tensors.values()]))
        aggregation.aggregate(tensors, "avg_world")
    return history


def whole(rank: int) -> dict[str, Tensor]:
    """Tensors of many kinds with the value of the rank, of which all is averaged."""
    value = float(rank)
    tensors = {
        "strided": torch.full((2, 3), value).t(),
        "scalar": torch.tensor(value),
        "empty": torch.zeros(0, 3),
        "one": torch.full((1,), value),
        "f64": torch.full((2,), value, dtype=torch.float64),
    }
    SPARTAAggregation(share=1.0).aggregate(tensors, "avg_world")
    return tensors


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "one without gradients": one_without_gradients(rank),
        "frozen": frozen(rank),
        "rare": rare(rank),
        "spread": spread(rank),
        "whole": whole(rank),
    }
    for k in (2, 3):
        group = dist.new_group(list(range(k)))
        if rank < k:
            result[f"des_loc {k}"] = des_loc(rank, group)
            result[f"sparta {k}"] = sparta(rank, group)
    return result
