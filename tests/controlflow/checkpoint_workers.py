"""What the workers of the tests of resumed runs do."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mlbench_core.aggregation.pytorch import (
    AllReduceAggregation,
    ARCTopKAggregation,
    ChocoAggregation,
    DecentralizedAggregation,
    DeMoAggregation,
    StreamingDiLoCoAggregation,
    consensus_distance,
)
from mlbench_core.aggregation.pytorch.transport.topology import Topology, from_edges, ring
from mlbench_core.controlflow.pytorch.checkpoint import Checkpointer, CheckpointFreq
from mlbench_core.optim.pytorch import (
    DESLOC,
    EF21,
    QSGD,
    SCAFFOLD,
    SGP,
    SPARTA,
    CentralizedAdam,
    CentralizedSGD,
    CentralizedSparsifiedSGD,
    ChocoSGD,
    DecentralizedSGD,
    DeMo,
    DiLoCo,
    Dion,
    EFSignSGD,
    FP16Optimizer,
    LocalSGD,
    NoLoCo,
    OneBitAdam,
    PowerSGD,
    QuantizedSGD,
    SignSGD,
    SparseLoCo,
    SparsifiedSGD,
    StreamingDiLoCo,
)

Make = Callable[[nn.Module, float], Optimizer]


class Net(nn.Module):
    """A matrix that is compressed, vectors, and statistics that each worker takes of its own
    batches.

    Only worker 0 has gradients of ``lone`` that are not zero.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.matrix = nn.Parameter(torch.randn(6, 5, generator=generator))
        self.vector = nn.Parameter(torch.randn(6, generator=generator))
        self.lone = nn.Parameter(torch.zeros(3))
        self.register_buffer("statistic", torch.zeros(5))

    def forward(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            self.statistic.lerp_(batch.mean(0), 0.1)
        return torch.tanh((batch - self.statistic) @ self.matrix.t() + self.vector)


def _fp16(model: nn.Module, lr: float) -> Optimizer:
    optimizer = FP16Optimizer(model, None)
    optimizer.set_optimizer(torch.optim.SGD([optimizer.fp32_params], lr=lr, momentum=0.9))
    return optimizer


def _choco(
    model: nn.Module, lr: float, topology: Topology | None = None, **options: Any
) -> Optimizer:
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    exchange = ChocoAggregation(topology=topology or ring(size), **options)
    return ChocoSGD(model=model, lr=lr, momentum=0.9, aggregation=exchange)


def _decentralized(model: nn.Module, lr: float) -> Optimizer:
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    exchange = DecentralizedAggregation(topology=ring(size))
    return DecentralizedSGD(model=model, lr=lr, momentum=0.9, aggregation=exchange)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m, lr: CentralizedSGD(model=m, lr=lr, momentum=0.9),
    "adam": lambda m, lr: CentralizedAdam(model=m, lr=lr),
    "sgd on weights": lambda m, lr: CentralizedSGD(model=m, lr=lr, momentum=0.9, agg_grad=False),
    "fp16": _fp16,
    "power": lambda m, lr: PowerSGD(m, lr, momentum=0.9, world_size=None, rank=1, reuse_query=True),
    "sign": lambda m, lr: SignSGD(m.named_parameters(), lr, momentum=0.9),
    "ef sign": lambda m, lr: EFSignSGD(m.named_parameters(), lr, momentum=0.9),
    "top-k": lambda m, lr: SparsifiedSGD(m.parameters(), lr, sparse_grad_size=3),
    "random-k": lambda m, lr: CentralizedSparsifiedSGD(
        m.named_parameters(), lr, sparse_grad_size=3, random_sparse=True, world_size=None
    ),
    "ef21": lambda m, lr: EF21(model=m, lr=lr, size=3),
    "arc": lambda m, lr: EF21(model=m, lr=lr, aggregation=ARCTopKAggregation(m, size=2, rank=1)),
    "qsgd": lambda m, lr: QSGD(model=m, lr=lr, momentum=0.9),
    "loco": lambda m, lr: QuantizedSGD(model=m, lr=lr, bits=4, error_decay=0.8),
    "demo": lambda m, lr: DeMo(m.named_parameters(), lr, aggregation=DeMoAggregation(top_k=2)),
    "one-bit adam": lambda m, lr: OneBitAdam(m.named_parameters(), lr, warmup_steps=3),
    "dion": lambda m, lr: Dion(m.named_parameters(), lr, rank=1),
    "gossip": _decentralized,
    "choco": _choco,
    "choco random-k": partial(_choco, compression="random_k", ratio=0.4),
    "choco sign": partial(_choco, compression="sign"),
    "sgp": lambda m, lr: SGP(model=m, lr=lr, momentum=0.9),
    "local": lambda m, lr: LocalSGD(model=m, lr=lr, momentum=0.9, period=4),
    "local delayed": lambda m, lr: LocalSGD(model=m, lr=lr, momentum=0.9, period=4, delay=3),
    "des loc": lambda m, lr: DESLOC(model=m, lr=lr, period=4, first_moment_period=3),
    "scaffold": lambda m, lr: SCAFFOLD(model=m, lr=lr, period=4),
    "diloco sparse": lambda m, lr: SparseLoCo(model=m, lr=lr, period=4),
    "sparta": lambda m, lr: SPARTA(model=m, lr=lr, share=0.3),
    "no loco": lambda m, lr: NoLoCo(model=m, lr=lr, period=4),
    "diloco streaming": lambda m, lr: StreamingDiLoCo(
        model=m,
        lr=lr,
        aggregation=StreamingDiLoCoAggregation(period=4, fragments=1, delay=0, mixing=0),
    ),
    "diloco": lambda m, lr: DiLoCo(model=m, lr=lr, period=4),
    "diloco adam": lambda m, lr: DiLoCo(
        model=m, lr=lr, period=4, outer_optimizer=partial(AdamW, lr=0.3)
    ),
}
REMEMBERING = {
    "power",
    "loco",
    "sign",
    "ef sign",
    "top-k",
    "random-k",
    "ef21",
    "arc",
    "choco",
    "choco random-k",
    "choco sign",
    "demo",
    "one-bit adam",
    "dion",
    "local delayed",
    "scaffold",
    "diloco sparse",
    "no loco",
}
"""Those of which a worker has a memory for itself."""


