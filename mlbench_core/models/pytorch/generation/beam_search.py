"""Greedy and beam search for models that generate step by step, such as GNMT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mlbench_core.arguments import check_at_least
from mlbench_core.models.pytorch.generation.decoding import SearchOptions, search
from mlbench_core.models.pytorch.generation.proposals import Constraints, Proposal, keep_forced
from mlbench_core.models.pytorch.generation.scores import GNMTScore, LengthPenaltyScore, Score

__all__ = ["GeneratingModel", "SequenceGenerator", "reorder_context"]


class GeneratingModel(Protocol):
    """The interface that :class:`SequenceGenerator` needs of a model.

    Two attributes are optional. ``batch_first`` (bool, False if missing) says whether ``generate``
    takes and returns (rows, 1) instead of (1, rows). ``reorder_context(context, rows)`` returns the
    context whose row r is row ``rows[r]`` of the old one. If it is missing, :func:`reorder_context`
    does that for a context of the usual three parts.
    """

    def generate(
        self, inputs: Tensor, context: Any, beam_size: int
    ) -> tuple[Tensor, Tensor, Tensor | None, Any]:
        """Run one time step.

        Args:
            inputs: Newest token of each row, int64 of shape (1, rows), or (rows, 1) with
                ``batch_first``.
            context: The context that the last step returned, or the initial context.
            beam_size: Number of tokens to propose for each row, at most the size of the vocabulary.

        Returns:
            The likeliest next tokens (int64) and their log-probabilities, both of shape (1, rows,
            beam_size); the attention on the source, shape (1, rows, source), exactly 0 at padding,
            or None; and the new context. With ``batch_first`` the first two dimensions are swapped.
        """


class SequenceGenerator:
    r"""A generator that translates by greedy search (the likeliest word) or by beam search.

    Finished translations are ranked by
    :class:`~mlbench_core.models.pytorch.generation.scores.GNMTScore`.

    Args:
        model: See :class:`GeneratingModel`. It should be in evaluation mode.
        beam_size: Hypotheses kept for each sentence.
        max_seq_len: Length of the longest translation, with the start and the end symbol, at least
            2. A translation that reaches it gets an end symbol of probability 1 there.
        len_norm_factor: :math:`\alpha` of the length normalization.
        len_norm_const: :math:`c` of the length normalization.
        cov_penalty_factor: :math:`\beta` of the coverage penalty.
        eos: End symbol; the default is that of the WMT16 vocabulary.
        pad: Padding symbol; the default is that of the WMT16 vocabulary.

    Raises:
        ValueError: An argument is out of its bounds.

    References:
        Wu et al. 2016, Google's Neural Machine Translation System, arXiv 1609.08144, section 7.
    """

    def __init__(
        self,
        model: GeneratingModel,
        beam_size: int = 5,
        max_seq_len: int = 100,
        len_norm_factor: float = 0.6,
        len_norm_const: float = 5,
        cov_penalty_factor: float = 0.1,
        *,
        eos: int = 3,
        pad: int = 0,
    ) -> None:
        check_at_least("max_seq_len", max_seq_len, 2)
        check_at_least("beam_size", beam_size, 1)
        self.model = model
        self.beam_size = beam_size
        self.max_seq_len = max_seq_len
        self.score = GNMTScore(len_norm_factor, len_norm_const, cov_penalty_factor)
        self.eos = eos
        self.pad = pad

    def greedy_search(
        self, batch_size: int, initial_input: Tensor, initial_context: Any = None
    ) -> tuple[Tensor, Tensor, int]:
        """Take the likeliest word at each step.

        Args:
            batch_size: Number of sentences.
            initial_input: Start symbol of each sentence, int64 of any shape with ``batch_size``
                elements.
            initial_context: Context for the first call of the model's ``generate``, with one row
                for each sentence.

        Returns:
            The translations, int64 of shape (batch_size, max_seq_len): start symbol, words, end
            symbol, padding. Their lengths with start and end symbol, int64 of shape (batch_size,).
            The number of time steps.

        Raises:
            ValueError: ``initial_input`` does not have ``batch_size`` elements.
        """
        # By log-probability alone: a longer hypothesis never has a higher one than the first that
        # ends, so the search of a sentence stops there.
        return self._search(batch_size, initial_input, initial_context, 1, LengthPenaltyScore(0.0))

    def beam_search(
        self, batch_size: int, initial_input: Tensor, initial_context: Any = None
    ) -> tuple[Tensor, Tensor, int]:
        """Keep the ``beam_size`` best hypotheses at each step and return the best finished one.

        Arguments, results and errors: see :meth:`greedy_search`.
        """
        return self._search(batch_size, initial_input, initial_context, self.beam_size, self.score)

    def _search(
        self,
        batch_size: int,
        initial_input: Tensor,
        initial_context: Any,
        beam_size: int,
        score: Score,
    ) -> tuple[Tensor, Tensor, int]:
        if initial_input.numel() != batch_size:
            raise ValueError(
                f"initial_input must have batch_size ({batch_size}) elements, not shape "
                f"{tuple(initial_input.shape)}"
            )
        start = initial_input.reshape(batch_size)
        options = SearchOptions(eos=self.eos, pad=self.pad, beam_size=beam_size, score=score)
        # The search does not count the start symbol, and its results do not have it.
        state = _GeneratingState(self.model, initial_context)
        hypotheses = search(state, start, options, self.max_seq_len - 1)
        translation = torch.cat((start.unsqueeze(1), hypotheses.tokens[:, 0]), dim=1)
        return translation, hypotheses.lengths[:, 0] + 1, hypotheses.steps


class _GeneratingState:
    """Adapter of a model with ``generate`` to the interface ``Proposer``."""

    def __init__(self, model: GeneratingModel, context: Any) -> None:
        self.model = model
        self.context = context
        # The other dimension is the single time step.
        self.rows_dim = 1
        if getattr(model, "batch_first", False):
            self.rows_dim = 0

    def propose(self, tokens: Tensor, count: int, constraints: Constraints) -> Proposal:
        """Return the model's proposals without forbidden tokens; forced ones have probability 1."""
        rows = len(tokens)
        # The model does not know the constraints: ask for extra tokens in place of the forbidden
        # ones.
        words, log_probs, attention, self.context = self.model.generate(
            tokens.unsqueeze(1 - self.rows_dim), self.context, count + len(constraints.forbidden)
        )
        words, log_probs = words.reshape(rows, -1), log_probs.reshape(rows, -1).float()
        for token in constraints.forbidden:
            log_probs = log_probs.masked_fill(words == token, float("-inf"))
        if constraints.forced is not None:
            certain = log_probs.new_zeros(rows)
            words, log_probs = keep_forced(words, log_probs, constraints.forced, certain)
        if attention is not None:
            attention = attention.reshape(rows, -1)
        return Proposal(words, log_probs, attention)

    def reorder(self, rows: Tensor, sentences: Tensor | None) -> None:
        """Pick the rows of the context, which is kept for each row."""
        if hasattr(self.model, "reorder_context"):
            self.context = self.model.reorder_context(self.context, rows)
        else:
            self.context = reorder_context(self.context, rows, batch_first=self.rows_dim == 0)


