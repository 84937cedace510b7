"""What the tests of PowerSGD run in each worker process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch import Tensor, nn

from mlbench_core.aggregation.pytorch.aggregation import Aggregation
from mlbench_core.aggregation.pytorch.centralized import (
    AVG_CUSTOM,
    AVG_WORLD,
    PowerAggregation,
    SparsifiedAggregation,
)
from mlbench_core.optim.pytorch import CentralizedSGD, GenericCentralizedOptimizer, PowerSGD
from tests.optim.workers import counted_all_reduces, weights

STEPS = 8
RANK = 2
SHAPE = (12, 9)
EXACT = [(rank, dtype) for rank in (0, 1, 2) for dtype in (torch.float32, torch.float64)]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def gradient(rank: int, step: int) -> Tensor:
    return draw(*SHAPE, seed=100 * step + rank)


def of_rank(rank: int, shape: tuple[int, int], seed: int) -> Tensor:
    return draw(shape[0], rank, seed=seed) @ draw(rank, shape[1], seed=seed + 1)


class Matrices(nn.Module):
    """Nothing but parameters of given shapes."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.items = nn.ParameterList(
            nn.Parameter(draw(*shape, seed=1000 + i, dtype=dtype)) for i, shape in enumerate(shapes)
        )


def aggregated(
    aggregation: PowerAggregation, tensor: Tensor, op: str = AVG_WORLD, denom: Any = None
) -> Tensor:
    result = tensor.clone(memory_format=torch.preserve_format)
    aggregation.aggregate({"items.0": result}, op, denom)
    return result


def like_the_reference(rank: int, world_size: int) -> dict[bool, tuple[list[Tensor], Tensor]]:
    """Weights and error after some steps with warm start and momentum, by by_layer."""
    result = {}
    for by_layer in (False, True):
        model = Matrices(SHAPE, (3,))
        exchange = PowerAggregation(
            model, reuse_query=True, world_size=world_size, rank=RANK, seed=7
        )
        optimizer = PowerSGD(model, 0.1, 0.9, by_layer=by_layer, aggregation=exchange)
        for step in range(STEPS):
            model.items[0].grad = gradient(rank, step)
            model.items[1].grad = torch.full((3,), float(rank), dtype=torch.float64)
            optimizer.step()
        result[by_layer] = (
            weights(model),
            optimizer.state_dict()["aggregation"]["errors"]["items.0"],
        )
    return result


def average_and_error(rank: int, world_size: int) -> dict[str, list[tuple[Tensor, Tensor, Tensor]]]:
    """What went in (gradient + error), what came out and the new error, for every step, by
    variant."""
    variants: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "float64": (torch.float64, {}),
        "float32 warm": (torch.float32, {"reuse_query": True}),
        "bf16 on the wire": (torch.float32, {"comm_dtype": torch.bfloat16}),
        "fp16 on the wire": (torch.float32, {"comm_dtype": torch.float16, "reuse_query": True}),
        "rank 4": (torch.float32, {"rank": 4}),
        "fp16 model": (torch.float16, {}),
        "bf16 model": (torch.bfloat16, {"reuse_query": True}),
        "in turns": (torch.float64, {"alternate": True}),
        "in turns, bf16 on the wire": (
            torch.float32,
            {"alternate": True, "comm_dtype": torch.bfloat16},
        ),
        "in turns, bf16 model": (torch.bfloat16, {"alternate": True}),
    }
    result = {}
    for name, (dtype, options) in variants.items():
        aggregation = PowerAggregation(
            Matrices(SHAPE, dtype=dtype), world_size=world_size, **{"rank": 1, **options}
        )
        error = torch.zeros(SHAPE)
        result[name] = []
        for step in range(5):
            mine = gradient(rank, step).to(dtype)
            delta = mine + error
            out = aggregated(aggregation, mine)
            error = aggregation.state_dict()["errors"]["items.0"].clone()
            result[name].append((delta, out, error))
    return result