class Warned(logging.Handler):
    """Counts the library's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Warned:
        logging.getLogger("mlbench_core").addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("mlbench_core").removeHandler(self)


def train(model: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    """Steps on noise of the worker's own, the same in every run."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        batch, target = (
            torch.randn(8, 5, generator=generator),
            torch.randn(8, 6, generator=generator),
        )
        optimizer.zero_grad()
        loss = ((model(batch) - target) ** 2).mean()
        if isinstance(optimizer, FP16Optimizer):
            optimizer.backward_loss(loss)
        else:
            loss.backward()
        model.lone.grad = torch.full((3,), float(rank == 0))
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def save_best(
    folder: Path, rank: int, model: nn.Module, optimizer: Any, freq: CheckpointFreq
) -> None:
    tracker = SimpleNamespace(current_epoch=1)
    Checkpointer(folder, rank, freq).save(tracker, model, optimizer, None, is_best=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def resume_from_best(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """By optimizer: whether a run that goes on from the best epoch has the bits of the
    uninterrupted one."""
    result = {}
    own = [torch.distributed.new_group([other]) for other in range(world_size)][rank]
    alone: Make = lambda m, lr: CentralizedSGD(  # noqa: E731
        model=m, lr=lr, aggregation=AllReduceAggregation(process_group=own)
    )
    for name, make in {**OPTIMIZERS, "alone": alone}.items():
        model = Net()
        optimizer = make(model, 0.1)
        train(model, optimizer, range(7), rank)
        save_best(Path(folder, name), rank, model, optimizer, CheckpointFreq.BEST)
        train(model, optimizer, range(7, 12), rank)
        second = Net()
        resumed = make(second, 0.1)
        with Warned() as warned:
            Checkpointer.load(Path(folder, name), rank, second, resumed, None)
            train(second, resumed, range(7, 12), rank)
        result[name] = equal(values(model), values(second)), warned.messages
    return result


def save_all(rank: int, world_size: int, folder: str) -> None:
    """Every optimizer's state, in one folder each for both frequencies, after eight steps, when all
    have just met."""
    for name, make in OPTIMIZERS.items():
        model = Net()
        optimizer = make(model, 0.1)
        train(model, optimizer, range(8), rank)
        for freq in (CheckpointFreq.BEST, CheckpointFreq.ALL):
            save_best(Path(folder, f"{name}-{freq.name}"), rank, model, optimizer, freq)


def average(model: nn.Module) -> Tensor:
    """The workers' average of all weights, in float64."""
    flat = torch.cat([parameter.detach().double().view(-1) for parameter in model.parameters()])
    torch.distributed.all_reduce(flat)
    return flat / torch.distributed.get_world_size()


def stand_still(
    rank: int, world_size: int, folder: str, steps: int = 8
) -> dict[tuple[str, str], Any]:
    """What 8 steps with learning rate 0 do to the workers' average after a resume, and to what they
    remember."""
    result = {}
    for (name, make), freq in itertools.product(
        OPTIMIZERS.items(), (CheckpointFreq.BEST, CheckpointFreq.ALL)
    ):
        model = Net()
        optimizer = make(model, 0.0)
        if name.startswith("diloco"):  # outer momentum goes on by itself, which is no drift
            optimizer.outer_optimizer.param_groups[0]["lr"] = 0.0  # type: ignore[attr-defined]
        with Warned() as warned:
            Checkpointer.load(Path(folder, f"{name}-{freq.name}"), rank, model, optimizer, None)
            stop(optimizer)
            train(model, optimizer, range(1), rank)
        first = average(model)
        train(model, optimizer, range(1, steps), rank)
        result[name, freq.name] = {
            "moved": float((average(model) - first).norm()),
            "apart": consensus_distance(model),
            "warnings": warned.messages,
        }
    return result


def stop(optimizer: Any) -> None:
    """Set all learning rates to 0: those of the checkpoint are restored with it."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    outer = getattr(optimizer, "outer_optimizer", None)
    for group in outer.param_groups if outer is not None else ():
        group["lr"] = 0.0


def other_graph(rank: int, world_size: int) -> dict[str, Any]:
    """ChocoSGD on a ring, resumed on a line, from states of two moments, from rank 0's, and as it
    was."""
    graphs = {
        "ring": ring(world_size),
        "line": from_edges(world_size, [(i, i + 1) for i in range(world_size - 1)]),
    }
    model = Net()
    optimizer = _choco(model, 0.1, graphs["ring"], compression="random_k", ratio=0.4)
    train(model, optimizer, range(6), rank)
    states = [copy.deepcopy((model.state_dict(), optimizer.state_dict()))]
    train(model, optimizer, range(6, 7), rank)
    states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    of_rank_0 = copy.deepcopy(states[:1])
    torch.distributed.broadcast_object_list(of_rank_0, 0)
    states += of_rank_0
    result = {}
    cases = {
        "line": ("line", 0),
        "two moments": ("ring", rank % 2),
        "rank 0's": ("ring", 2),
        "fits": ("ring", 0),
    }
    for case, (graph, moment) in cases.items():
        resumed_model = Net()
        resumed = _choco(resumed_model, 0.0, graphs[graph], compression="random_k", ratio=0.4)
        weights, state = states[moment]
        resumed_model.load_state_dict(weights)
        with Warned() as warned:
            resumed.load_state_dict(state)
            stop(resumed)
            before = average(resumed_model), consensus_distance(resumed_model)
            train(resumed_model, resumed, range(60), rank)
        result[case] = {
            "moved": float((average(resumed_model) - before[0]).norm()),
            "apart": (before[1], consensus_distance(resumed_model)),
            "warnings": warned.messages,
            "agreed": resumed.aggregation.topology.edges,  # type: ignore[attr-defined]
        }
    return result
