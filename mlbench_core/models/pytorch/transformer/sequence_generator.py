"""Translating with a Transformer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from mlbench_core.arguments import check_at_least
from mlbench_core.models.pytorch.generation.decoding import Hypotheses, SearchOptions, search
from mlbench_core.models.pytorch.generation.proposals import LogitProposer, Sampling
from mlbench_core.models.pytorch.generation.scores import GNMTScore
from mlbench_core.models.pytorch.modes import evaluation_mode
from mlbench_core.models.pytorch.transformer.modules.incremental import IncrementalState
from mlbench_core.models.pytorch.transformer.transformer import TransformerModel, Vocabulary

__all__ = ["SequenceGenerator", "TransformerState"]


class WordVocabulary(Vocabulary, Protocol):
    """A vocabulary that can write sentences."""

    def string(self, tensor: Tensor, bpe_symbol: str | None = None) -> str:
        """Text of a sentence."""


class TransformerState:
    """A Transformer in a generation: a :class:`~mlbench_core.models.pytorch.generation.proposals.DecoderState`.

    The source's keys and values are computed once and kept once for a sentence: the hypotheses of a sentence share
    them. Those of the generated tokens are kept for each row.

    Args:
        model: The model.
        src_tokens: int64 of shape (batch, source).
        src_lengths: As the model's ``forward`` takes it.
    """

    def __init__(self, model: TransformerModel, src_tokens: Tensor, src_lengths: Tensor | None = None) -> None:
        self.decoder = model.decoder
        self.encoder_out, self.padding_mask = model.encoder(src_tokens, src_lengths)
        self.caches = IncrementalState()
        self.steps = 0

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores of the next token of each row, shape (rows, symbols); no attention."""
        scores, _ = self.decoder(
            tokens.unsqueeze(1), self.encoder_out, self.padding_mask, self.caches, before=self.steps
        )
        self.steps += 1
        return scores[:, -1], None

    def reorder(self, rows: Tensor, sentences: Tensor | None) -> None:
        """Let the caches follow the search."""
        self.caches.reorder(rows, sentences)
        if sentences is not None:
            self.encoder_out = self.encoder_out.index_select(1, sentences)
            self.padding_mask = self.padding_mask.index_select(0, sentences)


