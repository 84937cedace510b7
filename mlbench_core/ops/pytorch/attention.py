r"""Attention of short sentences, as one operator with one CUDA kernel for each direction.

.. math:: O = \mathrm{dropout}(\mathrm{softmax}(s Q K^T + \mathrm{mask})) V

Sentences have at most 128 positions, so that their scores fit into a GPU's registers. No tensor of the size
queries x keys is ever stored. For the backward pass, the operator stores only the logarithm of each softmax's
denominator. The dropout mask is a function of a seed (:mod:`~mlbench_core.ops.pytorch.philox`), so the backward pass
computes it again. The kernels need no copy of tensors that are time-first, slices of a fused projection, padded on
either side, or packed.

This module defines the operators ``mlbench::short_attention`` and ``mlbench::short_attention_backward``. Their default
implementation is :mod:`~mlbench_core.ops.pytorch.attention_reference`, and
:mod:`~mlbench_core.ops.pytorch.extension` reports whether CUDA kernels replace it. With the same seed, forward and
backward pass give the same numbers each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlbench_core.ops.pytorch import extension
from mlbench_core.ops.pytorch.attention_reference import (
    OperatorArguments,
    backward_reference,
    forward_reference,
    output_like,
)
from mlbench_core.ops.pytorch.philox import draw_seed, dropout_threshold

__all__ = [
    "MAX_POSITIONS",
    "draw_seed",
    "short_attention",
    "short_attention_kv",
    "short_attention_qkv",
    "uses_kernel",
    "why_not_kernel",
]

MAX_POSITIONS = 128
"""Largest number of queries, and of keys, in a sentence."""

_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_KERNEL_HEAD_DIMS = (32, 64)
# The kernels load and store 16 bytes at a time.
_ALIGNMENT_BYTES = 16
_ARGUMENT_COUNT = len(OperatorArguments._fields)

# The two operators. attention_reference.OperatorArguments documents the arguments of _ARGUMENTS. The others are:
#   query (batch, max_query, heads, d), key and value (batch, max_key, heads, d), any strides whose last one is 1;
#   or packed, (rows, heads, d).
# Outputs: output as output_like(query); logsumexp (batch, heads, max_query), float32 (float64 for float64), natural
# logarithm, +inf if a query is padding or sees no key. Such rows of the output and all gradients of padding are 0.
_ARGUMENTS = (
    "Tensor? query_starts, Tensor? key_starts, SymInt max_query, SymInt max_key, Tensor? query_padding, "
    "Tensor? key_padding, bool is_causal, float scale, float dropout_p, Tensor? seed, int offset"
)
torch.library.define(
    "mlbench::short_attention",
    f"(Tensor query, Tensor key, Tensor value, {_ARGUMENTS}) -> (Tensor output, Tensor logsumexp)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "mlbench::short_attention_backward",
    f"(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor logsumexp, {_ARGUMENTS}, "
    "Tensor(a!) grad_query, Tensor(b!) grad_key, Tensor(c!) grad_value) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl("mlbench::short_attention", "default", forward_reference)
torch.library.impl("mlbench::short_attention_backward", "default", backward_reference)


@torch.library.register_fake("mlbench::short_attention")
def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    given = OperatorArguments(*arguments)
    batch = query.shape[0] if given.query_starts is None else given.query_starts.shape[0] - 1
    dtype = torch.promote_types(query.dtype, torch.float32)
    logsumexp = query.new_empty((batch, query.shape[-2], given.max_query), dtype=dtype)
    return output_like(query, given.query_starts is not None), logsumexp


# The operator writes the gradients in place and returns nothing.
torch.library.register_fake("mlbench::short_attention_backward", lambda *_: None)


def short_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding: Tensor | None = None,
    query_padding: Tensor | None = None,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
    max_query: int | None = None,
    max_key: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    r"""Compute :math:`\mathrm{dropout}(\mathrm{softmax}(s Q K^T + \mathrm{mask})) V` of each sentence and head.

    A batch has one of two layouts. Padded: all sentences have the same number of positions, and masks mark the padding.
    Packed: the rows of all sentences follow one another, and ``query_starts`` and ``key_starts`` give the first row of
    each sentence. Pass time-first tensors as ``x.transpose(0, 1)``, which copies nothing.

    The softmax is computed in float32, or in float64 for float64 tensors. A second derivative is not available.

    Args:
        query: Q, shape (batch, queries, heads, d), or (rows, heads, d) if packed; any floating-point dtype.
        key: K, shape (batch, keys, heads, d), or (rows, heads, d); dtype and device of the query.
        value: V, the shape of ``key``.
        key_padding: bool of shape (batch, keys), True at keys that no query may see. Any pattern is allowed.
        query_padding: bool of shape (batch, queries), True at outputs that are not needed. They are 0.
        query_starts: int32 of shape (batch + 1,): sentence b has the rows from ``query_starts[b]`` to
            ``query_starts[b + 1] - 1``. It begins with 0 and ends with the number of rows.
        key_starts: The same for the keys. Give both or neither.
        max_query: For packed rows, the number of queries of the longest sentence; 128 if None. A tight bound is faster.
        max_key: For packed rows, the number of keys of the longest sentence; 128 if None.
        is_causal: If True, a query sees only the keys at its own position and before it. The last query and the last
            key of a sentence are at the same position, padding included.
        scale: s, above 0; :math:`1 / \sqrt{d}` if None.
        dropout_p: Probability that a weight becomes 0, at least 0 and at most 65535/65536, rounded to a multiple of
            1/65536. The other weights are scaled to keep their expectation.
        seed: int64 of shape (1,) on the device of the tensors, the seed of the dropout mask. If None and there is
            dropout, :func:`draw_seed` draws one.
        offset: Number of the layer, so that layers that share a seed get different masks.

    Returns:
        O, shape and dtype of the query. If positions come before sentences in the query's memory, they do so here too.
        The row of a query that is padding or sees no key is exactly 0.

    Raises:
        ValueError: The shapes, lengths or numbers do not fit.
        TypeError: The dtypes do not fit.

    References:
        Dao, Fu, Ermon, Rudra and Re 2022, FlashAttention, arXiv 2205.14135: store only the sums of the softmax and
        recompute the weights.

    Example:
        >>> query = key = torch.zeros(1, 3, 1, 2)  # one sentence of 3 positions, one head
        >>> value = torch.tensor([[3.0, 0.0], [6.0, 3.0], [9.0, 9.0]]).view(1, 3, 1, 2)
        >>> short_attention(query, key, value, key_padding=torch.tensor([[False, False, True]]))[0, :, 0].tolist()
        [[4.5, 1.5], [4.5, 1.5], [4.5, 1.5]]
        >>> short_attention(query, key, value, is_causal=True)[0, :, 0].round().tolist()
        [[3.0, 0.0], [4.0, 2.0], [6.0, 4.0]]
    """
    if key.shape != value.shape:
        raise ValueError(f"value must have the shape of key, {tuple(key.shape)}, not {tuple(value.shape)}")
    sentences = (query_starts, key_starts, max_query, max_key, query_padding, key_padding)
    given = OperatorArguments(*sentences, is_causal, scale, dropout_p, seed, offset)
    return _attend((query, key, value), query.shape, key.shape, given)


def short_attention_kv(
    query: Tensor,
    kv: Tensor,
    *,
    key_padding: Tensor | None = None,
    query_padding: Tensor | None = None,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
    max_query: int | None = None,
    max_key: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Compute :func:`short_attention` on a fused projection of keys and values, which gets one gradient.

    Args:
        query: Shape (batch, queries, heads, d), or (rows, heads, d) if packed.
        kv: Keys and values, shape (batch, keys, 2, heads, d), or (rows, 2, heads, d).
        key_padding: As in :func:`short_attention`, like all arguments that follow.
        query_padding: bool of shape (batch, queries).
        query_starts: int32 of shape (batch + 1,).
        key_starts: int32 of shape (batch + 1,).
        max_query: The number of queries of the longest packed sentence.
        max_key: The number of keys of the longest packed sentence.
        is_causal: If True, a query sees no later key.
        scale: Factor of the scores.
        dropout_p: Probability that a weight becomes 0.
        seed: int64 of shape (1,).
        offset: Number of the layer among those that share a seed.

    Returns:
        O, shape and dtype of the query.

    Raises:
        ValueError: The shapes, lengths or numbers do not fit.
        TypeError: The dtypes do not fit.

    Example:
        >>> query, kv = torch.ones(2, 3, 4, 8), torch.ones(2, 5, 2, 4, 8)
        >>> short_attention_kv(query, kv).shape
        torch.Size([2, 3, 4, 8])
    """
    sentences = (query_starts, key_starts, max_query, max_key, query_padding, key_padding)
    given = OperatorArguments(*sentences, is_causal, scale, dropout_p, seed, offset)
    return _attend((query, kv), query.shape, _shape_of_part(kv, 2, "kv", key_starts), given)


