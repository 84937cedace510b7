"""Layers of the encoder and the decoder."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.models.pytorch.transformer.config import TransformerConfig
from mlbench_core.models.pytorch.transformer.modules.incremental import IncrementalState
from mlbench_core.models.pytorch.transformer.modules.multihead_attention import MultiheadAttention

__all__ = ["DecoderLayer", "EncoderLayer", "FeedForward", "Residual"]


class Residual(nn.Module):
    r"""A residual connection around a block, with dropout and layer norm.

    .. math::
        x + \mathrm{dropout}(f(\mathrm{LN}(x))) \quad\text{or}\quad
        \mathrm{LN}(x + \mathrm{dropout}(f(x)))

    Args:
        width: Number of features.
        dropout: Probability that a feature of the block's output becomes 0 in training.
        normalize_before: If True, layer norm comes before the block (first form), otherwise, as in
            the paper, after it.
    """

    def __init__(self, width: int, dropout: float, normalize_before: bool) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.normalize_before = normalize_before

    def forward(self, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply the block to x of shape (..., width)."""
        if self.normalize_before:
            return x + self.dropout(block(self.layer_norm(x)))
        return self.layer_norm(x + self.dropout(block(x)))


class FeedForward(nn.Module):
    r"""Two linear layers at each position, :math:`\max(0, x W_1 + b_1) W_2 + b_2`.

    Args:
        width: Number of features.
        hidden: Number of features between the two layers.
        dropout: Probability that a feature between the layers becomes 0 in training.
    """

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)
        for layer in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to x of shape (..., width)."""
        return self.fc2(self.dropout(F.relu(self.fc1(x))))


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network, each with a residual connection.

    Args:
        config: The model's dimensions.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, before = config.encoder_embed_dim, config.encoder_normalize_before
        self.self_attn = _attention(config, width, config.encoder_attention_heads)
        self.self_attn_residual = Residual(width, config.dropout, before)
        self.feed_forward = FeedForward(width, config.encoder_ffn_embed_dim, config.relu_dropout)
        self.feed_forward_residual = Residual(width, config.dropout, before)

    def forward(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Encode the source.

        Args:
            x: Shape (source, batch, width).
            padding_mask: bool of shape (batch, source), True at padding.

        Returns:
            A tensor of the shape of ``x``.
        """

        def attend(h: Tensor) -> Tensor:
            # Do not request weights, because the fused kernels do not return them.
            return self.self_attn(h, h, h, key_padding_mask=padding_mask, need_weights=False)[0]

        x = self.self_attn_residual(x, attend)
        return self.feed_forward_residual(x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Self-attention on earlier positions, attention on the source, then the feed-forward network.

    Args:
        config: The model's dimensions.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, before = config.decoder_embed_dim, config.decoder_normalize_before
        self.self_attn = _attention(config, width, config.decoder_attention_heads)
        self.self_attn_residual = Residual(width, config.dropout, before)
        self.encoder_attn = _attention(config, width, config.decoder_attention_heads)
        self.encoder_attn_residual = Residual(width, config.dropout, before)
        self.feed_forward = FeedForward(width, config.decoder_ffn_embed_dim, config.relu_dropout)
        self.feed_forward_residual = Residual(width, config.dropout, before)

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor,
        encoder_padding_mask: Tensor | None,
        padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Decode the target.

        Args:
            x: Shape (target, rows, width).
            encoder_out: Shape (source, batch, width); with a state, ``rows`` may be a multiple of
                ``batch``.
            encoder_padding_mask: bool of shape (batch, source), True at padding.
            padding_mask: bool of shape (rows, target), True at padding of the target; needed only
                for padding on the left.
            incremental_state: The caches of a generation; ``x`` then holds only the new positions.
            need_weights: If True, return the attention on the source.

        Returns:
            A tensor of the shape of ``x``, and the attention, shape (rows, target, source), or
            None.
        """
        weights: Tensor | None = None

        def attend(h: Tensor) -> Tensor:
            options = {
                "mask_future_timesteps": True,
                "key_padding_mask": padding_mask,
                "need_weights": False,
            }
            return self.self_attn(h, h, h, incremental_state=incremental_state, **options)[0]

        def attend_to_source(h: Tensor) -> Tensor:
            # A residual block returns one tensor, so the weights leave this function through a
            # variable.
            nonlocal weights
            options = {
                "key_padding_mask": encoder_padding_mask,
                "need_weights": need_weights,
                "static_kv": True,
            }
            output, weights = self.encoder_attn(
                h, encoder_out, encoder_out, incremental_state=incremental_state, **options
            )
            return output

        x = self.self_attn_residual(x, attend)
        x = self.encoder_attn_residual(x, attend_to_source)
        return self.feed_forward_residual(x, self.feed_forward), weights


def _attention(config: TransformerConfig, width: int, heads: int) -> MultiheadAttention:
    return MultiheadAttention(
        width,
        heads,
        config.attention_dropout,
        config.softmax_type,
        backend=config.attention_backend,
    )
