r"""Attention of short sentences, as one operator with one CUDA kernel for each direction.

.. math:: O = \mathrm{dropout}(\mathrm{softmax}(s Q K^T + \mathrm{mask})) V, \qquad s = 1 / \sqrt{d}

Sentences have at most 128 positions, so that their scores fit into a GPU's registers. No tensor of
the size queries x keys is stored: the forward pass keeps the logarithm of each softmax's
denominator, and the dropout mask is a function of a seed (:mod:`~mlbench_core.ops.pytorch.philox`).
The kernels copy neither time-first tensors nor slices of a fused projection.

The operators ``mlbench::short_attention`` and ``mlbench::short_attention_backward`` compute in
plain PyTorch unless the library of :mod:`~mlbench_core.ops.pytorch.extension` is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlbench_core.ops.pytorch import extension
from mlbench_core.ops.pytorch.philox import attention_dropout_mask, draw_seed, dropout_threshold

__all__ = ["MAX_POSITIONS", "fused_attention", "why_not_kernel"]

MAX_POSITIONS = 128
"""Largest number of queries, and of keys, in a sentence."""

_HEAD_SIZES = (32, 64)
_ROW_BYTES = 16
"""The kernels load and store 16 bytes at a time."""

# The schema of the kernels. Its arguments for packed sentences (starts) are always None here.
_ARGUMENTS = (
    "Tensor? query_starts, Tensor? key_starts, SymInt max_query, SymInt max_key, "
    "Tensor? query_padding, Tensor? key_padding, "
    "bool is_causal, float scale, float dropout_p, Tensor? seed, int offset"
)


def fused_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    key_padding: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    r"""Compute attention of each sentence and head; the softmax is in float32 or better.

    A fused projection gets its gradient in one piece, without a concatenation. Time-first tensors
    come as ``x.transpose(0, 1)``, which copies nothing. A second derivative is not available.

    Args:
        query: Q, shape (batch, queries, heads, d), any floating-point dtype; or, without ``key``,
            the fused projection (batch, positions, 3, heads, d) of self-attention.
        key: K, shape (batch, keys, heads, d); or, without ``value``, keys and values together,
            (batch, keys, 2, heads, d).
        value: V, the shape of ``key``.
        key_padding: bool of shape (batch, keys), True at keys that no query may see. In
            self-attention from one fused projection, the outputs of these positions are 0.
        is_causal: If True, a query sees only the keys at its own position and before it. The last
            query and the last key of a sentence are at the same position.
        dropout_p: Probability that a weight becomes 0, rounded to a multiple of 1/65536.
        seed: int64 of shape (1,) on the same device, which determines the dropout mask. If None and
            there is dropout, :func:`~mlbench_core.ops.pytorch.philox.draw_seed` draws one.
        offset: Number of the layer, so that layers that share a seed get different masks.

    Returns:
        O, shape (batch, queries, heads, d). The row of a query that sees no key is 0.

    Raises:
        ValueError: The shapes or dtypes do not fit, or a sentence has more than 128 positions.

    References:
        Dao, Fu, Ermon, Rudra and Re 2022, FlashAttention, arXiv 2205.14135: store only the sums of
        the softmax and compute the weights again.

    Example:
        >>> query = key = torch.zeros(1, 3, 1, 2)  # one sentence of 3 positions, one head
        >>> value = torch.tensor([[3.0, 0.0], [6.0, 3.0], [9.0, 9.0]]).view(1, 3, 1, 2)
        >>> fused_attention(query, key, value, is_causal=True)[0, :, 0].round().tolist()
        [[3.0, 0.0], [4.0, 2.0], [6.0, 4.0]]
    """
    parts = tuple(part for part in (query, key, value) if part is not None)
    q, k, v = _query_key_value(parts)
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[0] == k.shape[0]
    if not fits or q.shape[2:] != k.shape[2:] or max(q.shape[1], k.shape[1]) > MAX_POSITIONS:
        shapes = " and ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(
            f"the shapes must be (batch, positions, heads, d) with at most {MAX_POSITIONS} "
            f"positions, or those of fused projections, not {shapes}"
        )
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"the dtypes must be one floating-point dtype, not {q.dtype} and {k.dtype}"
        )
    if key_padding is not None and key_padding.shape != k.shape[:2]:
        raise ValueError(
            f"key_padding must be {tuple(k.shape[:2])}, not {tuple(key_padding.shape)}"
        )
    if dropout_threshold(dropout_p) == 0:
        seed = None
    elif seed is None:
        seed = draw_seed(q.device)
    padding: Tensor | None = None
    if key_padding is not None:
        # The kernels need masks with unit stride.
        padding = key_padding.contiguous()
    # Once the kernels are loaded, they are the operator's only implementation for CUDA tensors.
    is_plain = q.is_cuda and why_not_kernel(*parts) is not None
    numbers = (is_plain, is_causal, q.shape[-1] ** -0.5, dropout_p, offset)
    # The compiler rejects an autograd.Function that gets the same tensor twice.
    if torch.compiler.is_compiling():
        parts = tuple(part.view_as(part) for part in parts)
    output: Tensor = _FusedAttention.apply(numbers, padding, seed, *parts)
    return output


def why_not_kernel(*parts: Tensor) -> str | None:
    """Return the reason why :func:`fused_attention` cannot use its kernels; None if it does.

    Args:
        parts: The tensors that :func:`fused_attention` takes, fused or not.
    """
    first = parts[0]
    if first.device.type != "cuda":
        return f"the tensors are on {first.device}"
    if first.dtype not in (torch.float16, torch.bfloat16):
        return f"the tensors are of {first.dtype}, not in half precision"
    if first.shape[-1] not in _HEAD_SIZES:
        return f"the heads have {first.shape[-1]} features, not 32 or 64"
    if max(part.shape[1] for part in parts) > MAX_POSITIONS:
        return f"a sentence has more than {MAX_POSITIONS} positions"
    if not all(part.numel() and _has_aligned_rows(part) for part in parts):
        return "the rows of a tensor do not begin at multiples of 16 bytes"
    return extension.why_not()


def _has_aligned_rows(tensor: Tensor) -> bool:
    elements = _ROW_BYTES // tensor.element_size()
    *strides, last = tensor.stride()
    if last != 1 or any(stride % elements for stride in strides):
        return False
    # The compiler does not know offsets. The tensors that it allocates begin at such a multiple.
    return torch.compiler.is_compiling() or tensor.storage_offset() % elements == 0


def _query_key_value(parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of queries, keys and values, fused or not."""
    *separate, last = parts
    if len(parts) < 3:
        # The last one is a fused projection: of all three, or of keys and values.
        parts = (*separate, *last.unbind(-3))
    q, k, v = parts
    return q, k, v


