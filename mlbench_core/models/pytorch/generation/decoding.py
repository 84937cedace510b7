r"""Beam search and sampling for a whole batch at once.

Python loops over time steps only, not over sentences or hypotheses. The live hypotheses are the
rows of one batch: those of the first sentence, those of the second, and so on, the same number for
each. In each step

1. the model proposes the likeliest next tokens of each row (a ``Proposer``),
2. the best of all proposals of a sentence are selected,
3. proposals with the end symbol become finished hypotheses, the others the live ones of the next
   step,
4. finished sentences leave the batch, and the model's state follows the rows (``reorder``).

A model must score the next token and reorder its state (``DecoderState``, ``LogitProposer``). Both
language models and decoders that attend to a source can do so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlbench_core.arguments import check_at_least
from mlbench_core.models.pytorch.generation.proposals import FREE, Constraints, Proposal, Proposer
from mlbench_core.models.pytorch.generation.scores import LengthPenaltyScore, Score

__all__ = ["Hypotheses", "SearchOptions", "search"]


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search.

    Args:
        eos: Token that ends a sequence.
        pad: Token that is never generated and fills the results.
        beam_size: Hypotheses kept for each sentence, at least 1. With sampling, the number of draws
            for each sentence.
        min_len: Smallest number of tokens of a hypothesis, with the end symbol.
        score: Rule that ranks finished hypotheses. Live ones are ranked by their log-probability.
        stop_early: If True, a sentence is finished as soon as ``beam_size`` hypotheses have ended.
            Otherwise it continues until no live hypothesis can beat any of the ``beam_size`` best.
        independent: If True, the rows of a sentence do not compete, and each continues with its
            proposal (sampling).

    Raises:
        ValueError: ``beam_size`` or ``min_len`` is below 1.
    """

    eos: int
    pad: int
    beam_size: int = 1
    min_len: int = 1
    score: Score = field(default_factory=LengthPenaltyScore)
    stop_early: bool = True
    independent: bool = False

    def __post_init__(self) -> None:
        check_at_least("beam_size", self.beam_size, 1)
        check_at_least("min_len", self.min_len, 1)


@dataclass
class Hypotheses:
    """The finished hypotheses of each sentence, best first."""

    tokens: Tensor
    """int64 of shape (batch, beam, longest): no start token, but the end symbol, then padding."""
    lengths: Tensor
    """Tokens with the end symbol, int64 of shape (batch, beam); 0 if there is no hypothesis."""
    scores: Tensor
    """Scores that rank them, float32 of shape (batch, beam); -inf if there is no hypothesis."""
    ended: Tensor
    """Number of hypotheses that have ended, also those dropped since, int64 of shape (batch,)."""
    steps: int = 0
    """Time steps of the search."""

    @staticmethod
    def none(
        batch_size: int, width: int, longest: int, pad: int, device: torch.device
    ) -> Hypotheses:
        """Create an empty set of hypotheses with room for ``width`` of each sentence."""
        return Hypotheses(
            tokens=torch.full((batch_size, width, longest), pad, dtype=torch.int64, device=device),
            lengths=torch.zeros((batch_size, width), dtype=torch.int64, device=device),
            scores=torch.full((batch_size, width), -torch.inf, device=device),
            ended=torch.zeros(batch_size, dtype=torch.int64, device=device),
        )

    def add(self, sentences: Tensor, tokens: Tensor, length: int, scores: Tensor) -> None:
        """Keep the best of the old and the new hypotheses.

        Args:
            sentences: int64 of shape (sentences,): the sentence of each row of the other arguments.
            tokens: int64 of shape (sentences, new, longest).
            length: Number of their tokens, with the end symbol.
            scores: Shape (sentences, new); -inf marks an entry that is not a hypothesis.
        """
        is_new = scores > -torch.inf
        # An entry that is not a hypothesis has the length 0, which to_lists leaves out.
        lengths = is_new * length
        all_scores = torch.cat((self.scores[sentences], scores), dim=1)
        all_lengths = torch.cat((self.lengths[sentences], lengths), dim=1)
        all_tokens = torch.cat((self.tokens[sentences], tokens), dim=1)
        best, index = all_scores.topk(self.scores.shape[1], dim=1)
        self.scores[sentences] = best
        self.lengths[sentences] = all_lengths.gather(1, index)
        self.tokens[sentences] = _pick(all_tokens, index)
        self.ended[sentences] += is_new.sum(dim=1)

    def to_lists(self, nbest: int = 1) -> list[list[list[int]]]:
        """Return the tokens of the ``nbest`` best hypotheses of each sentence, without padding."""
        tokens, lengths = self.tokens[:, :nbest].tolist(), self.lengths[:, :nbest].tolist()
        hypotheses: list[list[list[int]]] = []
        for rows, ends in zip(tokens, lengths, strict=True):
            existing = zip(rows, ends, strict=True)
            hypotheses.append([row[:length] for row, length in existing if length])
        return hypotheses


