"""An infinity or nan of one worker is seen by all workers in the same step, or at the next average.

"Seen" means that weights (or gradients, of hooks) are not finite. An overflow that all workers skip
counts too."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mlbench_core.aggregation import pytorch as aggregations
from mlbench_core.aggregation.pytorch import (
    Aggregation,
    ChocoAggregation,
    ChunkedTopKAggregation,
    OneBitAggregation,
    PowerAggregation,
    QSGDAggregation,
    QuantizedAllReduceAggregation,
    SignAggregation,
    SparseLoCoAggregation,
    SparsifiedAggregation,
    StreamingDiLoCoAggregation,
    as_ddp_hook,
)
from mlbench_core.optim.pytorch import (
    QSGD,
    ChocoSGD,
    DecentralizedSGD,
    EFSignSGD,
    FP16Optimizer,
    GenericCentralizedOptimizer,
    OneBitAdam,
    PowerSGD,
    QuantizedSGD,
    SparseLoCo,
    StreamingDiLoCo,
)
from tests.aggregation import fsdp_hook_workers
from tests.aggregation.ddp_hook_workers import KINDS as HOOKS
from tests.contracts.test_distributed_optimizers import MEMBERS, Member, ring
from tests.helpers.ranks import run_ranks
from tests.helpers.thorough import pairs

VALUES = ("nan", "inf", "-inf")  # words, because a nan is not equal to itself
FIRST, LATER = 1, 6  # the later step averages, and is after the warm-up of 1-bit Adam
CASES = tuple(itertools.product(VALUES, (FIRST, LATER), ("one step", "always")))
FINITE = ("0", LATER, "one step")
SHAPE = (150, 230)  # so large that top-k samples


class Net(nn.Module):
    """A large matrix, a vector and a number, whose gradients are random numbers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(SHAPE, generator=generator).to(dtype))
        self.vector = nn.Parameter(torch.randn(5, generator=generator).to(dtype))
        self.number = nn.Parameter(torch.ones((), dtype=dtype))

    def loss(self, rank: int, step: int, value: str | None) -> Tensor:
        """The gradient is random, and has ``value`` in a coordinate of the matrix."""
        generator = torch.Generator().manual_seed(1000 * rank + step)
        factor = torch.randn(SHAPE, generator=generator)
        if value is not None:
            factor[77, 101] = float(value)
        dtype = self.matrix.dtype
        other = (self.vector.sum() + self.number) * torch.randn((), generator=generator).to(dtype)
        return (self.matrix * factor.to(dtype)).sum() + other

    def is_finite(self) -> bool:
        return all(bool(parameter.isfinite().all()) for parameter in self.parameters())


def streaming(quantize: bool) -> Callable[[Any, int, int], StreamingDiLoCo]:
    options: dict[str, Any] = {"period": 3, "fragments": 1, "delay": 1, "quantize": quantize}
    return lambda m, r, k: StreamingDiLoCo(
        k, m, lr=0.01, aggregation=StreamingDiLoCoAggregation(**options)
    )


def generic(
    aggregation: Aggregation, model: nn.Module, **options: Any
) -> GenericCentralizedOptimizer:
    return GenericCentralizedOptimizer(
        None, model, optimizer=partial(SGD, lr=0.1), aggregation=aggregation, **options
    )