def _output_like(tensor: Tensor) -> Tensor:
    """Return a dense tensor of this shape, time-first in memory if ``tensor`` is."""
    if tensor.stride(0) >= tensor.stride(1):
        return tensor.new_empty(tensor.shape)
    batch, positions, *rest = tensor.shape
    return tensor.new_empty((positions, batch, *rest)).transpose(0, 1)


def _scores(
    q: Tensor,
    k: Tensor,
    query_padding: Tensor | None,
    key_padding: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Return scores (batch, heads, queries, keys), minus infinity if a query does not see a key."""
    queries, keys = q.shape[2], k.shape[2]
    hidden = torch.zeros(queries, keys, dtype=torch.bool, device=q.device)
    if is_causal:
        hidden = torch.ones_like(hidden).triu(keys - queries + 1)
    if key_padding is not None:
        hidden = hidden | key_padding[:, None, None, :]
    if query_padding is not None:
        hidden = hidden | query_padding[:, None, :, None]
    return (scale * q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf)


def _wide(tensor: Tensor, padding: Tensor | None) -> Tensor:
    """Return (batch, heads, positions, features) in float32 or better, with 0 at padding."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if padding is not None:
        # Padding may hold infinities, which would be nan times the weight 0.
        wide = wide.masked_fill(padding[:, :, None, None], 0.0)
    return wide.transpose(1, 2)


def _dropped(weights: Tensor, dropout_p: float, seed: Tensor | None, offset: int) -> Tensor:
    """Return the weights after dropout; the same seed and offset keep the same weights."""
    threshold = dropout_threshold(dropout_p)
    if threshold == 0 or seed is None:
        return weights
    batch, heads, queries, keys = weights.shape
    kept = attention_dropout_mask(seed, offset, (batch, heads, queries, keys), threshold)
    # The realized rate is threshold / 65536, so this factor keeps the expectation.
    return torch.where(kept, weights * (65536 / (65536 - threshold)), 0.0)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, query_starts: None, key_starts: None,
    max_query: int, max_key: int, query_padding: Tensor | None, key_padding: Tensor | None,
    is_causal: bool, scale: float, dropout_p: float, seed: Tensor | None, offset: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the output, and the logarithm of each softmax's denominator."""
    q, k, v = _wide(query, query_padding), _wide(key, key_padding), _wide(value, key_padding)
    # Autocast would compute the products in half precision.
    with torch.autocast(query.device.type, enabled=False):
        scores = _scores(q, k, query_padding, key_padding, is_causal, scale)
        logsumexp = scores.logsumexp(dim=-1)
        # A row that sees no key would give exp(-inf - -inf), which is nan.
        logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, torch.inf)
        weights = (scores - logsumexp.unsqueeze(-1)).exp()
        attended = _dropped(weights, dropout_p, seed, offset) @ v
    output = _output_like(query)
    return output.copy_(attended.transpose(1, 2)), logsumexp


