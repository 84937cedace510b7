"""What the tests of decentralized and periodic optimizers run in each worker process."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from mlbench_core.aggregation.pytorch import (
    ChocoAggregation,
    DecentralizedAggregation,
    DiLoCoAggregation,
    PeriodicAggregation,
    all_reduce,
    average_weights,
    consensus_distance,
)
from mlbench_core.aggregation.pytorch.transport.topology import (
    Topology,
    complete,
    exponential,
    from_edges,
    ring,
)
from mlbench_core.optim.pytorch import (
    CentralizedSGD,
    ChocoSGD,
    DecentralizedSGD,
    DiLoCo,
    GenericCentralizedOptimizer,
    LocalSGD,
)
from tests.helpers.collectives import recording_collectives

STEPS = 15
SHAPE = (5, 7)
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "top_k": {"compression": "top_k", "ratio": 0.2, "gamma": 0.3},
    "random_k": {"compression": "random_k", "ratio": 0.2, "gamma": 0.2, "seed": 5},
    "sign": {"compression": "sign", "gamma": 0.3},
    "identity": {"compression": "identity", "gamma": 1.0},
}


def topologies(world_size: int) -> dict[str, Topology]:
    graphs = {
        "ring": ring(world_size),
        "complete": complete(world_size),
        "exponential": exponential(world_size),
    }
    graphs["star"] = from_edges(world_size, [(0, other) for other in range(1, world_size)])
    kite = [(0, 1), (1, 2), (0, 2), (2, 3)]  # as much of it as there are workers
    graphs["kite"] = from_edges(world_size, [edge for edge in kite if max(edge) < world_size])
    return graphs


def target(rank: int) -> Tensor:
    return torch.randn(
        SHAPE, generator=torch.Generator().manual_seed(40 + rank), dtype=torch.float64
    )


def gradient(rank: int, x: Tensor, step: int) -> Tensor:
    """Of a quadratic of the worker's own, with noise that is the same in every run."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    noise = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    return (1 + rank / 2) * (x - target(rank)) + noise / 10


def start(rank: int = 0) -> Tensor:
    return torch.linspace(-1, 1, 35, dtype=torch.float64).view(SHAPE) + rank


class Weights(nn.Module):
    """A model that is nothing but its parameters."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def descend(
    rank: int, model: Weights, optimizer: Optimizer, steps: range = range(STEPS)
) -> list[Tensor]:
    """Train the parameter x; return its value after every step."""
    history = []
    for step in steps:
        model.x.grad = gradient(rank, model.x.detach(), step)
        optimizer.step()
        history.append(model.x.detach().clone())
    return history


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the calls of what workers communicate with."""
    calls = dict.fromkeys(("all_reduce", "all_gather", "batch_isend_irecv"), 0)
    with recording_collectives(lambda name, _: calls.update({name: calls[name] + 1})):
        yield calls


# -- scenarios: each runs in every worker and returns what the tests look at
# ---------------------------------------


def decentralized(rank: int, world_size: int) -> dict[Any, list[Tensor]]:
    result = {}
    for name, graph in topologies(world_size).items():
        for by_layer in (False, True):
            model = Weights(x=start())
            listed = list(graph.neighbours(rank)) * 2  # repetition does not matter
            optimizer = DecentralizedSGD(rank, listed, model, lr=0.1, by_layer=by_layer)
            result[name, by_layer] = descend(rank, model, optimizer)
        model = Weights(x=start())
        optimizer = DecentralizedSGD(
            model=model, lr=0.1, aggregation=DecentralizedAggregation(topology=graph)
        )
        result[name, "topology"] = descend(rank, model, optimizer)
        assert optimizer.aggregation.topology.spectral_gap == graph.spectral_gap
    return result


def choco(rank: int, world_size: int) -> dict[Any, list[Tensor]]:
    result = {}
    for name in ("ring", "star"):
        graph = topologies(world_size)[name]
        for compression, options in COMPRESSIONS.items():
            model = Weights(x=start())
            exchange = ChocoAggregation(rank, graph.neighbours(rank), **options)
            optimizer = ChocoSGD(model=model, lr=0.1, aggregation=exchange)
            result[name, compression] = descend(rank, model, optimizer)
    return result