def in_turns(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Results and errors of each step, and the weights of PowerSGD after it, for ACP-SGD."""

    def make(model: nn.Module) -> PowerAggregation:
        return PowerAggregation(model, alternate=True, world_size=world_size, rank=RANK, seed=7)

    model = Matrices(SHAPE)
    alone, optimizer = make(model), PowerSGD(model, 0.1, aggregation=make(model))
    results, errors, history = [], [], []
    for step in range(STEPS):
        model.items[0].grad = gradient(rank, step)
        results.append(aggregated(alone, gradient(rank, step)))
        errors.append(alone.state_dict()["errors"]["items.0"].clone())
        optimizer.step()
        history.append(weights(model)[0])
    return results, errors, history


def constant_in_turns(
    rank: int, world_size: int
) -> dict[tuple[int, bool], tuple[Tensor, list[tuple[Tensor, Tensor]]]]:
    """The average gradient, and results and errors for ACP-SGD, if every step has the same
    gradients.

    By the rank of the average, and True if all workers have the same gradient."""
    found = {}
    away = [draw(*SHAPE, seed=50 + r) for r in range(world_size)]
    away = [own - sum(away) / world_size for own in away]
    for actual in (0, 1, RANK):
        for is_same in (True, False):
            average = of_rank(actual, SHAPE, seed=1)
            mine = average if is_same else average + away[rank]
            aggregation = PowerAggregation(
                Matrices(SHAPE), alternate=True, world_size=world_size, rank=RANK
            )
            steps = []
            for _ in range(6):
                out = aggregated(aggregation, mine)
                steps.append((out, aggregation.state_dict()["errors"]["items.0"].clone()))
            found[actual, is_same] = average, steps
    return found


def exact_ranks(
    rank: int, world_size: int
) -> dict[tuple[int, torch.dtype, bool, tuple[int, int]], float]:
    """Relative error where the average has a rank that suffices and the workers' own gradients do
    not."""
    result = {}
    for actual, dtype in EXACT:
        for reuse_query in (False, True):
            for shape in ((40, 30), (9, 70), (8, 8)):
                away = [draw(*shape, seed=50 + r) for r in range(world_size)]
                away = [own - sum(away) / world_size for own in away]
                aggregation = PowerAggregation(
                    Matrices(shape),
                    world_size=world_size,
                    rank=RANK,
                    reuse_query=reuse_query,
                    error_feedback=False,
                )
                worst = 0.0
                for step in range(4):
                    exact = of_rank(actual, shape, seed=10 * step)
                    out = aggregated(aggregation, (exact + away[rank]).to(dtype))
                    size = exact.norm() if actual else away[rank].norm()
                    worst = max(worst, float((out - exact).norm() / size))
                result[actual, dtype, reuse_query, shape] = worst
    return result


def growing_rank(rank: int, world_size: int) -> list[float]:
    """Relative error with warm start while the rank of the gradient goes 0, 1, 2, 0, 2, with dead
    units throughout."""
    shape = (20, 15)
    aggregation = PowerAggregation(
        Matrices(shape), world_size=world_size, rank=RANK, reuse_query=True
    )
    errors = []
    for step, actual in enumerate((0, 1, 2, 0, 2)):
        exact = of_rank(actual, shape, seed=10 * step)
        exact[:5] = 0
        exact[:, ::2] = 0
        errors.append(
            float((aggregated(aggregation, exact) - exact).norm() / max(1.0, float(exact.norm())))
        )
    return errors


def messages(rank: int, world_size: int) -> dict[str, Any]:
    """Sizes of all messages in bytes, of a model with four matrices, one of them too small, and two
    vectors."""
    shapes = ((10, 8), (6, 4, 3), (10, 8), (2, 2), (10,), ())
    result = {}
    for name, by_layer, options in (
        ("whole", False, {}),
        ("bf16", False, {"comm_dtype": torch.bfloat16}),
        ("by layer", True, {}),
        ("not yet", False, {"start_after_steps": 1}),
        ("in turns", False, {"alternate": True}),
        ("in turns, by layer", True, {"alternate": True}),
    ):
        model = Matrices(*shapes, dtype=torch.float32)
        exchange = PowerAggregation(model, world_size=world_size, rank=2, **options)
        optimizer = PowerSGD(model, 0.1, by_layer=by_layer, aggregation=exchange)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with counted_all_reduces() as sizes:
            optimizer.step()
        aggregation = optimizer.aggregation
        result[name] = {
            "sizes": list(sizes),
            "last_bytes": aggregation.last_bytes,
            "bytes_sent": aggregation.bytes_sent,
            "ratio": aggregation.compression_ratio,
        }
        with counted_all_reduces() as sizes:
            optimizer.step()
        result[name]["second sizes"] = sizes
    return result


def missing_gradients(rank: int, world_size: int) -> dict[bool, dict[str, Any]]:
    """Items: 0 has a gradient on rank 0 only, 1 on no worker in the second step, 2 always, 3 is
    never used."""
    result = {}
    for by_layer in (False, True):
        model = Matrices(SHAPE, SHAPE, SHAPE, SHAPE)
        optimizer = PowerSGD(model, 1.0, world_size=world_size, by_layer=by_layer)
        model.items[1].grad, model.items[2].grad = gradient(rank, 1), gradient(rank, 2)
        if rank == 0:
            model.items[0].grad = gradient(rank, 0)
        before = weights(model)
        optimizer.step()
        first = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        error = optimizer.state_dict()["aggregation"]["errors"]["items.1"]
        error_before, weight_before = error.clone(), model.items[1].detach().clone()
        optimizer.zero_grad()
        model.items[2].grad = gradient(rank, 3)
        optimizer.step()
        result[by_layer] = {
            "first": first,
            "before": before,
            "error kept": torch.equal(error_before, error),
            "weight kept": torch.equal(weight_before, model.items[1]),
            "still None": model.items[1].grad is None,
            "weights": weights(model),
        }
    return result


class Unusual(nn.Module):
    """A convolution in channels_last, a frozen matrix, numbers, an empty tensor, three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(8, 6, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.ones(9, 9), requires_grad=False)
        self.number = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.fine = nn.Parameter(torch.ones(9, 9, dtype=torch.float64))
        self.coarse = nn.Parameter(torch.ones(9, 9, dtype=torch.bfloat16))
        self.transposed = nn.Parameter(torch.ones(12, 7))


WITHOUT_GRADIENT: dict[str, Callable[[nn.Module, int], Aggregation]] = {
    "warm": lambda model, k: PowerAggregation(model, world_size=k, rank=1, reuse_query=True),
    "cold": lambda model, k: PowerAggregation(model, world_size=k, rank=1),
    "late": lambda model, k: PowerAggregation(
        model, world_size=k, rank=1, reuse_query=True, start_after_steps=2
    ),
    "in turns": lambda model, k: PowerAggregation(model, world_size=k, rank=1, alternate=True),
    "random-k": lambda model, k: SparsifiedAggregation(model, size=4, random=True, world_size=k),
}


def steps_without_gradient(rank: int, world_size: int) -> dict[str, Any]:
    """Weights, and all that is remembered of the tensors. Workers have equal gradients, and now and
    then none."""
    result = {}
    for name, make in WITHOUT_GRADIENT.items():
        model = Matrices(SHAPE, SHAPE, (3,))
        optimizer = GenericCentralizedOptimizer(
            world_size,
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            aggregation=make(model, world_size),
        )
        states = []
        for step in range(STEPS):
            for i, parameter in enumerate(model.items):
                missing = (step + i) % 3 == 0 or (i == 0 and step < 2)
                parameter.grad = None if missing else draw(*parameter.shape, seed=10 * step + i)
            optimizer.step()
            state = copy.deepcopy(optimizer.aggregation.state_dict())
            del state["generator"]
            states.append((weights(model), state))
        result[name] = states
    return result


def unusual(rank: int, world_size: int) -> dict[bool, dict[str, Any]]:
    result = {}
    for by_layer in (False, True):
        model = Unusual()
        optimizer = PowerSGD(model, 1.0, world_size=world_size, rank=3, by_layer=by_layer)
        averages = {}
        for i, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.requires_grad:
                of_workers = [draw(*parameter.shape, seed=i) * (r + 1) for r in range(world_size)]
                if parameter.dim() > 1 and parameter.numel():  # of rank 1 or 2
                    of_workers = [
                        of_rank(2, (len(parameter), parameter.numel() // len(parameter)), i).view(
                            parameter.shape
                        )
                        * (r + 1)
                        for r in range(world_size)
                    ]
                averages[name] = sum(of_workers) / world_size
                parameter.grad = of_workers[rank].to(parameter.dtype)
        model.conv.weight.grad = model.conv.weight.grad.to(memory_format=torch.channels_last)
        model.transposed.grad = model.transposed.grad.t().contiguous().t()
        optimizer.step()
        result[by_layer] = {
            "averages": averages,
            "gradients": {
                name: p.grad for name, p in model.named_parameters() if p.grad is not None
            },
            "channels_last": model.conv.weight.grad.is_contiguous(
                memory_format=torch.channels_last
            ),
        }
    return result


def resume(rank: int, world_size: int) -> dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]:
    """Weights of a run of 8 steps and of one taken over from a file, by start and step."""

    def make(model: nn.Module, start: str) -> PowerSGD:
        exchange = PowerAggregation(
            model,
            reuse_query=start == "warm",
            alternate=start == "in turns",
            world_size=world_size,
            rank=RANK,
            start_after_steps=3,
        )
        return PowerSGD(model, 0.1, 0.9, aggregation=exchange)

    def train(model: Matrices, optimizer: PowerSGD, steps: range) -> None:
        for step in steps:
            model.items[0].grad = gradient(rank, step).float()
            model.items[1].grad = gradient(rank, step + 50).float()
            optimizer.step()

    result = {}
    for start in ("cold", "warm", "in turns"):
        through = Matrices(SHAPE, SHAPE, dtype=torch.float32)
        train(through, make(through, start), range(STEPS))
        # With turns, a P is remembered after 6 steps, and a Q after 5.
        for stop in (2, 5, 6) if start == "in turns" else (2, 5):
            first, second = (
                Matrices(SHAPE, SHAPE, dtype=torch.float32),
                Matrices(SHAPE, SHAPE, dtype=torch.float32),
            )
            optimizer = make(first, start)
            train(first, optimizer, range(stop))
            file = io.BytesIO()
            torch.save((first.state_dict(), optimizer.state_dict()), file)
            train(first, optimizer, range(stop, stop + 1))  # must not change what was saved
            file.seek(0)
            weights_then, state = torch.load(file, weights_only=True)
            second.load_state_dict(weights_then)
            resumed = make(second, start)
            resumed.load_state_dict(state)
            train(second, resumed, range(stop, STEPS))
            result[start, stop] = (weights(through), weights(second))
    return result


def sums_and_denominators(rank: int, world_size: int) -> dict[str, Tensor]:
    mine = gradient(rank, 0)

    def result(op: str, denom: Any = None) -> Tensor:
        return aggregated(
            PowerAggregation(Matrices(SHAPE), world_size=world_size, rank=RANK), mine, op, denom
        )

    model = Matrices(SHAPE)
    before = weights(model)[0]
    model.items[0].grad = mine.clone()
    PowerSGD(model, lr=1.0, world_size=world_size, rank=RANK, average_world=False).step()
    return {
        "average": result(AVG_WORLD),
        "by 10": result(AVG_CUSTOM, 10),
        "by tensor": result(AVG_CUSTOM, torch.tensor([10])),
        "sum": before - weights(model)[0],
    }


def overflow(rank: int, world_size: int) -> dict[tuple[bool, int], list[tuple[Tensor, Tensor]]]:
    """Results and errors with an infinite gradient of one worker in one of five steps.

    By alternate and the step."""
    found = {}
    for case in ((False, 1), (True, 1), (True, 2)):
        aggregation = PowerAggregation(
            Matrices(SHAPE), world_size=world_size, reuse_query=True, alternate=case[0]
        )
        found[case] = []
        for step in range(5):
            mine = gradient(rank, step)
            if step == case[1] and rank == world_size - 1:
                mine[3, 4] = float("inf")
            out = aggregated(aggregation, mine)
            found[case].append((out, aggregation.state_dict()["errors"]["items.0"].clone()))
    return found


def composed(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """The preset, and the same of its parts."""
    result = []
    for preset in (True, False):
        model = Matrices(SHAPE, (5,))
        if preset:
            optimizer: Any = PowerSGD(model, 0.1, 0.9, world_size=world_size, rank=RANK)
        else:
            inside = torch.optim.SGD(model.parameters(), 0.1, 0.9)
            aggregation = PowerAggregation(model, world_size=world_size, rank=RANK)
            optimizer = GenericCentralizedOptimizer(
                world_size, model, optimizer=inside, aggregation=aggregation
            )
        for step in range(3):
            model.items[0].grad = gradient(rank, step)
            model.items[1].grad = draw(5, seed=rank + step)
            optimizer.step()
        result.append(weights(model))
    return result[0], result[1]


def world_sizes(rank: int, world_size: int) -> dict[str, str]:
    """What happens with the default, None and a wrong number of workers."""
    result = {"None": str(PowerSGD(Matrices(SHAPE), 0.1, world_size=None).world_size)}
    for name, options in {"default": {}, "wrong": {"world_size": world_size + 1}}.items():
        try:
            PowerSGD(Matrices(SHAPE), 0.1, **options)
            result[name] = "no error"
        except ValueError as error:
            result[name] = str(error)
    return result


SCENARIOS = (
    like_the_reference,
    average_and_error,
    in_turns,
    constant_in_turns,
    exact_ranks,
    growing_rank,
    messages,
    missing_gradients,
    steps_without_gradient,
    unusual,
    resume,
    sums_and_denominators,
    overflow,
    composed,
    world_sizes,
)


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(rank, world_size) for scenario in SCENARIOS}


# -- digits
# ------------------------------------------------------------------------------


def digits_accuracy(rank: int, world_size: int, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Share of right answers on the last 400 digits, by optimizer, each trained in the same way."""
    train_images, train_labels = images[:-400], labels[:-400]

    def accuracy(make: Any) -> float:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
        )
        optimizer = make(model)
        order = torch.Generator().manual_seed(2)
        for _ in range(12):
            for batch in torch.randperm(len(train_images), generator=order).split(64):
                mine = batch.chunk(world_size)[rank]
                optimizer.zero_grad()
                nn.functional.cross_entropy(
                    model(train_images[mine]), train_labels[mine]
                ).backward()
                optimizer.step()
        with torch.no_grad():
            return float((model(images[-400:]).argmax(1) == labels[-400:]).float().mean())

    def power(rank: int, **options: Any) -> Any:
        return lambda model: PowerSGD(
            model,
            0.3,
            aggregation=PowerAggregation(model, world_size=world_size, rank=rank, **options),
        )

    return {
        "sgd": accuracy(lambda model: CentralizedSGD(world_size, model, lr=0.3)),
        **{f"rank {r}": accuracy(power(r)) for r in (1, 2, 4)},
        "warm": accuracy(power(1, reuse_query=True)),
        "in turns": accuracy(power(2, alternate=True)),
        "bf16": accuracy(
            power(2, reuse_query=True, comm_dtype=torch.bfloat16, start_after_steps=20)
        ),
    }
