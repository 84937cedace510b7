"""The scenarios of the tests of EF21, in each of four worker processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

# The first optimizer would import it inside a test, and it sets an environment variable.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor

from mlbench_core.aggregation.pytorch import (
    AllReduceAggregation,
    ARCTopKAggregation,
    EF21Aggregation,
    SparsifiedAggregation,
)
from mlbench_core.optim.pytorch import EF21, CentralizedSGD, GenericCentralizedOptimizer, MuonAdamW
from tests.optim.weight_averaging import Weights, descend, gradient, start

WORKERS, STEPS, SIZE, MOMENTUM = 4, 15, 4, 0.6
ARC: dict[str, Any] = {"size": 2, "rank": 2, "seed": 3}
GROWTH_LR, FAR_LR = 0.08, 0.05
FAR_STEPS = 200


def growing(rank: int, x: Tensor, step: int) -> Tensor:
    """The gradient of <a_i, x>^2 + |x|^2 / 4, with a = (-3, 2, 2) and its rotations."""
    a = torch.tensor([-3.0, 2.0, 2.0], dtype=torch.float64).roll(rank)
    return 2 * (a @ x) * a + x / 2


def far_problem(rank: int) -> tuple[Tensor, Tensor]:
    """Curvatures and optimum of a diagonal quadratic of ten dimensions."""
    generator = torch.Generator().manual_seed(rank)
    curvature = 0.5 + 2 * torch.rand(10, generator=generator, dtype=torch.float64)
    return curvature, 5 * torch.randn(10, generator=generator, dtype=torch.float64)


def far(rank: int, x: Tensor, step: int) -> Tensor:
    curvature, optimum = far_problem(rank)
    return curvature * (x - optimum)


def train(
    rank: int, x: Tensor, make: Callable[[Weights], Any], gradient: Any, steps: int
) -> tuple[Tensor, Any]:
    """The weights after some steps, and the optimizer."""
    model = Weights(x=x)
    optimizer = make(model)
    for step in range(steps):
        model.x.grad = gradient(rank, model.x.detach(), step)
        optimizer.step()
    return model.x.detach(), optimizer


def against_references(rank: int, group: Any) -> dict[str, Any]:
    """Both algorithms, as SGD and with Muon's direction; bytes, and a resumed run."""
    result: dict[str, Any] = {}
    for momentum in (0.0, MOMENTUM):
        options: dict[str, Any] = {"size": SIZE, "momentum": momentum, "process_group": group}
        model = Weights(x=start())
        optimizer = EF21(model=model, lr=0.1, aggregation=EF21Aggregation(model, **options))
        sent, history = [], []
        for step in range(STEPS):
            if step == STEPS // 2:
                resumed_model = Weights(x=model.x.detach())
                exchange = EF21Aggregation(resumed_model, **options)
                resumed = EF21(model=resumed_model, lr=0.1, aggregation=exchange)
                resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            history += descend(rank, model, optimizer, range(step, step + 1))
            sent.append(optimizer.aggregation.last_bytes)
        descend(rank, resumed_model, resumed, range(STEPS // 2, STEPS))
        model = Weights(x=start())
        muon = GenericCentralizedOptimizer(
            None,
            model,
            optimizer=partial(MuonAdamW, lr=0.05, weight_decay=0, momentum=0),
            aggregation=EF21Aggregation(model, **options),
        )
        descend(rank, model, muon)
        result[str(momentum)] = {
            "x": history[-1],
            "resumed": resumed_model.x.detach(),
            "state": optimizer.aggregation.state_dict(),
            "sent": sent,
            "muon": model.x.detach(),
        }
    return result


def whole(rank: int, group: Any, kind: Any) -> tuple[Tensor, Tensor]:
    """All coordinates are sent; and SGD on momentum of the average gradient."""
    exchange = kind(None, size=1.0, momentum=MOMENTUM, process_group=group)
    model, other = Weights(x=start()), Weights(x=start())
    descend(rank, model, EF21(model=model, lr=0.1, aggregation=exchange))
    options = {"momentum": MOMENTUM, "dampening": MOMENTUM}
    average = AllReduceAggregation(process_group=group)
    sgd = CentralizedSGD(model=other, lr=0.1, aggregation=average, **options)
    return model.x.detach(), descend(rank, other, sgd)[-1]


def growth(rank: int, group: Any) -> dict[str, Tensor]:
    """Top-1 on three functions, plainly averaged and with EF21."""
    ones = torch.ones(3, dtype=torch.float64)
    options: dict[str, Any] = {"size": 1, "process_group": group}
    plain = SparsifiedAggregation(None, error_feedback=False, **options)
    exchange = EF21Aggregation(None, momentum=0, **options)

    def with_plain(model: Weights) -> Any:
        return CentralizedSGD(model=model, lr=GROWTH_LR, aggregation=plain)

    def with_ef21(model: Weights) -> Any:
        return EF21(model=model, lr=GROWTH_LR, aggregation=exchange)

    return {
        "plain": train(rank, ones, with_plain, growing, 10)[0],
        "ef21": train(rank, ones, with_ef21, growing, 100)[0],
    }


def far_optima(rank: int) -> dict[str, Tensor]:
    """Top-1 on four functions with different optima, with EF21 and with classical feedback."""
    zeros = torch.zeros(10, dtype=torch.float64)
    exchange, classical = (
        EF21Aggregation(None, size=1, momentum=0),
        SparsifiedAggregation(None, size=1),
    )

    def with_ef21(model: Weights) -> Any:
        return EF21(model=model, lr=FAR_LR, aggregation=exchange)

    def with_classical(model: Weights) -> Any:
        return CentralizedSGD(model=model, lr=FAR_LR, aggregation=classical)

    return {
        "ef21": train(rank, zeros, with_ef21, far, FAR_STEPS)[0],
        "classical": train(rank, zeros, with_classical, far, FAR_STEPS)[0],
    }


def overflow(rank: int, make: Callable[..., Any], *shape: int) -> dict[str, Any]:
    """A worker has a value that is not finite in a step: where each worker is afterwards."""
    result = {}
    for value in (float("inf"), float("nan")):
        aggregation = make(None, momentum=0.5)
        for step in range(8):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(12, generator=generator, dtype=torch.float64)
            if rank == 1 and step in (0, 4):
                x[5:10] = value
            x = x.view(shape)
            aggregation.aggregate({"x": x}, "avg_world")
            if step in (0, 4):
                result[value, step] = bool(x.isfinite().all())
        result[value, "state"] = aggregation.state_dict()
    return result


def denominators(rank: int) -> tuple[Tensor, Tensor]:
    """Sums over a number that changes, times that number, and averages times the workers."""
    one, other = (EF21Aggregation(None, size=3) for _ in range(2))
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(12, generator=generator, dtype=torch.float64)
        y = x.clone()
        one.aggregate({"x": x}, "avg_world")
        other.aggregate({"x": y}, "avg_custom", 2.0 + step)
    return x * WORKERS, y * (2.0 + step)


def joined(rank: int) -> dict[str, Any]:
    """All workers go on from a state without the entries of one worker."""
    zeros = torch.zeros(10, dtype=torch.float64)
    _, optimizer = train(rank, zeros, lambda m: EF21(model=m, lr=0.05), far, 5)
    shared = optimizer.shared_state_dict(copy.deepcopy(optimizer.state_dict()))
    model = Weights(x=zeros)
    resumed = EF21(model=model, lr=0.05)
    resumed.load_state_dict(shared)
    for step in range(3):
        model.x.grad = far(rank, model.x.detach(), step)
        resumed.step()
    return resumed.aggregation.state_dict()


def arc_step(rank: int, model: Weights, optimizer: Any, step: int) -> None:
    """Train a matrix x, and y, which has one row of it."""
    model.x.grad = gradient(rank, model.x.detach(), step)
    model.y.grad = gradient(rank, model.y.detach().expand(5, 7), step)[0]
    optimizer.step()


def arc_top_k(rank: int, group: Any) -> dict[str, Any]:
    """ARC-Top-K against the reference, with its bytes, and resumed."""
    result = {}
    for momentum in (0.0, MOMENTUM):
        exchange = partial(ARCTopKAggregation, None, momentum=momentum, process_group=group, **ARC)
        model = Weights(x=start(), y=start()[0])
        optimizer, sent = EF21(model=model, lr=0.1, aggregation=exchange()), []
        for step in range(STEPS):
            if step == STEPS // 2:
                resumed_model = copy.deepcopy(model)
                resumed = EF21(model=resumed_model, lr=0.1, aggregation=exchange())
                resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            arc_step(rank, model, optimizer, step)
            sent.append(optimizer.aggregation.last_bytes)
        for step in range(STEPS // 2, STEPS):
            arc_step(rank, resumed_model, resumed, step)
        result[str(momentum)] = {
            "x": model.x.detach(),
            "y": model.y.detach(),
            "resumed": (resumed_model.x.detach(), resumed_model.y.detach()),
            "state": optimizer.aggregation.state_dict(),
            "sent": sent,
        }
    return result


def one_row(rank: int, group: Any) -> list[Tensor]:
    """Return the averages of gradients of which one row is not zero, for each row."""
    results = []
    for row in range(5):
        exchange = ARCTopKAggregation(None, size=1, rank=1, momentum=0, process_group=group)
        for factor in (0, rank + 1):
            x = torch.zeros(5, 7, dtype=torch.float64)
            x[row] = factor * torch.arange(7)
            exchange.aggregate({"x": x}, "avg_world")
        results.append(x)
    return results


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for k in (2, 3):
        group = dist.new_group(list(range(k)))
        if rank < k:
            result[f"references {k}"] = against_references(rank, group)
            result[f"whole {k}"] = whole(rank, group, EF21Aggregation)
            result[f"all rows {k}"] = whole(rank, group, ARCTopKAggregation)
            result[f"arc {k}"] = arc_top_k(rank, group)
            result[f"one row {k}"] = one_row(rank, group)
            if k == 3:
                result["growth"] = growth(rank, group)
    for scenario in (far_optima, denominators, joined):
        result[scenario.__name__] = scenario(rank)
    result["overflow"] = overflow(rank, partial(EF21Aggregation, size=3), 12)
    rows = partial(ARCTopKAggregation, size=1, rank=1)
    result["overflow of rows"] = overflow(rank, rows, 6, 2)
    return result
