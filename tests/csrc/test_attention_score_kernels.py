"""The CUDA kernels of GNMT's attention score, run on the host emulator, against the formula in float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mlbench_core.ops.pytorch import attention_score_reference
from tests.helpers.cuda_host import SCHEDULES, host_library, pointer, set_schedule

KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""The numbers that csrc/attention_score/host.cpp gives to types."""
CHUNK = 64
"""The most queries of a block in the backward kernel; more need partial sums of the gradients of keys."""


class _Sizes(ctypes.Structure):
    _fields_ = (
        ("batch", ctypes.c_int),
        ("queries", ctypes.c_int),
        ("keys", ctypes.c_int),
        ("features", ctypes.c_int),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sentence_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Case:
    """Inputs of the operator: query and keys in one dtype, bias and v in float32."""

    query: Tensor
    keys: Tensor
    bias: Tensor
    v: Tensor
    delta: Tensor

    def exact(self) -> list[Tensor]:
        """Scores and the four gradients in float64."""
        parts = [part.double().requires_grad_() for part in (self.query, self.keys, self.bias, self.v)]
        scores = attention_score_reference(*parts)
        return [scores.detach(), *torch.autograd.grad(scores, parts, self.delta.double())]

    def _arguments(self) -> tuple[object, ...]:
        rows = [_Rows(part.data_ptr(), part.stride(0), part.stride(1)) for part in (self.query, self.keys)]
        sizes = _Sizes(*self.query.shape[:2], *self.keys.shape[1:])
        return (
            KINDS[self.query.dtype],
            ctypes.byref(sizes),
            *map(ctypes.byref, rows),
            pointer(self.bias),
            pointer(self.v),
        )

    def forward(self) -> Tensor:
        scores = Written(self.delta.shape, torch.float32)
        host_library("attention_score").attention_score(*self._arguments(), pointer(scores.memory))
        return scores.result()

    def backward(self) -> list[Tensor]:
        batch, queries, features = self.query.shape
        chunks = -(-queries // CHUNK)
        gradients = [Written(part.shape, part.dtype) for part in (self.query, self.keys, self.bias, self.v)]
        partial_weights = Written((2, batch * chunks, features), torch.float32)
        partial_keys = Written((chunks, *self.keys.shape), torch.float32)
        outputs = (*gradients, partial_weights, partial_keys)
        host_library("attention_score").attention_score_backward(
            *self._arguments(), pointer(self.delta), *(pointer(output.memory) for output in outputs)
        )
        partial_weights.result()
        if chunks > 1:
            partial_keys.result()
        return [gradient.result() for gradient in gradients]


class Written:
    """Memory for an output, all NaN before, with a guard behind it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape = shape
        self._count = torch.Size(shape).numel()
        self.memory = torch.full((self._count + 64,), torch.nan, dtype=dtype)

    def result(self) -> Tensor:
        """What was written: every number of it, and nothing beyond."""
        assert self.memory[self._count :].isnan().all(), "written beyond the end"
        result = self.memory[: self._count]
        assert not result.isnan().any(), f"{int(result.isnan().sum())} numbers of {self._count} were not written"
        return result.view(self._shape)


def case(batch: int, queries: int, keys: int, features: int, dtype: torch.dtype, scale: float = 1.0) -> Case:
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key = (scale * draw(batch, count, features) for count in (queries, keys))
    return Case(query.to(dtype), key.to(dtype), 0.3 * draw(features), draw(features), draw(batch, queries, keys))


def assert_right(case: Case) -> None:
    """Scores and weights' gradients to float32 precision; gradients of rows to that of their own type."""
    exact = case.exact()
    for number, (result, expected) in enumerate(zip([case.forward(), *case.backward()], exact, strict=True)):
        # Sums of n numbers of about 1, in a few partial sums: some roundings of numbers of the size of the largest.
        size = float(expected.abs().max())
        rounding = torch.finfo(result.dtype).eps if result.dtype != torch.float32 else 2e-6
        torch.testing.assert_close(
            result.double(), expected, rtol=rounding, atol=2e-6 * size, msg=lambda m, n=number: f"output {n}: {m}"
        )


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "features", "dtype"),
    [
        (2, 9, 18, 8, torch.float16),
        (1, 1, 1, 24, torch.bfloat16),
        (1, 5, 17, 24, torch.float32),
        (1, 2, 14, 24, torch.float32),
        (2, 3, 6, 264, torch.float16),
        (1, 10, 19, 264, torch.float32),
        (1, 4, 5, 1024, torch.bfloat16),
        (1, 9, 3, 1024, torch.float16),
        (1, 2, 2, 1024, torch.float32),
    ],
)
def test_kernels_are_the_formula(batch: int, queries: int, keys: int, features: int, dtype: torch.dtype) -> None:
    assert_right(case(batch, queries, keys, features, dtype))


@pytest.mark.parametrize("dtype", KINDS)
def test_long_sentences_are_divided_into_chunks(dtype: torch.dtype) -> None:
    assert_right(case(batch=2, queries=CHUNK + 1, keys=5, features=8, dtype=dtype))


def test_sums_over_more_sentences_than_a_block_has_warps() -> None:
    assert_right(case(batch=35, queries=2, keys=1, features=40, dtype=torch.float32))


def test_saturated_tanh_gives_finite_gradients() -> None:
    assert_right(case(batch=1, queries=4, keys=4, features=32, dtype=torch.float32, scale=100.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_may_lie_anywhere(dtype: torch.dtype) -> None:
    dense = case(batch=3, queries=5, keys=6, features=16, dtype=dtype)
    wide = torch.full((3, 6, 48), torch.nan, dtype=dtype)  # a slice of wider rows, as a joint projection's
    wide[..., 16:32] = dense.keys
    time_first = dense.query.transpose(0, 1).contiguous().transpose(0, 1)
    strided = Case(time_first, wide[..., 16:32], dense.bias, dense.v, dense.delta)
    assert strided.query.stride() == (16, 48, 1)
    assert torch.equal(strided.forward(), dense.forward())
    for one, other in zip(strided.backward(), dense.backward(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_order_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    library = host_library("attention_score")
    inputs = case(batch=1, queries=CHUNK + 1, keys=18, features=40, dtype=dtype)
    results = []
    try:
        for seed in SCHEDULES:
            set_schedule(library, seed)
            results.append([inputs.forward(), *inputs.backward()])
    finally:
        set_schedule(library, SCHEDULES[0])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