MORE: dict[str, Member] = {
    **{
        f"choco {kind}": Member(
            lambda m, r, k, kind=kind: ChocoSGD(  # type: ignore[misc]
                model=m,
                lr=0.05,
                aggregation=ChocoAggregation(r, ring(r, k), compression=kind, ratio=0.01),
            )
        )
        for kind in ("top_k", "random_k", "sign", "identity")
    },
    "streaming in 4 bits": Member(streaming(quantize=True), period=3),
    "streaming, whole": Member(streaming(quantize=False), period=3),
    "sparse loco unquantized": Member(
        lambda m, r, k: SparseLoCo(
            k,
            m,
            lr=0.01,
            period=3,
            aggregation=SparseLoCoAggregation(ChunkedTopKAggregation(bits=None)),
        ),
        period=3,
    ),
    "one-bit adam in the warm-up": Member(
        lambda m, r, k: OneBitAdam(
            m.named_parameters(), lr=0.01, aggregation=OneBitAggregation(warmup_steps=100)
        )
    ),
    "qsgd by the largest": Member(
        lambda m, r, k: QSGD(k, m, lr=0.05, aggregation=QSGDAggregation(norm=math.inf, levels=127))
    ),
    "quantized with feedback": Member(
        lambda m, r, k: QuantizedSGD(k, m, lr=0.05, bits=4, error_decay=0.5)
    ),
    "power in half precision": Member(
        lambda m, r, k: PowerSGD(
            m,
            lr=0.05,
            aggregation=PowerAggregation(
                m, world_size=k, comm_dtype=torch.float16, error_feedback=False
            ),
        )
    ),
    "sign by layer": Member(lambda m, r, k: generic(SignAggregation(), m, by_layer=True)),
    "random-k without memory": Member(
        lambda m, r, k: generic(
            SparsifiedAggregation(m, size=2, random=True, error_feedback=False), m
        )
    ),
    "ef sign in bf16": Member(
        lambda m, r, k: EFSignSGD(m.named_parameters(), lr=0.01), dtype=torch.bfloat16
    ),
}
ALL = {**MEMBERS, **MORE}
DELAYS = {
    "local delayed": 2,
    "eager": 3,
    "streaming": 2,
    "streaming in 4 bits": 1,
    "streaming, whole": 1,
}


def last_step(name: str, injected: int) -> int:
    """The step, counted from 1, after which all workers must see it."""
    period = ALL[name].period
    return -(-injected // period) * period + DELAYS.get(name, 0)


def train(name: str, rank: int, world_size: int, value: str, injected: int, duration: str) -> bool:
    """True if this worker's weights are finite at the end, or if it skipped the step."""
    member = ALL[name]
    model = Net(member.dtype)
    optimizer = member.make(model, rank, world_size)  # type: ignore[arg-type]
    skipped = False
    for step in range(1, last_step(name, injected) + 1):
        is_wrong = rank == 1 and (step == injected or (duration == "always" and step > injected))
        optimizer.zero_grad()
        loss = model.loss(rank, step, value if is_wrong else None)
        getattr(optimizer, "backward_loss", Tensor.backward)(loss)
        taken = optimizer.step()
        skipped = skipped or (isinstance(optimizer, FP16Optimizer) and not taken)
    return model.is_finite() and not skipped


def train_with_hook(
    name: str, rank: int, world_size: int, value: str, injected: int, duration: str
) -> bool:
    """Whether the gradients of torch's DistributedDataParallel are finite in the last step."""
    model = Net()
    wrapped = DistributedDataParallel(_Loss(model))
    wrapped.register_comm_hook(*as_ddp_hook(HOOKS[name](wrapped.module), wrapped))
    for step in range(1, injected + 1):
        is_wrong = rank == 1 and (step == injected)
        model.zero_grad()
        wrapped(rank, step, value if is_wrong else None).backward()
    return all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())  # type: ignore[union-attr]


class _Loss(nn.Module):
    """A model whose output is the loss, because DDP wraps the forward pass."""

    def __init__(self, model: Net) -> None:
        super().__init__()
        self.model = model

    def forward(self, rank: int, step: int, value: str | None) -> Tensor:
        return self.model.loss(rank, step, value)


def run_all(rank: int, world_size: int) -> dict[Any, bool]:
    found = {}
    for function, names in ((train, ALL), (train_with_hook, HOOKS)):
        tried = pairs(names, CASES, each=3) + [(name, FINITE) for name in names]
        for name, case in tried:
            found[(function.__name__, name, *case)] = function(name, rank, world_size, *case)
    return found


@functools.cache
def trained() -> list[dict[Any, bool]]:
    return run_ranks(2, run_all, timeout_s=300)


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("train", name) for name in ALL), *(("train_with_hook", name) for name in HOOKS)],
)
def test_all_workers_see_what_is_not_finite_on_one(kind: str, name: str) -> None:
    for rank, found in enumerate(trained()):
        assert found[(kind, name, *FINITE)], "the training itself is finite"
        cases = [case for of_kind, of_name, *case in found if (of_kind, of_name) == (kind, name)]
        hidden = [case for case in cases if case != [*FINITE] and found[(kind, name, *case)]]
        assert not hidden, f"rank {rank} does not see it in the cases {hidden}"