class _Live(NamedTuple):
    """The hypotheses that continue; ``n`` sentences are left, each with ``width`` rows."""

    sentences: Tensor  # (n,): place in the batch
    limits: Tensor  # (n,): largest number of tokens, with the end symbol
    tokens: Tensor  # (n, width, longest): the generated tokens
    newest: Tensor  # (n, width): the next input of the model
    log_probs: Tensor  # (n, width); -inf: not a hypothesis
    coverage: Tensor | None = None  # (n, width, source): attention summed over all steps


class _Candidates(NamedTuple):
    """The best continuations of each sentence, sorted; all of shape (n, candidates)."""

    log_probs: Tensor
    parents: Tensor
    tokens: Tensor


@torch.no_grad()
def search(
    proposer: Proposer,
    start: Tensor,
    options: SearchOptions,
    max_len: int | Tensor,
    prefix: Tensor | None = None,
) -> Hypotheses:
    """Generate the best sequences, or sample some, for a batch of sentences.

    A hypothesis ends when the end symbol is among the ``beam_size`` best continuations of its
    sentence. At the last step only the end symbol is allowed. In each step the host waits for two
    values from the device: if a hypothesis has ended, and how many sentences are left.

    Args:
        proposer: The model, with one row of state for each sentence; ``reorder`` asks for more
            rows.
        start: First token to feed, int64 of shape (batch,).
        options: Options of the search.
        max_len: Largest number of tokens of a hypothesis, with the end symbol: one number, or one
            for each sentence, int64 of shape (batch,).
        prefix: Tokens that each sequence has to begin with, int64 of shape (batch, length). Padding
            in it leaves the token free.

    Returns:
        The finished hypotheses.

    Raises:
        ValueError: ``max_len`` is below ``min_len``, or shapes do not fit.

    Example:
        >>> from mlbench_core.models.pytorch.generation.proposals import LogitProposer
        >>> class Alphabet:  # after token i comes i + 1
        ...     def step(self, tokens):
        ...         return 9.0 * torch.eye(5)[(tokens + 1) % 5], None
        ...     def reorder(self, rows, sentences):
        ...         pass
        >>> proposer, options = LogitProposer(Alphabet()), SearchOptions(eos=4, pad=0)
        >>> search(proposer, torch.tensor([1, 2]), options, max_len=9).to_lists()
        [[[2, 3, 4]], [[3, 4]]]

    References:
        Graves 2012, Sequence Transduction with Recurrent Neural Networks, arXiv 1211.3711.
    """
    limits = _limits(max_len, start, options)
    if prefix is not None and (prefix.dim() != 2 or len(prefix) != len(start)):
        raise ValueError(
            f"prefix must have shape ({len(start)}, length), not {tuple(prefix.shape)}"
        )
    # An empty batch has no smallest and no largest limit.
    shortest = longest = 0
    if len(limits):
        shortest, longest = int(limits.min()), int(limits.max())
    finished = Hypotheses.none(len(start), options.beam_size, longest, options.pad, start.device)
    live = _begin(proposer, start, limits, longest, options)
    for step in range(longest):
        # Live hypotheses all have the same length, so one number counts the steps of the whole
        # batch.
        finished.steps = step + 1
        constraints = _constraints(live, step, shortest, prefix, options)
        # One more than the beam, because the end symbol never becomes a live hypothesis.
        count = options.beam_size + 1
        if options.independent:
            count = 1
        proposal = proposer.propose(live.newest.flatten(), count, constraints)
        if proposal.attention is not None and options.score.uses_coverage:
            coverage = proposal.attention.float().unflatten(0, live.newest.shape)
            if live.coverage is not None:
                coverage = live.coverage + coverage
            live = live._replace(coverage=coverage)
        candidates = _select(live, proposal, options)
        _finish(finished, live, candidates, step, options)
        rows, live = _continue(live, candidates, step, options)
        # nonzero() waits for the second of the two values.
        kept = _open_sentences(finished, live, step, options).nonzero().squeeze(1)
        if len(kept) == 0:
            break
        live = _follow(proposer, rows, live, kept)
    return finished


