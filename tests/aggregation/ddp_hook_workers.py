"""What the tests of DDP's communication hooks run in each worker process."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mlbench_core.aggregation import pytorch as aggregations
from mlbench_core.aggregation.pytorch import Aggregation, AllReduceAggregation, as_ddp_hook
from mlbench_core.aggregation.pytorch.transport.topology import ring
from mlbench_core.optim.pytorch import GenericCentralizedOptimizer

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "ddp_hooks.md"
STEPS = 6
SMALL_MB = 0.0005  # a layer of the network is larger
MAKE_SGD = partial(SGD, lr=0.05, momentum=0.9)


def power(model: nn.Module, **options: Any) -> Aggregation:
    return aggregations.PowerAggregation(model, world_size=None, **options)


KINDS: dict[str, Callable[[nn.Module], Aggregation]] = {
    "all-reduce": lambda model: AllReduceAggregation(),
    "overlap": lambda model: AllReduceAggregation(overlap=True),
    "overlap in bf16": lambda model: AllReduceAggregation(overlap=True, comm_dtype=torch.bfloat16),
    "power": partial(power, start_after_steps=2),
    "warm power": partial(power, reuse_query=True, rank=2),
    "power in turns": partial(power, alternate=True, rank=2),
    "sign": lambda model: aggregations.SignAggregation(),
    "EF-sign": lambda model: aggregations.EFSignAggregation(),
    "top-k": lambda model: aggregations.SparsifiedAggregation(model, size=3),
    "random-k": lambda model: aggregations.SparsifiedAggregation(model, size=3, random=True),
    "EF21": lambda model: aggregations.EF21Aggregation(model, size=3),
    "ARC-Top-K": lambda model: aggregations.ARCTopKAggregation(model, rank=1),
    "chunked top-k": lambda model: aggregations.ChunkedTopKAggregation(),
    "QSGD": lambda model: aggregations.QSGDAggregation(),
    "LoCo": lambda model: aggregations.QuantizedAllReduceAggregation(bits=4, error_decay=0.8),
    "DeMo": lambda model: aggregations.DeMoAggregation(top_k=2),
    "Dion": lambda model: aggregations.DionAggregation(rank=2),
    "one bit": lambda model: aggregations.OneBitAggregation(warmup_steps=2),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "several buckets": {"bucket_cap_mb": SMALL_MB},
    "views": {"bucket_cap_mb": SMALL_MB, "gradient_as_bucket_view": True},
    "static graph": {"bucket_cap_mb": SMALL_MB, "static_graph": True},
}


class Network(nn.Module):
    """Two paths, the second of which an input may leave out. Gradients arrive in another order than
    registration's."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 4)
        self.first = nn.Linear(6, 12)
        self.optional = nn.Linear(6, 12)

    def forward(self, inputs: Tensor, takes_both: bool = True) -> Tensor:
        hidden = self.first(inputs)
        return self.last((hidden + self.optional(inputs) if takes_both else hidden).tanh())


def make_network() -> Network:
    torch.manual_seed(1)
    return Network()


def backward(
    model: nn.Module, rank: int, step: int, part: int = 0, takes_both: bool = True
) -> None:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)
    nn.functional.mse_loss(model(inputs, takes_both), targets).backward()


def takes_both(rank: int, step: int) -> bool:
    """All workers take both paths in most steps, one worker in step 2, and none in step 4."""
    return step not in (2, 4) or (step == 2 and rank == 0)


def train(
    model: nn.Module,
    optimizer: Any,
    steps: range,
    *,
    skips: bool = False,
    accumulates: bool = False,
) -> None:
    """Train a DDP model, or a plain one with an optimizer that communicates."""
    rank = dist.get_rank()
    for step in steps:
        if accumulates:
            # Without overlap, the library's optimizer sends in step() and needs no such block.
            with (
                model.no_sync()
                if isinstance(model, DistributedDataParallel)
                else contextlib.nullcontext()
            ):
                backward(model, rank, step, part=1)
        backward(model, rank, step, takes_both=not skips or takes_both(rank, step))
        optimizer.step()
        optimizer.zero_grad()


class Hooked:
    """A DDP model with a hook of ours, its optimizer, and the number of buckets of each pass."""

    def __init__(self, kind: str, network: nn.Module, **options: Any) -> None:
        self.model = DistributedDataParallel(network, **options)
        self.state, hook = as_ddp_hook(KINDS[kind](network), self.model)
        self.optimizer = MAKE_SGD(self.model.parameters())
        self.buckets: list[int] = []

        def counting(state: Any, bucket: Any) -> Any:
            if bucket.is_last():
                self.buckets.append(bucket.index() + 1)
            return hook(state, bucket)

        counting.__annotations__ = {}
        self.model.register_comm_hook(self.state, counting)

    def values(self) -> dict[str, Any]:
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        return {"weights": weights, "state": copy.deepcopy(self.state.state_dict())}


