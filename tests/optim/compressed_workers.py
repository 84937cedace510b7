"""What the tests of sign and sparsified optimizers run in each worker process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mlbench_core.aggregation.pytorch.centralized import (
    AVG_CUSTOM,
    AVG_WORLD,
    EFSignAggregation,
    SignAggregation,
    SparsifiedAggregation,
)
from mlbench_core.aggregation.pytorch.compression.compressed import CompressedAggregation
from mlbench_core.aggregation.pytorch.compression.demo import DeMoAggregation
from mlbench_core.aggregation.pytorch.compression.one_bit import OneBitAggregation
from mlbench_core.aggregation.pytorch.compression.qsgd import QSGDAggregation
from mlbench_core.aggregation.pytorch.local_steps.sparse_loco import ChunkedTopKAggregation
from mlbench_core.optim.pytorch import (
    CentralizedSGD,
    CentralizedSparsifiedSGD,
    EFSignSGD,
    GenericCentralizedOptimizer,
    SignSGD,
    SparsifiedSGD,
)
from mlbench_core.optim.pytorch.compression.compressed import CompressedOptimizer
from tests.helpers.collectives import recording_collectives

STEPS = 12
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (3, 7),
    "vector": (5,),
    "scalar": (),
    "kernel": (2, 3, 2, 2),
}
LR = 0.1
DIGITS_STEPS = 200

Make = Callable[[Any], CompressedOptimizer]
OPTIMIZERS: dict[str, Make] = {
    "sign": lambda params: SignSGD(params, lr=LR),
    "signum": lambda params: SignSGD(params, lr=LR, momentum=0.5),
    "ef sign": lambda params: EFSignSGD(params, lr=LR),
    "top-k": lambda params: SparsifiedSGD(params, lr=LR, sparse_grad_size=3),
    "top 20 %": lambda params: CentralizedSparsifiedSGD(
        params, lr=LR, sparse_grad_size=0.2, world_size=None
    ),
    "random-k": lambda params: CentralizedSparsifiedSGD(
        params, lr=LR, sparse_grad_size=3, random_sparse=True, world_size=None
    ),
}
AGGREGATIONS: dict[str, Callable[[], CompressedAggregation]] = {
    "sign": SignAggregation,
    "ef sign": EFSignAggregation,
    "top-k": lambda: SparsifiedAggregation(None, size=3),
    "random-k": lambda: SparsifiedAggregation(None, size=3, random=True),
    "qsgd": lambda: QSGDAggregation(bucket_size=4),
    "chunked top-k": lambda: ChunkedTopKAggregation(density=2, chunk_size=4, decay=1.0),
    "demo": lambda: DeMoAggregation(top_k=1, block_size=2),
    "one bit": lambda: OneBitAggregation(warmup_steps=0),
    "top-k without memory": lambda: SparsifiedAggregation(None, size=3, error_feedback=False),
}


def rate(t: int) -> float:
    """Learning rate of step t."""
    return LR / (1 + t)


def target(name: str, rank: int) -> Tensor:
    """The optimum of worker ``rank`` for a parameter."""
    generator = torch.Generator().manual_seed(10 * rank + len(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def gradient(name: str, rank: int, x: Tensor, t: int) -> Tensor:
    """Of a quadratic, the same in the tests and in the workers; every fifth coordinate is zero on
    every worker."""
    g = (1 + rank) * (x - target(name, rank)) + 0.1 * t
    g.view(-1)[::5] = 0
    return g


def make_params(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    params = {}
    for name, shape in SHAPES.items():
        x = torch.linspace(-1, 1, max(1, torch.Size(shape).numel()), dtype=dtype).view(shape)
        if name == "kernel":
            x = x.to(memory_format=torch.channels_last)
        params[name] = nn.Parameter(x)
    return params


def set_gradients(params: dict[str, nn.Parameter], rank: int, t: int) -> None:
    for name, x in params.items():
        x.grad = torch.empty_like(x).copy_(gradient(name, rank, x.detach().contiguous(), t))


def train(params: dict[str, nn.Parameter], optimizer: Optimizer, rank: int, steps: range) -> None:
    for t in steps:
        for group in optimizer.param_groups:
            group["lr"] = rate(t)
        set_gradients(params, rank, t)
        optimizer.step()


def values(params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in params.items()}


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[tuple[str, int]]]:
    """Record name and bytes of every collective."""
    calls: list[tuple[str, int]] = []
    with recording_collectives(lambda name, size_bytes: calls.append((name, size_bytes))):
        yield calls


def trajectories(rank: int, world_size: int) -> dict[str, Any]:
    """Parameters, memories and estimates after some steps, by optimizer."""
    result = {}
    for name, make in OPTIMIZERS.items():
        params = make_params()
        optimizer = make(params.items())
        train(params, optimizer, rank, range(STEPS))
        estimate = optimizer.get_estimated_weights() if isinstance(optimizer, SparsifiedSGD) else []
        result[name] = {
            "params": values(params),
            "memory": optimizer.state_dict().get("aggregation", {}).get("memory", {}),
            "estimate": dict(zip(params, estimate, strict=False)),
        }
    return result


def mixed_tensors(rank: int) -> dict[str, Tensor]:
    """Everything that is not a plain float32 matrix."""
    generator = torch.Generator().manual_seed(rank)
    kinds = {
        "matrix": ((4, 6), torch.float32),
        "scalar": ((), torch.float32),
        "double": ((7,), torch.float64),
        "empty": ((0, 3), torch.float32),
        "half": ((3, 3), torch.float16),
        "bfloat": ((9,), torch.bfloat16),
    }
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, (shape, dtype) in kinds.items()
    }
    tensors["transposed"] = torch.randn(5, 2, generator=generator).T
    tensors["zeros"] = torch.zeros(11)
    return tensors


def aggregations(rank: int, world_size: int) -> dict[str, Any]:
    """Two rounds of every aggregation: what went in and came out, the memory, the collectives."""
    result = {}
    for name, make in AGGREGATIONS.items():
        aggregation, rounds = make(), []
        for _ in range(2):
            tensors = mixed_tensors(rank)
            before = {key: tensor.clone() for key, tensor in tensors.items()}
            owed = {
                key: tensor.clone()
                for key, tensor in aggregation.state_dict().get("memory", {}).items()
            }
            flag = torch.tensor([float(rank)])
            with counted_collectives() as calls:
                aggregation.aggregate(tensors, AVG_WORLD, extra=[flag])
            still = {
                key: tensor.clone()
                for key, tensor in aggregation.state_dict().get("memory", {}).items()
            }
            rounds.append(
                {
                    "in": before,
                    "owed": owed,
                    "out": tensors,
                    "still": still,
                    "calls": calls,
                    "flag": flag,
                }
            )
        result[name] = {
            "rounds": rounds,
            "bytes_sent": aggregation.bytes_sent,
            "ratio": aggregation.compression_ratio,
        }
    return result


def custom_denominators(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    result = {}
    for name, make in AGGREGATIONS.items():
        tensors = []
        for op, denom in ((AVG_WORLD, None), (AVG_CUSTOM, 10), (AVG_CUSTOM, torch.tensor([10.0]))):
            tensor = torch.tensor([1.0, -2.0]) * (rank + 1)
            make().aggregate({"x": tensor}, op, denom)
            tensors.append(tensor)
        result[name] = tensors
    return result


def partly_missing(rank: int, world_size: int) -> dict[str, Any]:
    """A parameter with a gradient on rank 0 only, one frozen, one that loses its gradient
    everywhere."""
    result = {}
    for name, make in OPTIMIZERS.items():
        one, frozen, lost = (nn.Parameter(torch.arange(1.0, 8.0)) for _ in range(3))
        frozen.requires_grad_(False)
        optimizer = make({"one": one, "frozen": frozen, "lost": lost}.items())
        lost.grad = torch.linspace(1, 2, 7)
        if rank == 0:
            one.grad = torch.full((7,), 4.0)
        optimizer.step()
        memory = optimizer.aggregation.memory("lost")
        first = {"one": one.detach().clone(), "lost": lost.detach().clone()}
        first_memory = None if memory is None else memory.clone()
        lost.grad = None
        optimizer.step()
        result[name] = {
            "first": first,
            "frozen": frozen.detach().clone(),
            "lost again": lost.detach().clone(),
            "memory": (first_memory, optimizer.aggregation.memory("lost")),
            "grad is none": (one.grad is None, lost.grad is None),
        }
    return result


def by_layer(rank: int, world_size: int) -> dict[tuple[str, bool], Any]:
    """Gradients aggregated in one message and in one per parameter, and the collectives of
    either."""
    result: dict[tuple[str, bool], Any] = {}
    for name, make in AGGREGATIONS.items():
        for layered in (False, True):
            params = make_params(torch.float32)
            model = nn.ParameterDict(params)
            optimizer = GenericCentralizedOptimizer(
                None,
                model,
                by_layer=layered,
                optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
                aggregation=make(),
            )
            with counted_collectives() as calls:
                for t in range(2):
                    set_gradients(params, rank, t)
                    optimizer.step()
            result[name, layered] = (values(params), calls)
    return result


def resume(rank: int, world_size: int) -> dict[str, Any]:
    """Parameters of a run, and of one that a new optimizer takes over half-way."""
    result = {}
    for name, make in OPTIMIZERS.items():
        through, first = make_params(torch.float32), make_params(torch.float32)
        train(through, make(through.items()), rank, range(STEPS))
        optimizer = make(first.items())
        train(first, optimizer, rank, range(STEPS // 2))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        second = make_params(torch.float32)
        with torch.no_grad():
            for key, x in second.items():
                x.copy_(first[key])
        resumed = make(second.items())
        resumed.load_state_dict(torch.load(file, weights_only=True))
        train(second, resumed, rank, range(STEPS // 2, STEPS))
        result[name] = (values(through), values(second))
    return result


def accumulation(rank: int, world_size: int) -> dict[str, Any]:
    """Parameters after steps on two passes each and on their sum, and the collectives called
    between the passes."""
    result = {}
    for name, make in OPTIMIZERS.items():
        passes, sums = make_params(), make_params()
        optimizer, reference = make(passes.items()), make(sums.items())
        for t in range(3):
            optimizer.zero_grad()
            with counted_collectives() as calls, optimizer.no_sync():
                loss_of_pass(passes, rank, t, 0).backward()
                loss_of_pass(passes, rank, t, 1).backward()
            optimizer.step()
            reference.zero_grad()
            (loss_of_pass(sums, rank, t, 0) + loss_of_pass(sums, rank, t, 1)).backward()
            reference.step()
        result[name] = (values(passes), values(sums), calls)
    return result


def loss_of_pass(params: dict[str, nn.Parameter], rank: int, t: int, number: int) -> Tensor:
    """A loss whose gradients are whole numbers and do not depend on the parameters."""
    return sum(((t + 2 * rank - number) * (i + 1) * x).sum() for i, x in enumerate(params.values()))


def errors(rank: int, world_size: int) -> dict[str, str]:
    """Messages that every worker sees."""
    makers: dict[str, Callable[[], Any]] = {
        "default": lambda: CentralizedSparsifiedSGD([nn.Parameter(torch.ones(1))], lr=0.1),
        "too many": lambda: SignSGD(
            [nn.Parameter(torch.ones(1))], lr=0.1, world_size=world_size + 1
        ),
    }
    messages = {}
    for name, make in makers.items():
        try:
            make()
        except ValueError as error:
            messages[name] = str(error)
    return messages


QUADRATIC: dict[str, tuple[Make, Callable[[int], float], int]] = {
    "ef sign": (lambda p: EFSignSGD(p, lr=1.0), lambda t: 2 / (t + 10), 250),
    "top-1": (lambda p: SparsifiedSGD(p, lr=1.0, sparse_grad_size=1), lambda t: 2 / (t + 10), 250),
    "random-1": (
        lambda p: CentralizedSparsifiedSGD(
            p, lr=1.0, sparse_grad_size=1, random_sparse=True, world_size=None
        ),
        lambda t: 2 / (t + 20),
        250,
    ),
}


def quadratic(rank: int) -> tuple[Tensor, Tensor]:
    """A and b of worker ``rank``, who minimises (x - b)' A (x - b) / 2; A has eigenvalues from
    about 0.5 to 3."""
    generator = torch.Generator().manual_seed(50 + rank)
    half = torch.randn(6, 6, generator=generator, dtype=torch.float64) / 3
    return half @ half.T + 0.5 * torch.eye(6, dtype=torch.float64), torch.randn(
        6, generator=generator, dtype=torch.float64
    )


def quadratics(rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
    """Every worker has its own quadratic and noisy gradients; the parameters after many steps, by 2
    workers."""
    if world_size != 2:
        return {}
    A, b = quadratic(rank)
    result = {}
    for name, (make, eta, steps) in QUADRATIC.items():
        x = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        optimizer = make([x])
        scheduler = LambdaLR(optimizer, eta)
        noise = torch.Generator().manual_seed(rank)
        for _ in range(steps):
            x.grad = A @ (x.detach() - b) + 0.01 * torch.randn(
                6, generator=noise, dtype=torch.float64
            )
            optimizer.step()
            scheduler.step()
        result[name] = {"x": x.detach()}
        if isinstance(optimizer, SparsifiedSGD):
            result[name]["estimate"] = optimizer.get_estimated_weights()[0]
    return result


def digits(rank: int, world_size: int) -> dict[str, float]:
    """Share of test digits that a small net gets right, by optimizer; trained by 2 workers on
    halves of the batch."""
    if world_size != 2:
        return {}
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    train_set, test_set = order[:1400], order[1400:]
    makers: dict[str, Callable[[nn.Module], Optimizer]] = {
        "sgd": lambda net: CentralizedSGD(2, net, lr=0.2, momentum=0.9),
        "ef sign": lambda net: EFSignSGD(net.parameters(), lr=0.2, momentum=0.9),
        "top 1 %": lambda net: CentralizedSparsifiedSGD(
            net.parameters(), lr=0.2, sparse_grad_size=0.01, world_size=2, momentum=0.9
        ),
    }
    accuracy = {}
    for name, make in makers.items():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = make(net)
        scheduler = LambdaLR(optimizer, lambda t: 1 - t / DIGITS_STEPS)
        shuffle = torch.Generator().manual_seed(2)
        for _ in range(DIGITS_STEPS):
            batch = train_set[torch.randint(len(train_set), (64,), generator=shuffle)].chunk(
                world_size
            )[rank]
            net.zero_grad()
            nn.functional.cross_entropy(net(inputs[batch]), targets[batch]).backward()
            optimizer.step()
            scheduler.step()
        right = net(inputs[test_set]).argmax(dim=1) == targets[test_set]
        accuracy[name] = right.float().mean().item()
    return accuracy


SCENARIOS = (
    trajectories,
    aggregations,
    custom_denominators,
    partly_missing,
    by_layer,
    resume,
    accumulation,
    errors,
    quadratics,
    digits,
)


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(rank, world_size) for scenario in SCENARIOS}
