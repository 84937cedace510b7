"""What the tests run in each worker process, and the same in one process to compare with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.centralized import AllReduceAggregation
from mlbench_core.optim.pytorch import (
    CentralizedAdam,
    CentralizedSGD,
    CustomCentralizedOptimizer,
    GenericCentralizedOptimizer,
)
from tests.helpers.collectives import recording_collectives

STEPS = 20
SAMPLES = 8
OPTIMIZERS: dict[str, tuple[type, type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (
        CentralizedSGD,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
    ),
    "dampened sgd": (
        CentralizedSGD,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    ),
    "adam": (CentralizedAdam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 1e-2}),
    "amsgrad": (
        CentralizedAdam,
        torch.optim.Adam,
        {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.9), "eps": 1e-6},
    ),
}


def make_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def make_batches(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [
        (
            torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64).to(dtype),
            torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64).to(dtype),
        )
        for _ in range(STEPS)
    ]


def backward(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    model.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss.detach()


def share(tensor: Tensor, rank: int, world_size: int) -> Tensor:
    return tensor.chunk(world_size)[rank]


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    """Count what goes through all_reduce, in bytes per call."""
    sizes: list[int] = []
    with recording_collectives(
        lambda name, size_bytes: sizes.append(size_bytes) if name == "all_reduce" else None
    ):
        yield sizes


# -- scenarios: each runs in every worker and returns what the tests look at
# ---------------------------------------


def train_on_shares(rank: int, world_size: int) -> dict[tuple[str, bool], list[list[Tensor]]]:
    """Weights after each step, by optimizer and by_layer."""
    result = {}
    for name, (ours, _, options) in OPTIMIZERS.items():
        for by_layer in (False, True):
            model = make_net()
            optimizer = ours(world_size=world_size, model=model, by_layer=by_layer, **options)
            history = []
            for inputs, targets in make_batches():
                backward(model, share(inputs, rank, world_size), share(targets, rank, world_size))
                optimizer.step()
                history.append(weights(model))
            result[name, by_layer] = history
    return result


def train_on_whole_batches(name: str) -> list[Tensor]:
    model = make_net()
    _, theirs, options = OPTIMIZERS[name]
    optimizer = theirs(model.parameters(), **options)
    for inputs, targets in make_batches():
        backward(model, inputs, targets)
        optimizer.step()
    return weights(model)


def average_weights(rank: int, world_size: int) -> dict[bool, list[Tensor]]:
    result = {}
    for by_layer in (False, True):
        model = make_net()
        memory = [parameter.data_ptr() for parameter in model.parameters()]
        optimizer = CentralizedSGD(
            world_size, model, lr=0.1, momentum=0.9, by_layer=by_layer, agg_grad=False
        )
        for inputs, targets in make_batches():
            backward(model, share(inputs, rank, world_size), share(targets, rank, world_size))
            optimizer.step()
        assert memory == [parameter.data_ptr() for parameter in model.parameters()]
        result[by_layer] = weights(model)
    return result


def average_weights_alone(world_size: int) -> list[Tensor]:
    """The same in one process with k models."""
    models = [make_net() for _ in range(world_size)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for inputs, targets in make_batches():
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, share(inputs, rank, world_size), share(targets, rank, world_size))
            optimizer.step()
        with torch.no_grad():
            for same in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack(list(same)).mean(0)
                for parameter in same:
                    parameter.copy_(mean)
    return weights(models[0])


def float32_like_by_hand(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """CentralizedSGD against an all_reduce of each gradient, a division and torch's SGD."""
    ours, theirs = make_net(torch.float32), make_net(torch.float32)
    our_optimizer = CentralizedSGD(world_size, ours, lr=0.1, momentum=0.9, weight_decay=1e-3)
    their_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for inputs, targets in make_batches(torch.float32):
        for model in (ours, theirs):
            backward(model, share(inputs, rank, world_size), share(targets, rank, world_size))
        our_optimizer.step()
        for parameter in theirs.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        their_optimizer.step()
    return weights(ours), weights(theirs)


