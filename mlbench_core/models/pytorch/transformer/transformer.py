"""The Transformer model for translation."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from mlbench_core.models.pytorch.transformer.config import TransformerConfig
from mlbench_core.models.pytorch.transformer.modules.incremental import IncrementalState
from mlbench_core.models.pytorch.transformer.modules.layers import DecoderLayer, EncoderLayer
from mlbench_core.models.pytorch.transformer.modules.positions import (
    LearnedPositions,
    SinusoidalPositions,
)

__all__ = ["TransformerDecoder", "TransformerEncoder", "TransformerModel", "Vocabulary"]


class Vocabulary(Protocol):
    """The methods of a vocabulary that the model calls; WMT17's dictionary has them."""

    def pad(self) -> int:
        """Return the number of the padding symbol."""

    def eos(self) -> int:
        """Return the number of the symbol that ends a sentence."""

    def __len__(self) -> int:
        """Return the number of symbols."""


class TransformerModel(nn.Module):
    r"""An encoder and a decoder of attention layers, for translation.

    Take V symbols, width d, feed-forward width f, N layers in the encoder and N in the decoder, one
    shared embedding and sinusoidal positions. The model then has :math:`V d + N (4 d^2 + 2 d f + f
    + 5 d) + N (8 d^2 + 2 d f + f + 7 d) + 4 d` parameters. Attention has no biases, as in the
    paper. By default, layer norms come before each block and once after the last one.

    Args:
        args: The dimensions: a
            :class:`~mlbench_core.models.pytorch.transformer.config.TransformerConfig`, or any
            object with its fields as attributes.
        src_dict: Vocabulary of the source.
        trg_dict: Vocabulary of the target.

    Raises:
        ValueError: Embeddings are shared but the vocabularies differ.

    References:
        Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762.

    Example:
        >>> import torch
        >>> from mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary import Dictionary
        >>> words = Dictionary(symbols=["ein_", "Hund_"])
        >>> model = TransformerModel(TransformerConfig.preset("small"), words, words)
        >>> source = torch.tensor([[2, 3, 1], [0, 3, 1]])  # padded on the left
        >>> scores, attention = model(source, torch.tensor([3, 2]), torch.tensor([[1, 2], [1, 3]]))
        >>> scores.shape, attention
        (torch.Size([2, 2, 4]), None)
    """

    def __init__(self, args: object, src_dict: Vocabulary, trg_dict: Vocabulary) -> None:
        super().__init__()
        self.config = config = TransformerConfig.from_args(args)
        source_embedding = _embedding(src_dict, config.encoder_embed_dim)
        if not config.share_all_embeddings:
            target_embedding = _embedding(trg_dict, config.decoder_embed_dim)
        elif src_dict is trg_dict or src_dict == trg_dict:
            target_embedding = source_embedding
        else:
            raise ValueError(
                "share_all_embeddings must be False for two vocabularies, not True: src_dict "
                f"({len(src_dict)} symbols) and trg_dict ({len(trg_dict)} symbols) are not equal"
            )
        self.encoder = TransformerEncoder(config, source_embedding)
        self.decoder = TransformerDecoder(config, target_embedding)

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor | None, prev_output_tokens: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Score the next token at each target position.

        Args:
            src_tokens: int64 of shape (batch, source), padded on either side.
            src_lengths: Tokens of each source, int64 of shape (batch,). It has no effect: the
                tokens show the padding.
            prev_output_tokens: The target shifted right by the end symbol, int64 of shape (batch,
                target).

        Returns:
            ``(scores, attention)``: scores before the softmax, shape (batch, target, target
            symbols), and None. The attention on the source is not returned, because the fused
            kernels do not return it.

        Raises:
            ValueError: Sentences are longer than the number of the model's positions.
        """
        encoder_out, padding_mask = self.encoder(src_tokens, src_lengths)
        scores, attention = self.decoder(prev_output_tokens, encoder_out, padding_mask)
        return scores, attention

    def max_decoder_positions(self) -> int:
        """Return the length of the longest target, in tokens."""
        return self.config.max_target_positions


class TransformerEncoder(nn.Module):
    """The encoder, which embeds a source and attends to it.

    Args:
        config: The dimensions.
        embed_tokens: Embedding of the source's symbols.
    """

    def __init__(self, config: TransformerConfig, embed_tokens: nn.Embedding) -> None:
        super().__init__()
        width = config.encoder_embed_dim
        self.embed_tokens = embed_tokens
        self.embed_positions = _positions(
            config.encoder_learned_pos, config.max_source_positions, embed_tokens
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        # With norms before the blocks, nothing has normalized the output of the last one.
        self.layer_norm: nn.Module = nn.Identity()
        if config.encoder_normalize_before:
            self.layer_norm = nn.LayerNorm(width)

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode source sentences.

        Args:
            src_tokens: int64 of shape (batch, source).
            src_lengths: Has no effect.

        Returns:
            Shape (source, batch, width), and the padding mask, bool of shape (batch, source), True
            at padding.
        """
        x = _embed(src_tokens, self.embed_tokens, self.embed_positions(src_tokens))
        x = self.dropout(x).transpose(0, 1)
        # Padded positions of x hold values too, so every layer gets the mask.
        padding_mask = src_tokens.eq(_padding_idx(self.embed_tokens))
        for layer in self.layers:
            x = layer(x, padding_mask)
        return self.layer_norm(x), padding_mask