def gossip(rank: int, world_size: int) -> dict[Any, Any]:
    """Average different weights, without gradients: distances to the average, and the last
    weights."""
    result = {}

    def rounds(make: Callable[[], Any], count: int, every: int) -> tuple[list[float], Tensor]:
        model = Weights(x=target(rank))
        aggregate = make().agg_model()
        distances = [consensus_distance(model)]
        for done in range(1, count + 1):
            aggregate(model, "avg_world")
            if done % every == 0:
                distances.append(consensus_distance(model))
        return distances, model.x.detach()

    for name, graph in topologies(world_size).items():
        make = partial(DecentralizedAggregation, rank, None, topology=graph)
        result[name, "plain"] = rounds(make, count=8, every=1)
    for compression, options in COMPRESSIONS.items():
        make = partial(ChocoAggregation, rank, None, topology=ring(world_size), **options)
        result["ring", compression] = rounds(make, count=100, every=50)
    return result


def bytes_and_messages(rank: int, world_size: int) -> dict[str, Any]:
    """Bytes and collectives by step, after the first, in which the workers meet."""
    tensors = {"a": torch.zeros(10, 3), "b": torch.zeros(7), "c": torch.zeros(())}
    graph = topologies(world_size)["star"]
    neighbors = graph.neighbours(rank)
    of_choco = {
        name: partial(ChocoSGD, aggregation=ChocoAggregation(rank, neighbors, **options))
        for name, options in COMPRESSIONS.items()
    }
    makers: dict[str, Callable[..., Any]] = {
        "decentralized": partial(DecentralizedSGD, rank, graph.neighbours(rank)),
        "local": partial(LocalSGD, world_size, period=3),
        "diloco": partial(DiLoCo, world_size, period=3),
        **of_choco,
    }
    result = {}
    for name, make in makers.items():
        model = nn.Sequential(Weights(**tensors), nn.BatchNorm1d(4, affine=False))
        optimizer = make(model=model, lr=0.1)
        steps = []
        for _ in range(7):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape)
            with counted() as calls:
                optimizer.step()
            steps.append((optimizer.aggregation.last_bytes, calls))
        result[name] = (
            steps,
            optimizer.aggregation.bytes_sent,
            optimizer.aggregation.compression_ratio,
        )
    return result


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """Messages of errors: the same on every worker where they come from the exchange of lists."""

    def message(action: Callable[[], Any]) -> str:
        try:
            action()
        except ValueError as error:
            return str(error)
        return "no error"

    def mix(neighbors: list[int]) -> None:
        DecentralizedAggregation(rank, neighbors).agg_model()(Weights(x=start()), "avg_world")

    model = Weights(x=start())
    make = partial(DecentralizedSGD, model=model, lr=0.1)
    return {
        "one-sided": message(lambda: mix([1] if rank == 0 else [3] if rank == 2 else []))
        if world_size == 4
        else "",
        "one-sided pair": message(lambda: mix([1] if rank == 0 else [])),
        "apart": message(lambda: mix([rank ^ 1])) if world_size == 4 else "",
        "alone": message(lambda: mix([])),
        "missing": message(lambda: make(rank)),
        "itself": message(lambda: make(rank, [rank])),
        "outside": message(lambda: make(rank, [world_size])),
        "rank": message(lambda: make((rank + 1) % world_size, [rank])),
        "topology": message(lambda: DecentralizedAggregation(rank, topology=ring(world_size + 1))),
        "both": message(lambda: DecentralizedAggregation(rank, [0], topology=ring(world_size))),
        "twice": message(
            lambda: make(rank, aggregation=DecentralizedAggregation(topology=ring(world_size)))
        ),
        "op": message(
            lambda: DecentralizedAggregation(rank, [(rank + 1) % world_size]).agg_model()(
                model, "sum"
            )
        ),
        "average": message(lambda: make(rank, [0], average_world=False)),
    }