class SequenceGenerator:
    r"""Translates by beam search, or by sampling.

    Finished translations Y are ranked by

    .. math:: s(Y, X) = \log P(Y \mid X) \Big/ \left(\frac{5 + |Y|}{6}\right)^p,

    where :math:`|Y|` counts the end symbol: the length normalization of Wu et al. 2016, equation 14, without coverage,
    as Vaswani et al. 2017, section 6.1, use it with p = 0.6.

    Args:
        model: The model. It is put into evaluation mode while it translates, and back afterwards.
        src_dict: Vocabulary of the source.
        trg_dict: Vocabulary of the target.
        beam_size: Hypotheses kept for each sentence; with sampling, independent draws.
        minlen: The fewest tokens of a translation, without the end symbol.
        maxlen: The most tokens, without the end symbol; None for what the model has positions for.
        stop_early: Whether a sentence is done as soon as ``beam_size`` hypotheses have ended, although a longer one
            might still get a better score.
        normalize_scores: Whether to divide at all; False ranks by the log-probability.
        len_penalty: p: above 1 favours longer translations.
        retain_dropout: Leave the model in the mode it has.
        sampling: Draw tokens from the model's distribution instead of searching.
        sampling_topk: Draw among this number of the most likely tokens; -1 for all.
        sampling_temperature: Below 1 sharpens the distribution, above 1 flattens it.
        generator: Source of the random numbers for sampling, on the model's device; None for torch's global one.

    Raises:
        ValueError: An argument is out of its bounds.

    References:
        Wu et al. 2016, Google's Neural Machine Translation System, arXiv 1609.08144, section 7.

        Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762, section 6.1.
    """

    def __init__(
        self,
        model: TransformerModel,
        src_dict: Vocabulary,
        trg_dict: WordVocabulary,
        beam_size: int = 1,
        minlen: int = 1,
        maxlen: int | None = None,
        stop_early: bool = True,
        normalize_scores: bool = True,
        len_penalty: float = 1,
        retain_dropout: bool = False,
        sampling: bool = False,
        sampling_topk: int = -1,
        sampling_temperature: float = 1,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        check_at_least("minlen", minlen, 0)
        longest = model.max_decoder_positions() - 1
        self.maxlen = longest if maxlen is None else min(maxlen, longest)
        if self.maxlen < minlen:
            raise ValueError(f"minlen is {minlen}, above the longest translation, {self.maxlen} tokens")
        self.model = model
        self.src_dict = src_dict
        self.trg_dict = trg_dict
        self.minlen = minlen
        self.retain_dropout = retain_dropout
        self.sampling = Sampling(sampling_topk, sampling_temperature, generator) if sampling else None
        self.options = SearchOptions(
            eos=trg_dict.eos(),
            pad=trg_dict.pad(),
            beam_size=beam_size,
            min_len=minlen + 1,
            score=GNMTScore(len_penalty if normalize_scores else 0.0, len_norm_const=5.0, cov_penalty_factor=0.0),
            stop_early=stop_early,
            independent=sampling,
        )

    def translate_batch(
        self,
        batch: Mapping[str, Any],
        maxlen_a: float = 1.0,
        maxlen_b: int = 50,
        prefix_size: int = 0,
        remove_bpe: str | None = None,
        nbest: int = 1,
        ignore_case: bool = True,
    ) -> tuple[list[Any], list[str]]:
        """Translate a batch of the data set and write both translations and references as text.

        Args:
            batch: What the data set's ``collater`` gives: ``batch["net_input"]`` with ``src_tokens`` and
                ``src_lengths``, and ``batch["target"]``, int64 of shape (batch, target), which may be missing.
            maxlen_a: A translation has at most ``maxlen_a * tokens of the source + maxlen_b`` tokens.
            maxlen_b: See ``maxlen_a``.
            prefix_size: Number of tokens of the reference with which a translation has to begin.
            remove_bpe: Divided words are joined where this stands, see the dictionary's ``string``.
            nbest: How many translations of each sentence.
            ignore_case: Whether all text is made lower case.

        Returns:
            The translations, one text a sentence, or with ``nbest`` above 1 a list of texts a sentence, best first; and
            the references, one text a sentence (none without a target). Where the model gives no finite score, as
            after a training that diverged, the text is empty.

        Raises:
            ValueError: ``nbest`` is above the size of the beam, or there is no target for the prefix.
        """
        if not 1 <= nbest <= self.options.beam_size:
            raise ValueError(f"nbest is {nbest}; it must be from 1 to the size of the beam, {self.options.beam_size}")
        source, target = batch["net_input"], batch.get("target")
        if prefix_size > 0 and target is None:
            raise ValueError(f"prefix_size is {prefix_size}, but the batch has no target to take the prefix from")
        prefix = target[:, :prefix_size] if target is not None and prefix_size > 0 else None
        found = self.generate(source["src_tokens"], source.get("src_lengths"), maxlen_a, maxlen_b, prefix)
        texts = [
            [self._text(torch.tensor(tokens, dtype=torch.int64), remove_bpe, ignore_case) for tokens in hypotheses]
            for hypotheses in found.to_lists(nbest)
        ]
        references = [] if target is None else [self._text(row, remove_bpe, ignore_case) for row in target.cpu()]
        return [best[0] if best else "" for best in texts] if nbest == 1 else texts, references

    @torch.no_grad()
    def generate(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        maxlen_a: float = 1.0,
        maxlen_b: int = 50,
        prefix: Tensor | None = None,
    ) -> Hypotheses:
        """Translate a batch into token numbers.

        Args:
            src_tokens: int64 of shape (batch, source), padded on either side.
            src_lengths: Tokens of each source with the end symbol, int64 of shape (batch,); counted if None.
            maxlen_a: See :meth:`translate_batch`; each sentence's own length counts, not that of the batch.
            maxlen_b: See :meth:`translate_batch`.
            prefix: Tokens to begin with, int64 of shape (batch, length).

        Returns:
            The hypotheses of each sentence, best first, with the end symbol.
        """
        lengths = (src_tokens != self.src_dict.pad()).sum(dim=1) if src_lengths is None else src_lengths
        most = (maxlen_a * lengths.to(src_tokens.device).double() + maxlen_b).long()
        most = most.clamp(min=self.minlen, max=self.maxlen)
        start = src_tokens.new_full((len(src_tokens),), self.options.eos)
        with evaluation_mode(self.model, not self.retain_dropout):
            state = TransformerState(self.model, src_tokens, src_lengths)
            return search(LogitProposer(state, self.sampling), start, self.options, most + 1, prefix)

    def _text(self, tokens: Tensor, remove_bpe: str | None, ignore_case: bool) -> str:
        text = self.trg_dict.string(tokens, remove_bpe)
        return text.lower() if ignore_case else text
