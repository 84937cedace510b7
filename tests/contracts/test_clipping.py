"""Rules for ``clip_grad_norm_``, which every distributed optimizer obeys: it clips the average
gradient, or refuses."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from mlbench_core.aggregation.pytorch import (
    AllReduceAggregation,
    DeMoAggregation,
    DionAggregation,
    OneBitAggregation,
)
from mlbench_core.optim.pytorch import (
    CentralizedSGD,
    DistributedGradScaler,
    GenericCentralizedOptimizer,
)
from tests.contracts.test_distributed_optimizers import MEMBERS, Net, every_member
from tests.helpers.ranks import run_ranks

MAX_NORM = 0.1
REFUSING = {
    *(
        "sgd on weights",
        "fp16",
        "bf16",
        "sign",
        "ef sign",
        "sparsified",
        "top-k",
        "random-k",
        "demo",
        "one-bit adam",
    ),
    *(
        "dion",
        "local",
        "local delayed",
        "des loc",
        "scaffold",
        "diloco",
        "edit",
        "eager",
        "diloco quantized",
        "muloco",
        "sparse loco",
        "no loco",
        "sparta",
        "streaming",
        "ring",
        "choco",
        "sgp",
    ),
}
"""The members whose workers exchange weights, compressed steps, or gradients with a loss scale."""

EXACT = {
    "default": lambda m, k: CentralizedSGD(k, m, lr=0.5),
    "overlap": lambda m, k: CentralizedSGD(k, m, lr=0.5, overlap=True),
    "by layer": lambda m, k: CentralizedSGD(k, m, lr=0.5, by_layer=True),
    "in bf16": lambda m, k: CentralizedSGD(
        k, m, lr=0.5, aggregation=AllReduceAggregation(comm_dtype=torch.bfloat16)
    ),
    "any optimizer": lambda m, k: GenericCentralizedOptimizer(k, m, optimizer=partial(SGD, lr=0.5)),
}


def backward(model: Net, rank: int, world_size: int, step: int = 0) -> None:
    """Add the gradients of this worker's share of a batch, as sums over samples divided by the
    samples of a share."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(world_size, 8, 6, generator=generator)[rank]
    targets = torch.randn(world_size, 8, 3, generator=generator)[rank]
    nn.functional.mse_loss(model(inputs, uses_sometimes=rank == 0), targets).backward()


def gradients(model: Net) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def net() -> Net:
    return Net(is_plain=True)


def member(name: str, rank: int, world_size: int) -> Any:
    model = MEMBERS[name].model()
    optimizer = MEMBERS[name].make(model, rank, world_size)
    inputs = torch.full((8, 6), rank + 1.0, dtype=model.first.weight.dtype)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(inputs, uses_sometimes=True).float() * (rank + 2)).square().mean()
        getattr(optimizer, "backward_loss", Tensor.backward)(loss)
        try:
            norm = optimizer.clip_grad_norm_(MAX_NORM)
        except ValueError as error:
            return str(error)
        clipped = torch.cat(
            [g.double().reshape(-1) for g in gradients(model) if g is not None]
        ).norm()
        sent = optimizer.aggregation.bytes_sent
        optimizer.step()
        found.append((norm.item(), clipped.item(), optimizer.aggregation.bytes_sent - sent))
    return found, [p.detach().clone() for p in model.parameters()]


def exact(name: str, rank: int, world_size: int) -> Any:
    model = net()
    optimizer = EXACT[name](model, world_size)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():  # an accumulated gradient is clipped as a whole
            backward(model, rank, world_size, step)
        backward(model, rank, world_size, step + 10)
        norms.append(optimizer.clip_grad_norm_(MAX_NORM, norm_type=3.0).item())
        optimizer.step()
    return norms, [p.detach().clone() for p in model.parameters()]


