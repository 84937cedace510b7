"""What the tests of half-precision training run in each worker process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

from mlbench_core.optim.pytorch import (
    CentralizedSGD,
    CentralizedSparsifiedSGD,
    DistributedGradScaler,
    FP16Optimizer,
)
from tests.optim.workers import counted_all_reduces, make_batches, make_net, share

LR = 0.5


def half_line(
    values: tuple[float, ...] = (1.0, 2.0, 4.0), dtype: torch.dtype = torch.float16
) -> nn.Module:
    """A layer with one output and given weights."""
    model = nn.Linear(len(values), 1, bias=False, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values]))
    return model


def sgd(
    model: nn.Module, world_size: int | None = 1, lr: float = LR, **options: Any
) -> FP16Optimizer:
    """SGD on the master weights of a model."""
    optimizer = FP16Optimizer(model, world_size, **options)
    optimizer.set_optimizer(torch.optim.SGD([optimizer.fp32_params], lr=lr))
    return optimizer


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs).float(), targets.float())


def power_of_two_batch() -> tuple[Tensor, Tensor]:
    """Inputs and factors whose products, sums and quotients are exact in float16."""
    inputs = torch.tensor(
        [[1.0, 2.0, 0.5], [0.5, 1.0, 4.0], [2.0, 0.25, 1.0], [4.0, 1.0, 2.0]]
    ).repeat(2, 1)
    return inputs, torch.tensor([1.0, 2.0, 0.5, 4.0, 2.0, 1.0, 0.5, 0.25]).view(-1, 1)


def step_exactly(
    model: nn.Module, optimizer: FP16Optimizer, inputs: Tensor, factors: Tensor
) -> None:
    optimizer.zero_grad()
    optimizer.backward_loss((model(inputs.half()).float() * factors).mean())
    assert optimizer.step()


# -- scenarios: each runs in every worker and returns what the tests look at
# ---------------------------------------


def exact_shares(rank: int, world_size: int) -> Tensor:
    model = half_line()
    optimizer = sgd(model, world_size, average_world=True)
    inputs, factors = power_of_two_batch()
    for _ in range(3):
        step_exactly(
            model, optimizer, share(inputs, rank, world_size), share(factors, rank, world_size)
        )
    return optimizer.fp32_params.detach()


def exact_in_two_passes(rank: int, world_size: int) -> tuple[Tensor, list[int]]:
    """Master weights where each share is accumulated in two passes, and what was sent between
    these."""
    model = half_line()
    optimizer = sgd(model, world_size, average_world=True)
    inputs, factors = (share(whole, rank, world_size).chunk(2) for whole in power_of_two_batch())
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync(), counted_all_reduces() as sizes:
            for some_inputs, some_factors in zip(inputs, factors, strict=True):
                optimizer.backward_loss((model(some_inputs.half()).float() * some_factors).mean())
        assert optimizer.step(multiplier=2)
    return optimizer.fp32_params.detach(), sizes


def exact_alone() -> Tensor:
    model = half_line()
    optimizer = sgd(model)
    for _ in range(3):
        step_exactly(model, optimizer, *power_of_two_batch())
    return optimizer.fp32_params.detach()


def make_adamw(model: nn.Module, world_size: int | None) -> FP16Optimizer:
    optimizer = FP16Optimizer(model, world_size, init_scale=256, scale_window=3, max_scale=4096)
    optimizer.set_optimizer(torch.optim.AdamW([optimizer.fp32_params], lr=0.01, eps=1e-4))
    return optimizer


def adamw_on_shares(rank: int, world_size: int) -> list[Tensor]:
    """Master weights after each step of a small net."""
    model = make_net(torch.float16)
    optimizer = make_adamw(model, world_size)
    history = []
    for inputs, targets in make_batches(torch.float16):
        optimizer.zero_grad()
        optimizer.backward_loss(
            loss_of(model, share(inputs, rank, world_size), share(targets, rank, world_size))
        )
        optimizer.step()
        history.append(optimizer.fp32_params.detach().clone())
    return history


def adamw_alone() -> Tensor:
    model = make_net(torch.float16)
    optimizer = make_adamw(model, 1)
    for inputs, targets in make_batches(torch.float16):
        optimizer.zero_grad()
        optimizer.backward_loss(loss_of(model, inputs, targets))
        optimizer.step()
    return optimizer.fp32_params.detach()


def overflow_on_one(rank: int, world_size: int) -> dict[str, Any]:
    """What each worker does when the last one alone has an inf or nan, with and without its
    gradients being summed."""
    result = {}
    for name, bad, options, is_local in (
        ("inf", float("inf"), {}, False),
        ("nan by layer", float("nan"), {"by_layer": True}, False),
        ("nan divided before", float("nan"), {"divide_before": True}, False),
        ("seen by one only", float("inf"), {}, True),
    ):
        model = half_line()
        optimizer = sgd(model, world_size, init_scale=8, **options)
        if is_local:  # an aggregation that does not carry the overflow to the others
            optimizer.agg = lambda model, op, denom=None: None
        updated, scales = [], []
        for step in range(2):
            model.weight.grad = torch.full((1, 3), 4.0, dtype=torch.float16)
            if rank == world_size - 1 and step == 0:
                model.weight.grad[0, 1] = bad
            updated.append(optimizer.step())
            scales.append(optimizer.loss_scaler.loss_scale)
        result[name] = {
            "updated": updated,
            "scales": scales,
            "weight": model.weight.detach().clone(),
        }
    return result


def minimum_scale(rank: int, world_size: int) -> list[str]:
    """The error of each worker when the first one alone overflows in every step."""
    model = half_line()
    optimizer = sgd(model, world_size, init_scale=4, min_scale=1.0)
    messages = []
    for _ in range(2):
        model.weight.grad = torch.full(
            (1, 3), float("inf") if rank == 0 else 1.0, dtype=torch.float16
        )
        try:
            messages.append(str(optimizer.step()))
        except FloatingPointError as error:
            messages.append(str(error))
    return messages


def denominators(rank: int, world_size: int) -> dict[str, Tensor]:
    """The unscaled gradients. Batch b of worker r has (r + 1) (b + 1) tokens, each with the
    gradient 1, 2, 4."""

    def gradient(
        is_mean: bool, custom: bool, multiplier: Any = 1, denom: Any = None, scale: float = 128.0
    ) -> Tensor:
        model = half_line()
        optimizer = sgd(
            model,
            world_size,
            init_scale=scale,
            average_world=not custom,
            average_custom=custom,
            divide_before=custom,
        )
        for batch in range(2):
            tokens = (rank + 1) * (batch + 1)
            outputs = model(torch.tensor([[1.0, 2.0, 4.0]]).half().repeat(tokens, 1)).float() * (
                1 + rank
            )
            optimizer.backward_loss(outputs.mean() if is_mean else outputs.sum())
        assert optimizer.step(multiplier=multiplier, denom=denom)
        return optimizer.fp32_params.grad.clone()

    shares = world_size * 2
    tokens = torch.tensor(float(3 * (rank + 1)))
    dist.all_reduce(tokens)
    return {
        "mean, averaged over the world": gradient(True, False),
        "4a": gradient(True, True, denom=shares),
        "4a, world and multiplier": gradient(True, False, multiplier=2),
        "4b": gradient(False, True, multiplier=tokens.item() / shares, denom=shares),
        "4b, tensor": gradient(
            False, True, multiplier=tokens / shares, denom=torch.tensor([shares])
        ),
    }


def ranges(rank: int, world_size: int) -> dict[str, list[Any]]:
    """A sum over workers that float16 does not hold, and a scale that does not hold either."""
    result = {}
    for divide_before in (False, True):
        model = half_line()
        optimizer = sgd(model, world_size, init_scale=1024, divide_before=divide_before)
        model.weight.grad = torch.full((1, 3), 40960.0, dtype=torch.float16)
        result[f"divide_before={divide_before}"] = [
            optimizer.step(),
            optimizer.fp32_params.grad.tolist(),
        ]
    return result


class Mixed(nn.Module):
    """Half precision with float32 normalisation, a frozen, an unused, a shared and a scalar
    parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.frozen = nn.Linear(3, 3).half().requires_grad_(False)
        self.inside = nn.Linear(3, 3, bias=False).half()
        self.norm = nn.LayerNorm(3)
        self.outside = nn.Linear(3, 3, bias=False).half()
        self.outside.weight = self.inside.weight
        self.unused = nn.Parameter(torch.ones(2).half())
        self.scalar = nn.Parameter(torch.tensor(2.0).half())
        self.only_on_rank_0 = nn.Parameter(torch.ones(2, 2).half())

    def forward(self, inputs: Tensor) -> Tensor:
        return (
            self.outside(self.norm(self.inside(self.frozen(inputs)).float()).half()) * self.scalar
        )


