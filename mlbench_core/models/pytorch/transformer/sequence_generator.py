"""Translation with a Transformer."""

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
    """A vocabulary that can write sentences as text."""

    def string(self, tensor: Tensor, bpe_symbol: str | None = None) -> str:
        """Return the text of a sentence."""


class TransformerState:
    """The state of a Transformer in a search.

    It is a :class:`~mlbench_core.models.pytorch.generation.proposals.DecoderState`. The source's
    keys and values are computed and kept once for each sentence. All hypotheses of a sentence share
    them. The keys and values of the generated tokens are kept for each row.

    Args:
        model: The model.
        src_tokens: int64 of shape (batch, source).
        src_lengths: As for the model's ``forward``.
    """

    def __init__(
        self, model: TransformerModel, src_tokens: Tensor, src_lengths: Tensor | None = None
    ) -> None:
        self.decoder = model.decoder
        self.encoder_out, self.padding_mask = model.encoder(src_tokens, src_lengths)
        self.caches = IncrementalState()
        self.steps = 0

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores of each row's next token, shape (rows, symbols), and no attention."""
        scores, _ = self.decoder(
            tokens.unsqueeze(1), self.encoder_out, self.padding_mask, self.caches, before=self.steps
        )
        self.steps += 1
        return scores[:, -1], None

    def reorder(self, rows: Tensor, sentences: Tensor | None) -> None:
        """Reorder the caches as the search requires."""
        self.caches.reorder(rows, sentences)
        if sentences is not None:
            self.encoder_out = self.encoder_out.index_select(1, sentences)
            self.padding_mask = self.padding_mask.index_select(0, sentences)