def odd_tensors(rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
    """One round of every aggregation on tensors of many kinds; the value is the rank plus one."""

    def build() -> nn.Module:
        value = float(rank + 1)
        odd = Weights(
            scalar=torch.tensor(value),
            empty=torch.zeros(0, 3),
            f64=torch.full((3,), value, dtype=torch.float64),
            f16=torch.full((2, 2), value, dtype=torch.float16),
            bf16=torch.full((9,), value, dtype=torch.bfloat16),
            strided=torch.full((2, 3, 4, 5), value).to(memory_format=torch.channels_last),
            frozen=torch.full((2,), value),
        )
        odd.frozen.requires_grad_(False)
        odd.register_buffer("statistic", torch.full((3,), value))
        odd.register_buffer("counter", torch.tensor(rank))
        return odd

    graph = complete(world_size)
    aggregations = {
        "decentralized": lambda: DecentralizedAggregation(rank, graph.neighbours(rank)),
        "choco": lambda: ChocoAggregation(
            rank, None, topology=graph, compression="identity", gamma=1.0
        ),
        "local": lambda: PeriodicAggregation(
            DecentralizedAggregation(rank, None, topology=graph), 1
        ),
        "diloco": DiLoCoAggregation,
    }
    result = {}
    for name, make in aggregations.items():
        for by_layer in (False, True):
            model = build()
            memory = [tensor.data_ptr() for tensor in model.state_dict().values()]
            make().agg_model(by_layer=by_layer)(model, "avg_world")
            assert memory == [tensor.data_ptr() for tensor in model.state_dict().values()]
            result[f"{name} {by_layer}"] = {
                key: value.clone() for key, value in model.state_dict().items()
            }
    return result


def large_tensors(rank: int, world_size: int) -> dict[str, Any]:
    """Three rounds with large tensors in messages of their own, and packed.

    Returns:
        The tensors at the start, and for each kind the tensors, all bytes and the messages of a
        round.
    """
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape: int, **options: Any) -> Tensor:
        return torch.randn(shape, generator=generator, **options)

    start = {
        "small": draw(5),
        "odd size": draw(300_001),  # more than two blocks, and the last is short
        "second": draw(700),
        "third": draw(1000),
        "transposed": draw(40, 30).t(),
        "left": (left := draw(900)),
        "right": left.view(30, 30),
        "f64": draw(400, dtype=torch.float64),
        "f16": draw(2000).half(),
    }
    result: dict[str, Any] = {"start": copy.deepcopy(start)}
    usual = all_reduce.LARGE_BYTES
    for which, all_reduce.LARGE_BYTES in (("alone", 1 << 10), ("packed", usual)):
        tensors = copy.deepcopy(start)
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        aggregation = DecentralizedAggregation(topology=ring(world_size))
        for _ in range(3):
            with counted() as calls:
                aggregation.aggregate(tensors, "avg_world")
        assert addresses == [tensor.data_ptr() for tensor in tensors.values()]
        result[which] = tensors, aggregation.bytes_sent, calls["batch_isend_irecv"]
    return result


def interrupted(rank: int, world_size: int) -> dict[str, Any]:
    """The state of ChocoSGD after a call in which no message arrived."""
    aggregation = ChocoAggregation(topology=ring(world_size))
    model = Weights(x=target(rank))
    aggregation.agg_model()(model, "avg_world")
    assert aggregation.state_dict()["copies"]

    def arrive() -> None:
        raise RuntimeError("no message arrived")

    aggregation._start_exchange = lambda message: arrive
    with contextlib.suppress(RuntimeError):
        aggregation.agg_model()(model, "avg_world")
    return aggregation.state_dict()


RESUMED: dict[str, Callable[[int, int, nn.Module], Optimizer]] = {
    "decentralized": lambda r, n, m: DecentralizedSGD(
        r, ring(n).neighbours(r), m, lr=0.1, momentum=0.9
    ),
    "top_k": lambda r, n, m: ChocoSGD(
        model=m,
        lr=0.1,
        momentum=0.9,
        aggregation=ChocoAggregation(r, ring(n).neighbours(r), **COMPRESSIONS["top_k"]),
    ),
    "random_k": lambda r, n, m: ChocoSGD(
        model=m,
        lr=0.1,
        by_layer=True,
        aggregation=ChocoAggregation(r, ring(n).neighbours(r), **COMPRESSIONS["random_k"]),
    ),
    "sign": lambda r, n, m: ChocoSGD(
        model=m, lr=0.1, aggregation=ChocoAggregation(topology=ring(n), **COMPRESSIONS["sign"])
    ),
    "local": lambda r, n, m: LocalSGD(n, m, lr=0.1, momentum=0.9, period=4),
    "diloco": lambda r, n, m: DiLoCo(n, m, lr=0.1, period=4),
    "diloco by layer": lambda r, n, m: DiLoCo(
        n, m, lr=0.1, period=4, by_layer=True, outer_optimizer=partial(AdamW, lr=0.3)
    ),
}


