"""The compiled library of CUDA kernels, as far as it can be checked without a GPU."""

from __future__ import annotations

import pytest
import torch

from mlbench_core.ops.pytorch import extension

pytestmark = pytest.mark.skipif(
    not extension.LIBRARY.is_file(), reason="the CUDA kernels are not built: make cuda"
)
OPERATORS = ("short_attention", "attention_score")


def test_it_loads_and_adds_the_kernels_of_every_operator() -> None:
    assert extension._load_error() is None
    for name in OPERATORS:
        for operator in (name, f"{name}_backward"):
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
            assert has_kernel(f"mlbench::{operator}", "CUDA"), operator


def test_it_replaces_nothing_on_the_cpu() -> None:
    extension._load_error()
    parts = [torch.randn(2, 4, 8, dtype=torch.float64) for _ in range(2)]
    weights = [torch.randn(8, dtype=torch.float64) for _ in range(2)]
    torch.library.opcheck(torch.ops.mlbench.attention_score.default, (*parts, *weights))
    q, k, v = (torch.randn(2, 4, 2, 8) for _ in range(3))
    rest = (None, None, 4, 4, None, None, False, 0.5, 0.0, None, 0)
    torch.library.opcheck(torch.ops.mlbench.short_attention.default, (q, k, v, *rest))


def test_schemas_hold_for_tensors_without_data() -> None:
    extension._load_error()
    q, k, v = (
        torch.empty(2, length, 4, 64, dtype=torch.float16, device="meta") for length in (5, 7, 7)
    )
    rest = (None, None, 5, 7, None, None, False, 0.125, 0.0, None, 0)
    output, logsumexp = torch.ops.mlbench.short_attention(q, k, v, *rest)
    assert (output.shape, output.dtype, logsumexp.shape) == (q.shape, torch.float16, (2, 4, 5))
    query, keys, weights = (torch.empty(s, device="meta") for s in ((2, 5, 8), (2, 7, 8), (2, 8)))
    assert torch.ops.mlbench.attention_score(query, keys, *weights).shape == (2, 5, 7)
