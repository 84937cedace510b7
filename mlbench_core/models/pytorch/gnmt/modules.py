"""Parts of GNMT: attention, encoder and decoder.

The LSTMs take time-first tensors; the attention takes batch-first tensors.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mlbench_core.models.pytorch.autocast import AutocastLSTM
from mlbench_core.ops.pytorch.attention_score import (
    attention_score,
    attention_score_reference,
    masked_softmax,
)

__all__ = [
    "Decoder",
    "EncodedSource",
    "Encoder",
    "Hidden",
    "NormalizedBahdanauAttention",
    "init_uniform",
]

Hidden: TypeAlias = "tuple[tuple[Tensor, Tensor], ...]"
"""State (h, c) of each decoder layer, each tensor of shape (1, rows, hidden_size)."""

_FIRST_RESIDUAL = 2
"""Index of the third layer, the first one that adds its input to its output."""


@dataclass(frozen=True)
class EncodedSource:
    """The encoded source sentences as the decoder reads them, computed once for all steps."""

    memory: Tensor
    """The encoder's outputs, shape (sentences, source, hidden_size)."""
    keys: Tensor
    """The vectors that attention compares queries with, shape (sentences, source, hidden_size)."""
    padding: Tensor
    """bool of shape (sentences, source), True at padding."""

    def pick(self, sentences: Tensor) -> EncodedSource:
        """Return the sentences at these indices, int64 of shape (new sentences,)."""
        return EncodedSource(
            self.memory.index_select(0, sentences),
            self.keys.index_select(0, sentences),
            self.padding.index_select(0, sentences),
        )


class NormalizedBahdanauAttention(nn.Module):
    r"""Additive attention with a normalized score vector.

    For a query :math:`y` and the encoder's output :math:`m_s` at source position s:

    .. math::
        e_s = \sum_h \hat v_h \tanh\big((W_q y)_h + (W_k m_s)_h + b_h\big), \qquad
        \hat v = g \frac{v}{|v|}, \qquad
        a = \mathrm{softmax}(e), \qquad c = \sum_s a_s m_s

    The softmax runs in float32 over the words of the source, not over its padding. Initially,
    the weights are uniform in (-0.1, 0.1), :math:`g = \sqrt{1/H}` and :math:`b = 0`.

    Args:
        hidden_size: H, width of the queries, the encoder's outputs and the projections.
        fusion: If True, the scores come from
            :func:`~mlbench_core.ops.pytorch.attention_score.attention_score`, which needs little
            memory. Otherwise they come from the plain formula. The numbers are the same up to
            rounding.

    References:
        Bahdanau, Cho and Bengio 2014, arXiv 1409.0473, appendix A.1.2.

        Salimans and Kingma 2016, Weight Normalization, arXiv 1602.07868, equation 2.

    Example:
        >>> attention = NormalizedBahdanauAttention(4)
        >>> source = attention.encoded(torch.randn(2, 5, 4), torch.tensor([5, 3]))
        >>> context, weights = attention(torch.randn(2, 1, 4), source)
        >>> context.shape, weights[1, 0, 3:].tolist()
        (torch.Size([2, 1, 4]), [0.0, 0.0])
    """

    def __init__(self, hidden_size: int, fusion: bool = True) -> None:
        super().__init__()
        self.fusion = fusion
        self.query_projection = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key_projection = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v = nn.Parameter(torch.empty(hidden_size))
        self.g = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        init_uniform(self)
        nn.init.constant_(self.g, hidden_size**-0.5)
        nn.init.zeros_(self.bias)

    def encoded(self, memory: Tensor, lengths: Tensor) -> EncodedSource:
        """Compute the tensors that are the same for all queries.

        Args:
            memory: The encoder's outputs, shape (sentences, source, hidden_size).
            lengths: Words of each source, integers of shape (sentences,).
        """
        positions = torch.arange(memory.shape[1], device=memory.device)
        padding = positions >= lengths.to(memory.device).unsqueeze(1)
        return EncodedSource(memory, self.key_projection(memory), padding)

    def forward(self, queries: Tensor, source: EncodedSource) -> tuple[Tensor, Tensor]:
        """Attend to the source.

        Args:
            queries: Shape (sentences, queries, hidden_size).
            source: Result of :meth:`encoded`.

        Returns:
            The attended outputs :math:`c`, in the shape of the queries, and the weights :math:`a`,
            float32 of shape (sentences, queries, source), exactly 0 at padding.
        """
        queries = self.query_projection(queries)
        v = self.g * self.v / self.v.norm()
        if self.fusion:
            scores = attention_score(queries, source.keys, self.bias, v)
        else:
            scores = attention_score_reference(queries, source.keys, self.bias, v)
        weights = masked_softmax(scores, source.padding.unsqueeze(1))
        # The weights are float32, and bmm takes two tensors of one dtype only.
        return torch.bmm(weights.to(source.memory.dtype), source.memory), weights