def resume(
    rank: int, world_size: int
) -> dict[str, tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """A run, the same resumed from a file at step 6 of 15, and the same by a deep copy."""
    result = {}
    for name, make in RESUMED.items():
        through, first, second = (Weights(x=start(), y=torch.ones(3)) for _ in range(3))
        descend(rank, through, make(rank, world_size, through))
        optimizer = make(rank, world_size, first)
        descend(rank, first, optimizer, range(6))
        file = io.BytesIO()
        torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        second.load_state_dict(loaded["model"])
        resumed = make(rank, world_size, second)
        resumed.load_state_dict(loaded["optimizer"])
        descend(rank, second, resumed, range(6, STEPS))
        copied, copied_optimizer = copy.deepcopy((first, optimizer))
        descend(rank, copied, copied_optimizer, range(6, STEPS))
        result[name] = weights(through), weights(second), weights(copied)
    return result


def local(rank: int, world_size: int) -> dict[Any, list[Tensor]]:
    result: dict[Any, list[Tensor]] = {}
    for by_layer in (False, True):
        for period in (1, 4):
            model = Weights(x=start())
            optimizer = LocalSGD(world_size, model, lr=0.1, by_layer=by_layer, period=period)
            result[period, by_layer] = descend(rank, model, optimizer)
            inner = partial(SGD, lr=0.1)
            model = Weights(x=start())
            optimizer = DiLoCo(
                None,
                model,
                by_layer=by_layer,
                period=period,
                outer_lr=1.0,
                outer_momentum=0.0,
                inner_optimizer=inner,
            )
            result["diloco is local", period, by_layer] = descend(rank, model, optimizer)
    model = Weights(x=start())
    result["averaged every step"] = descend(
        rank, model, CentralizedSGD(world_size, model, lr=0.1, agg_grad=False)
    )
    for by_layer in (False, True):
        model = Weights(x=start())
        result["diloco", by_layer] = descend(
            rank, model, DiLoCo(None, model, lr=0.05, period=5, by_layer=by_layer)
        )
    model = Weights(x=start())
    composed = PeriodicAggregation(DiLoCoAggregation(partial(SGD, lr=0.5)), period=5)
    optimizer = GenericCentralizedOptimizer(
        None, model, agg_grad=False, optimizer=partial(AdamW, lr=0.05), aggregation=composed
    )
    result["composed"] = descend(rank, model, optimizer)
    return result


def added_later(rank: int, world_size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """A parameter that is not the model's and comes after the first step: after its 2nd and its 8th
    step."""
    graph = ring(world_size)
    makers: dict[str, Callable[[nn.Module], Optimizer]] = {
        "decentralized": lambda m: DecentralizedSGD(rank, graph.neighbours(rank), m, lr=0.1),
        "choco": lambda m: ChocoSGD(
            model=m,
            lr=0.1,
            aggregation=ChocoAggregation(
                rank, graph.neighbours(rank), compression="random_k", ratio=0.5
            ),
        ),
        "local": lambda m: LocalSGD(world_size, m, lr=0.1, period=4),
        "diloco": lambda m: DiLoCo(world_size, m, lr=0.1, period=4),
    }
    result = {}
    for name, make in makers.items():
        model, extra = Weights(x=start()), nn.Parameter(torch.zeros(4))
        optimizer = make(model)
        descend(rank, model, optimizer, range(1))
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
        values = []
        for step in range(1, 9):
            extra.grad = torch.full((4,), float(rank)) if step < 3 else torch.zeros(4)
            descend(rank, model, optimizer, range(step, step + 1))
            values.append(extra.detach().clone())
        result[name] = values[1], values[-1]
    return result


def unfrozen(rank: int, world_size: int) -> dict[tuple[str, int], list[Tensor]]:
    """A layer that is unfrozen after so many steps of an optimizer with H = 3: its bias after each
    of 9 steps."""
    result = {}
    for name, make in {"local": LocalSGD, "diloco": DiLoCo}.items():
        for first_steps in (3, 1):
            torch.manual_seed(0)
            model = nn.Linear(2, 2)
            model.bias.requires_grad_(False)
            optimizer = make(world_size, model, lr=0.1, period=3)
            history = []
            for step in range(9):
                model.bias.requires_grad_(step >= first_steps)
                optimizer.zero_grad()
                model(torch.full((1, 2), rank + 1.0)).mul(
                    torch.tensor([1.0, -2.0]) * (rank + 1)
                ).sum().backward()
                optimizer.step()
                history.append(model.bias.detach().clone())
            result[name, first_steps] = history
    return result


def consensus(rank: int, world_size: int) -> dict[str, Any]:
    model = nn.Sequential(Weights(x=start(rank)), nn.BatchNorm1d(2, affine=False))
    model[1].running_mean.fill_(rank)
    before = consensus_distance(model), model[0].x.detach().clone()
    average_weights(model)
    buffers = model[1].running_mean.clone()
    equal = Weights(x=start() / 3)
    distance, bits = consensus_distance(equal), equal.x.detach().clone()
    for graph in topologies(world_size).values():
        DecentralizedAggregation(rank, None, topology=graph).agg_model()(equal, "avg_world")
        assert torch.equal(bits, equal.x)  # workers that agree keep their bits
    return {
        "before": before,
        "after": model[0].x.detach(),
        "buffers": buffers,
        "distance of equal weights": distance,
    }


def steady_state(rank: int, world_size: int) -> dict[float, Tensor]:
    """Where gradient descent on 1/2 ||x - b_i||^2 with a constant step ends, on a ring."""
    result = {}
    for lr in (0.1, 0.4):
        model = Weights(x=start())
        optimizer = DecentralizedSGD(rank, ring(world_size).neighbours(rank), model, lr=lr)
        for _ in range(int(8 / lr)):
            model.x.grad = model.x.detach() - target(rank)
            optimizer.step()
        result[lr] = model.x.detach()
    return result


def digits(rank: int, world_size: int) -> dict[str, float]:
    """Accuracy on the digits' test set, in percent, after 8 epochs with 4 workers, of the average
    of all workers."""
    if world_size < 4:
        return {}
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(data.target)[order]
    own, test = slice(rank, 1440, world_size), slice(1440, None)
    graph = ring(world_size)
    makers: dict[str, Callable[[nn.Module], Optimizer]] = {
        "sgd": lambda m: CentralizedSGD(world_size, m, lr=0.1, momentum=0.9),
        "ring": lambda m: DecentralizedSGD(rank, graph.neighbours(rank), m, lr=0.1, momentum=0.9),
        "choco": lambda m: ChocoSGD(rank, graph.neighbours(rank), m, lr=0.1, momentum=0.9),
        "local": lambda m: LocalSGD(world_size, m, lr=0.1, momentum=0.9, period=8),
        "diloco": lambda m: DiLoCo(world_size, m, lr=0.02, period=20),
    }
    result = {}
    for name, make in makers.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = make(model)
        for epoch in range(8):
            shuffled = torch.randperm(
                1440 // world_size, generator=torch.Generator().manual_seed(epoch)
            )
            for batch in shuffled.split(36):
                optimizer.zero_grad()
                nn.functional.cross_entropy(
                    model(inputs[own][batch]), labels[own][batch]
                ).backward()
                optimizer.step()
        average_weights(model)
        with torch.no_grad():
            result[name] = (
                100 * (model(inputs[test]).argmax(1) == labels[test]).double().mean().item()
            )
    return result


SCENARIOS = (
    decentralized,
    choco,
    gossip,
    bytes_and_messages,
    refusals,
    odd_tensors,
    large_tensors,
    interrupted,
    resume,
    local,
    added_later,
    unfrozen,
    consensus,
    steady_state,
    digits,
)


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    return {scenario.__name__: scenario(rank, world_size) for scenario in SCENARIOS}
