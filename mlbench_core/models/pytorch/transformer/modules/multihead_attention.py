"""Multi-head attention, time first."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.models.pytorch.transformer.modules.attention import (
    attention_mask,
    fused_attention,
    reference_attention,
)
from mlbench_core.models.pytorch.transformer.modules.incremental import KeyValueCache

__all__ = ["MultiheadAttention"]

_SOFTMAX_TYPES = ("default", "fast_fill")
_BACKENDS = ("auto", "reference", "fused")


class MultiheadAttention(nn.Module):
    r"""Multi-head attention.

    .. math::
        \mathrm{MultiHead}(Q, K, V) = \mathrm{Concat}(h_1, \dots, h_n) W^O, \qquad
        h_i = \mathrm{softmax}\left(\frac{Q W_i^Q (K W_i^K)^T}{\sqrt{d}}\right) V W_i^V

    All tensors are time first: (positions, batch, ``embed_dim``). The three input projections are one matrix
    ``in_proj_weight`` of shape (3 ``embed_dim``, ``embed_dim``), so that self-attention needs one product.

    Args:
        embed_dim: Width of the model.
        num_heads: Number of heads; it divides ``embed_dim``.
        dropout: Probability that an attention weight becomes 0 in training.
        softmax_type: ``"default"`` or ``"fast_fill"``, the CUDA variants of version 3.0; both give the same numbers.
        bias: Whether the projections add a bias.
        backend: ``"reference"`` (plain), ``"fused"`` (torch's kernels; the plain path where weights are asked for), or
            ``"auto"``, which takes the fastest one there is.

    Raises:
        ValueError: An argument is not among these.

    References:
        Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762, section 3.2.2.

    Example:
        >>> attention = MultiheadAttention(embed_dim=8, num_heads=2)
        >>> x = torch.randn(5, 3, 8)  # 5 positions, 3 sentences
        >>> output, weights = attention(x, x, x, mask_future_timesteps=True)
        >>> output.shape, weights.shape
        (torch.Size([5, 3, 8]), torch.Size([3, 5, 5]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        softmax_type: str = "default",
        bias: bool = False,
        *,
        backend: Literal["auto", "reference", "fused"] = "auto",
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim is {embed_dim} and num_heads {num_heads}; the heads must divide the width")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout is {dropout}; it must be at least 0 and below 1")
        for name, value, known in (("softmax_type", softmax_type, _SOFTMAX_TYPES), ("backend", backend, _BACKENDS)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; known: {', '.join(known)}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.softmax_type = softmax_type
        self.backend = backend
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights: Glorot's uniform distribution for each of the four matrices; biases 0."""
        for weight in (*self.in_proj_weight.chunk(3), self.out_proj.weight):
            nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask_future_timesteps: bool = False,
        key_padding_mask: Tensor | None = None,
        incremental_state: MutableMapping[nn.Module, KeyValueCache] | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        With an ``incremental_state`` the module remembers its keys and values: of self-attention, to which each call
        adds its own positions; with ``static_kv``, those of the first call, which later calls use again whatever key
        and value they get. Hypotheses of one sentence may share static ones: the query then has a multiple of their
        batch, consecutive rows belonging together.

        Args:
            query: Shape (target, batch, embed_dim).
            key: Shape (source, batch, embed_dim); the same object as ``query`` for self-attention.
            value: The shape of ``key``; the same object as ``key``, as a rule.
            mask_future_timesteps: Whether position i sees positions up to i only.
            key_padding_mask: bool of shape (batch, source), True where the key is padding. With a cache it covers the
                remembered positions too. A query that sees padding only gets zeros before the output projection.
            incremental_state: A dict that is empty before the first step, or an
                :class:`~mlbench_core.models.pytorch.transformer.modules.incremental.IncrementalState`.
            need_weights: Whether to return the weights, which takes the plain path.
            static_kv: Whether key and value stay what they were in the first call.

        Returns:
            The output, shape (target, batch, embed_dim), and the weights averaged over the heads, shape (batch, target,
            source), or None.

        Raises:
            ValueError: Shapes do not fit.
        """
        target, rows, width = query.shape
        if width != self.embed_dim:
            raise ValueError(f"query has shape {tuple(query.shape)}; its last dimension must be {self.embed_dim}")
        q, k, v = self._project(query, key, value, incremental_state, static_kv)
        is_causal = mask_future_timesteps and target > 1
        self._check_masks(q, k, rows, is_causal, key_padding_mask)
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights or self.backend == "reference":
            mask = attention_mask(q.shape[2], k.shape[2], key_padding_mask, is_causal, q.device)
            output, weights = reference_attention(q, k, v, mask, p)
        else:
            output = fused_attention(q, k, v, key_padding_mask, is_causal, p)
        output = self.out_proj(self._merge_heads(output, target, rows))
        if weights is None or not need_weights:
            return output, None
        return output, weights.mean(dim=1).reshape(rows, target, -1)

    def extra_repr(self) -> str:
        """The arguments, for ``repr``."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}"

    def _project(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        state: MutableMapping[nn.Module, KeyValueCache] | None,
        static_kv: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, remembered ones with them, of shape (batch, heads, positions, head features)."""
        cache = None if state is None else state.get(self)
        if static_kv and cache is not None:
            q = self._linear(query, 0, 1)
            return self._split_heads(q, cache.keys.shape[0]), cache.keys, cache.values
        if key is None or value is None:
            raise ValueError("key and value are None; only static ones that were remembered can be left out")
        if key is query and value is query:
            q, k, v = self._linear(query, 0, 3).chunk(3, dim=-1)
        elif key is value:
            q = self._linear(query, 0, 1)
            k, v = self._linear(key, 1, 3).chunk(2, dim=-1)
        else:
            q, k, v = self._linear(query, 0, 1), self._linear(key, 1, 2), self._linear(value, 2, 3)
        batch = key.shape[1]
        k, v = self._split_heads(k, batch), self._split_heads(v, batch)
        if cache is not None:
            k, v = torch.cat((cache.keys, k), dim=2), torch.cat((cache.values, v), dim=2)
        if state is not None:
            state[self] = KeyValueCache(k, v, is_static=static_kv)
        return self._split_heads(q, batch), k, v

    def _linear(self, x: Tensor, first: int, last: int) -> Tensor:
        """Some of the three input projections: 0 of queries, 1 of keys, 2 of values."""
        part = slice(first * self.embed_dim, last * self.embed_dim)
        return F.linear(x, self.in_proj_weight[part], None if self.in_proj_bias is None else self.in_proj_bias[part])

    def _split_heads(self, x: Tensor, batch: int) -> Tensor:
        """(positions, rows, width) to (batch, heads, rows of a sentence x positions, features of a head)."""
        positions, rows, _ = x.shape
        if rows % batch:
            raise ValueError(f"the query has {rows} rows and the key {batch}; rows must be a multiple of the key's")
        x = x.reshape(positions, batch, rows // batch, self.num_heads, self.head_dim)
        return x.permute(1, 3, 2, 0, 4).reshape(batch, self.num_heads, -1, self.head_dim)

    def _merge_heads(self, x: Tensor, positions: int, rows: int) -> Tensor:
        """The inverse of :meth:`_split_heads`."""
        x = x.unflatten(2, (-1, positions)).permute(3, 0, 2, 1, 4)
        return x.reshape(positions, rows, self.embed_dim)

    def _check_masks(self, q: Tensor, k: Tensor, rows: int, is_causal: bool, key_padding_mask: Tensor | None) -> None:
        """Refuse masks that do not fit queries and keys of shape (batch, heads, positions, features)."""
        batch, keys = k.shape[0], k.shape[2]
        if key_padding_mask is not None and key_padding_mask.shape != (batch, keys):
            raise ValueError(f"key_padding_mask has shape {tuple(key_padding_mask.shape)}; it must be {(batch, keys)}")
        if is_causal and rows != batch:
            raise ValueError(f"{rows} rows share {batch} keys; mask_future_timesteps needs keys for each row")