def short_attention_qkv(
    qkv: Tensor,
    *,
    padding: Tensor | None = None,
    starts: Tensor | None = None,
    max_length: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Compute self-attention on a fused projection of queries, keys and values, which gets one gradient.

    Args:
        qkv: Queries, keys and values, shape (batch, positions, 3, heads, d), or (rows, 3, heads, d) if packed.
        padding: bool of shape (batch, positions), True at padding, which no query sees and whose output is 0.
        starts: int32 of shape (batch + 1,) for packed rows, as in :func:`short_attention`.
        max_length: The number of positions of the longest packed sentence; 128 if None.
        is_causal: As in :func:`short_attention`, like all arguments that follow.
        scale: Factor of the scores.
        dropout_p: Probability that a weight becomes 0.
        seed: int64 of shape (1,).
        offset: Number of the layer among those that share a seed.

    Returns:
        O, shape (batch, positions, heads, d), or (rows, heads, d).

    Raises:
        ValueError: The shapes, lengths or numbers do not fit.
        TypeError: The dtypes do not fit.

    Example:
        >>> x = torch.randn(7, 2, 3 * 4 * 8)  # a time-first projection: 7 positions, 2 sentences, 4 heads of 8
        >>> short_attention_qkv(x.unflatten(-1, (3, 4, 8)).transpose(0, 1)).shape
        torch.Size([2, 7, 4, 8])
    """
    sentences = (starts, starts, max_length, max_length, padding, padding)
    given = OperatorArguments(*sentences, is_causal, scale, dropout_p, seed, offset)
    shape = _shape_of_part(qkv, 3, "qkv", starts)
    return _attend((qkv,), shape, shape, given)


def uses_kernel(*tensors: Tensor, max_query: int, max_key: int) -> bool:
    """Return whether the CUDA kernels accept these tensors; :func:`why_not_kernel` gives the reason if not."""
    return why_not_kernel(*tensors, max_query=max_query, max_key=max_key) is None


def why_not_kernel(*tensors: Tensor, max_query: int, max_key: int) -> str | None:
    """Return the reason why the CUDA kernels cannot compute attention on these tensors.

    Args:
        tensors: Tensors of one of the functions above: (query, key, value), (query, kv) or (qkv,).
        max_query: Queries of the longest sentence, padding included.
        max_key: Keys of the longest sentence.

    Returns:
        One line that names the property of the tensors or of the installation that the kernels do not support; None if
        the kernels are used.

    Example:
        >>> why_not_kernel(torch.zeros(2, 5, 3, 4, 64), max_query=5, max_key=5)
        'the tensors are on cpu; the kernels need CUDA'
    """
    first = tensors[0]
    if first.device.type != "cuda":
        return f"the tensors are on {first.device}; the kernels need CUDA"
    if first.dtype not in _KERNEL_DTYPES:
        return f"the tensors are of {first.dtype}; the kernels need {' or '.join(map(str, _KERNEL_DTYPES))}"
    if first.shape[-1] not in _KERNEL_HEAD_DIMS:
        known = ", ".join(map(str, _KERNEL_HEAD_DIMS))
        return f"the heads have {first.shape[-1]} features; the kernels need one of {known}"
    if max(max_query, max_key) > MAX_POSITIONS:
        return f"sentences have up to {max_query} queries and {max_key} keys; the kernels take at most {MAX_POSITIONS}"
    for tensor in tensors:
        if tensor.numel() == 0:
            return f"a tensor of shape {tuple(tensor.shape)} is empty"
        if not _has_aligned_rows(tensor):
            return f"strides {tensor.stride()} do not give rows without gaps that begin at multiples of 16 bytes"
    return None if extension.is_available() else extension.why_not()


def _attend(
    parts: tuple[Tensor, ...], query_shape: torch.Size, key_shape: torch.Size, given: OperatorArguments
) -> Tensor:
    """Check the arguments, replace None by the defaults, and attend on (query, key, value), (query, kv) or (qkv,)."""
    first = parts[0]
    if not first.is_floating_point() or any(part.dtype != first.dtype for part in parts):
        raise TypeError(f"the tensors must have one floating-point dtype, not {[part.dtype for part in parts]}")
    if any(part.device != first.device for part in parts):
        raise ValueError(f"the tensors must be on one device, not {[str(part.device) for part in parts]}")
    if given.query_starts is None and given.key_starts is None:
        _check_padded(query_shape, key_shape, given)
        max_query, max_key = query_shape[1], key_shape[1]
    else:
        _check_packed(query_shape, key_shape, given)
        lengths = (given.max_query, given.max_key)
        max_query, max_key = (MAX_POSITIONS if length is None else length for length in lengths)
    # The scores of longer sentences would not fit into a GPU's registers.
    if not (0 <= max_query <= MAX_POSITIONS and 0 <= max_key <= MAX_POSITIONS):
        raise ValueError(
            f"sentences must have at most {MAX_POSITIONS} queries and keys, not {max_query} and {max_key}: use "
            "torch.nn.functional.scaled_dot_product_attention for more"
        )
    scale = 1.0 / math.sqrt(max(1, query_shape[-1])) if given.scale is None else given.scale
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale must be above 0 and finite, not {scale}")
    seed = _seed_of(first, given.dropout_p, given.seed)
    given = given._replace(max_query=max_query, max_key=max_key, scale=scale, seed=seed)
    is_plain = _needs_plain_path(parts, max_query, max_key)
    # The kernels need contiguous starts and masks with unit stride.
    inputs = [*(x.contiguous() if isinstance(x, Tensor) else x for x in given), *parts]
    # The compiler rejects an autograd.Function that gets the same tensor twice.
    if torch.compiler.is_compiling():
        inputs = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
    output: Tensor = _ShortAttention.apply(is_plain, *inputs)
    return output


def _needs_plain_path(parts: tuple[Tensor, ...], max_query: int, max_key: int) -> bool:
    """Return whether to call the reference directly instead of the operator."""
    # Once the kernels are loaded, they are the operator's only implementation for CUDA tensors. Tensors that they do
    # not support must therefore not reach the operator.
    return parts[0].is_cuda and not uses_kernel(*parts, max_query=max_query, max_key=max_key)


class _ShortAttention(torch.autograd.Function):
    """Autograd function of the operators; ``inputs`` are :class:`OperatorArguments` and then the parts of ``_attend``.

    ``is_plain`` replaces the operators by the plain reference.
    """

    @staticmethod
    def forward(ctx: Any, is_plain: bool, *inputs: Any) -> Tensor:
        given, parts = OperatorArguments(*inputs[:_ARGUMENT_COUNT]), inputs[_ARGUMENT_COUNT:]
        operator: Any = forward_reference if is_plain else torch.ops.mlbench.short_attention.default
        output, logsumexp = operator(*_query_key_value(parts), *given)
        masks = (given.query_starts, given.key_starts, given.query_padding, given.key_padding, given.seed)
        ctx.save_for_backward(logsumexp, *masks, *parts)
        ctx.numbers = (given.max_query, given.max_key, given.is_causal, given.scale, given.dropout_p, given.offset)
        ctx.is_plain = is_plain
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logsumexp, query_starts, key_starts, query_padding, key_padding, seed, *parts = ctx.saved_tensors
        max_query, max_key, is_causal, scale, dropout_p, offset = ctx.numbers
        sentences = (query_starts, key_starts, max_query, max_key, query_padding, key_padding)
        given = (*sentences, is_causal, scale, dropout_p, seed, offset)
        # A gradient may be expanded (that of a sum has strides 0), which the kernels cannot read.
        if not _has_aligned_rows(grad):
            grad = grad.clone(memory_format=torch.contiguous_format)
        # One buffer per part: a fused projection gets its gradient without a concatenation.
        gradients = [output_like(part, query_starts is not None) for part in parts]
        operator: Any = backward_reference if ctx.is_plain else torch.ops.mlbench.short_attention_backward.default
        operator(grad, *_query_key_value(parts), logsumexp, *given, *_query_key_value(gradients))
        # Neither is_plain nor the operator's arguments have gradients.
        return (None,) * (1 + _ARGUMENT_COUNT) + tuple(gradients)


def _query_key_value(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return views of queries, keys and values, fused or not."""
    if len(parts) == 3:
        return tuple(parts)
    *query, fused = parts
    return (*query, *fused.unbind(-3))


def _has_aligned_rows(tensor: Tensor) -> bool:
    """Return whether the features of each head are contiguous and begin at a multiple of 16 bytes."""
    elements = _ALIGNMENT_BYTES // tensor.element_size()
    *strides, last = tensor.stride()
    if last != 1 or any(stride % elements for stride in strides):
        return False
    # The compiler does not know storage offsets. The tensors that it allocates begin at such a multiple.
    return torch.compiler.is_compiling() or tensor.storage_offset() % elements == 0


def _seed_of(tensor: Tensor, dropout_p: float, seed: Tensor | None) -> Tensor | None:
    """Return the given or a newly drawn seed, or None without dropout."""
    if dropout_threshold(dropout_p) == 0:
        return None
    if seed is None:
        return draw_seed(tensor.device)
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != tensor.device:
        raise ValueError(
            f"seed must be int64 of shape (1,) on {tensor.device}, not {seed.dtype} of shape {tuple(seed.shape)} on "
            f"{seed.device}: use draw_seed"
        )
    return seed


def _shape_of_part(fused: Tensor, number: int, name: str, starts: Tensor | None) -> torch.Size:
    """Return the shape of each of ``number`` tensors, fused along the third dimension from the right."""
    first = "(batch, positions" if starts is None else "(rows"
    if fused.dim() != (5 if starts is None else 4) or fused.shape[-3] != number:
        raise ValueError(f"{name} must have shape {first}, {number}, heads, d), not {tuple(fused.shape)}")
    return torch.Size((*fused.shape[:-3], *fused.shape[-2:]))


def _check_padded(query_shape: torch.Size, key_shape: torch.Size, given: OperatorArguments) -> None:
    """Reject arguments that do not describe a padded batch."""
    # Only the numbers of positions, dimension 1, may differ.
    others_differ = query_shape[:1] + query_shape[2:] != key_shape[:1] + key_shape[2:]
    if len(query_shape) != 4 or len(key_shape) != 4 or others_differ:
        raise ValueError(
            f"queries and keys must have shapes (batch, queries, heads, d) and (batch, keys, heads, d) without starts, "
            f"not {tuple(query_shape)} and {tuple(key_shape)}"
        )
    lengths = (given.max_query, given.max_key)
    if lengths != (None, None):
        raise ValueError(f"the lengths of the longest sentences must be None without starts, not {lengths}")
    for name, padding, shape in (
        ("query_padding", given.query_padding, query_shape),
        ("key_padding", given.key_padding, key_shape),
    ):
        if padding is not None and (padding.dtype != torch.bool or padding.shape != shape[:2]):
            raise ValueError(
                f"{name} must be bool of shape {tuple(shape[:2])}, not {padding.dtype} of {tuple(padding.shape)}"
            )


def _check_packed(query_shape: torch.Size, key_shape: torch.Size, given: OperatorArguments) -> None:
    """Reject arguments that do not describe a packed batch."""
    query_starts, key_starts = given.query_starts, given.key_starts
    if query_starts is None or key_starts is None:
        raise ValueError("query_starts and key_starts must both be given for packed rows, not only one of them")
    if len(query_shape) != 3 or len(key_shape) != 3 or query_shape[1:] != key_shape[1:]:
        raise ValueError(
            f"queries and keys must both have shape (rows, heads, d) with starts, not {tuple(query_shape)} and "
            f"{tuple(key_shape)}"
        )
    if query_starts.dtype != torch.int32 or key_starts.dtype != torch.int32 or query_starts.dim() != 1:
        raise ValueError(
            f"query_starts and key_starts must be int32 of one dimension, not {query_starts.dtype} and "
            f"{key_starts.dtype} of {query_starts.dim()} and {key_starts.dim()} dimensions"
        )
    if query_starts.shape != key_starts.shape or query_starts.shape[0] < 2:
        raise ValueError(
            f"query_starts and key_starts must both have shape (batch + 1,) for at least one sentence, not "
            f"{tuple(query_starts.shape)} and {tuple(key_starts.shape)}"
        )
    if given.query_padding is not None or given.key_padding is not None:
        raise ValueError("query_padding and key_padding must be None with starts: packed rows have no padding")