def _backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, logsumexp: Tensor,
    query_starts: None, key_starts: None, max_query: int, max_key: int,
    query_padding: Tensor | None, key_padding: Tensor | None,
    is_causal: bool, scale: float, dropout_p: float, seed: Tensor | None, offset: int,
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor,
) -> None:  # fmt: skip
    """Write the gradients of Q, K and V, with the weights computed again from ``logsumexp``."""
    q, k, v = _wide(query, query_padding), _wide(key, key_padding), _wide(value, key_padding)
    grad = _wide(grad_output, query_padding)
    with torch.autocast(query.device.type, enabled=False):
        scores = _scores(q, k, query_padding, key_padding, is_causal, scale)
        weights = (scores - logsumexp.unsqueeze(-1)).exp()
        grad_v = _dropped(weights, dropout_p, seed, offset).transpose(-1, -2) @ grad
        grad_weights = _dropped(grad @ v.transpose(-1, -2), dropout_p, seed, offset)
        # The backward pass of a softmax: P (dP - sum P dP).
        delta = (weights * grad_weights).sum(dim=-1, keepdim=True)
        grad_scores = scale * weights * (grad_weights - delta)
        grad_q, grad_k = grad_scores @ k, grad_scores.transpose(-1, -2) @ q
    for target, result in ((grad_query, grad_q), (grad_key, grad_k), (grad_value, grad_v)):
        target.copy_(result.transpose(1, 2))


def _fake_forward(query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _size = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    return _output_like(query), query.new_empty((batch, heads, queries), dtype=dtype)


extension.define_operator(
    "short_attention",
    f"(Tensor query, Tensor key, Tensor value, {_ARGUMENTS}) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
extension.define_operator(
    "short_attention_backward",
    f"(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor logsumexp, {_ARGUMENTS}, "
    "Tensor(a!) grad_query, Tensor(b!) grad_key, Tensor(c!) grad_value) -> ()",
    _backward,
    lambda *_: None,
)


class _FusedAttention(torch.autograd.Function):
    """Autograd function of the operators; ``numbers`` are those that ``fused_attention`` makes."""

    @staticmethod
    def forward(
        ctx: Any, numbers: Any, padding: Tensor | None, seed: Tensor | None, *parts: Tensor
    ) -> Tensor:
        ctx.numbers = numbers
        operator: Callable[..., tuple[Tensor, Tensor]] = torch.ops.mlbench.short_attention.default
        if numbers[0]:
            operator = _forward
        arguments = _operator_arguments(numbers, padding, seed, parts)
        output, logsumexp = operator(*_query_key_value(parts), *arguments)
        ctx.save_for_backward(logsumexp, padding, seed, *parts)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logsumexp, padding, seed, *saved = ctx.saved_tensors
        parts = tuple(saved)
        # A gradient may be expanded (that of a sum has strides 0), which the kernels cannot read.
        if not _has_aligned_rows(grad):
            grad = grad.clone(memory_format=torch.contiguous_format)
        gradients = tuple(_output_like(part) for part in parts)
        arguments = _operator_arguments(ctx.numbers, padding, seed, parts)
        operator: Callable[..., None] = torch.ops.mlbench.short_attention_backward.default
        if ctx.numbers[0]:
            operator = _backward
        inputs = (grad, *_query_key_value(parts), logsumexp, *arguments)
        operator(*inputs, *_query_key_value(gradients))
        return (None, None, None, *gradients)


def _operator_arguments(
    numbers: Any, padding: Tensor | None, seed: Tensor | None, parts: tuple[Tensor, ...]
) -> tuple[Any, ...]:
    """Return the arguments of both operators that ``_ARGUMENTS`` lists, in this order."""
    _, is_causal, scale, dropout_p, offset = numbers
    # In a single fused projection, queries and keys are the same positions.
    query_padding: Tensor | None = None
    if len(parts) == 1:
        query_padding = padding
    lengths = (parts[0].shape[1], parts[-1].shape[1])
    return (None, None, *lengths, query_padding, padding, is_causal, scale, dropout_p, seed, offset)
