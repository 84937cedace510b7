r"""Scaled dot-product attention: the plain reference, and torch's kernels.

.. math:: \mathrm{Attention}(Q, K, V) = \mathrm{softmax}\left(\frac{Q K^T}{\sqrt{d}} + M\right) V

M is minus infinity at masked positions and 0 elsewhere. If all keys of a query are masked, its
output is 0.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mlbench_core.ops.pytorch.attention_score import masked_softmax

__all__ = ["attention_mask", "reference_attention", "sdpa_attention"]


def attention_mask(
    queries: int, keys: int, key_padding_mask: Tensor | None, is_causal: bool, device: torch.device
) -> Tensor | None:
    """Return a mask of the keys that each query must not see.

    Args:
        queries: Number of queries. The last query and the last key are at the same position.
        keys: Number of keys.
        key_padding_mask: bool of shape (batch, keys), True if the key is padding.
        is_causal: If True, hide keys that come after the query.
        device: Device of the mask.

    Returns:
        bool of a shape that broadcasts to (batch, heads, queries, keys), True if masked; None if
        nothing is masked.
    """
    mask = None
    if key_padding_mask is not None:
        mask = key_padding_mask[:, None, None, :]
    if not is_causal:
        return mask
    future = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)
    if mask is None:
        return future
    return mask | future


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute attention step by step, with the softmax in float32 or better.

    Args:
        query: Shape (batch, heads, queries, features).
        key: Shape (batch, heads, keys, features).
        value: Shape (batch, heads, keys, features).
        mask: Result of :func:`attention_mask`.
        dropout_p: Probability that a weight becomes 0; the others are scaled by 1/(1 - p).

    Returns:
        The output, in the shape of ``query``, and the weights before dropout, shape (batch, heads,
        queries, keys), in the dtype of the query.
    """
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-1, -2)
    weights = masked_softmax(scores, mask).to(query.dtype)
    return F.dropout(weights, dropout_p, training=dropout_p > 0) @ value, weights


def sdpa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute attention by :func:`torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: Shape (batch, heads, queries, features).
        key: Shape (batch, heads, keys, features).
        value: Shape (batch, heads, keys, features).
        key_padding_mask: bool of shape (batch, keys), True if the key is padding.
        is_causal: If True, hide keys that come after the query. Without padding, and with the same
            number of queries and keys, the kernel applies this rule itself; otherwise it gets a
            mask.
        dropout_p: Probability that a weight becomes 0.

    Returns:
        The output, in the shape of ``query``.
    """
    queries, keys = query.shape[2], key.shape[2]
    if key_padding_mask is None and (not is_causal or queries == keys):
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout_p, is_causal=is_causal
        )
    mask = attention_mask(queries, keys, key_padding_mask, is_causal, query.device)
    assert mask is not None
    # torch's masks are the reverse: True at visible keys.
    return F.scaled_dot_product_attention(query, key, value, attn_mask=~mask, dropout_p=dropout_p)