def ours(kind: str, **ways: bool) -> dict[str, Any]:
    """Train with the library's optimizer."""
    network = make_network()
    aggregation = KINDS[kind](network)
    aggregation.overlap = False
    optimizer = GenericCentralizedOptimizer(
        None, network, optimizer=MAKE_SGD, aggregation=aggregation
    )
    train(network, optimizer, range(STEPS), **ways)
    weights = [parameter.detach().clone() for parameter in network.parameters()]
    return {
        "weights": weights,
        "state": copy.deepcopy(aggregation.state_dict()),
        "bytes": aggregation.bytes_sent,
    }


def hooked(kind: str, options: dict[str, Any], **ways: bool) -> dict[str, Any]:
    """Train with DDP and a hook."""
    run = Hooked(kind, make_network(), **options)
    train(run.model, run.optimizer, range(STEPS), **ways)
    return {**run.values(), "buckets": run.buckets, "bytes": run.state.aggregation.bytes_sent}


def resumed(kind: str) -> dict[str, Any]:
    """Train without interruption, and resume in the middle, when the buckets have long been
    rebuilt."""
    options = LAYOUTS["several buckets"]
    run = Hooked(kind, make_network(), **options)
    train(run.model, run.optimizer, range(3))
    saved = copy.deepcopy(
        [run.model.module.state_dict(), run.optimizer.state_dict(), run.state.state_dict()]
    )
    train(run.model, run.optimizer, range(3, STEPS))
    network = make_network()
    network.load_state_dict(saved[0])
    again = Hooked(kind, network, **options)
    again.optimizer.load_state_dict(saved[1])
    again.state.load_state_dict(saved[2])
    train(again.model, again.optimizer, range(3, STEPS))
    return {
        "whole": run.values(),
        "resumed": again.values(),
        "buckets": (run.buckets[3], again.buckets[0]),
    }


def errors() -> dict[str, str]:
    """Return the message of each wrong use."""
    network = make_network()
    model = DistributedDataParallel(network)
    alone = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    periodic = aggregations.PeriodicAggregation(AllReduceAggregation(), 2)
    wrong: dict[str, tuple[Any, Any]] = {
        "no aggregation": (AllReduceAggregation, model),
        "no DDP": (AllReduceAggregation(), network),
        "other group": (AllReduceAggregation(process_group=alone), model),
        "periodic": (periodic, model),
        "DiLoCo": (aggregations.DiLoCoAggregation(), model),
        "eager": (aggregations.EagerDiLoCoAggregation(), model),
        "SparseLoCo": (aggregations.SparseLoCoAggregation(), model),
        "DES-LOC": (aggregations.DESLOCAggregation(), model),
        "NoLoCo": (aggregations.NoLoCoAggregation(), model),
        "SPARTA": (aggregations.SPARTAAggregation(), model),
        "SCAFFOLD": (aggregations.ScaffoldAggregation(), model),
        "gossip": (aggregations.DecentralizedAggregation(topology=ring(2)), model),
        "CHOCO": (aggregations.ChocoAggregation(topology=ring(2)), model),
        "SGP": (aggregations.PushSumAggregation(), model),
    }
    messages = {}
    for name, arguments in wrong.items():
        try:
            as_ddp_hook(*arguments)
        except (TypeError, ValueError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    state, _ = as_ddp_hook(aggregations.EFSignAggregation(), model)
    try:
        state.load_state_dict({"memory": {"module.last.weight": torch.zeros(4, 12)}})
    except ValueError as error:
        messages["other names"] = str(error)
    sparse = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    sparse.register_comm_hook(*as_ddp_hook(AllReduceAggregation(), sparse))
    try:
        sparse(torch.tensor([0])).sum().backward()
    except ValueError as error:
        messages["sparse"] = str(error)
    return messages


def example() -> list[Tensor]:
    """Run the code of the documentation's page, and return the weights."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {"model": make_network(), "batches": [torch.ones(8, 6)] * 2}
    for block in blocks:
        exec(block, names)
    assert names["state"].aggregation.bytes_sent > 0
    return [parameter.detach() for parameter in names["model"].parameters()]


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    unused = {**LAYOUTS["several buckets"], "find_unused_parameters": True}
    views = {**LAYOUTS["views"], "find_unused_parameters": True}
    return {
        "ours": {kind: ours(kind) for kind in KINDS},
        "hooked": {
            (kind, name): hooked(kind, options)
            for kind in KINDS
            for name, options in LAYOUTS.items()
        },
        "ours with gaps": {kind: ours(kind, skips=True, accumulates=False) for kind in KINDS},
        "gaps": {
            kind: [hooked(kind, options, skips=True) for options in (unused, views)]
            for kind in KINDS
        },
        "ours accumulated": {kind: ours(kind, accumulates=True) for kind in ("overlap", "EF-sign")},
        "accumulated": {
            kind: hooked(kind, LAYOUTS["several buckets"], accumulates=True)
            for kind in ("overlap", "EF-sign")
        },
        "resumed": {kind: resumed(kind) for kind in KINDS},
        "errors": errors(),
        "example": example(),
    }
