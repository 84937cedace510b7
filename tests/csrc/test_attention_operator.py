"""The kernels of short attention, run by the emulator, against the operators' plain implementation in Python.

The other tests of the kernels bring a formula and a dropout mask of their own. Here both sides are the library's, so
that the mask, the layouts and what padding gives are one thing on every device.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mlbench_core.ops.pytorch.attention_reference import backward_reference, forward_reference
from tests.csrc.test_attention_kernels import OFFSET, SEED, Problem, Results, make_problem, padding_mask, run_kernels


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are no work to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_reference(problem: Problem, dropout_p: float) -> Results:
    """Both operators in float64, on the same numbers."""
    query, key, value, grad = (x.double() for x in (problem.query, problem.key, problem.value, problem.grad_output))
    rest = (
        problem.query_starts,
        problem.key_starts,
        problem.max_query,
        problem.max_key,
        problem.query_padding,
        problem.key_padding,
        problem.is_causal,
        problem.scale,
        dropout_p,
        torch.tensor([SEED]),
        OFFSET,
    )
    output, logsumexp = forward_reference(query, key, value, *rest)
    gradients = [torch.empty_like(x) for x in (query, key, value)]
    backward_reference(grad, query, key, value, logsumexp, *rest, *gradients)
    return Results(output, logsumexp, *gradients)


def packed(rows: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The first rows of each sentence, one after the other, and where each sentence begins."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return torch.cat([sentence[:length] for sentence, length in zip(rows, lengths, strict=True)]), starts


@pytest.mark.parametrize(
    ("layout", "dtype", "tolerance"), [("padded", "fp16", 4e-3), ("time first", "bf16", 3e-2), ("packed", "fp16", 4e-3)]
)
def test_kernels_agree_with_the_plain_implementation(layout: str, dtype: str, tolerance: float) -> None:
    """With dropout, of 40 queries and 37 keys, causal if packed; a wrong bit of the mask would be an error near 1."""
    problem = make_problem(40, 37, batch=3, d=32, dtype=dtype, threshold=16384, is_causal=layout == "packed")
    if layout == "packed":
        problem.grad_output, _ = packed(problem.grad_output, (40, 1, 17))
        problem.query, problem.query_starts = packed(problem.query, (40, 1, 17))
        problem.value, _ = packed(problem.value, (5, 37, 20))
        problem.key, problem.key_starts = packed(problem.key, (5, 37, 20))
    else:
        problem.query_padding, problem.key_padding = padding_mask(3, 40, "left"), padding_mask(3, 37, "holes")
    if layout == "time first":
        for name in ("query", "key", "value", "grad_output"):
            setattr(problem, name, getattr(problem, name).transpose(0, 1).contiguous().transpose(0, 1))
    actual, wanted = run_kernels(problem).named(), run_reference(problem, dropout_p=0.25).named()
    for name, tensor in wanted.items():
        scale = tensor[tensor.isfinite()].abs().max()
        torch.testing.assert_close(actual[name].double() / scale, tensor / scale, rtol=0, atol=tolerance)
        assert torch.equal(actual[name] == 0, tensor == 0) or name == "logsumexp", name
