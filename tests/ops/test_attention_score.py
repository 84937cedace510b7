"""Attention's score: against its formula number by number, its derivatives, its operators, and what
it keeps."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mlbench_core.ops.pytorch import (
    attention_score,
    attention_score_reference,
    extension,
    masked_softmax,
)
from mlbench_core.ops.pytorch.attention_score import _GPU_BLOCK, _blocks, why_not_kernel

WORDY_BLOCKS = [1, 12, 24, 10**9]
"""For 3 sentences of 4 queries, 2 keys and H = 3: one query, two queries, one sentence, everything
at once."""


def inputs(dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4, 3), (3, 2, 3), (3,), (3,)]
    parts = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]
    return [part.requires_grad_(requires_grad) for part in parts]


def by_hand(query: Tensor, keys: Tensor, bias: Tensor, v: Tensor) -> Tensor:
    scores = torch.zeros(query.shape[0], query.shape[1], keys.shape[1], dtype=torch.float64)
    for b in range(scores.shape[0]):
        for t in range(scores.shape[1]):
            for s in range(scores.shape[2]):
                for h in range(len(v)):
                    pre = query[b, t, h].item() + keys[b, s, h].item() + bias[h].item()
                    scores[b, t, s] += v[h].item() * math.tanh(pre)
    return scores


@pytest.mark.parametrize("block_elements", [*WORDY_BLOCKS, None])
def test_score_is_the_formula(block_elements: int | None) -> None:
    parts = inputs()
    scores = attention_score(*parts, block_elements=block_elements)
    torch.testing.assert_close(scores, by_hand(*parts), rtol=0, atol=1e-14)
    torch.testing.assert_close(
        attention_score_reference(*parts), by_hand(*parts), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("block_elements", WORDY_BLOCKS)
def test_gradients_are_right(block_elements: int) -> None:
    assert torch.autograd.gradcheck(
        lambda *parts: attention_score(*parts, block_elements=block_elements), inputs()
    )


def test_gradients_are_those_of_the_reference_where_only_some_are_wanted() -> None:
    for wanted in range(4):
        gradients = []
        for function in (attention_score, attention_score_reference):
            parts = inputs(requires_grad=False)
            parts[wanted].requires_grad_()
            weight = torch.arange(24.0, dtype=torch.float64).view(3, 4, 2)
            gradients.append(
                torch.autograd.grad((function(*parts) * weight).sum(), parts[wanted])[0]
            )
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_nothing_but_the_inputs_is_kept_for_the_backward_pass() -> None:
    parts = inputs()
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(tuple(t.shape)) or t, lambda t: t
    ):
        attention_score(*parts)
    assert kept == [tuple(part.shape) for part in parts]


@pytest.mark.parametrize(
    ("shape", "features", "limit", "expected"),
    [
        ((5, 4, 3), 2, 48, [(2, 4), (2, 4), (1, 4)]),
        ((2, 5, 3), 2, 13, [(1, 2), (1, 2), (1, 1)] * 2),
        ((2, 2, 3), 2, 1, [(1, 1)] * 4),
        ((2, 2, 0), 2, 1, [(1, 1)] * 4),
        ((0, 2, 3), 2, 1, []),
    ],
)
def test_blocks_cover_everything_once(
    shape: tuple[int, int, int], features: int, limit: int, expected: list[tuple[int, int]]
) -> None:
    count = torch.zeros(shape[:2])
    sizes = []
    for rows, steps in _blocks(torch.Size(shape), features, limit):
        count[rows, steps] += 1
        sizes.append(tuple(count[rows, steps].shape))
    assert torch.equal(count, torch.ones(shape[:2]))
    assert sizes == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    parts = inputs(dtype)
    scores = attention_score(*parts)
    assert scores.dtype == torch.float32
    wide = [part.detach().double().requires_grad_() for part in parts]
    expected = attention_score_reference(*wide)
    torch.testing.assert_close(scores, expected.float(), rtol=1e-5, atol=1e-6)
    for part, gradient, other in zip(
        parts,
        torch.autograd.grad(scores.sum(), parts),
        torch.autograd.grad(expected.sum(), wide),
        strict=True,
    ):
        assert gradient.dtype == part.dtype
        torch.testing.assert_close(
            gradient, other.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6
        )


def test_autocast_changes_nothing() -> None:
    parts = inputs(torch.float32)
    plain = attention_score(*parts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = attention_score(*parts)
        gradients = torch.autograd.grad(cast.sum(), parts)
    assert torch.equal(cast, plain)
    for one, other in zip(gradients, torch.autograd.grad(plain.sum(), parts), strict=True):
        assert torch.equal(one, other)


def test_wrong_arguments_are_named() -> None:
    query, keys, bias, v = inputs()
    with pytest.raises(
        ValueError,
        match=r"must have the shapes .*, not \(3, 4, 3\), \(2, 2, 3\), \(3,\) and \(3,\)$",
    ):
        attention_score(query, keys[:2], bias, v)
    with pytest.raises(ValueError, match=r"must have the shapes \(batch, queries, H\)"):
        attention_score_reference(query, keys, bias[:1], v)  # would broadcast
    with pytest.raises(ValueError, match="block_elements must be at least 1, not 0"):
        attention_score(query, keys, bias, v, block_elements=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_masked_softmax_is_safe(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    scores = torch.tensor(
        [[1.0, 2.0, 3.0], [largest, -largest, largest], [5.0, 5.0, 5.0]], dtype=dtype
    )
    scores.requires_grad_()
    mask = torch.tensor([[False, False, True], [False, False, False], [True, True, True]])
    weights = masked_softmax(scores, mask)
    ratio = 1 / (1 + math.e)
    expected = [[ratio, 1 - ratio, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=weights.dtype))
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(weights[mask], torch.zeros(4, dtype=weights.dtype))
    weights.square().sum().backward()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()
    assert torch.equal(scores.grad[mask], torch.zeros(4, dtype=dtype))
    assert torch.equal(
        masked_softmax(scores[:1], None), scores[:1].to(weights.dtype).softmax(dim=-1)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_operators_keep_torchs_rules(dtype: torch.dtype) -> None:
    query, keys, bias, v = inputs(dtype, requires_grad=False)
    time_first = query.transpose(0, 1).contiguous().transpose(0, 1)
    grad = torch.ones(
        3, 4, 1, dtype=torch.float64 if dtype == torch.float64 else torch.float32
    ).expand(3, 4, 2)
    torch.library.opcheck(
        torch.ops.mlbench.attention_score_blocks.default, (time_first, keys, bias, v, 12)
    )
    torch.library.opcheck(
        torch.ops.mlbench.attention_score_blocks_backward.default,
        (grad, time_first, keys, bias, v, 12),
    )


def test_mixed_dtypes_give_each_its_own_gradient() -> None:
    query, keys, bias, v = inputs(torch.float32, requires_grad=False)
    parts = [part.requires_grad_() for part in (query.bfloat16(), keys.bfloat16(), bias, v)]
    gradients = torch.autograd.grad(attention_score(*parts).sum(), parts)
    assert [gradient.dtype for gradient in gradients] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]


# What torch's compiler does itself with every torch.autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_it_compiles_whole_and_into_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.hub.tqdm, "monitor_interval", 0, raising=False
    )  # the compiler's starts a thread
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def loss(*parts: Tensor) -> Tensor:
        return (attention_score(*parts) ** 2).sum()

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    parts = inputs()
    value = torch.compile(loss, fullgraph=True, backend=backend)(*parts)
    gradients = torch.autograd.grad(value, parts)
    torch.testing.assert_close(value, loss(*parts))
    for one, other in zip(gradients, torch.autograd.grad(loss(*parts), parts), strict=True):
        torch.testing.assert_close(one, other)
    names = [{str(node.target) for node in graph.graph.nodes} for graph in graphs]
    assert "mlbench.attention_score_blocks.default" in names[0]
    assert "mlbench.attention_score_blocks_backward.default" in names[1]
    assert not any("tanh" in name for name in names[0] | names[1])


def test_importing_it_again_does_no_harm() -> None:
    name = "mlbench_core.ops.pytorch.attention_score"
    module = sys.modules[name]
    parts = inputs()
    expected = attention_score(*parts)
    try:
        assert torch.equal(importlib.reload(module).attention_score(*parts), expected)
        del sys.modules[name]
        assert torch.equal(importlib.import_module(name).attention_score(*parts), expected)
    finally:
        sys.modules[name] = module
        sys.modules["mlbench_core.ops.pytorch"].attention_score = attention_score
    assert torch.equal(attention_score(*parts), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_and_cpu_agree() -> None:
    parts = inputs(torch.float32)
    on_gpu = [part.detach().cuda().requires_grad_() for part in parts]
    scores, gpu_scores = attention_score(*parts), attention_score(*on_gpu)
    torch.testing.assert_close(gpu_scores.cpu(), scores, rtol=1e-5, atol=1e-5)
    for one, other in zip(
        torch.autograd.grad(gpu_scores.sum(), on_gpu),
        torch.autograd.grad(scores.sum(), parts),
        strict=True,
    ):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)


# ---- the choice of the kernels


def on_pretended_gpu(features: int = 8, key_dtype: torch.dtype = torch.float16) -> list[Tensor]:
    """Inputs without data; only in a FakeTensorMode, which needs no GPU."""
    query = torch.empty(2, 3, features, dtype=torch.float16, device="cuda")
    keys = torch.empty(2, 5, features, dtype=key_dtype, device="cuda")
    return [query, keys, *torch.empty(2, features, device="cuda")]


class CalledOperators(TorchDispatchMode):
    """The calls of MLBench's operators: the name, and the arguments after four tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mlbench":
            self.calls.append((func.name().removeprefix("mlbench::"), *args[4:]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("reason", "block_elements", "expected"),
    [
        (None, None, ("attention_score",)),
        ("they are not built", None, ("attention_score_blocks", _GPU_BLOCK)),
        (None, 100, ("attention_score_blocks", 100)),
    ],
)
def test_kernels_are_used_if_they_can_be_and_no_block_is_given(
    reason: str | None,
    block_elements: int | None,
    expected: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extension, "why_not", lambda: reason)
    with FakeTensorMode(), CalledOperators() as called:
        scores = attention_score(*on_pretended_gpu(), block_elements=block_elements)
    assert (scores.shape, scores.dtype, scores.device.type) == ((2, 3, 5), torch.float32, "cuda")
    assert called.calls == [expected]


def test_both_passes_call_the_operators_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_score.__globals__, "why_not_kernel", lambda *_: None)
    parts = inputs()
    expected = attention_score_reference(*parts).sin().sum()
    with CalledOperators() as called:
        scores = attention_score(*parts)
        gradients = torch.autograd.grad(scores.sin().sum(), parts)
    assert [name for name, *_ in called.calls] == ["attention_score", "attention_score_backward"]
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, parts))


def test_why_the_kernels_do_not_take_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "why_not", lambda: None)
    assert "not all on one CUDA device" in str(why_not_kernel(*inputs()))
    with FakeTensorMode():
        parts = on_pretended_gpu()
        assert why_not_kernel(*parts) is None
        assert "H is 12" in str(why_not_kernel(*on_pretended_gpu(features=12)))
        assert "bfloat16" in str(why_not_kernel(*on_pretended_gpu(key_dtype=torch.bfloat16)))
        assert "float64" in str(why_not_kernel(*(part.double() for part in parts)))
        no_keys = [parts[0], parts[1].new_empty(2, 0, 8), *parts[2:]]
        assert "no keys" in str(why_not_kernel(*no_keys))
        elsewhere = [parts[0], torch.empty(2, 5, 8), *parts[2:]]
        assert "not all on one CUDA device" in str(why_not_kernel(*elsewhere))
        monkeypatch.setattr(extension, "why_not", lambda: "they are not built")
        assert why_not_kernel(*parts) == "they are not built"
