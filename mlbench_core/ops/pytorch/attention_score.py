r"""Additive attention: a score of each query with each key, and the weights from the scores.

The score of query t and key s sums over H features:

.. math:: e_{ts} = \sum_{h=1}^{H} v_h \tanh(q_{th} + k_{sh} + b_h)

A direct implementation in plain torch keeps several tensors of batch x queries x keys x H numbers
for the backward pass. Each of them takes 1.3 GB in float32 for 128 sentences of 50 words and H =
1024. :func:`attention_score` keeps only its inputs and computes the tanh again in the backward
pass, in blocks. With :math:`\delta_{ts}` the gradient of :math:`e_{ts}`:

.. math::
    g_{tsh} = \delta_{ts} (1 - \tanh^2(q_{th} + k_{sh} + b_h)), \qquad
    \partial q_{th} = v_h \sum_s g_{tsh}, \quad
    \partial k_{sh} = v_h \sum_t g_{tsh}, \quad
    \partial b_h = v_h \sum_{t,s} g_{tsh}, \quad
    \partial v_h = \sum_{t,s} \delta_{ts} \tanh(q_{th} + k_{sh} + b_h)

This module defines the operators ``mlbench::attention_score`` and
``mlbench::attention_score_blocks``, and one for the backward pass of each. CUDA kernels compute the
first one if they are built (:mod:`~mlbench_core.ops.pytorch.extension`). The second one is for
:func:`torch.compile`: without it the compiler would trace each block. It would then notice that the
forward and the backward pass compute the same tanh, and keep all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlbench_core.arguments import check_at_least
from mlbench_core.ops.pytorch import extension

__all__ = ["attention_score", "attention_score_reference", "masked_softmax", "why_not_kernel"]

_CPU_BLOCK = 1 << 20
"""Numbers in a block on the CPU: 4 MB of float32, which fits into the caches."""
_GPU_BLOCK = 1 << 25
"""Numbers in a block on a GPU: 128 MB of float32 keep it busy and are little of its memory."""
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def attention_score_reference(query: Tensor, keys: Tensor, bias: Tensor, v: Tensor) -> Tensor:
    """Compute the formula directly, without blocks.

    Arguments, results and errors: see :func:`attention_score`.
    """
    _check_shapes(query, keys, bias, v)
    dtype = _working_dtype(query, keys, bias, v)
    query, keys, bias, v = (part.to(dtype) for part in (query, keys, bias, v))
    return (v * torch.tanh(query.unsqueeze(2) + keys.unsqueeze(1) + bias)).sum(dim=-1)


def attention_score(
    query: Tensor, keys: Tensor, bias: Tensor, v: Tensor, *, block_elements: int | None = None
) -> Tensor:
    r"""Compute :math:`\sum_h v_h \tanh(q_h + k_h + b_h)` of all queries and keys.

    They are those of each sentence of a batch. The result is computed in little memory.

    The dtype of the computation is float32, or float64 for float64 inputs. Gradients flow to all
    four arguments, in the dtype of each. A second derivative is not available.

    Args:
        query: :math:`q`, shape (batch, queries, H), any floating-point dtype.
        keys: :math:`k`, shape (batch, keys, H).
        bias: :math:`b`, shape (H,).
        v: :math:`v`, shape (H,).
        block_elements: The largest number of tanh values held at once; a single query is never
            divided. It changes only the order of sums. If None, the CUDA kernels compute the scores
            if :func:`why_not_kernel` is None, and otherwise a default for the device applies.

    Returns:
        Scores, float32 (float64 for float64), of shape (batch, queries, keys).

    Raises:
        ValueError: The shapes do not fit, or ``block_elements`` is below 1.

    References:
        Bahdanau, Cho and Bengio 2014, Neural Machine Translation by Jointly Learning to Align and
        Translate, arXiv 1409.0473.

    Example:
        >>> query, keys = torch.zeros(1, 2, 3), torch.zeros(1, 4, 3)
        >>> bias, v = torch.full((3,), 9.0), torch.ones(3)
        >>> attention_score(query, keys, bias=bias, v=v).round().tolist()
        [[[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]]
    """
    _check_shapes(query, keys, bias, v)
    if block_elements is not None:
        check_at_least("block_elements", block_elements, 1)
    elif why_not_kernel(query, keys, bias, v) is not None:
        block_elements = _CPU_BLOCK if query.device.type == "cpu" else _GPU_BLOCK
    scores: Tensor = _AttentionScore.apply(query, keys, bias, v, block_elements)
    return scores


def why_not_kernel(query: Tensor, keys: Tensor, bias: Tensor, v: Tensor) -> str | None:
    """Return the reason why :func:`attention_score` cannot use its CUDA kernels; None if it does.

    Args:
        query: Shape (batch, queries, H).
        keys: Shape (batch, keys, H).
        bias: Shape (H,).
        v: Shape (H,).
    """
    parts = (query, keys, bias, v)
    if not query.is_cuda or any(part.device != query.device for part in parts):
        return "the tensors are not all on one CUDA device"
    if query.dtype != keys.dtype or any(part.dtype not in _KERNEL_DTYPES for part in parts):
        return f"the tensors are of {query.dtype}, {keys.dtype}, {bias.dtype} and {v.dtype}"
    if query.numel() == 0 or keys.numel() == 0:
        return "there are no queries or no keys"
    # The kernels read 16 bytes at a time, which are 8 numbers in half precision.
    if query.shape[2] % 8:
        return f"H is {query.shape[2]}, which is not a multiple of 8"
    return extension.why_not()


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the softmax over the last dimension, exactly 0 if masked.

    Half-precision scores are converted to float32 first: their exponentials neither overflow nor
    lose small values.

    Args:
        scores: Shape (..., keys), any floating-point dtype.
        mask: bool of a shape that broadcasts to that of the scores, True for keys that get the
            weight 0. None masks no key. If all keys are masked, all weights are 0.

    Returns:
        Weights, float32 (float64 for float64), of the shape of the scores.

    Example:
        >>> is_masked = torch.tensor([False, True, False])
        >>> masked_softmax(torch.tensor([2.0, 5.0, 2.0]), is_masked).tolist()
        [0.5, 0.0, 0.5]
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is None:
        return scores.softmax(dim=-1)
    # The lowest finite number instead of -inf, because a row of -inf would give NaN.
    least = torch.finfo(scores.dtype).min
    return scores.masked_fill(mask, least).softmax(dim=-1).masked_fill(mask, 0.0)


class _AttentionScore(torch.autograd.Function):
    """Autograd function of the operators, which does not save the tanh.

    A plain function costs less per call than an autograd formula registered for the operator.
    Without ``block_elements`` the operators are those of the kernels.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, bias: Tensor, v: Tensor, block_elements: int | None
    ) -> Tensor:
        inputs = (query, keys, bias, v)
        ctx.save_for_backward(*inputs)
        ctx.block_elements = block_elements
        if block_elements is None:
            return torch.ops.mlbench.attention_score.default(*inputs)  # type: ignore[no-any-return]
        scores: Tensor = torch.ops.mlbench.attention_score_blocks.default(*inputs, block_elements)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        operators = torch.ops.mlbench
        if ctx.block_elements is None:
            return (*operators.attention_score_backward.default(grad, *ctx.saved_tensors), None)
        operator = operators.attention_score_blocks_backward.default
        return (*operator(grad, *ctx.saved_tensors, ctx.block_elements), None)