def mixed(rank: int, world_size: int) -> dict[str, Any]:
    model = Mixed()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = sgd(model, world_size, init_scale=16, by_layer=rank < 0)
    loss = model(torch.full((2, 3), 1.0 + rank).half()).float().square().mean()
    if rank == 0:
        loss = loss + model.only_on_rank_0.float().sum() * world_size
    optimizer.backward_loss(loss)
    with counted_all_reduces() as sizes:
        updated = optimizer.step()
    return {
        "updated": updated,
        "before": before,
        "after": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        "master": optimizer.fp32_params.detach().clone(),
        "gradients": {
            name: parameter.grad is not None for name, parameter in model.named_parameters()
        },
        "sizes": sizes,
        "bytes_sent": optimizer.aggregation.bytes_sent,
    }


def resume(rank: int, world_size: int) -> tuple[list[Any], list[Any]]:
    """Masters and scales of a run, and of one that new objects take over in the middle; overflows
    included."""

    def train(model: nn.Module, optimizer: FP16Optimizer, steps: range) -> None:
        for step in steps:
            inputs, targets = make_batches(torch.float16)[step]
            optimizer.zero_grad()
            optimizer.backward_loss(
                loss_of(model, share(inputs, rank, world_size), share(targets, rank, world_size))
            )
            if step in (3, 11) and rank == 0:
                next(model.parameters()).grad[0, 0] = float("inf")
            assert optimizer.step() == (step not in (3, 11))

    through, first, second = (make_net(torch.float16) for _ in range(3))
    whole, half = make_adamw(through, world_size), make_adamw(first, world_size)
    train(through, whole, range(16))
    train(first, half, range(8))
    resumed = make_adamw(second, world_size)
    resumed.load_state_dict(half.state_dict())
    train(second, resumed, range(8, 16))

    def end(model: nn.Module, optimizer: FP16Optimizer) -> list[Any]:
        return [
            optimizer.fp32_params.detach(),
            *model.state_dict().values(),
            optimizer.loss_scaler.state_dict(),
        ]

    return end(through, whole), end(second, resumed)