def reorder_context(
    context: Sequence[Any] | None, rows: Tensor, batch_first: bool = False
) -> list[Any] | None:
    """Pick rows of a decoder's context of three parts.

    Args:
        context: Encoder outputs of shape (source, rows, features), or (rows, source, features) with
            ``batch_first``; lengths of the sources, shape (rows,); and the decoder's hidden state:
            tensors of shape (..., rows, features) in any nesting of lists and tuples. Any part may
            be None.
        rows: int64 of shape (new rows,): the old row that each new row continues.
        batch_first: If True, the rows are the first dimension of the encoder outputs.

    Returns:
        The new context, or None if ``context`` is None.

    Raises:
        ValueError: The context does not have three parts.
    """
    if context is None:
        return None
    if len(context) != 3:
        raise ValueError(
            f"the context must have encoder outputs, lengths and hidden state, not {len(context)} "
            "parts: give the model a method reorder_context(context, rows)"
        )
    outputs, lengths, hidden = context
    rows_of_outputs = 1
    if batch_first:
        rows_of_outputs = 0
    return [
        _rows_of(outputs, rows, rows_of_outputs),
        _rows_of(lengths, rows, 0),
        # The state of torch's recurrent layers begins with the number of layers, also with
        # batch_first.
        _rows_of(hidden, rows, -2),
    ]


def _rows_of(part: Any, rows: Tensor, dim: int) -> Any:
    """Pick rows of a tensor, or of each tensor of a list or tuple."""
    if part is None:
        return None
    if isinstance(part, Tensor):
        return part.index_select(dim, rows.to(part.device))
    return type(part)([_rows_of(inner, rows, dim) for inner in part])