def with_a_scaler(rank: int, world_size: int) -> Any:
    model = net()
    optimizer, scaler = (
        CentralizedSGD(world_size, model, lr=0.5),
        DistributedGradScaler("cpu", init_scale=8.0),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "backward", lambda loss, f=Tensor.backward: f(scaler.scale(loss)))
        backward(model, rank, world_size)
    scaler.unscale_(optimizer)
    norm = optimizer.clip_grad_norm_(MAX_NORM).item()
    scaler.step(optimizer)
    scaler.update()
    too_early = net()
    optimizer = CentralizedSGD(world_size, too_early, lr=0.5)
    scaler = DistributedGradScaler("cpu", init_scale=8.0)
    scaler.scale(too_early(torch.ones(2, 6), uses_sometimes=True).sum()).backward()
    optimizer.clip_grad_norm_(MAX_NORM)
    with pytest.raises(ValueError, match="unscale_"):
        scaler.step(optimizer)
    return norm, [p.detach().clone() for p in model.parameters()]


def called_too_early(rank: int, world_size: int) -> str:
    model = net()
    optimizer = CentralizedSGD(world_size, model, lr=0.5)
    backward(model, rank, world_size)
    optimizer.clip_grad_norm_(MAX_NORM)
    backward(model, rank, world_size)
    with pytest.raises(RuntimeError, match="right before step") as caught:
        optimizer.step()
    return str(caught.value)


def run_all(rank: int, world_size: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {name: member(name, rank, world_size) for name in MEMBERS}
    found |= {("exact", name): exact(name, rank, world_size) for name in EXACT}
    found["scaler"] = with_a_scaler(rank, world_size)
    found["too early"] = called_too_early(rank, world_size)
    return found


@functools.cache
def trained() -> list[dict[Any, Any]]:
    return run_ranks(2, run_all, timeout_s=200)


def alone(
    steps: int, norm_type: float, passes: tuple[int, ...] = (0,)
) -> tuple[list[float], list[Tensor]]:
    """One worker on the joined batch, with torch's own clipping."""
    model, norms = net(), []
    optimizer = SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for shift in passes:
            for rank in range(2):
                backward(model, rank, 2, step + shift)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type).item())
        optimizer.step()
    return norms, [p.detach().clone() for p in model.parameters()]


@every_member
def test_the_average_is_clipped_or_the_call_is_refused(name: str) -> None:
    found = [result[name] for result in trained()]
    if name in REFUSING:
        assert all(message.startswith("clip_grad_norm_ must have gradients") for message in found)
        return
    (steps, weights), (other_steps, other_weights) = found
    assert steps == other_steps
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))
    for norm, clipped, sent in steps:
        assert norm > MAX_NORM
        assert clipped == pytest.approx(MAX_NORM, rel=1e-3)
        assert sent == 0


@pytest.mark.parametrize("name", EXACT)
def test_it_is_one_worker_on_the_joined_batch(name: str) -> None:
    norms, weights = alone(3, norm_type=3.0, passes=(0, 10))
    for result in trained():
        found, ours = result["exact", name]
        tolerance = 2e-2 if name == "in bf16" else 1e-5
        assert found == pytest.approx(norms, rel=tolerance)
        torch.testing.assert_close(ours, weights, rtol=tolerance, atol=tolerance / 10)


def test_a_scaled_gradient_is_clipped_after_it_was_unscaled() -> None:
    (norm,), weights = alone(1, norm_type=2.0)
    for result in trained():
        found, ours = result["scaler"]
        assert found == pytest.approx(norm, rel=1e-5)
        torch.testing.assert_close(ours, weights, rtol=1e-5, atol=1e-6)


def test_a_backward_pass_after_it_is_refused() -> None:
    assert len({result["too early"] for result in trained()}) == 1


@pytest.mark.parametrize("kind", [DeMoAggregation, DionAggregation, OneBitAggregation])
def test_a_direction_that_is_no_average_is_not_clipped(kind: Any) -> None:
    model = net()
    optimizer = CentralizedSGD(1, model, lr=0.5, aggregation=kind())
    backward(model, 0, 1)
    with pytest.raises(ValueError, match=f"the result of {kind.__name__} is another direction"):
        optimizer.clip_grad_norm_(1.0)