class Encoder(nn.Module):
    """One bidirectional LSTM layer and unidirectional ones above it.

    Residual connections begin at the third layer.

    Args:
        embedding: Embedding of the source's symbols. All layers have its width.
        num_layers: Number of layers, the bidirectional one included.
        dropout: Dropout probability of each layer's input.
    """

    def __init__(self, embedding: nn.Embedding, num_layers: int, dropout: float) -> None:
        super().__init__()
        width = embedding.embedding_dim
        self.embedding = embedding
        self.dropout = nn.Dropout(dropout)
        self.bidirectional = _lstm(width, width, bidirectional=True)
        self.layers = nn.ModuleList()
        # The first of these layers reads both directions of the bidirectional one.
        input_size = 2 * width
        for _ in range(num_layers - 1):
            self.layers.append(_lstm(input_size, width))
            input_size = width

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        """Encode source sentences.

        Only the bidirectional layer needs the ends of the sentences, because its backward direction
        starts there. The other layers read forward, so padding comes after all words, and attention
        ignores it.

        Args:
            inputs: int64 of shape (source, batch), padded at the end, in any order of lengths.
            lengths: Number of words of each source, integers of shape (batch,), preferably on the
                CPU.

        Returns:
            Shape (source, batch, hidden_size); meaningless at padding.

        Raises:
            ValueError: A length is greater than the number of source positions.
        """
        # pack_padded_sequence accepts lengths on the CPU only.
        lengths = lengths.cpu()
        if len(lengths) and int(lengths.max()) > len(inputs):
            raise ValueError(
                f"lengths must be at most {len(inputs)}, the "
                f"source positions, not {int(lengths.max())}"
            )
        x = self.dropout(self.embedding(inputs))
        # Packing rejects sentences of length 0, so an empty one counts as one symbol of padding.
        packed = pack_padded_sequence(x, lengths.clamp(min=1), enforce_sorted=False)
        x, _ = pad_packed_sequence(self.bidirectional(packed)[0], total_length=len(inputs))
        for number, layer in enumerate(self.layers, start=1):
            output, _ = layer(self.dropout(x))
            if number >= _FIRST_RESIDUAL:
                output = x + output
            x = output
        return x