def _limits(max_len: int | Tensor, start: Tensor, options: SearchOptions) -> Tensor:
    """Return the checked limit of each sentence."""
    if start.dim() != 1:
        raise ValueError(f"start must have shape (batch,), not {tuple(start.shape)}")
    limits = torch.as_tensor(max_len, dtype=torch.int64, device=start.device)
    if limits.shape not in ((), start.shape):
        raise ValueError(
            "max_len must be one number or have shape "
            f"{tuple(start.shape)}, not {tuple(limits.shape)}"
        )
    if limits.numel() and int(limits.min()) < options.min_len:
        raise ValueError(
            f"max_len must be at least min_len ({options.min_len}), not {int(limits.min())}"
        )
    return limits.expand(start.shape)


def _begin(
    proposer: Proposer, start: Tensor, limits: Tensor, longest: int, options: SearchOptions
) -> _Live:
    """Return one row for each sentence, or ``beam_size`` rows if they do not compete."""
    width = 1
    if options.independent:
        width = options.beam_size
    n = len(start)
    sentences = torch.arange(n, device=start.device)
    if width > 1:
        proposer.reorder(sentences.repeat_interleave(width), None)
    tokens = torch.full((n, width, longest), options.pad, dtype=torch.int64, device=start.device)
    # The first step selects from the proposals of a single row, so that no hypothesis appears twice
    # in a beam.
    newest = start.unsqueeze(1).expand(n, width)
    return _Live(sentences, limits, tokens, newest, torch.zeros((n, width), device=start.device))


def _constraints(
    live: _Live, step: int, shortest: int, prefix: Tensor | None, options: SearchOptions
) -> Constraints:
    """Forbid padding and an early end symbol; force the prefix, and the end symbol at the limit."""
    forbidden: tuple[int, ...] = (options.pad,)
    if step + 1 < options.min_len:
        forbidden = (options.pad, options.eos)
    forced = None
    if prefix is not None and step < prefix.shape[1]:
        wanted = prefix[live.sentences, step]
        forced = wanted.masked_fill(wanted == options.pad, FREE)
    if step + 1 >= shortest:
        # Each sentence has its own limit, and the shortest one is the first step at which any can
        # be reached.
        if forced is None:
            forced = live.limits.new_full(live.limits.shape, FREE)
        forced = forced.masked_fill(live.limits == step + 1, options.eos)
    if forced is not None:
        forced = forced.repeat_interleave(live.newest.shape[1])
    return Constraints(forbidden, forced)