def like_the_reference(rank: int, world_size: int) -> tuple[Tensor, list[float]]:
    """Gradients that overflow once the scale has grown; see ``reference_gradient``."""
    model = half_line()
    optimizer = sgd(model, world_size, lr=0.125, init_scale=2.0**10, scale_window=3)
    scales = []
    for step in range(40):
        scale = optimizer.loss_scaler.loss_scale
        model.weight.grad = reference_gradient(rank, step, model.weight.detach()[0], scale).view(
            1, -1
        )
        optimizer.step()
        scales.append(optimizer.loss_scaler.loss_scale)
    return optimizer.fp32_params.detach(), scales


def reference_gradient(rank: int, step: int, weights: Tensor, scale: float) -> Tensor:
    """The scaled gradient of (rank + 1) |x|^2 / 8 (1 + step / 16): of one sign, so sums in any
    order overflow alike."""
    return (weights.float() * (rank + 1) / 4 * (1 + step / 16) * scale).half()


def grad_scalers(rank: int, world_size: int) -> dict[str, Any]:
    """What optimizers and scalers do when worker 0 alone overflows in the second of three steps."""
    result = {}

    def averaging(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return CentralizedSGD(world_size, model, lr=LR, **options)

    def all_coordinates(model: nn.Module) -> torch.optim.Optimizer:
        return CentralizedSparsifiedSGD(
            model.parameters(), lr=LR, sparse_grad_size=3, world_size=world_size
        )

    for name, make, unscale_first, make_optimizer in (
        ("torch", torch.amp.GradScaler, False, averaging),
        ("torch, unscaled", torch.amp.GradScaler, True, averaging),
        ("torch, weights", torch.amp.GradScaler, False, partial(averaging, agg_grad=False)),
        ("torch, sparsified", torch.amp.GradScaler, False, all_coordinates),
        ("ours", DistributedGradScaler, False, averaging),
        ("ours, unscaled", DistributedGradScaler, True, averaging),
    ):
        model, scaler = (
            half_line(dtype=torch.float32),
            make("cpu", init_scale=16.0, growth_interval=100),
        )
        optimizer = make_optimizer(model)
        weights, scales = [], []
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.full((2, 3), 1.0 + rank)).mean()
            scaler.scale(loss * (float("inf") if step == 1 and rank == 0 else 1.0)).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()
            weights.append(model.weight.detach().clone())
            scales.append(scaler.get_scale())
        result[name] = {"weights": weights, "scales": scales}
    return result


SCENARIOS = (
    exact_shares,
    exact_in_two_passes,
    adamw_on_shares,
    overflow_on_one,
    minimum_scale,
    denominators,
    ranges,
    mixed,
    resume,
    like_the_reference,
    grad_scalers,
)


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(rank, world_size) for scenario in SCENARIOS}
