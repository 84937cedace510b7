r"""Additive attention: how well each query fits each key, and weights from these scores.

The score of query t and key s sums over H features:

.. math:: e_{ts} = \sum_{h=1}^{H} v_h \tanh(q_{th} + k_{sh} + b_h)

Written in plain torch it holds batch x queries x keys x H numbers, several times over for the backward pass: 1.3 GB
each in float32 for 128 sentences of 50 words and H = 1024. :func:`attention_score` works in blocks, keeps only its
inputs and computes the tanh again in the backward pass. With :math:`\delta_{ts}` the gradient of :math:`e_{ts}`:

.. math::
    g_{tsh} = \delta_{ts} (1 - \tanh^2(q_{th} + k_{sh} + b_h)), \qquad
    \partial q_{th} = v_h \sum_s g_{tsh}, \quad
    \partial k_{sh} = v_h \sum_t g_{tsh}, \quad
    \partial b_h = v_h \sum_{t,s} g_{tsh}, \quad
    \partial v_h = \sum_{t,s} \delta_{ts} \tanh(q_{th} + k_{sh} + b_h)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["attention_score", "attention_score_reference", "masked_softmax"]

_CPU_BLOCK = 1 << 20
"""Numbers in a block: 4 MB of float32, which the caches hold."""
_GPU_BLOCK = 1 << 25
"""128 MB of float32: enough to fill a GPU, little of its memory."""


def attention_score_reference(query: Tensor, keys: Tensor, bias: Tensor, v: Tensor) -> Tensor:
    """The formula as it stands, all at once.

    Arguments, result and errors are those of :func:`attention_score`.
    """
    _check_shapes(query, keys, bias, v)
    dtype = _working_dtype(query, keys, bias, v)
    query, keys, bias, v = (part.to(dtype) for part in (query, keys, bias, v))
    return (v * torch.tanh(query.unsqueeze(2) + keys.unsqueeze(1) + bias)).sum(dim=-1)


def attention_score(
    query: Tensor, keys: Tensor, bias: Tensor, v: Tensor, *, block_elements: int | None = None
) -> Tensor:
    r"""Scores :math:`\sum_h v_h \tanh(q_h + k_h + b_h)` of all queries and keys of each sentence, in little memory.

    Computed in float32, or in float64 for such inputs. Gradients flow to all four arguments, in the dtype of each.
    There is no second derivative.

    Args:
        query: :math:`q`, shape (batch, queries, H), any floating-point dtype.
        keys: :math:`k`, shape (batch, keys, H).
        bias: :math:`b`, shape (H,).
        v: :math:`v`, shape (H,).
        block_elements: The most tanh that are held at once; but a single query is never divided. Chosen by the device
            if None. It changes the order of sums, nothing else.

    Returns:
        Scores, float32 (float64 for float64), of shape (batch, queries, keys).

    Raises:
        ValueError: Shapes do not fit, or ``block_elements`` is below 1.

    References:
        Bahdanau, Cho and Bengio 2014, Neural Machine Translation by Jointly Learning to Align and Translate, arXiv
        1409.0473.

    Example:
        >>> query, keys = torch.zeros(1, 2, 3), torch.zeros(1, 4, 3)
        >>> attention_score(query, keys, bias=torch.full((3,), 9.0), v=torch.ones(3)).round().tolist()
        [[[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]]
    """
    _check_shapes(query, keys, bias, v)
    if block_elements is None:
        block_elements = _CPU_BLOCK if query.device.type == "cpu" else _GPU_BLOCK
    elif block_elements < 1:
        raise ValueError(f"block_elements is {block_elements}; it must be at least 1")
    scores: Tensor = _AttentionScore.apply(query, keys, bias, v, block_elements)
    return scores


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the last dimension, exactly 0 where masked.

    Half-precision scores are widened first: their exponentials neither overflow nor lose the small ones.

    Args:
        scores: Shape (..., keys), any floating-point dtype.
        mask: bool of a shape that broadcasts to that of the scores, True where a key must get nothing; None for none.
            Where all keys are masked all weights are 0.

    Returns:
        Weights, float32 (float64 for float64), of the shape of the scores.

    Example:
        >>> masked_softmax(torch.tensor([2.0, 5.0, 2.0]), torch.tensor([False, True, False])).tolist()
        [0.5, 0.0, 0.5]
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is None:
        return scores.softmax(dim=-1)
    # The least number, not -inf: a row of -inf would be NaN.
    least = torch.finfo(scores.dtype).min
    return scores.masked_fill(mask, least).softmax(dim=-1).masked_fill(mask, 0.0)


class _AttentionScore(torch.autograd.Function):
    """:func:`attention_score` in blocks, with the tanh computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, bias: Tensor, v: Tensor, block_elements: int) -> Tensor:
        ctx.save_for_backward(query, keys, bias, v)
        ctx.block_elements = block_elements
        shifted, wide_keys, wide_v = _widened(query, keys, bias, v)
        scores = shifted.new_empty(query.shape[0], query.shape[1], keys.shape[1])
        with torch.autocast(query.device.type, enabled=False):
            for rows, steps in _blocks(scores.shape, query.shape[2], block_elements):
                scores[rows, steps] = _tanh(shifted[rows, steps], wide_keys[rows]) @ wide_v
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        query, keys, bias, v = ctx.saved_tensors
        shifted, wide_keys, wide_v = _widened(query, keys, bias, v)
        grad_query, grad_keys, grad_v = map(torch.zeros_like, (shifted, wide_keys, wide_v))
        with torch.autocast(query.device.type, enabled=False):
            for rows, steps in _blocks(grad.shape, query.shape[2], ctx.block_elements):
                tanh, delta = _tanh(shifted[rows, steps], wide_keys[rows]), grad[rows, steps]
                grad_v += delta.flatten() @ tanh.flatten(0, 2)
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
            None,
        )


def _widened(query: Tensor, keys: Tensor, bias: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q + b, k and v in the dtype to compute in."""
    dtype = _working_dtype(query, keys, bias, v)
    return query.to(dtype) + bias.to(dtype), keys.to(dtype), v.to(dtype)


def _tanh(shifted: Tensor, keys: Tensor) -> Tensor:
    """All tanh(q + b + k) of a block, shape (rows, steps, keys, H)."""
    return (shifted.unsqueeze(2) + keys.unsqueeze(1)).tanh_()


def _blocks(shape: torch.Size, features: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Which sentences and which of their queries to compute together: whole sentences, if they are small enough."""
    batch, queries, keys = shape
    one = max(1, keys * features)
    steps = max(1, min(queries, limit // one))
    rows = max(1, limit // (steps * one)) if steps == queries else 1
    for row in range(0, batch, rows):
        for step in range(0, queries, steps):
            yield slice(row, row + rows), slice(step, step + steps)


def _working_dtype(*parts: Tensor) -> torch.dtype:
    """float64 if any part is, otherwise float32."""
    return torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32


def _check_shapes(query: Tensor, keys: Tensor, bias: Tensor, v: Tensor) -> None:
    """Refuse shapes that would broadcast by accident."""
    fits = (
        query.dim() == keys.dim() == 3
        and query.shape[0] == keys.shape[0]
        and query.shape[2:] == keys.shape[2:] == bias.shape == v.shape
    )
    if not fits:
        raise ValueError(
            f"query, keys, bias and v have the shapes {tuple(query.shape)}, {tuple(keys.shape)}, {tuple(bias.shape)} "
            f"and {tuple(v.shape)}; they must be (batch, queries, H), (batch, keys, H), (H,) and (H,)"
        )