class TransformerDecoder(nn.Module):
    """The decoder, which attends to the target so far and to the source, and scores the next token.

    Args:
        config: The dimensions.
        embed_tokens: Embedding of the target's symbols.
    """

    def __init__(self, config: TransformerConfig, embed_tokens: nn.Embedding) -> None:
        super().__init__()
        width = config.decoder_embed_dim
        self.left_pad = config.left_pad_target
        self.embed_tokens = embed_tokens
        self.embed_positions = _positions(
            config.decoder_learned_pos, config.max_target_positions, embed_tokens
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        # With norms before the blocks, nothing has normalized the output of the last one.
        self.layer_norm: nn.Module = nn.Identity()
        if config.decoder_normalize_before:
            self.layer_norm = nn.LayerNorm(width)
        self.output_projection = nn.Linear(width, embed_tokens.num_embeddings, bias=False)
        if config.share_all_embeddings or config.share_decoder_input_output_embed:
            # One parameter: its gradient sums the gradients of all uses.
            self.output_projection.weight = embed_tokens.weight
        else:
            nn.init.normal_(self.output_projection.weight, std=width**-0.5)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Tensor,
        encoder_padding_mask: Tensor | None,
        incremental_state: IncrementalState | None = None,
        before: int = 0,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Score the next token at each position.

        Args:
            prev_output_tokens: int64 of shape (rows, target); with a state, only the new positions.
            encoder_out: Shape (source, batch, width). With a state, ``rows`` may be a multiple of
                ``batch``.
            encoder_padding_mask: bool of shape (batch, source).
            incremental_state: The caches of a generation.
            before: Number of positions in the caches.
            need_weights: If True, return the last layer's attention on the source.

        Returns:
            Scores before the softmax, shape (rows, target, symbols), and the attention, shape
            (rows, target, source), or None.
        """
        padding_mask = None
        # Padding on the right comes after all words, so no word sees it. Generated tokens have no
        # padding.
        if self.left_pad and incremental_state is None:
            padding_mask = prev_output_tokens.eq(_padding_idx(self.embed_tokens))
        positions = self.embed_positions(prev_output_tokens, before)
        x = self.dropout(_embed(prev_output_tokens, self.embed_tokens, positions)).transpose(0, 1)
        weights = None
        for layer in self.layers:
            masks = (encoder_padding_mask, padding_mask)
            # Only the last layer's weights are returned, so the others can use fused kernels.
            needs = need_weights and layer is self.layers[-1]
            x, weights = layer(x, encoder_out, *masks, incremental_state, needs)
        return F.linear(self.layer_norm(x).transpose(0, 1), self.output_projection.weight), weights


def _embedding(vocabulary: Vocabulary, width: int) -> nn.Embedding:
    """Create an embedding with normal weights of variance 1/width, and zeros for padding."""
    embedding = nn.Embedding(len(vocabulary), width, padding_idx=vocabulary.pad())
    nn.init.normal_(embedding.weight, std=width**-0.5)
    # The line above has overwritten the zeros of padding.
    nn.init.zeros_(embedding.weight[vocabulary.pad()])
    return embedding


def _positions(is_learned: bool, max_positions: int, embedding: nn.Embedding) -> nn.Module:
    """Create the position vectors that are added to an embedding."""
    width, padding_idx = embedding.embedding_dim, _padding_idx(embedding)
    if is_learned:
        return LearnedPositions(width, max_positions, padding_idx)
    return SinusoidalPositions(width, max_positions, padding_idx)


def _padding_idx(embedding: nn.Embedding) -> int:
    """Return the number of the padding symbol, which these embeddings always have."""
    padding_idx: Any = embedding.padding_idx
    return padding_idx


def _embed(tokens: Tensor, embedding: nn.Embedding, positions: Tensor) -> Tensor:
    """Return embeddings times the root of the width, plus positions: (batch, positions, width)."""
    # The weights have variance 1/width; the factor gives embeddings variance 1 (Vaswani et al.
    # 2017, section 3.4).
    x = math.sqrt(embedding.embedding_dim) * embedding(tokens)
    return x + positions.to(x.dtype)