def train_in_a_ring(rank: int, world_size: int) -> list[list[bool]]:
    """Whether the weights are finite after each step, if worker 1 has a nan in the first."""
    result = []
    makers: list[Callable[[Net], Any]] = [
        lambda m: DecentralizedSGD(rank, ring(rank, world_size), m, lr=0.1)
    ]
    makers += [partial(_make, f"choco {kind}", rank, world_size) for kind in ("random_k", "sign")]
    for make in makers:
        model, seen = Net(), []
        optimizer = make(model)
        for step in range(3):
            optimizer.zero_grad()
            model.loss(rank, step, "nan" if rank == 1 and step == 0 else None).backward()
            optimizer.step()
            seen.append(model.is_finite())
        result.append(seen)
    return result


def _make(name: str, rank: int, world_size: int, model: Any) -> Any:
    return MORE[name].make(model, rank, world_size)


def test_gossip_carries_it_one_edge_further_in_each_step() -> None:
    for rank, found in enumerate(run_ranks(4, train_in_a_ring)):
        distance = min((rank - 1) % 4, (1 - rank) % 4)
        for seen in found:
            assert seen == [step + 1 < distance for step in range(3)]


def aggregate_shards(rank: int, world_size: int) -> dict[Any, bool]:
    """Whether the gradients are finite if FSDP2 shards a model that one worker has a nan in."""
    mesh, found = fsdp_hook_workers.make_mesh(), {}
    for name, value in itertools.product(fsdp_hook_workers.KINDS, ("1", "nan", "inf")):
        sharded = fsdp_hook_workers.Sharded(name, mesh, fsdp_hook_workers.make_network())
        loss = fsdp_hook_workers.loss_of(sharded.model, rank, 0)
        (loss * float(value) if rank == 3 else loss).backward()
        gradients = [parameter.grad.to_local() for parameter in sharded.model.parameters()]
        found[name, value] = all(bool(gradient.isfinite().all()) for gradient in gradients)
    return found


def test_all_replicas_of_sharded_models_see_it() -> None:
    for found in run_ranks(4, aggregate_shards):
        assert found == {(name, value): value == "1" for name, value in found}


AGGREGATIONS: dict[str, Callable[[], Aggregation]] = {
    "all-reduce": aggregations.AllReduceAggregation,
    "sign": SignAggregation,
    "EF-sign": aggregations.EFSignAggregation,
    "top-k": lambda: SparsifiedAggregation(None, size=2),
    "random-k": lambda: SparsifiedAggregation(None, size=2, random=True),
    "EF21": lambda: aggregations.EF21Aggregation(None, size=2),
    "ARC-Top-K": lambda: aggregations.ARCTopKAggregation(None, size=2, rank=1),
    "random-k without memory": lambda: SparsifiedAggregation(
        None, size=2, random=True, error_feedback=False
    ),
    **{
        f"chunked top-k, {b} bits": lambda b=b: ChunkedTopKAggregation(bits=b)
        for b in (None, 1, 2, 8)
    },  # type: ignore[misc]
    "QSGD": QSGDAggregation,
    "QSGD by the largest": lambda: QSGDAggregation(norm=math.inf),
    "quantized": QuantizedAllReduceAggregation,
    "quantized with feedback": lambda: QuantizedAllReduceAggregation(bits=4, error_decay=0.5),
    "DeMo": aggregations.DeMoAggregation,
    "Dion": aggregations.DionAggregation,
    "power": lambda: PowerAggregation(Net()),
    "power in turns": lambda: PowerAggregation(Net(), alternate=True),
    "one bit": lambda: OneBitAggregation(warmup_steps=0),
    "one bit in the warm-up": OneBitAggregation,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_one_worker_alone_sees_it_wherever_it_is_and_forgets_it(
    name: str, dtype: torch.dtype
) -> None:
    for value, place in itertools.product(VALUES, (0, 77, -1)):
        aggregation = AGGREGATIONS[name]()
        for is_wrong in (False, True, False):
            x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
            if is_wrong:
                x.view(-1)[place] = float(value)
            aggregation.aggregate({"x": x}, "avg_world")
            assert bool(x.isfinite().all()) is not is_wrong, (value, place)


def test_an_unused_weight_of_one_bit_adam_shows_it_too() -> None:
    """Weights whose second moment is 0 do not move, but must not hide it either."""
    x = nn.Parameter(torch.ones(9))
    optimizer = OneBitAdam([x], lr=0.1, warmup_steps=2)
    for step in range(4):
        x.grad = torch.zeros(9)
        if step == 3:
            x.grad[4] = math.nan
        optimizer.step()
        assert bool(x.isfinite().all()) is (step < 3)