class Decoder(nn.Module):
    r"""LSTM layers and a classifier; the layers above the first also read the attention's result.

    Here :math:`x^0_t` is the embedding of target word t, :math:`m` the encoder's outputs, and D
    dropout:

    .. math::
        y^1_t &= \mathrm{LSTM}^1(D(x^0_t)) \\
        c_t &= \mathrm{attention}(y^1_t, m) \\
        y^2_t &= \mathrm{LSTM}^2(D([y^1_t; c_t])) \\
        y^l_t &= \mathrm{LSTM}^l(D([y^{l-1}_t; c_t])) + y^{l-1}_t \qquad (l \ge 3) \\
        z_t &= W y^L_t + b

    In Wu et al. (figure 1) the first layer also reads :math:`c_{t-1}`, so each step must wait for
    the attention of the previous one. Here, as in GNMT version 2, :math:`c_t` comes from the first
    layer's output at the same step and goes to all layers above. Therefore only the LSTMs
    themselves are recurrent. In training each layer runs over the whole target in one call, and the
    attention of all steps is computed at once.

    Args:
        embedding: Embedding of the target's symbols. All layers have its width.
        num_layers: Number of LSTM layers.
        dropout: Dropout probability of each layer's input.
        fusion: As for :class:`NormalizedBahdanauAttention`.

    References:
        Wu et al. 2016, Google's Neural Machine Translation System, arXiv 1609.08144, section 3.
    """

    def __init__(
        self, embedding: nn.Embedding, num_layers: int, dropout: float, fusion: bool = True
    ) -> None:
        super().__init__()
        width = embedding.embedding_dim
        self.embedding = embedding
        self.dropout = nn.Dropout(dropout)
        self.first = _lstm(width, width)
        self.attention = NormalizedBahdanauAttention(width, fusion)
        self.layers = nn.ModuleList(_lstm(2 * width, width) for _ in range(num_layers - 1))
        self.classifier = nn.Linear(width, embedding.num_embeddings)
        init_uniform(self.classifier)

    def forward(
        self, inputs: Tensor, source: EncodedSource, hidden: Hidden | None = None
    ) -> tuple[Tensor, Tensor, Hidden]:
        """Return the scores of the next word after each word.

        Args:
            inputs: int64 of shape (target, rows). The rows of the first source sentence come first,
                then those of the second, and so on. Each sentence has the same number of rows.
            source: Encoded source sentences.
            hidden: State before the first word; None for zeros.

        Returns:
            Scores before the softmax, shape (target, rows, vocabulary); the attention on the
            source, float32 of shape (target, rows, source); and the state after the last word.
        """
        # torch's LSTM starts from zeros if its state is None.
        states = iter(hidden or itertools.repeat(None))
        x, state = self.first(self.dropout(self.embedding(inputs)), next(states))
        new_hidden = [state]
        # Attend once per step: all layers above read the same context.
        context, weights = self._attend(x, source)
        # Not strict, because itertools.repeat has no end.
        layers = zip(self.layers, states, strict=False)
        for number, (layer, old_state) in enumerate(layers, start=1):
            output, state = layer(self.dropout(torch.cat((x, context), dim=2)), old_state)
            if number >= _FIRST_RESIDUAL:
                output = x + output
            x = output
            new_hidden.append(state)
        return self.classifier(x), weights, tuple(new_hidden)

    def _attend(self, y: Tensor, source: EncodedSource) -> tuple[Tensor, Tensor]:
        """Attend in all steps at once; every step and row of a sentence queries its source.

        Args:
            y: Shape (target, rows, hidden_size).
            source: Encoded sentences; ``rows`` is a multiple of their number.

        Returns:
            Shapes (target, rows, hidden_size) and (target, rows, source).
        """
        steps, rows, _ = y.shape
        sentences = len(source.memory)
        width = rows // sentences
        # With one batch entry per sentence, the source needs no copy for each of its hypotheses.
        queries = y.unflatten(1, (sentences, width)).movedim(0, 1).flatten(1, 2)
        context, weights = self.attention(queries, source)
        context = context.unflatten(1, (steps, width)).movedim(1, 0).flatten(1, 2)
        weights = weights.unflatten(1, (steps, width)).movedim(1, 0).flatten(1, 2)
        return context, weights


def init_uniform(module: nn.Module, bound: float = 0.1) -> None:
    """Draw all parameters uniformly between ``-bound`` and ``bound``, as GNMT does."""
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -bound, bound)


def _lstm(input_size: int, hidden_size: int, bidirectional: bool = False) -> nn.LSTM:
    """Create one LSTM layer; its weights and the sum of its two biases are initially uniform."""
    lstm = AutocastLSTM(input_size, hidden_size, bidirectional=bidirectional)
    init_uniform(lstm)
    # The layer uses only the sum of bias_ih and bias_hh. With two uniform ones, the sum would not
    # be uniform.
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias_hh"):
            nn.init.zeros_(parameter)
    return lstm