def _scores(
    query: Tensor, keys: Tensor, bias: Tensor, v: Tensor, block_elements: int = _GPU_BLOCK
) -> Tensor:
    """Return the scores, with at most ``block_elements`` tanh values at a time."""
    shifted, wide_keys, wide_v = _widened(query, keys, bias, v)
    scores = shifted.new_empty(query.shape[0], query.shape[1], keys.shape[1])
    # Autocast would compute the product with v in half precision.
    with torch.autocast(query.device.type, enabled=False):
        for rows, steps in _blocks(scores.shape, query.shape[2], block_elements):
            scores[rows, steps] = _tanh(shifted[rows, steps], wide_keys[rows]) @ wide_v
    return scores


def _gradients(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    bias: Tensor,
    v: Tensor,
    block_elements: int = _GPU_BLOCK,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the contiguous gradients of query, keys, bias and v, in :func:`_scores`' blocks."""
    shifted, wide_keys, wide_v = _widened(query, keys, bias, v)
    grad_query, grad_keys = shifted.new_zeros(shifted.shape), wide_keys.new_zeros(wide_keys.shape)
    grad_v = wide_v.new_zeros(wide_v.shape)
    with torch.autocast(query.device.type, enabled=False):
        for rows, steps in _blocks(grad.shape, query.shape[2], block_elements):
            tanh, delta = _tanh(shifted[rows, steps], wide_keys[rows]), grad[rows, steps]
            grad_v += delta.flatten() @ tanh.flatten(0, 2)
            # g lacks the factor v_h, which is constant over a block. It is applied
            # once to the sums at the end.
            g = tanh.square_().neg_().add_(1.0).mul_(delta.unsqueeze(-1))
            grad_query[rows, steps] = g.sum(dim=2)
            grad_keys[rows] += g.sum(dim=1)
    grad_query.mul_(wide_v)
    grad_keys.mul_(wide_v)
    grad_bias = grad_query.sum(dim=(0, 1))
    return (
        grad_query.to(query.dtype),
        grad_keys.to(keys.dtype),
        grad_bias.to(bias.dtype),
        grad_v.to(v.dtype),
    )


def _widened(query: Tensor, keys: Tensor, bias: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q + b, k and v in the dtype of the computation."""
    dtype = _working_dtype(query, keys, bias, v)
    return query.to(dtype) + bias.to(dtype), keys.to(dtype), v.to(dtype)


def _tanh(shifted: Tensor, keys: Tensor) -> Tensor:
    """Return tanh(q + b + k) of a block, shape (rows, steps, keys, H)."""
    # In place on the new sum, so that memory holds a block once, not twice.
    return (shifted.unsqueeze(2) + keys.unsqueeze(1)).tanh_()


def _blocks(shape: torch.Size, features: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Yield the sentences and queries to compute together: whole sentences if small enough."""
    batch, queries, keys = shape
    one = max(1, keys * features)
    steps = max(1, min(queries, limit // one))
    # Several sentences share a block only if all of their queries fit.
    rows = max(1, limit // (steps * one)) if steps == queries else 1
    for row in range(0, batch, rows):
        for step in range(0, queries, steps):
            yield slice(row, row + rows), slice(step, step + steps)


def _working_dtype(*parts: Tensor) -> torch.dtype:
    """Return float64 if any part has it, otherwise float32."""
    is_double = any(part.dtype == torch.float64 for part in parts)
    if is_double:
        return torch.float64
    return torch.float32


def _check_shapes(query: Tensor, keys: Tensor, bias: Tensor, v: Tensor) -> None:
    """Reject shapes that would broadcast by accident."""
    fits = (
        query.dim() == keys.dim() == 3
        and query.shape[0] == keys.shape[0]
        and query.shape[2:] == keys.shape[2:] == bias.shape == v.shape
    )
    if not fits:
        raise ValueError(
            "query, keys, bias and v must have the shapes (batch, queries, H), (batch, keys, "
            f"H), (H,) and (H,), not {tuple(query.shape)}, {tuple(keys.shape)}, "
            f"{tuple(bias.shape)} and {tuple(v.shape)}"
        )


def _fake_scores(query: Tensor, keys: Tensor, bias: Tensor, v: Tensor, *_: int) -> Tensor:
    shape = (query.shape[0], query.shape[1], keys.shape[1])
    return query.new_empty(shape, dtype=_working_dtype(query, keys, bias, v))


def _fake_gradients(grad: Tensor, *parts: Any) -> tuple[Tensor, ...]:
    return tuple(part.new_empty(part.shape) for part in parts[:4])


_INPUTS = "Tensor query, Tensor keys, Tensor bias, Tensor v"
# The kernels implement the first pair of operators for CUDA tensors.
for _name, _inputs in (
    ("attention_score", _INPUTS),
    ("attention_score_blocks", f"{_INPUTS}, int block_elements"),
):
    extension.define_operator(_name, f"({_inputs}) -> Tensor", _scores, _fake_scores)
    extension.define_operator(
        f"{_name}_backward",
        f"(Tensor grad, {_inputs}) -> (Tensor, Tensor, Tensor, Tensor)",
        _gradients,
        _fake_gradients,
    )
