"""The error of a compression is never larger than its input: ||x - Q(x)|| <= ||x||, for every x.

An error memory that grows in a step would come back in later ones. What is left out is measured in
float64 between the input and the result. The error memory must be this difference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mlbench_core.aggregation.pytorch import (
    ChunkedTopKAggregation,
    DeMoAggregation,
    DionAggregation,
    EFSignAggregation,
    OneBitAggregation,
    PowerAggregation,
    QSGDAggregation,
    QuantizedAllReduceAggregation,
    SparsifiedAggregation,
)
from mlbench_core.aggregation.pytorch.choco import Compression, Identity, RandomK, ScaledSign, TopK
from mlbench_core.aggregation.pytorch.local_steps.streaming import from_float4, to_float4

# The same examples in every run, no database in the folder of the project, and no limit of time.
repeatable = settings(derandomize=True, database=None, deadline=None)
AGGREGATIONS: dict[str, Callable[[], Any]] = {
    "EF-sign": EFSignAggregation,
    "one bit": lambda: OneBitAggregation(beta=0.0, warmup_steps=0),
    "top-k": lambda: SparsifiedAggregation(None, size=0.1),
    "random-k": lambda: SparsifiedAggregation(None, size=0.1, random=True),
    "DeMo": lambda: DeMoAggregation(decay=0.0, top_k=2, block_size=8),
    "DeMo in whole blocks": lambda: DeMoAggregation(decay=0.0, top_k=64, block_size=8),
    # A level is at most 1/127 of the norm of 16 coordinates.
    "QSGD": lambda: QSGDAggregation(levels=127, bucket_size=16),
    "8 bits": lambda: QuantizedAllReduceAggregation(block=16),
    "4 bits with feedback": lambda: QuantizedAllReduceAggregation(bits=4, error_decay=0),
    "Dion": lambda: DionAggregation(rank=3, momentum=0.0),
    "power": lambda: PowerAggregation(torch.nn.Linear(1, 1)),
    "power of rank 3": lambda: PowerAggregation(torch.nn.Linear(1, 1), rank=3),
    **{
        f"chunked top-k, {bits} bits": lambda bits=bits: ChunkedTopKAggregation(  # type: ignore[misc]
            density=0.2, bits=bits, decay=0.0, chunk_size=48
        )
        for bits in (None, 1, 2, 3, 8)
    },
}
COMPRESSIONS: dict[str, Callable[[], Compression]] = {
    "top-k": lambda: TopK(0.1),
    "random-k": lambda: RandomK(0.1),
    "sign": ScaledSign,
    "identity": Identity,
}
SHAPES = ((16, 24), (1, 40), (5, 9), (130,), (7,), (1,), ())
KINDS = (
    "normal",
    "sparse",
    "heavy-tailed",
    "constant",
    "denormal",
    "zero",
    "spike",
    "two scales",
    "one sign",
    "mixed",
)
SMALLEST = {torch.float32: -149, torch.float64: -1074, torch.bfloat16: -133, torch.float16: -24}
LARGEST = {
    torch.float32: 90,
    torch.float64: 900,
    torch.bfloat16: 90,
    torch.float16: 13,
}  # room for a sum of squares


def make(kind: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """An input of a kind, the same for the same seed."""
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=g, dtype=torch.float64)
    small, large = SMALLEST[dtype], LARGEST[dtype]
    exponents = torch.randint(small, large, shape, generator=g).double()
    x = {
        "normal": lambda: normal,
        "sparse": lambda: normal * (torch.rand(shape, generator=g) < 0.05),
        "heavy-tailed": lambda: normal.sign() * 2.0 ** (exponents / 2),
        "constant": lambda: torch.full_like(
            normal, float(2.0 ** (exponents.view(-1)[0] / 2)) * float(normal.view(-1)[0])
        ),
        "denormal": lambda: torch.randint(-9, 10, shape, generator=g).double() * 2.0**small,
        "zero": lambda: torch.zeros_like(normal),
        "spike": lambda: torch.zeros_like(normal),
        "two scales": lambda: normal * torch.where(torch.rand(shape, generator=g) < 0.3, 1.0, 1e-3),
        "one sign": lambda: normal.abs(),
        "mixed": lambda: normal.sign() * 2.0**exponents,
    }[kind]()
    if kind == "spike":
        x.view(-1)[seed % x.numel()] = 2.0 ** float(exponents.view(-1)[0])
    return x.to(dtype)


def norm(x: Tensor) -> float:
    """In float64, scaled so that squares neither overflow nor underflow."""
    x = x.double()
    peak = float(x.abs().max())
    return peak * float((x / peak).norm()) if peak else 0.0


def assert_contracts(x: Tensor, left_out: Tensor) -> None:
    assert left_out.isfinite().all()
    # A few units in the last place: sums and products of floating-point numbers are rounded.
    assert norm(left_out) <= norm(x) * (1 + 8 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("name", AGGREGATIONS)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from(list(SMALLEST)),
)
@example(kind="denormal", shape=(64, 64), seed=2, dtype=torch.float32)
@settings(repeatable, max_examples=120)
def test_an_aggregation_leaves_out_no_more_than_there_was(
    name: str, kind: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype
) -> None:
    x = make(kind, shape, seed, dtype)
    aggregation, result = AGGREGATIONS[name](), x.clone()
    aggregation.aggregate({"x": result}, "avg_world")
    memory = aggregation.memory("x")
    is_wide = dtype in (torch.float32, torch.float64)
    if name != "Dion":  # its result has another length than its input
        left_out = x.double() - result.double()
        if is_wide:  # in half precision the result is rounded, but not the memory
            assert_contracts(x, left_out)
        if is_wide and memory is not None:
            tolerance = (
                4 * torch.finfo(dtype).eps * max(float(x.abs().max()), float(result.abs().max()))
            )
            assert (
                memory.view(shape).double() - left_out
            ).abs().max() <= tolerance + 2.0 ** SMALLEST[dtype]
    if memory is not None:
        assert_contracts(x, memory.view(shape))
    if kind == "zero":
        assert not result.any()
    if kind == "spike" and "top-k" in name:
        assert torch.equal(result, x)


@pytest.mark.parametrize("name", COMPRESSIONS)
@given(
    kind=st.sampled_from(KINDS),
    numel=st.sampled_from([1, 2, 9, 130, 1000]),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from(list(SMALLEST)),
)
@settings(repeatable, max_examples=120)
def test_a_compressed_difference_leaves_out_no_more_than_there_was(
    name: str, kind: str, numel: int, seed: int, dtype: torch.dtype
) -> None:
    x, compression = make(kind, (numel,), seed, dtype), COMPRESSIONS[name]()
    result = torch.zeros(numel, dtype=torch.promote_types(dtype, torch.float32))
    compression.add_to(result, compression.compress(x), 1.0)
    # In half precision, the mean size is rounded to the dtype of the message.
    assert norm(x.double() - result.double()) <= norm(x) * (1 + 8 * torch.finfo(torch.float32).eps)


@given(
    kind=st.sampled_from(KINDS),
    numel=st.sampled_from([1, 2, 9, 130, 1000]),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(repeatable, max_examples=200)
def test_four_bits_leave_out_no_more_than_there_was(
    kind: str, numel: int, seed: int, dtype: torch.dtype
) -> None:
    x = make(kind, (numel,), seed, dtype)
    assert_contracts(x, x.double() - from_float4(to_float4(x), numel, dtype).double())


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_a_spike_is_sent_alone_and_whole(bits: int) -> None:
    """The other coordinates of the top-k are zeros, which stay zeros on all workers."""
    d = torch.zeros(4096)
    d[7] = 1
    aggregation = ChunkedTopKAggregation(bits=bits)
    aggregation.aggregate({"x": d}, "avg_world")
    assert d[7] == 1
    assert d.count_nonzero() == 1
    assert not aggregation.memory("x").any()


@pytest.mark.parametrize(
    "make_one", [EFSignAggregation, lambda: OneBitAggregation(beta=0.0, warmup_steps=0)]
)
def test_a_sum_of_large_numbers_stays_in_range(make_one: Callable[[], Any]) -> None:
    x = torch.full((1000,), -1e38)
    make_one().aggregate({"x": x}, "avg_world")
    torch.testing.assert_close(x, torch.full((1000,), -1e38))
    y = torch.zeros(1000)
    ScaledSign().add_to(y, ScaledSign().compress(x), 1.0)
    torch.testing.assert_close(y, x)


@pytest.mark.parametrize("norm", [2, math.inf])
def test_qsgd_keeps_large_numbers(norm: float) -> None:
    """Their squares, and their products with the number of levels, overflow."""
    for value in (1e30, 3e38):
        x = torch.tensor([value, 0.0])
        QSGDAggregation(norm=norm, levels=127).aggregate({"x": x}, "avg_world")
        torch.testing.assert_close(x, torch.tensor([value, 0.0]))


@pytest.mark.parametrize(
    ("make_one", "shape", "share"),
    [
        (lambda: DeMoAggregation(decay=0.0, top_k=4096), (64, 64), 1.0),
        (lambda: PowerAggregation(torch.nn.Linear(1, 1)), (64, 64), 0.1),
        (lambda: DionAggregation(rank=4, momentum=0.0), (128, 96), 0.1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_denormal_products_do_not_add_up(
    make_one: Callable[[], Any], shape: tuple[int, int], share: float, dtype: torch.dtype
) -> None:
    """Each product of a matrix with the smallest numbers may be rounded to twice its value."""
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        x = torch.randint(-3, 4, shape, generator=g) * (torch.rand(shape, generator=g) < share)
        x = (x.double() * 2.0 ** SMALLEST[dtype]).to(dtype)
        aggregation = make_one()
        aggregation.aggregate({"x": x.clone()}, "avg_world")
        assert_contracts(x, aggregation.memory("x"))
