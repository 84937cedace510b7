"""GNMT, Google's recurrent translation model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mlbench_core.arguments import check_at_least, check_positive
from mlbench_core.models.pytorch.gnmt.modules import Decoder, EncodedSource, Encoder, Hidden

__all__ = ["GNMT", "DecoderContext"]

_PAD = 0
_INIT_BOUND = 0.1

# The docstring of GNMT gives the reason for the larger init_bound of the small model.
_PRESETS: dict[str, dict[str, Any]] = {
    "big": {"hidden_size": 1024, "num_layers": 4, "dropout": 0.2},
    "small": {"hidden_size": 256, "num_layers": 2, "dropout": 0.3, "init_bound": 0.2},
}


@dataclass(frozen=True)
class DecoderContext:
    """The state of a generation, which :meth:`GNMT.generate` takes and returns."""

    source: EncodedSource
    """The source sentences."""
    hidden: Hidden | None = None
    """The decoder's state; None before the first word.

    Each sentence has the same number of rows: first those of the first sentence, then those of the
    second, and so on.
    """

    def reorder(self, rows: Tensor, sentences: Tensor | None = None) -> DecoderContext:
        """Return the context that follows the rows of a search.

        Args:
            rows: int64 of shape (new rows,): the old row that each new row continues.
            sentences: int64 of shape (new sentences,): the old sentences that are still in the
                batch; None if all are.
        """
        source = self.source
        if sentences is not None:
            source = source.pick(sentences)
        if self.hidden is None:
            return DecoderContext(source)
        hidden = tuple((h.index_select(1, rows), c.index_select(1, rows)) for h, c in self.hidden)
        return DecoderContext(source, hidden)

    def by_row(self, rows: Tensor) -> DecoderContext:
        """Return the context of any choice of rows, each with its own source.

        Args:
            rows: int64 of shape (new rows,): the old row that each new row continues.
        """
        # Before the first word, each sentence has one row.
        width = 1
        if self.hidden is not None:
            width = self.hidden[0][0].shape[1] // len(self.source.memory)
        return self.reorder(rows, rows.div(width, rounding_mode="floor"))


class GNMT(nn.Module):
    r"""A translation model of LSTM layers and attention.

    The encoder has one bidirectional and ``num_layers - 1`` unidirectional LSTM layers, the decoder
    ``num_layers``. Both have residual connections from the third layer on. The output of the
    decoder's first layer is the query of normalized Bahdanau attention, and all layers above read
    the result of the attention. For the formulas, see
    :class:`~mlbench_core.models.pytorch.gnmt.modules.Decoder`. The classifier does not share the
    embedding's weights.

    All weights start uniform in (-0.1, 0.1), also those of the LSTM layers. With another
    ``init_bound`` b, matrices start in (-b, b). A sum of H products grows with the root of H.
    Therefore, signals with b = 0.2 and a width of 256 are as large as with b = 0.1 and a width of
    1,024. With V symbols, width H and L layers the model has

    .. math::
        \underbrace{V H}_\text{embedding}
        + \underbrace{16 H^2 + 16 H}_\text{bidirectional}
        + \underbrace{12 H^2 + 8 H}_\text{reads two directions}
        + \underbrace{(L - 2) (8 H^2 + 8 H)}_\text{encoder's others}
        + \underbrace{8 H^2 + 8 H + (L - 1)(12 H^2 + 8 H)}_\text{decoder}
        + \underbrace{2 H^2 + 2 H + 1}_\text{attention}
        + \underbrace{V H + V}_\text{classifier}

    parameters. For L = 4 that is :math:`90 H^2 + 74 H + 1 + (2 H + 1) V`. A model without a shared
    embedding has a second one, of V H parameters.

    Symbol 0 is padding, and its embedding is always 0. Inputs are time-first, padded at the end.

    Args:
        vocab_size: V, symbols of source and target together.
        hidden_size: H, width of embeddings and of all layers.
        num_layers: L, layers of the encoder and of the decoder, at least 2.
        dropout: Probability that a feature of a layer's input is dropped.
        share_embedding: If True, source and target share one embedding.
        fusion: If True, the attention scores come from the operator that needs little memory,
            otherwise from the plain formula. The results are the same up to rounding.
        init_bound: b, the bound of the initial weights in matrices.

    Raises:
        ValueError: An argument is out of its bounds.

    References:
        Wu et al. 2016, Google's Neural Machine Translation System, arXiv 1609.08144.

    Example:
        >>> model = GNMT(vocab_size=11, hidden_size=4, num_layers=2)
        >>> # Two sentences, of 4 and 3 words.
        >>> source = torch.tensor([[2, 2], [5, 7], [9, 3], [3, 0]])
        >>> model(source, torch.tensor([4, 3]), torch.tensor([[2, 2], [8, 6]])).shape
        torch.Size([2, 2, 11])
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int = 1024,
        num_layers: int = 4,
        dropout: float = 0.2,
        share_embedding: bool = True,
        fusion: bool = True,
        *,
        init_bound: float = _INIT_BOUND,
    ) -> None:
        super().__init__()
        check_positive("init_bound", init_bound)
        check_at_least("vocab_size", vocab_size, 1)
        check_at_least("hidden_size", hidden_size, 1)
        # The encoder has a bidirectional layer and at least one above it.
        check_at_least("num_layers", num_layers, 2)
        self.vocab_size = vocab_size
        source_embedding = _embedding(vocab_size, hidden_size)
        target_embedding = source_embedding
        if not share_embedding:
            target_embedding = _embedding(vocab_size, hidden_size)
        self.encoder = Encoder(source_embedding, num_layers, dropout)
        self.decoder = Decoder(target_embedding, num_layers, dropout, fusion)
        # The layers draw from the default range. Scaling them keeps the random numbers the same for
        # every bound.
        _scale_matrices(self, init_bound / _INIT_BOUND)

    @classmethod
    def preset(cls, name: str, vocab_size: int, **changes: Any) -> GNMT:
        """Create a model by name.

        Args:
            name: ``"big"`` is the model of task 4a; ``"small"`` (2 layers, 256 wide) is for small
                data sets such as Multi30k on a CPU.
            vocab_size: Symbols of source and target together.
            changes: Arguments of the class that differ from the preset.

        Returns:
            The model, with newly drawn weights.

        Raises:
            ValueError: The name is unknown.

        Example:
            >>> GNMT.preset("small", 11, hidden_size=8).vocab_size
            11
        """
        if name not in _PRESETS:
            raise ValueError(f"preset must be one of {', '.join(_PRESETS)}, not {name!r}")
        return cls(vocab_size, **{**_PRESETS[name], **changes})

    def forward(
        self, input_encoder: Tensor, input_enc_len: Tensor, input_decoder: Tensor
    ) -> Tensor:
        """Return the scores of the next word at each target position.

        Args:
            input_encoder: Source sentences, int64 of shape (source, batch), padded at the end, in
                any order.
            input_enc_len: Number of words of each source, integers of shape (batch,). The model
                ignores the symbols after them. Pass a CPU tensor: a copy from a GPU makes the host
                wait.
            input_decoder: Target sentences without their last symbol, int64 of shape (target,
                batch).

        Returns:
            Scores before the softmax, shape (target, batch, ``vocab_size``).

        Raises:
            ValueError: Shapes do not fit.
        """
        if input_decoder.dim() != 2 or input_decoder.shape[1:] != input_encoder.shape[1:]:
            raise ValueError(
                "input_decoder and input_encoder must have the shapes (target, batch) and "
                "(source, batch), not "
                f"{tuple(input_decoder.shape)} and {tuple(input_encoder.shape)}"
            )
        context = self.context(self.encode(input_encoder, input_enc_len), input_enc_len)
        scores, _, _ = self.decoder(input_decoder, context.source)
        return scores

    def encode(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        """Encode source sentences.

        Args:
            inputs: int64 of shape (source, batch).
            lengths: Number of words of each sentence, integers of shape (batch,).

        Returns:
            The encoder's outputs, shape (source, batch, ``hidden_size``).

        Raises:
            ValueError: Shapes do not fit.
        """
        if inputs.dim() != 2 or lengths.shape != inputs.shape[1:]:
            raise ValueError(
                "source and lengths must have the shapes (source, batch) and (batch,), not "
                f"{tuple(inputs.shape)} and {tuple(lengths.shape)}"
            )
        memory: Tensor = self.encoder(inputs, lengths)
        return memory

    def context(self, memory: Tensor, lengths: Tensor) -> DecoderContext:
        """Return the context in which a generation begins.

        Args:
            memory: Outputs of :meth:`encode`.
            lengths: Number of words of each source, integers of shape (batch,).
        """
        return DecoderContext(
            self.decoder.attention.encoded(memory.transpose(0, 1).contiguous(), lengths)
        )

    def step(
        self, tokens: Tensor, context: DecoderContext
    ) -> tuple[Tensor, Tensor, DecoderContext]:
        """Feed one more word.

        Args:
            tokens: Newest word of each row, int64 of shape (rows,).
            context: Context of the last step, or the first one.

        Returns:
            Scores before the softmax, shape (rows, vocabulary), attention on the source, float32 of
            shape (rows, source), and the new context.
        """
        scores, weights, hidden = self.decoder(tokens.unsqueeze(0), context.source, context.hidden)
        return scores[0], weights[0], DecoderContext(context.source, hidden)

    def generate(
        self, inputs: Tensor, context: DecoderContext | Sequence[Any], beam_size: int
    ) -> tuple[Tensor, Tensor, Tensor, DecoderContext]:
        """Run one step of a generation.

        This is the interface of
        :class:`~mlbench_core.models.pytorch.generation.beam_search.SequenceGenerator`.

        Args:
            inputs: Newest word of each row, int64 of shape (1, rows).
            context: Context of the last step. At first the result of :meth:`context`, or a list of
                the result of :meth:`encode`, the lengths, and None.
            beam_size: Number of words to propose for each row; fewer if the vocabulary is smaller.

        Returns:
            The likeliest next words and their log-probabilities, shape (1, rows, ``beam_size``),
            the attention on the source, shape (1, rows, source), and the new context.
        """
        scores, weights, context = self.step(inputs.reshape(-1), self._as_context(context))
        # float32, because sums of log-probabilities in half precision are too coarse to rank
        # hypotheses.
        count = min(beam_size, self.vocab_size)
        log_probs, words = scores.float().log_softmax(dim=-1).topk(count, dim=-1)
        return words.unsqueeze(0), log_probs.unsqueeze(0), weights.unsqueeze(0), context

    def reorder_context(
        self, context: DecoderContext | Sequence[Any], rows: Tensor
    ) -> DecoderContext:
        """Return the context whose row r is row ``rows[r]`` of the old one.

        Args:
            context: The old context.
            rows: int64 of shape (new rows,).
        """
        return self._as_context(context).by_row(rows)

    def _as_context(self, context: DecoderContext | Sequence[Any]) -> DecoderContext:
        if isinstance(context, DecoderContext):
            return context
        memory, lengths, hidden = context
        return DecoderContext(self.context(memory, lengths).source, hidden)


def _embedding(vocab_size: int, hidden_size: int) -> nn.Embedding:
    """Create an embedding with uniform weights, and zeros for padding."""
    embedding = nn.Embedding(vocab_size, hidden_size, padding_idx=_PAD)
    with torch.no_grad():
        embedding.weight.uniform_(-_INIT_BOUND, _INIT_BOUND)
        # padding_idx gives this row no gradient, so it stays 0.
        embedding.weight[_PAD] = 0.0
    return embedding


@torch.no_grad()
def _scale_matrices(module: nn.Module, factor: float) -> None:
    """Scale the matrices; biases and the attention's score vector do not change."""
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.mul_(factor)