class Odd(nn.Module):
    """Everything that is not a plain float32 matrix with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.only_on_rank_0 = nn.Parameter(torch.ones(2, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.fine = nn.Parameter(torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.also_scalar = self.scalar


def set_odd_gradients(model: Odd, rank: int) -> None:
    model.scalar.grad = torch.tensor(1.0 + rank)
    model.fine.grad = torch.tensor([1e-12 + rank, 1.0], dtype=torch.float64)
    weight = model.conv.weight
    values = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape) * (rank + 1)
    model.conv.weight.grad = values.to(memory_format=torch.channels_last)
    model.conv.bias.grad = torch.full((4,), float(rank))
    if rank == 0:
        model.only_on_rank_0.grad = torch.full((2, 3), 4.0)


def odd_gradients(rank: int, world_size: int) -> dict[bool, dict[str, Any]]:
    result = {}
    for by_layer in (False, True):
        model = Odd()
        set_odd_gradients(model, rank)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = CentralizedSGD(world_size, model, lr=1.0, by_layer=by_layer)
        with counted_all_reduces() as sizes:
            optimizer.step()
        result[by_layer] = {
            "gradients": {
                name: None if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
            },
            "steps": {name: before[name] - p.detach() for name, p in model.named_parameters()},
            "conv_is_channels_last": model.conv.weight.grad.is_contiguous(
                memory_format=torch.channels_last
            ),
            "sizes": sizes,
            "last_bytes": optimizer.aggregation.last_bytes,
            "bytes_sent": optimizer.aggregation.bytes_sent,
        }
    return result


def batch_norm(rank: int, world_size: int) -> dict[bool, dict[str, Tensor]]:
    """Running statistics after a step, by agg_grad."""
    result = {}
    for agg_grad in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        memory = [buffer.data_ptr() for buffer in model.buffers()]
        optimizer = CentralizedSGD(world_size, model, lr=0.1, agg_grad=agg_grad)
        model(torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))).sum().backward()
        before = buffers(model)
        optimizer.step()
        assert memory == [buffer.data_ptr() for buffer in model.buffers()]
        result[agg_grad] = {"before": before, "after": buffers(model)}
    return result


def custom(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """The update with lr 1 by what was asked for. The gradient of rank r is r + 1 everywhere."""

    def update(
        dtype: torch.dtype = torch.float64, scale: float = 1.0, denom: Any = None, **options: Any
    ) -> Tensor:
        model = nn.Linear(3, 1, bias=False, dtype=dtype)
        nn.init.zeros_(model.weight)
        model.weight.grad = torch.full((1, 3), scale * (rank + 1), dtype=dtype)
        inside = torch.optim.SGD(model.parameters(), lr=1.0)
        assert (
            CustomCentralizedOptimizer(model, world_size, inside, **options).step(denom=denom)
            is True
        )
        return -model.weight.detach()[0]

    half = torch.float16
    return {
        "default": update(),
        "average_world": update(average_world=True),
        "average_custom": update(average_custom=True, denom=10),
        "tensor denom": update(average_custom=True, denom=torch.tensor([10])),
        "weights by denom": update(average_custom=True, agg_grad=False, denom=torch.tensor(10.0)),
        "custom divided before": update(average_custom=True, divide_before=True, denom=10),
        "clipped": update(average_world=True, grad_clip=0.5),
        "clipped by layer": update(average_world=True, grad_clip=0.5, by_layer=True),
        "not clipped": update(average_world=True, grad_clip=1e3),
        "half overflows": update(half, scale=12000.0, average_world=True),
        "half divided before": update(half, scale=12000.0, average_world=True, divide_before=True),
    }


def closures(rank: int, world_size: int) -> dict[str, Any]:
    inputs, targets = make_batches()[0]
    inputs, targets = share(inputs, rank, world_size), share(targets, rank, world_size)
    model = make_net()
    optimizer = CentralizedSGD(world_size, model, lr=0.1)
    losses = [optimizer.step(lambda: backward(model, inputs, targets)) for _ in range(3)]
    by_hand = make_net()
    plain = CentralizedSGD(world_size, by_hand, lr=0.1)
    expected = []
    for _ in range(3):
        expected.append(backward(by_hand, inputs, targets))
        plain.step()
    return {
        "losses": losses,
        "expected": expected,
        "weights": weights(model),
        "by_hand": weights(by_hand),
    }


def line_search(rank: int, world_size: int) -> dict[str, Any]:
    """LBFGS decides from the loss how often it evaluates; all workers must decide alike."""
    inputs, targets = make_batches()[0]
    inputs, targets = share(inputs, rank, world_size), share(targets, rank, world_size)
    model = make_net()
    inside = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    optimizer = GenericCentralizedOptimizer(world_size, model, optimizer=inside)
    loss = optimizer.step(lambda: backward(model, inputs, targets))
    return {"loss": loss, "weights": weights(model)}


def line_search_alone() -> list[Tensor]:
    model = make_net()
    inside = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    inside.step(lambda: backward(model, *make_batches()[0]))
    return weights(model)


def resume(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Weights of a run of 20 steps, and of one that a new optimizer takes over after 10."""

    def train(
        model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]
    ) -> None:
        for inputs, targets in batches:
            backward(model, share(inputs, rank, world_size), share(targets, rank, world_size))
            optimizer.step()

    batches = make_batches()
    through, first, second = make_net(), make_net(), make_net()
    train(through, CentralizedAdam(world_size, through, lr=0.01, amsgrad=True), batches)
    optimizer = CentralizedAdam(world_size, first, lr=0.01, amsgrad=True)
    train(first, optimizer, batches[:10])
    second.load_state_dict(first.state_dict())
    resumed = CentralizedAdam(world_size, second, lr=0.5, amsgrad=True)
    resumed.load_state_dict(optimizer.state_dict())
    train(second, resumed, batches[10:])
    return weights(through), weights(second)


def beside_the_model(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """A group of parameters that are not the model's, with a learning rate of its own."""
    model, extra = nn.Linear(2, 1, bias=False), nn.Parameter(torch.zeros(2))
    before = model.weight.detach().clone()
    optimizer = CentralizedSGD(world_size, model, lr=1.0)
    optimizer.add_param_group({"params": [extra], "lr": 0.1})
    model.weight.grad, extra.grad = torch.full((1, 2), 2.0 * rank), torch.full((2,), 4.0 * rank)
    optimizer.step()
    return before - model.weight.detach(), -extra.detach()


def errors(rank: int, world_size: int) -> dict[str, str]:
    """Messages of the errors that every worker sees."""
    model = make_net()
    messages = {}
    for wrong in (1, world_size + 1, 0):
        for make in (
            lambda w=wrong: CentralizedSGD(w, model, lr=0.1),
            lambda w=wrong: AllReduceAggregation(w),
        ):
            try:
                make()
            except ValueError as error:
                messages[f"{wrong}"] = str(error)
            else:
                messages[f"{wrong}"] = "no error"
    messages["taken from the group"] = str(CentralizedSGD(model=model, lr=0.1).world_size)
    return messages


SCENARIOS = (
    train_on_shares,
    average_weights,
    float32_like_by_hand,
    odd_gradients,
    batch_norm,
    custom,
    closures,
    line_search,
    resume,
    beside_the_model,
    errors,
)


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(rank, world_size) for scenario in SCENARIOS}