class SequenceGenerator:
    r"""A translator that uses beam search or sampling.

    Finished translations Y are ranked by

    .. math:: s(Y, X) = \log P(Y \mid X) \Big/ \left(\frac{5 + |Y|}{6}\right)^p,

    where :math:`|Y|` counts the end symbol. This is the length normalization of Wu et al. 2016,
    equation 14, without coverage, which Vaswani et al. 2017, section 6.1, use with p = 0.6.

    Args:
        model: The model. It is in evaluation mode while it translates and returns to its mode
            afterwards.
        src_dict: Vocabulary of the source.
        trg_dict: Vocabulary of the target.
        beam_size: Hypotheses kept for each sentence; with sampling, the number of independent
            draws.
        minlen: Smallest number of tokens of a translation, without the end symbol.
        maxlen: Largest number of tokens, without the end symbol; None for the largest that the
            model's positions allow.
        stop_early: If True, a sentence is finished as soon as ``beam_size`` hypotheses have ended,
            although a longer one might still get a better score.
        normalize_scores: If True, divide as above; if False, rank by the log-probability.
        len_penalty: p; values above 1 favor longer translations.
        retain_dropout: If True, leave the model in its mode, so that a model in training mode keeps
            its dropout.
        sampling: If True, sample tokens from the model's distribution instead of searching.
        sampling_topk: Number of the most likely tokens to sample from; -1 for all.
        sampling_temperature: Below 1 sharpens the distribution, above 1 flattens it.
        generator: Source of the random numbers for sampling, on the model's device; None for
            torch's global one.

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
        # One position of the decoder holds the start symbol.
        self.maxlen = model.max_decoder_positions() - 1
        if maxlen is not None:
            self.maxlen = min(maxlen, self.maxlen)
        if self.maxlen < minlen:
            raise ValueError(
                f"minlen must be at most {self.maxlen}, the longest translation, not {minlen}"
            )
        self.model = model
        self.src_dict = src_dict
        self.trg_dict = trg_dict
        self.minlen = minlen
        self.retain_dropout = retain_dropout
        self.sampling: Sampling | None = None
        if sampling:
            self.sampling = Sampling(sampling_topk, sampling_temperature, generator)
        if not normalize_scores:
            # The divisor is then 1, so the score is the log-probability.
            len_penalty = 0.0
        # The search counts the end symbol.
        self.options = SearchOptions(
            eos=trg_dict.eos(),
            pad=trg_dict.pad(),
            beam_size=beam_size,
            min_len=minlen + 1,
            score=GNMTScore(len_penalty, len_norm_const=5.0, cov_penalty_factor=0.0),
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
            batch: Result of the data set's ``collater``: ``batch["net_input"]`` with ``src_tokens``
                and ``src_lengths``, and ``batch["target"]``, int64 of shape (batch, target), which
                may be missing.
            maxlen_a: A translation has at most ``maxlen_a * tokens of the source + maxlen_b``
                tokens.
            maxlen_b: See ``maxlen_a``.
            prefix_size: Number of tokens of the reference with which a translation has to begin.
            remove_bpe: Mark of divided words whose parts are joined: ``bpe_symbol`` of the
                dictionary's ``string``.
            nbest: Number of translations of each sentence.
            ignore_case: If True, convert all text to lower case.

        Returns:
            The translations and the references. Each sentence has one translation as text, or with
            ``nbest`` above 1 a list of texts, best first. The references are one text per sentence,
            none without a target. If the model gives no finite score, as after a training that
            diverged, the text is empty.

        Raises:
            ValueError: ``nbest`` is above the size of the beam, or ``prefix_size`` is above 0
                without a target.
        """
        if not 1 <= nbest <= self.options.beam_size:
            raise ValueError(
                f"nbest must be from 1 to beam_size ({self.options.beam_size}), not {nbest}"
            )
        source, target = batch["net_input"], batch.get("target")
        prefix = None
        if prefix_size > 0:
            if target is None:
                raise ValueError(
                    f"prefix_size must be 0 for a batch without a target, not {prefix_size}"
                )
            prefix = target[:, :prefix_size]
        hypotheses = self.generate(
            source["src_tokens"], source.get("src_lengths"), maxlen_a, maxlen_b, prefix
        )
        translations: list[Any] = []
        for best in hypotheses.to_lists(nbest):
            texts = []
            for tokens in best:
                sentence = torch.tensor(tokens, dtype=torch.int64)
                texts.append(self._text(sentence, remove_bpe, ignore_case))
            if nbest > 1:
                translations.append(texts)
            elif texts:
                translations.append(texts[0])
            else:
                # A model without finite scores finishes no hypothesis.
                translations.append("")
        references: list[str] = []
        if target is not None:
            # One copy from the device, instead of one for each row.
            for row in target.cpu():
                references.append(self._text(row, remove_bpe, ignore_case))
        return translations, references

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
            src_lengths: Tokens of each source with the end symbol, int64 of shape (batch,); counted
                if None.
            maxlen_a: See :meth:`translate_batch`. The length of each sentence counts, not that of
                the batch.
            maxlen_b: See :meth:`translate_batch`.
            prefix: Tokens to begin with, int64 of shape (batch, length).

        Returns:
            The hypotheses of each sentence, best first, with the end symbol.
        """
        lengths = src_lengths
        if lengths is None:
            lengths = (src_tokens != self.src_dict.pad()).sum(dim=1)
        most = (maxlen_a * lengths.to(src_tokens.device).double() + maxlen_b).long()
        most = most.clamp(min=self.minlen, max=self.maxlen)
        # As in training, the end symbol is also the first input of the decoder.
        start = src_tokens.new_full((len(src_tokens),), self.options.eos)
        with evaluation_mode(self.model, not self.retain_dropout):
            state = TransformerState(self.model, src_tokens, src_lengths)
            # The search counts the end symbol, which the limits of this class do not.
            return search(
                LogitProposer(state, self.sampling), start, self.options, most + 1, prefix
            )

    def _text(self, tokens: Tensor, remove_bpe: str | None, ignore_case: bool) -> str:
        text = self.trg_dict.string(tokens, remove_bpe)
        if ignore_case:
            return text.lower()
        return text
