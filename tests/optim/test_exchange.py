"""Settings of the exchange belong to the aggregation, and what contradicts it is refused with the
way to write it."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

# the first optimizer would import it inside a test, and it sets an environment variable
import torch._dynamo
from torch import nn
from torch.optim import SGD

from mlbench_core.aggregation.pytorch import (
    Aggregation,
    AllReduceAggregation,
    ChocoAggregation,
    DecentralizedAggregation,
    DeMoAggregation,
    DESLOCAggregation,
    DiLoCoAggregation,
    DionAggregation,
    EF21Aggregation,
    EFSignAggregation,
    NoLoCoAggregation,
    OneBitAggregation,
    PeriodicAggregation,
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
    EFSignSGD,
    FP16Optimizer,
    GenericCentralizedOptimizer,
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

MODEL = nn.Linear(8, 6)
HALF = nn.Linear(8, 6).half()


def power(**options: Any) -> PowerAggregation:
    return PowerAggregation(MODEL, rank=2, **options)


MAKE: dict[str, tuple[Any, Aggregation]] = {
    "generic": (partial(GenericCentralizedOptimizer, 1, MODEL), power()),
    "custom": (
        partial(CustomCentralizedOptimizer, MODEL, 1, partial(SGD, lr=0.1)),
        AllReduceAggregation(),
    ),
    "sgd": (partial(CentralizedSGD, model=MODEL, lr=0.1), AllReduceAggregation()),
    "adam": (partial(CentralizedAdam, model=MODEL, lr=0.1), AllReduceAggregation()),
    "power": (partial(PowerSGD, MODEL, lr=0.1), power(reuse_query=True)),
    "qsgd": (partial(QSGD, model=MODEL, lr=0.1), QSGDAggregation()),
    "quantized": (partial(QuantizedSGD, model=MODEL, lr=0.1), QuantizedAllReduceAggregation()),
    "sign": (partial(SignSGD, MODEL.parameters(), lr=0.1), SignAggregation()),
    "ef sign": (partial(EFSignSGD, MODEL.parameters(), lr=0.1), EFSignAggregation()),
    "sparsified": (
        partial(SparsifiedSGD, MODEL.parameters(), lr=0.1),
        SparsifiedAggregation(None, size=3),
    ),
    "ef21": (partial(EF21, model=MODEL, lr=0.1), EF21Aggregation(None)),
    "random": (
        partial(CentralizedSparsifiedSGD, MODEL.parameters(), lr=0.1),
        SparsifiedAggregation(None, size=3, random=True),
    ),
    "decentralized": (partial(DecentralizedSGD, model=MODEL, lr=0.1), DecentralizedAggregation()),
    "choco": (partial(ChocoSGD, model=MODEL, lr=0.1), ChocoAggregation(compression="sign")),
    "sgp": (partial(SGP, model=MODEL, lr=0.1), PushSumAggregation()),
    "diloco": (partial(DiLoCo, model=MODEL, lr=0.1), DiLoCoAggregation()),
    "streaming": (partial(StreamingDiLoCo, model=MODEL, lr=0.1), StreamingDiLoCoAggregation()),
    "scaffold": (partial(SCAFFOLD, model=MODEL, lr=0.1), ScaffoldAggregation()),
    "sparse loco": (partial(SparseLoCo, model=MODEL, lr=0.1), SparseLoCoAggregation()),
    "des loc": (partial(DESLOC, model=MODEL, lr=0.1), DESLOCAggregation()),
    "sparta": (partial(SPARTA, model=MODEL, lr=0.1), SPARTAAggregation()),
    "no loco": (partial(NoLoCo, model=MODEL, lr=0.1), NoLoCoAggregation()),
    "demo": (partial(DeMo, MODEL.parameters(), lr=0.1), DeMoAggregation()),
    "one-bit adam": (partial(OneBitAdam, MODEL.parameters(), lr=0.1), OneBitAggregation()),
    "dion": (partial(Dion, MODEL.parameters(), lr=0.1), DionAggregation()),
    "local": (partial(LocalSGD, model=MODEL, lr=0.1), AllReduceAggregation()),
    "fp16": (partial(FP16Optimizer, HALF, 1), AllReduceAggregation(divide_before=True)),
}
OWN_KIND = tuple(name for name in MAKE if name not in ("generic", "custom", "sgd", "adam", "local"))


@pytest.mark.parametrize("name", MAKE)
def test_every_optimizer_takes_an_aggregation(name: str) -> None:
    make, aggregation = MAKE[name]
    own = make(aggregation=aggregation).aggregation
    assert aggregation in (own, getattr(own, "inside", None))


@pytest.mark.parametrize(
    "setting", ["comm_dtype", "shared_memory", "bucket_size_bytes", "process_group"]
)
@pytest.mark.parametrize("name", MAKE)
def test_no_optimizer_takes_a_setting_of_the_exchange(name: str, setting: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{setting}'"):
        MAKE[name][0](**{setting: None})


@pytest.mark.parametrize("name", OWN_KIND)
def test_a_preset_wants_its_own_kind_of_aggregation(name: str) -> None:
    make, aggregation = MAKE[name]
    other = power() if name == "fp16" else AllReduceAggregation()
    with pytest.raises(
        TypeError, match=f"of the class {type(aggregation).__name__}, not {type(other).__name__}"
    ):
        make(aggregation=other)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sgd", {"world_size": 2}, "world_size is 2, but the process group has 1 worker"),
        (
            "sgd",
            {"use_cuda": True},
            "use_cuda must be left out or False, not True, because the aggregation decides",
        ),
        (
            "custom",
            {"divide_before": True},
            "write divide_before=True in AllReduceAggregation(...)",
        ),
        (
            "power",
            {"rank": 3},
            (
                "rank must be left out or 2, not 3, because the "
                "aggregation decides on it: write rank=3"
            ),
        ),
        (
            "qsgd",
            {"levels": 3},
            "levels must be left out or 7, not 3, because the aggregation decides on it",
        ),
        (
            "one-bit adam",
            {"warmup_steps": 5},
            "warmup_steps must be left out or 100, not 5, because the aggregation",
        ),
        (
            "dion",
            {"rank": 3},
            "rank must be left out or 8, not 3, because the aggregation decides on it",
        ),
        ("power", {"world_size": 2}, "world_size is 2, but the process group has 1 worker"),
        ("sparsified", {"sparse_grad_size": 4}, "sparse_grad_size must be left out or 3, not 4"),
        ("sparsified", {"world_size": 2}, "world_size is 2, but the process group has 1 worker"),
        ("sign", {"world_size": 2}, "world_size is 2, but the process group has 1 worker"),
        ("decentralized", {"rank": 0}, "rank must be left out, not 0"),
        (
            "choco",
            {"neighbors": [1]},
            "neighbors must be left out, not [1], because the aggregation has its own",
        ),
        (
            "diloco",
            {"outer_optimizer": partial(SGD, lr=0.1)},
            "outer_optimizer must be left out if aggregation is given",
        ),
        (
            "diloco",
            {"outer_lr": 0.5},
            "outer_lr, outer_momentum and outer_optimizer must be left out",
        ),
        ("fp16", {"use_horovod": True}, "give AllReduceAggregationHVD(...) as aggregation"),
    ],
)
def test_a_contradiction_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    make, aggregation = MAKE[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        make(aggregation=aggregation, **options)


def test_a_given_optimizer_has_its_own_rate() -> None:
    make = partial(SGD, lr=0.5)
    with pytest.raises(
        ValueError, match=r"lr must be left out, not 0\.1, because inner_optimizer has its own"
    ):
        DiLoCo(model=MODEL, lr=0.1, inner_optimizer=make)
    with pytest.raises(
        ValueError,
        match="outer_lr and outer_momentum must be left out, because outer_optimizer has",
    ):
        DiLoCo(model=MODEL, lr=0.1, outer_lr=0.5, outer_optimizer=make)
    assert (
        DiLoCo(
            model=MODEL, inner_optimizer=make, outer_optimizer=make
        ).outer_optimizer.param_groups[0]["lr"]
        == 0.5
    )


def test_what_agrees_may_be_given_twice() -> None:
    assert PowerSGD(MODEL, lr=0.1, rank=2, world_size=1, aggregation=power()).aggregation.rank == 2
    SparsifiedSGD(
        MODEL.parameters(),
        lr=0.1,
        sparse_grad_size=3,
        aggregation=SparsifiedAggregation(None, size=3),
    )
    random = SparsifiedAggregation(None, size=3, random=True)
    CentralizedSparsifiedSGD(MODEL.parameters(), lr=0.1, random_sparse=True, aggregation=random)
    with pytest.raises(ValueError, match="random_sparse must be left out or False, not True"):
        CentralizedSparsifiedSGD(
            MODEL.parameters(),
            lr=0.1,
            random_sparse=True,
            aggregation=SparsifiedAggregation(None, size=3),
        )


def test_weights_cannot_overlap_with_the_backward_pass() -> None:
    overlapping = AllReduceAggregation(overlap=True)
    with pytest.raises(ValueError, match="overlap must be False for a periodic aggregation"):
        LocalSGD(model=MODEL, lr=0.1, aggregation=overlapping)
    with pytest.raises(ValueError, match="overlap must be False with FP16Optimizer"):
        FP16Optimizer(HALF, 1, aggregation=overlapping)
    with pytest.raises(ValueError, match="compresses gradients and would destroy weights"):
        LocalSGD(model=MODEL, lr=0.1, aggregation=power())
    with pytest.raises(
        ValueError,
        match="aggregation must be the average of every H-th step, not a PeriodicAggregation",
    ):
        LocalSGD(model=MODEL, lr=0.1, aggregation=PeriodicAggregation(AllReduceAggregation(), 4))


@pytest.mark.parametrize("make", [CentralizedSGD, CentralizedAdam])
def test_the_shortcut_is_the_setting(make: Any) -> None:
    short, long = (
        make(model=MODEL, lr=0.1, **options)
        for options in ({"overlap": True}, {"aggregation": AllReduceAggregation(overlap=True)})
    )
    assert short.aggregation.overlap
    assert long.aggregation.overlap
    assert short.param_groups[0]["fused"] is long.param_groups[0]["fused"] is True
    assert torch.equal(short.param_groups[0]["params"][0], long.param_groups[0]["params"][0])


@pytest.mark.parametrize(
    "make",
    [
        partial(CentralizedSGD, overlap=True),
        partial(CentralizedAdam, overlap=True),
        DiLoCo,
        StreamingDiLoCo,
    ],
)
def test_one_rule_chooses_fused_kernels(make: Any) -> None:
    gaps = nn.Linear(3, 2)
    gaps.weight = nn.Parameter(torch.zeros(2, 6)[:, :3])
    models = (nn.Linear(3, 2), nn.Linear(3, 2, dtype=torch.bfloat16), gaps)
    assert [make(model=model, lr=0.1).param_groups[0]["fused"] for model in models] == [
        True,
        None,
        None,
    ]
