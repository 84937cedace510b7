"""Workers in groups of their own: what each group computes is what a run of its workers alone
computes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from mlbench_core.aggregation.pytorch import (
    AllReduceAggregation,
    ARCTopKAggregation,
    ChocoAggregation,
    ChunkedTopKAggregation,
    DecentralizedAggregation,
    DeMoAggregation,
    DESLOCAggregation,
    DiLoCoAggregation,
    DionAggregation,
    EagerDiLoCoAggregation,
    EF21Aggregation,
    EFSignAggregation,
    NoLoCoAggregation,
    OneBitAggregation,
    PowerAggregation,
    PushSumAggregation,
    QSGDAggregation,
    QuantizedAllReduceAggregation,
    ScaffoldAggregation,
    SignAggregation,
    SparseLoCoAggregation,
    SparsifiedAggregation,
    SPARTAAggregation,
    StreamingDiLoCoAggregation,
)
from mlbench_core.aggregation.pytorch.consensus import averaged_weights
from mlbench_core.aggregation.pytorch.transport.topology import ring
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
    CustomCentralizedOptimizer,
    DecentralizedSGD,
    DeMo,
    DiLoCo,
    Dion,
    DistributedGradScaler,
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
from tests.helpers.ranks import run_ranks

GROUPS = ([0, 2], [1, 3])  # both ranks even, or odd: a rank of the world is not one of the group
STEPS = 3


def custom(model: nn.Module, **group: Any) -> CustomCentralizedOptimizer:
    exchange = AllReduceAggregation(2, **group)
    return CustomCentralizedOptimizer(
        model, 2, SGD(model.parameters(), lr=0.1), grad_clip=0.5, aggregation=exchange
    )


def centralized(
    model: nn.Module, make: Any = CentralizedSGD, exchange: Any = None, **options: Any
) -> Any:
    return make(2, model, lr=0.1, aggregation=AllReduceAggregation(2, **exchange), **options)


MAKE: dict[str, Callable[..., Any]] = {
    "all-reduce": lambda m, **group: centralized(m, exchange=group, momentum=0.9),
    "weights": lambda m, **group: centralized(m, exchange=group, agg_grad=False),
    "overlap": lambda m, **group: centralized(
        m, exchange={"overlap": True, "bucket_size_bytes": 64, **group}
    ),
    "adam": lambda m, **group: centralized(
        m, CentralizedAdam, {"overlap": True, "bucket_size_bytes": 64, **group}
    ),
    "shared memory": lambda m, **group: centralized(
        m, exchange={"overlap": True, "shared_memory": True, **group}
    ),
    "clipped": custom,
    "power": lambda m, **group: PowerSGD(
        m, lr=0.1, aggregation=PowerAggregation(m, world_size=2, **group)
    ),
    "quantized": lambda m, **group: QuantizedSGD(
        2, m, lr=0.1, aggregation=QuantizedAllReduceAggregation(error_decay=0.8, **group)
    ),
    "rounded": lambda m, **group: QSGD(2, m, lr=0.1, aggregation=QSGDAggregation(**group)),
    "signs": lambda m, **group: SignSGD(
        m.parameters(), lr=0.1, aggregation=SignAggregation(**group)
    ),
    "scaled signs": lambda m, **group: EFSignSGD(
        m.parameters(), lr=0.1, world_size=2, aggregation=EFSignAggregation(**group)
    ),
    "largest": lambda m, **group: SparsifiedSGD(
        m.parameters(), lr=0.1, aggregation=SparsifiedAggregation(None, size=2, **group)
    ),
    "ef21": lambda m, **group: EF21(2, m, lr=0.1, aggregation=EF21Aggregation(m, size=2, **group)),
    "arc": lambda m, **group: EF21(
        2, m, lr=0.1, aggregation=ARCTopKAggregation(m, rank=1, **group)
    ),
    "random": lambda m, **group: CentralizedSparsifiedSGD(
        m.parameters(),
        lr=0.1,
        world_size=2,
        aggregation=SparsifiedAggregation(None, size=2, random=True, **group),
    ),
    "neighbours": lambda m, **group: DecentralizedSGD(
        model=m, lr=0.1, aggregation=DecentralizedAggregation(topology=ring(2), **group)
    ),
    "compressed": lambda m, **group: ChocoSGD(
        model=m,
        lr=0.1,
        aggregation=ChocoAggregation(
            neighbors=[1 - dist.get_rank(group.get("process_group"))], **group
        ),
    ),
    "sgp": lambda m, **group: SGP(2, m, lr=0.1, aggregation=PushSumAggregation(**group)),
    "local": lambda m, **group: LocalSGD(
        2, m, lr=0.1, period=2, aggregation=AllReduceAggregation(2, **group)
    ),
    "scaffold": lambda m, **group: SCAFFOLD(
        2, m, lr=0.1, period=2, aggregation=ScaffoldAggregation(**group)
    ),
    "sparse loco": lambda m, **group: SparseLoCo(
        2,
        m,
        lr=0.1,
        period=2,
        aggregation=SparseLoCoAggregation(ChunkedTopKAggregation(density=3, **group)),
    ),
    "des loc": lambda m, **group: DESLOC(
        2, m, lr=0.1, aggregation=DESLOCAggregation(period=2, first_moment_period=2, **group)
    ),
    "sparta": lambda m, **group: SPARTA(
        2, m, lr=0.1, aggregation=SPARTAAggregation(share=0.5, **group)
    ),
    "no loco": lambda m, **group: NoLoCo(
        2, m, lr=0.1, period=2, aggregation=NoLoCoAggregation(**group)
    ),
    "demo": lambda m, **group: DeMo(
        m.parameters(), lr=0.1, aggregation=DeMoAggregation(top_k=2, **group)
    ),
    "one-bit adam": lambda m, **group: OneBitAdam(
        m.parameters(), lr=0.1, aggregation=OneBitAggregation(warmup_steps=1, **group)
    ),
    "dion": lambda m, **group: Dion(
        m.parameters(), lr=0.1, aggregation=DionAggregation(rank=2, **group)
    ),
    "streaming": lambda m, **group: StreamingDiLoCo(
        2,
        m,
        lr=0.1,
        aggregation=StreamingDiLoCoAggregation(period=2, fragments=1, delay=0, mixing=0, **group),
    ),
    "diloco": lambda m, **group: DiLoCo(
        2, m, lr=0.1, period=2, aggregation=DiLoCoAggregation(**group)
    ),
    "eager": lambda m, **group: DiLoCo(
        2, m, lr=0.1, period=1, aggregation=EagerDiLoCoAggregation(**group)
    ),
}


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Hardshrink(1.0), nn.Linear(8, 3))


def loss_of(model: nn.Module, which: int, rank: int, step: int) -> Tensor:
    """The loss of worker ``rank`` of the group ``which``."""
    generator = torch.Generator().manual_seed(100 * which + 10 * rank + step)
    return model(torch.randn(4, 6, generator=generator)).square().mean()


def train(which: int, rank: int, **group: Any) -> dict[str, list[Any]]:
    """Weights at the end, of all algorithms; ``group`` is empty where the group is the world."""
    result: dict[str, list[Any]] = {}
    for name, make in MAKE.items():
        model = layers()
        optimizer = make(model, **group)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, which, rank, step).backward()
            optimizer.step()
        result[name] = [parameter.detach().clone() for parameter in model.parameters()]
    result["consensus"] = [apart(model, which, rank, **group)]
    result["half"] = half(which, rank, **group)
    result["scaled"] = scaled(which, rank, **group)
    result["copied"] = copied(which, rank, **group)
    return result


def apart(model: nn.Module, which: int, rank: int, **group: Any) -> Any:
    """How far workers are apart, and a weight as lent for a validation and as given by the
    optimizer."""
    exchange = DecentralizedAggregation(topology=ring(2), **group)
    optimizer = DecentralizedSGD(model=model, lr=0.1, aggregation=exchange)
    loss_of(model, which, rank, 9).backward()
    nn.init.constant_(model[0].weight, float(10 * which + rank))
    with averaged_weights(model, **group):
        lent = model[0].weight[0, 0].item()
    distance = optimizer.consensus_distance()
    optimizer.average_weights()
    return lent, distance, model[0].weight[0, 0].item()


def half(which: int, rank: int, **group: Any) -> list[Tensor]:
    model = layers().bfloat16()
    optimizer = FP16Optimizer(model, 2, aggregation=AllReduceAggregation(**group))
    optimizer.set_optimizer(SGD([optimizer.fp32_params], lr=0.1))
    optimizer.backward_loss(
        model(torch.full((2, 6), which + rank / 2, dtype=torch.bfloat16)).float().square().mean()
    )
    optimizer.step()
    return [optimizer.fp32_params.detach().clone()]


def scaled(which: int, rank: int, **group: Any) -> list[Any]:
    """One worker of the first group has an overflow: the other group goes on."""
    model = layers()
    optimizer = centralized(model, exchange=group)
    scaler = DistributedGradScaler("cpu", init_scale=8.0)
    for step in range(2):
        optimizer.zero_grad()
        factor = math.inf if (which, rank, step) == (0, 1, 1) else 1.0
        scaler.scale(loss_of(model, which, rank, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale(), *(parameter.detach().clone() for parameter in model.parameters())]


def copied(which: int, rank: int, **group: Any) -> list[Tensor]:
    """A copy goes on in the same group."""
    model = layers()
    optimizer = PowerSGD(model, lr=0.1, aggregation=PowerAggregation(model, world_size=2, **group))
    model, optimizer = copy.deepcopy((model, optimizer))
    loss_of(model, which, rank, 0).backward()
    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def in_subgroups(rank: int, world_size: int) -> tuple[int, int, dict[str, list[Any]], list[str]]:
    made = [dist.new_group(ranks) for ranks in GROUPS]
    which = next(i for i, ranks in enumerate(GROUPS) if rank in ranks)
    errors = []
    for options in (
        {"process_group": made[1 - which]},
        {"process_group": GROUPS[which]},
        {"process_group": made[which], "world_size": 4},
    ):
        try:
            AllReduceAggregation(**options)
        except (ValueError, TypeError) as error:
            errors.append(str(error))
    try:
        CentralizedSGD(
            4, layers(), lr=0.1, aggregation=AllReduceAggregation(process_group=made[which])
        )
    except ValueError as error:
        errors.append(str(error))
    own = dist.get_rank(made[which])
    return which, own, train(which, own, process_group=made[which]), errors


def alone(rank: int, world_size: int) -> list[dict[str, list[Any]]]:
    return [train(which, rank) for which in range(len(GROUPS))]


@pytest.fixture(scope="module")
def results() -> tuple[list[Any], list[Any]]:
    return run_ranks(4, in_subgroups), run_ranks(2, alone)


def assert_same(ours: list[Any], expected: list[Any]) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("name", [*MAKE, "consensus", "half", "scaled", "copied"])
def test_a_group_computes_what_its_workers_alone_compute(
    results: tuple[list[Any], list[Any]], name: str
) -> None:
    subgroups, worlds = results
    for which, own_rank, result, _ in subgroups:
        assert_same(result[name], worlds[own_rank][which][name])


def test_the_groups_are_two(results: tuple[list[Any], list[Any]]) -> None:
    subgroups, _ = results
    assert [(which, rank) for which, rank, *_ in subgroups] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    first, second = subgroups[0][2], subgroups[1][2]
    for name in MAKE:
        assert any(not torch.equal(a, b) for a, b in zip(first[name], second[name], strict=True))
    assert [result["scaled"][0] for _, _, result, _ in subgroups] == [4.0, 8.0, 4.0, 8.0]
    assert [result["consensus"][0][0] for _, _, result, _ in subgroups] == [0.5, 10.5, 0.5, 10.5]


def test_a_group_that_does_not_fit_is_refused(results: tuple[list[Any], list[Any]]) -> None:
    for *_, errors in results[0]:
        other, no_group, four, two_answers = errors
        assert "process_group must be a group that this process belongs to" in other
        assert (
            "process_group must be a group from torch.distributed.new_group, or None, not list"
            in no_group
        )
        assert "world_size is 4, but the process group has 2 workers" in four
        assert (
            "world_size is 4, but the process group has 2 workers, and so the aggregation"
            in two_answers
        )


def test_horovod_has_no_groups() -> None:
    with pytest.raises(
        ValueError, match="use_horovod must be False, not True, because AllReduceAggregation sends"
    ):
        FP16Optimizer(layers().half(), 1, use_horovod=True, aggregation=AllReduceAggregation())