def _select(live: _Live, proposal: Proposal, options: SearchOptions) -> _Candidates:
    """Return the best 2 * ``beam_size`` proposals of a sentence; at most half of them are ends."""
    n, width = live.log_probs.shape
    # All rows of a sentence compete: their proposals become one row of width * count candidates.
    count = proposal.tokens.shape[1]
    log_probs = live.log_probs.unsqueeze(2) + proposal.log_probs.view(n, width, count)
    best, index = log_probs.flatten(1).topk(min(2 * options.beam_size, width * count), dim=1)
    tokens = proposal.tokens.reshape(n, width * count).gather(1, index)
    return _Candidates(best, index.div(count, rounding_mode="floor"), tokens)


def _finish(
    finished: Hypotheses, live: _Live, candidates: _Candidates, step: int, options: SearchOptions
) -> None:
    """Add the hypotheses that end among the best candidates to the finished ones."""
    log_probs = candidates.log_probs[:, : options.beam_size]
    parents = candidates.parents[:, : options.beam_size]
    tokens = candidates.tokens[:, : options.beam_size]
    ends = (tokens == options.eos) & (log_probs > -torch.inf)
    # The first of the two values that the host waits for.
    if not ends.any():
        return
    coverage = live.coverage
    if coverage is not None:
        coverage = _pick(coverage, parents)
    length = torch.full((), step + 1, device=log_probs.device)
    scores = options.score(log_probs, length, coverage).masked_fill(~ends, -torch.inf)
    sequences = _pick(live.tokens, parents)
    sequences[:, :, step] = tokens
    finished.add(live.sentences, sequences, step + 1, scores)


def _continue(
    live: _Live, candidates: _Candidates, step: int, options: SearchOptions
) -> tuple[Tensor, _Live]:
    """Return the best candidates that do not end, and the batch row that each continues."""
    # _select returned twice the beam, so enough candidates remain without those that end.
    going_on = candidates.log_probs.masked_fill(candidates.tokens == options.eos, -torch.inf)
    log_probs, index = going_on.topk(min(options.beam_size, going_on.shape[1]), dim=1)
    parents, newest = candidates.parents.gather(1, index), candidates.tokens.gather(1, index)
    tokens = _pick(live.tokens, parents)
    tokens[:, :, step] = newest
    coverage = live.coverage
    if coverage is not None:
        coverage = _pick(coverage, parents)
    n, width = live.newest.shape
    rows = torch.arange(n, device=parents.device).unsqueeze(1) * width + parents
    return rows, _Live(live.sentences, live.limits, tokens, newest, log_probs, coverage)


def _open_sentences(finished: Hypotheses, live: _Live, step: int, options: SearchOptions) -> Tensor:
    """Return which sentences are not finished, bool of shape (n,)."""
    best_live = live.log_probs.amax(dim=1)
    done = finished.ended[live.sentences] >= options.beam_size
    if not options.stop_early:
        # A score is monotone in the length, so its maximum is at the next length or at the limit.
        # A live hypothesis has step + 1 tokens now, and needs one more to end.
        soonest = torch.full((), step + 2, device=best_live.device)
        next_score = options.score(best_live, soonest)
        last_score = options.score(best_live, live.limits)
        reachable = torch.maximum(next_score, last_score)
        done &= reachable <= finished.scores[live.sentences].amin(dim=1)
    return (best_live > -torch.inf) & ~done


def _follow(proposer: Proposer, rows: Tensor, live: _Live, kept: Tensor) -> _Live:
    """Drop the finished sentences and reorder the model's state to match."""
    if len(kept) < len(rows):
        proposer.reorder(rows[kept].flatten(), kept)
        parts: dict[str, Any] = {}
        for name, part in live._asdict().items():
            if part is not None:
                parts[name] = part[kept]
        return live._replace(**parts)
    # A single row per sentence keeps its place.
    if rows.shape[1] > 1:
        proposer.reorder(rows.flatten(), None)
    return live


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """Return the values (n, m, ...) at ``index`` (n, k) as a tensor of shape (n, k, ...)."""
    return values[torch.arange(len(values), device=values.device).unsqueeze(1), index]
