"""Multi-head attention on time-first tensors.

One call takes the first of these paths whose condition holds::

    condition                                           path
    weights are requested, or backend is "reference"    reference_attention
    no cache, and the operator takes the projections    fused_attention, without a copy of them
    otherwise                                           sdpa_attention, torch's

The operator takes tensors if backend is "auto" or "kernel" and its CUDA kernels accept them. If
they do not accept short sentences, the backend "kernel" is an error.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.models.pytorch.transformer.modules.attention import (
    attention_mask,
    reference_attention,
    sdpa_attention,
)
from mlbench_core.models.pytorch.transformer.modules.incremental import KeyValueCache
from mlbench_core.ops.pytorch.attention import MAX_POSITIONS, fused_attention, why_not_kernel

__all__ = ["MultiheadAttention"]

_SOFTMAX_TYPES = ("default", "fast_fill")
_BACKENDS = ("auto", "reference", "sdpa", "kernel")


class MultiheadAttention(nn.Module):
    r"""Multi-head attention with a choice of backends.

    .. math::
        \mathrm{MultiHead}(Q, K, V) = \mathrm{Concat}(h_1, \dots, h_n) W^O, \qquad
        h_i = \mathrm{softmax}\left(\frac{Q W_i^Q (K W_i^K)^T}{\sqrt{d}}\right) V W_i^V

    All tensors are time first: (positions, batch, ``embed_dim``). The three input projections are
    one matrix ``in_proj_weight`` of shape (3 ``embed_dim``, ``embed_dim``), so that self-attention
    needs one product.

    Args:
        embed_dim: Width of the model.
        num_heads: Number of heads; ``embed_dim`` must be a multiple of it.
        dropout: Probability that an attention weight becomes 0 in training.
        softmax_type: ``"default"`` leaves the choice to ``backend``. ``"fast_fill"``, which
            selected a kernel in version 3.0, is the same as ``backend="sdpa"``.
        bias: If True, the projections add a bias.
        backend: ``"reference"`` is the plain formula. ``"sdpa"`` is torch's
            ``scaled_dot_product_attention``, or the plain formula if weights are requested.
            ``"kernel"`` is :func:`~mlbench_core.ops.pytorch.attention.fused_attention` with its
            CUDA kernels. With a cache, with weights that are requested, or with more than 128
            positions, it is the same as ``"sdpa"``. ``"auto"`` is ``"kernel"`` if the CUDA kernels
            accept the tensors, and otherwise ``"sdpa"``.

    Raises:
        ValueError: An argument is not one of the values listed above.

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
        backend: Literal["auto", "reference", "sdpa", "kernel"] = "auto",
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads ({num_heads}), not {embed_dim}"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, not {dropout}")
        for name, value, choices in (
            ("softmax_type", softmax_type, _SOFTMAX_TYPES),
            ("backend", backend, _BACKENDS),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.softmax_type = softmax_type
        if softmax_type == "fast_fill":
            # Both arguments choose the path, so a contradiction between them is an error.
            if backend not in ("auto", "sdpa"):
                raise ValueError(
                    "backend must be 'auto' or 'sdpa' with softmax_type='fast_fill', not "
                    f"{backend!r}: leave one of them out"
                )
            backend = "sdpa"
        self.backend = backend
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias: nn.Parameter | None = None
        if bias:
            self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each of the four matrices from Glorot's uniform distribution; set biases to 0."""
        # Glorot's bound depends on the shape, so the three fused matrices are drawn separately.
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
        """Attend to the keys and values.

        With an ``incremental_state`` the module keeps its keys and values. In self-attention each
        call adds its own positions. With ``static_kv``, later calls use the keys and values of the
        first call and ignore their own arguments. Hypotheses of one sentence may share static keys
        and values. The batch of the query is then a multiple of the batch of the keys, and the
        hypotheses of a sentence are consecutive rows.

        The output of padded positions has arbitrary values, which no caller should read. The
        operator gives zeros there, before the output projection.

        Args:
            query: Shape (target, batch, embed_dim).
            key: Shape (source, batch, embed_dim); the same object as ``query`` for self-attention.
            value: Shape of ``key``; usually the same object.
            mask_future_timesteps: If True, position i sees only positions up to i.
            key_padding_mask: bool of shape (batch, source), True if the key is padding. With a
                cache it covers the cached positions too. A query that sees only padding gets zeros
                before the output projection.
            incremental_state: A dict that is empty before the first step, or an
                :class:`.IncrementalState`.
            need_weights: If True, return the weights, which requires the plain formula.
            static_kv: If True, key and value are those of the first call.

        Returns:
            The output, shape (target, batch, embed_dim), and the weights averaged over the heads,
            shape (batch, target, source), or None.

        Raises:
            ValueError: The shapes do not fit.
            RuntimeError: ``backend`` is ``"kernel"``, and the CUDA kernels cannot run.
        """
        target, rows, width = query.shape
        if width != self.embed_dim:
            raise ValueError(
                f"query must have {self.embed_dim} features, not shape {tuple(query.shape)}"
            )
        # A single new position may see all cached ones.
        is_causal = mask_future_timesteps and target > 1
        # The functional forms of attention know no evaluation mode.
        p = 0.0
        if self.training:
            p = self.dropout
        if incremental_state is None:
            parts = self._projections(query, key, value)
            keys, batch = parts[-1].shape[:2]
            _check_masks(batch, keys, rows, is_causal, key_padding_mask)
            if not need_weights:
                views = self._views_for_operator(parts)
                if views is not None:
                    output = fused_attention(
                        *views, key_padding=key_padding_mask, is_causal=is_causal, dropout_p=p
                    )
                    return self.out_proj(output.transpose(0, 1).flatten(2)), None
            q, k, v = self._split_parts(parts)
        else:
            q, k, v = self._with_cache(query, key, value, incremental_state, static_kv)
            _check_masks(k.shape[0], k.shape[2], rows, is_causal, key_padding_mask)
        weights = None
        if need_weights or self.backend == "reference":
            mask = attention_mask(q.shape[2], k.shape[2], key_padding_mask, is_causal, q.device)
            output, weights = reference_attention(q, k, v, mask, p)
        else:
            output = sdpa_attention(q, k, v, key_padding_mask, is_causal, p)
        # The inverse of _split_heads.
        output = output.unflatten(2, (-1, target)).permute(3, 0, 2, 1, 4)
        output = self.out_proj(output.reshape(target, rows, width))
        if weights is None or not need_weights:
            return output, None
        return output, weights.mean(dim=1).reshape(rows, target, -1)

    def extra_repr(self) -> str:
        """Return the arguments, for ``repr``."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}"

    def _projections(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Project queries, keys and values, with one product for inputs that are the same object.

        Returns:
            (qkv,), (q, kv) or (q, k, v), each of shape (positions, rows, parts x ``embed_dim``).
        """
        if key is None or value is None:
            raise ValueError(
                "key and value must be tensors, not None: only "
                "static ones that are cached can be left out"
            )
        # By identity: to compare values, the host would have to wait for the device.
        if key is query and value is query:
            return (self._linear(query, 0, 3),)
        if key is value:
            return self._linear(query, 0, 1), self._linear(key, 1, 3)
        return self._linear(query, 0, 1), self._linear(key, 1, 2), self._linear(value, 2, 3)

    def _split_parts(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Split projections into q, k and v, each of shape (batch, heads, positions, features)."""
        projections: list[Tensor] = []
        for part in parts:
            projections += part.split(self.embed_dim, dim=-1)
        q, k, v = projections
        batch = k.shape[1]
        return self._split_heads(q, batch), self._split_heads(k, batch), self._split_heads(v, batch)

    def _views_for_operator(self, parts: tuple[Tensor, ...]) -> list[Tensor] | None:
        """Return the projections as the operator takes them, without a copy; None if it does not.

        A fused projection gets its gradient in one piece, and nothing is transposed in memory.
        """
        if self.backend in ("reference", "sdpa"):
            return None
        views = []
        for part in parts:
            sizes = [self.num_heads, self.head_dim]
            if part.shape[-1] != self.embed_dim:
                # Several projections of one product have a dimension of their own.
                sizes.insert(0, -1)
            view = part.unflatten(-1, sizes)
            views.append(view.transpose(0, 1))
        # Hypotheses that share the keys of a sentence need another path.
        if views[0].shape[0] != views[-1].shape[0]:
            return None
        if max(view.shape[1] for view in views) > MAX_POSITIONS:
            return None
        reason = why_not_kernel(*views)
        if reason is not None and self.backend == "kernel":
            raise RuntimeError(
                f"the attention backend 'kernel' cannot run, but 'auto' can: {reason}"
            )
        if reason is not None:
            return None
        return views

    def _with_cache(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        state: MutableMapping[nn.Module, KeyValueCache],
        static_kv: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, and k and v with the cached ones: (batch, heads, positions, features)."""
        cache = state.get(self)
        if static_kv and cache is not None:
            q = self._linear(query, 0, 1)
            return self._split_heads(q, cache.keys.shape[0]), cache.keys, cache.values
        q, k, v = self._split_parts(self._projections(query, key, value))
        # Static keys do not come here again: the branch above returned them.
        if cache is not None:
            k, v = torch.cat((cache.keys, k), dim=2), torch.cat((cache.values, v), dim=2)
        state[self] = KeyValueCache(k, v, is_static=static_kv)
        return q, k, v

    def _linear(self, x: Tensor, first: int, last: int) -> Tensor:
        """Apply some of the three input projections: 0 for queries, 1 for keys, 2 for values."""
        part = slice(first * self.embed_dim, last * self.embed_dim)
        weight = self.in_proj_weight[part]
        if self.in_proj_bias is None:
            return F.linear(x, weight)
        return F.linear(x, weight, self.in_proj_bias[part])

    def _split_heads(self, x: Tensor, batch: int) -> Tensor:
        """Reshape (positions, rows, width) to (batch, heads, queries of a sentence, features)."""
        positions, rows, _ = x.shape
        if rows % batch:
            raise ValueError(f"query must have a multiple of the key's {batch} rows, not {rows}")
        # The hypotheses of a sentence share its keys, so they become further queries of one batch
        # entry.
        x = x.reshape(positions, batch, rows // batch, self.num_heads, self.head_dim)
        return x.permute(1, 3, 2, 0, 4).reshape(batch, self.num_heads, -1, self.head_dim)


def _check_masks(
    batch: int, keys: int, rows: int, is_causal: bool, key_padding_mask: Tensor | None
) -> None:
    """Reject masks that do not fit ``keys`` keys of ``batch`` sentences and ``rows`` query rows."""
    if key_padding_mask is not None and key_padding_mask.shape != (batch, keys):
        raise ValueError(
            f"key_padding_mask must have shape {(batch, keys)}, not {tuple(key_padding_mask.shape)}"
        )
    if is_causal and rows != batch:
        raise ValueError(
            f"mask_future_timesteps must be False if {rows} rows "
            f"share the keys of {batch} sentences, not True"
        )
