"""Multi-head attention, time first."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.models.pytorch.transformer.modules.attention import (
    attention_mask,
    fused_attention,
    reference_attention,
)
from mlbench_core.models.pytorch.transformer.modules.incremental import KeyValueCache
from mlbench_core.ops.pytorch.attention import (
    MAX_POSITIONS,
    short_attention,
    short_attention_kv,
    short_attention_qkv,
    uses_kernel,
)

__all__ = ["MultiheadAttention"]

_SOFTMAX_TYPES = ("default", "fast_fill")
_BACKENDS = ("auto", "reference", "fused", "kernel")


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
        softmax_type: ``"default"``: as ``backend`` says. ``"fast_fill"``, for which version 3.0 had a kernel that fills
            the mask: mask and softmax in torch's fused kernels, as with ``backend="fused"``. The results are the same.
        bias: Whether the projections add a bias.
        backend: ``"reference"`` (plain), ``"fused"`` (torch's kernels; the plain path where weights are asked for),
            ``"kernel"`` (:func:`~mlbench_core.ops.pytorch.attention.short_attention`, which is plain PyTorch where its
            CUDA kernels are not; what ``"fused"`` does where weights are asked for or a sentence is longer than 128),
            or ``"auto"``, which is ``"kernel"`` where the CUDA kernels take the tensors and ``"fused"`` elsewhere.

    Attributes:
        dropout_offset: Tells the dropout of this module from that of others which get the same ``dropout_seed``.

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
        backend: Literal["auto", "reference", "fused", "kernel"] = "auto",
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
        if softmax_type == "fast_fill" and backend not in ("auto", "fused"):
            raise ValueError(
                f"backend must be 'auto' or 'fused' with softmax_type='fast_fill', not {backend!r}: leave one of them "
                "out"
            )
        self.backend = "fused" if softmax_type == "fast_fill" else backend
        self.dropout_offset = 0
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
        *,
        dropout_seed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        With an ``incremental_state`` the module remembers its keys and values: of self-attention, to which each call
        adds its own positions; with ``static_kv``, those of the first call, which later calls use again whatever key
        and value they get. Hypotheses of one sentence may share static ones: the query then has a multiple of their
        batch, consecutive rows belonging together.

        With ``"kernel"``, padded positions of self-attention are padded queries too: their output is zeros before the
        output projection, where the other backends compute what nothing should read.

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
            dropout_seed: int64 of shape (1,), from which ``"kernel"`` makes its dropout: the same seed drops the same
                weights again. Drawn where it is needed if None. Other backends drop by torch's random numbers.

        Returns:
            The output, shape (target, batch, embed_dim), and the weights averaged over the heads, shape (batch, target,
            source), or None.

        Raises:
            ValueError: Shapes do not fit.
        """
        target, rows, width = query.shape
        if width != self.embed_dim:
            raise ValueError(f"query has shape {tuple(query.shape)}; its last dimension must be {self.embed_dim}")
        is_causal = mask_future_timesteps and target > 1
        p = self.dropout if self.training else 0.0
        options: dict[str, Any] = {
            "is_causal": is_causal,
            "dropout_p": p,
            "seed": dropout_seed,
            "offset": self.dropout_offset,
        }
        if incremental_state is None:
            parts = self._projections(query, key, value)
            _check_masks(parts[-1].shape[1], parts[-1].shape[0], rows, is_causal, key_padding_mask)
            output = None if need_weights else self._whole_sentences(parts, key_padding_mask, options)
            if output is not None:
                return self.out_proj(output), None
            q, k, v = self._split_parts(parts)
        else:
            q, k, v = self._remember(query, key, value, incremental_state, static_kv)
            _check_masks(k.shape[0], k.shape[2], rows, is_causal, key_padding_mask)
        weights = None
        if need_weights or self.backend == "reference":
            mask = attention_mask(q.shape[2], k.shape[2], key_padding_mask, is_causal, q.device)
            output, weights = reference_attention(q, k, v, mask, p)
        elif self._takes_kernel(views := [x.transpose(1, 2) for x in (q, k, v)]):
            output = short_attention(*views, key_padding=key_padding_mask, **options).transpose(1, 2)
        else:
            output = fused_attention(q, k, v, key_padding_mask, is_causal, p)
        output = self.out_proj(self._merge_heads(output, target, rows))
        if weights is None or not need_weights:
            return output, None
        return output, weights.mean(dim=1).reshape(rows, target, -1)

    def extra_repr(self) -> str:
        """The arguments, for ``repr``."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}"

    def _projections(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, ...]:
        """The projection of queries, keys and values, fused as far as their inputs are the same objects.

        Returns:
            (qkv,), (q, kv) or (q, k, v), each of shape (positions, rows, ``embed_dim`` for each that is fused).
        """
        if key is None or value is None:
            raise ValueError("key and value are None; only static ones that were remembered can be left out")
        if key is query and value is query:
            return (self._linear(query, 0, 3),)
        if key is value:
            return self._linear(query, 0, 1), self._linear(key, 1, 3)
        return self._linear(query, 0, 1), self._linear(key, 1, 2), self._linear(value, 2, 3)

    def _split_parts(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """What :meth:`_projections` gives, as queries, keys and values (batch, heads, positions, head features)."""
        q, k, v = (third for part in parts for third in part.split(self.embed_dim, dim=-1))
        batch = k.shape[1]
        return self._split_heads(q, batch), self._split_heads(k, batch), self._split_heads(v, batch)

    def _remember(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        state: MutableMapping[nn.Module, KeyValueCache],
        static_kv: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, remembered ones with them, of shape (batch, heads, positions, head features)."""
        cache = state.get(self)
        if static_kv and cache is not None:
            q = self._linear(query, 0, 1)
            return self._split_heads(q, cache.keys.shape[0]), cache.keys, cache.values
        q, k, v = self._split_parts(self._projections(query, key, value))
        if cache is not None:
            k, v = torch.cat((cache.keys, k), dim=2), torch.cat((cache.values, v), dim=2)
        state[self] = KeyValueCache(k, v, is_static=static_kv)
        return q, k, v

    def _whole_sentences(
        self, parts: tuple[Tensor, ...], key_padding_mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor | None:
        """Attention straight from the projections, (target, rows, embed_dim); None where the kernels are not for it.

        A fused projection gets its gradient in one piece, and nothing is transposed in memory.
        """
        if self.backend in ("reference", "fused"):
            return None
        heads = (self.num_heads, self.head_dim)
        views = [
            part.unflatten(-1, heads if part.shape[-1] == self.embed_dim else (-1, *heads)).transpose(0, 1)
            for part in parts
        ]
        if views[0].shape[0] != views[-1].shape[0] or not self._takes_kernel(views):
            return None
        if len(views) == 1:
            output = short_attention_qkv(*views, padding=key_padding_mask, **options)
        elif len(views) == 2:
            output = short_attention_kv(*views, key_padding=key_padding_mask, **options)
        else:
            output = short_attention(*views, key_padding=key_padding_mask, **options)
        return output.transpose(0, 1).flatten(2)

    def _takes_kernel(self, parts: list[Tensor]) -> bool:
        """Whether tensors of shape (batch, positions, ..., head features) are for :func:`short_attention`."""
        queries, keys = parts[0].shape[1], parts[-1].shape[1]
        if self.backend == "kernel":
            return max(queries, keys) <= MAX_POSITIONS
        return self.backend == "auto" and uses_kernel(*parts, max_query=queries, max_key=keys)

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


def _check_masks(batch: int, keys: int, rows: int, is_causal: bool, key_padding_mask: Tensor | None) -> None:
    """Refuse masks that do not fit ``keys`` keys of ``batch`` sentences and ``rows`` rows of queries."""
    if key_padding_mask is not None and key_padding_mask.shape != (batch, keys):
        raise ValueError(f"key_padding_mask has shape {tuple(key_padding_mask.shape)}; it must be {(batch, keys)}")
    if is_causal and rows != batch:
        raise ValueError(f"{rows} rows share {batch} keys; mask_future_timesteps needs keys for each row")
