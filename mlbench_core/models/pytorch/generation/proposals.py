"""The interface of a model for the search, and the choice of the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = [
    "FREE",
    "Constraints",
    "DecoderState",
    "LogitProposer",
    "Proposal",
    "Proposer",
    "Sampling",
    "keep_forced",
]

FREE = -1
"""Value of a forced token that leaves the row free."""


class DecoderState(Protocol):
    """The interface of a model for the search: a step for all rows, and a state to reorder."""

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Feed the newest token of each row.

        Args:
            tokens: int64 of shape (rows,).

        Returns:
            Scores of the next token before the softmax, shape (rows, vocabulary), and the attention
            on the source, shape (rows, source), or None.
        """

    def reorder(self, rows: Tensor, sentences: Tensor | None) -> None:
        """Reorder the state as the search requires.

        Args:
            rows: int64 of shape (new rows,): the old row that each new row continues.
            sentences: int64 of shape (new sentences,): the old sentences that are still in the
                batch; None if all are. Any state that is kept once per sentence, and not per row,
                follows only this argument.
        """


class Constraints(NamedTuple):
    """The tokens that the next step must and must not take."""

    forbidden: tuple[int, ...]
    """Tokens that no row may take."""
    forced: Tensor | None
    """The token that each row has to take, int64 of shape (rows,), -1 for a free row; or None."""


class Proposal(NamedTuple):
    """The next tokens proposed for each row."""

    tokens: Tensor
    """int64 of shape (rows, count)."""
    log_probs: Tensor
    """Their log-probabilities, float32 of shape (rows, count); -inf if it is not a candidate."""
    attention: Tensor | None
    """Attention of this step on the source, shape (rows, source), if the model has one."""


class Proposer(Protocol):
    """The interface that the search calls; :class:`LogitProposer` wraps a :class:`DecoderState`."""

    def propose(self, tokens: Tensor, count: int, constraints: Constraints) -> Proposal:
        """Feed the newest token of each row and propose next ones.

        Args:
            tokens: int64 of shape (rows,).
            count: Number of proposals that a row needs; fewer if the vocabulary is smaller.
            constraints: Forbidden and forced tokens. A forced token is the only candidate of its
                row.

        Returns:
            The proposals, in any order.
        """

    def reorder(self, rows: Tensor, sentences: Tensor | None) -> None:
        """Reorder the state as in :meth:`DecoderState.reorder`."""


@dataclass(frozen=True)
class Sampling:
    """Sampling of the next token from the model's distribution, instead of the likeliest tokens.

    Args:
        topk: Draw from the ``topk`` likeliest tokens only; -1 for all.
        temperature: Divisor of the scores before the softmax: below 1 sharpens, above 1 flattens.
        generator: Generator of the random numbers, on the model's device; None for torch's global
            generator.

    Raises:
        ValueError: An argument is out of its bounds.
    """

    topk: int = -1
    temperature: float = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.topk != -1 and self.topk < 1:
            raise ValueError(f"topk must be at least 1, or -1 for all tokens, not {self.topk}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}")

    def draw(self, logits: Tensor, forbidden: Sequence[int]) -> Tensor:
        """Draw one token for each row.

        Args:
            logits: Scores, float32 of shape (rows, vocabulary).
            forbidden: Tokens that are never drawn.

        Returns:
            int64 of shape (rows, 1).
        """
        # The division creates a new tensor, so the assignment leaves the caller's logits alone.
        scores = logits / self.temperature
        scores[:, list(forbidden)] = -torch.inf
        if self.topk == -1 or self.topk >= scores.shape[1]:
            return torch.multinomial(scores.softmax(dim=-1), 1, generator=self.generator)
        scores, tokens = scores.topk(self.topk, dim=-1)
        index = torch.multinomial(scores.softmax(dim=-1), 1, generator=self.generator)
        return tokens.gather(1, index)


@dataclass(frozen=True)
class LogitProposer:
    """A proposer for models that give a score to every token of their vocabulary.

    Args:
        state: State of the model.
        sampling: Sampling of the next token; None proposes the likeliest tokens.
    """

    state: DecoderState
    sampling: Sampling | None = None

    def propose(self, tokens: Tensor, count: int, constraints: Constraints) -> Proposal:
        """Propose as in :meth:`Proposer.propose`, with the model's own log-probabilities.

        They do not depend on the temperature.
        """
        logits, attention = self.state.step(tokens)
        # Half precision is too coarse to rank hypotheses by sums of log-probabilities.
        logits = logits.float()
        if self.sampling is None:
            # Forbidden tokens may be among the likeliest; the row needs ``count`` proposals without
            # them.
            count = min(count + len(constraints.forbidden), logits.shape[1])
            scores, proposed = logits.topk(count, dim=-1)
        else:
            proposed = self.sampling.draw(logits, constraints.forbidden)
            scores = logits.gather(1, proposed)
        for token in constraints.forbidden:
            scores = scores.masked_fill(proposed == token, -torch.inf)
        forced = constraints.forced
        if forced is not None:
            # A forced token keeps the model's own probability, whether or not it was among the
            # proposals. Free rows, which have -1, read the score of token 0 and ignore it.
            forced_scores = logits.gather(1, forced.clamp(min=0).unsqueeze(1)).squeeze(1)
            proposed, scores = keep_forced(proposed, scores, forced, forced_scores)
        # Normalize the chosen tokens only: log_softmax would write the scores of the whole
        # vocabulary.
        return Proposal(proposed, scores - logits.logsumexp(dim=-1, keepdim=True), attention)

    def reorder(self, rows: Tensor, sentences: Tensor | None) -> None:
        """Reorder the state as in :meth:`DecoderState.reorder`."""
        self.state.reorder(rows, sentences)


def keep_forced(
    tokens: Tensor, log_probs: Tensor, forced: Tensor, forced_log_probs: Tensor
) -> tuple[Tensor, Tensor]:
    """Make the forced token the only candidate of its row; free rows do not change.

    Args:
        tokens: Proposals, int64 of shape (rows, count).
        log_probs: Their log-probabilities, shape (rows, count).
        forced: int64 of shape (rows,), -1 for a free row.
        forced_log_probs: The forced tokens' log-probabilities, shape (rows,).

    Returns:
        The tokens and their log-probabilities.
    """
    is_forced = (forced != FREE).unsqueeze(1)
    is_first = torch.arange(tokens.shape[1], device=tokens.device) == 0
    # All rows have the same number of entries: the first is the forced token, the others are not
    # candidates.
    only = torch.where(is_first, forced_log_probs.unsqueeze(1), -torch.inf)
    tokens = torch.where(is_forced, forced.unsqueeze(1), tokens)
    return tokens, torch.where(is_forced, only, log_probs)
