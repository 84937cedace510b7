"""Translation with GNMT, from numbers to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mlbench_core.arguments import check_at_least
from mlbench_core.models.pytorch.generation.decoding import Hypotheses, SearchOptions, search
from mlbench_core.models.pytorch.generation.proposals import LogitProposer
from mlbench_core.models.pytorch.generation.scores import GNMTScore
from mlbench_core.models.pytorch.gnmt.models import GNMT
from mlbench_core.models.pytorch.modes import evaluation_mode

__all__ = ["GNMTState", "Translator"]


class Detokenizer(Protocol):
    """An object that writes symbols as text, such as the WMT16 tokenizer."""

    def detokenize(self, inputs: Sequence[int]) -> str:
        """Return the text of a sentence."""


class GNMTState:
    """The state of GNMT in a search.

    It is a :class:`~mlbench_core.models.pytorch.generation.proposals.DecoderState`. The source is
    encoded and kept once for each sentence. All hypotheses of a sentence share it.

    Args:
        model: The model.
        inputs: Source sentences, int64 of shape (source, batch).
        lengths: Words of each, integers of shape (batch,).
    """

    def __init__(self, model: GNMT, inputs: Tensor, lengths: Tensor) -> None:
        self.model = model
        self.context = model.context(model.encode(inputs, lengths), lengths)

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores of the next words and the attention.

        Their shapes are (rows, vocabulary) and (rows, source).
        """
        scores, weights, self.context = self.model.step(tokens, self.context)
        return scores, weights

    def reorder(self, rows: Tensor, sentences: Tensor | None) -> None:
        """Reorder the decoder's state as the search requires."""
        self.context = self.context.reorder(rows, sentences)


class Translator:
    r"""A translator of batches of sentences, which runs beam search and writes the results as text.

    A translation starts after the start symbol and ends with the end symbol. Finished ones are
    ranked by :class:`~mlbench_core.models.pytorch.generation.scores.GNMTScore`.

    Args:
        model: The model. It is in evaluation mode while it translates and returns to its mode
            afterwards.
        trg_tokenizer: Tokenizer whose ``detokenize`` converts a list of symbols to text. The list
            has no start symbol, no end symbol and no padding. The translator does not change the
            text.
        trg_lang: Language of the target. It has no effect, because the tokenizer places the spaces.
        beam_size: Hypotheses kept for each sentence; 1 is greedy search.
        len_norm_factor: :math:`\alpha` of the length normalization.
        len_norm_const: :math:`c` of the length normalization.
        cov_penalty_factor: :math:`\beta` of the coverage penalty.
        max_seq_len: Length of the longest translation, with start and end symbol, at least 2. A
            translation that reaches it ends there, with the probability that the model gives to the
            end symbol.
        bos: Start symbol. The defaults of all three symbols are those of the WMT16 vocabulary.
        eos: End symbol.
        pad: Padding.

    Raises:
        ValueError: An argument is out of its bounds.

    Example:
        >>> class Numbers:
        ...     def detokenize(self, inputs):
        ...         return " ".join(str(number) for number in inputs)
        >>> model = GNMT(vocab_size=11, hidden_size=4, num_layers=2)
        >>> # The second sentence has no words.
        >>> source = (torch.tensor([[2, 2], [5, 3], [3, 0]]), torch.tensor([3, 2]))
        >>> target = (torch.tensor([[2, 2], [8, 3], [7, 0], [3, 0]]), torch.tensor([4, 2]))
        >>> translations, references = Translator(model, Numbers()).translate(source, target)
        >>> len(translations), translations[1], references
        (2, '', ['8 7', ''])

    References:
        Wu et al. 2016, Google's Neural Machine Translation System, arXiv 1609.08144, section 7.
    """

    def __init__(
        self,
        model: GNMT,
        trg_tokenizer: Detokenizer,
        trg_lang: str = "de",
        beam_size: int = 5,
        len_norm_factor: float = 0.6,
        len_norm_const: float = 5.0,
        cov_penalty_factor: float = 0.1,
        max_seq_len: int = 150,
        *,
        bos: int = 2,
        eos: int = 3,
        pad: int = 0,
    ) -> None:
        # The shortest translation is the start symbol and the end symbol.
        check_at_least("max_seq_len", max_seq_len, 2)
        self.model = model
        self.trg_tokenizer = trg_tokenizer
        self.trg_lang = trg_lang
        self.max_seq_len = max_seq_len
        self.bos = bos
        self.options = SearchOptions(
            eos=eos,
            pad=pad,
            beam_size=beam_size,
            score=GNMTScore(len_norm_factor, len_norm_const, cov_penalty_factor),
        )

    def translate(
        self, src: tuple[Tensor, Tensor], trg: tuple[Tensor, Tensor] | None = None
    ) -> tuple[list[str], list[str]]:
        """Translate a batch of the data set and write both translations and references as text.

        Args:
            src: Source sentences, int64 of shape (source, batch), padded at the end, and the number
                of symbols of each, integers of shape (batch,). A sentence without words (nothing,
                or start and end symbol only) becomes an empty text.
            trg: References in the same form, or None.

        Returns:
            The translations and the references, one text per sentence, in the order of the batch;
            no references without ``trg``. If the model gives no finite score, as after a training
            that diverged, the text is empty.

        Raises:
            ValueError: The shapes do not fit, or the numbers of sentences and references differ.
        """
        sources = self._words_of_each(*src)
        references: list[list[int]] = []
        if trg is not None:
            references = self._words_of_each(*trg)
            if len(references) != len(sources):
                raise ValueError(
                    "trg must have one reference for each of the "
                    f"{len(sources)} sentences, not {len(references)}"
                )
        translations: list[list[int]] = [[] for _ in sources]
        # A search would also generate words for a sentence without words.
        with_words = [number for number, words in enumerate(sources) if words]
        if with_words:
            index = torch.tensor(with_words)
            # The words may be on a GPU, but their lengths are mostly on the CPU.
            ids, lengths = src
            inputs = ids.index_select(1, index.to(ids.device))
            lengths = lengths.index_select(0, index.to(lengths.device))
            hypotheses = self.generate(inputs, lengths).to_lists()
            for number, best in zip(with_words, hypotheses, strict=True):
                # A model without finite scores finishes no hypothesis.
                if best:
                    translations[number] = self._words(best[0])
        return list(map(self._text, translations)), list(map(self._text, references))

    @torch.no_grad()
    def generate(self, inputs: Tensor, lengths: Tensor) -> Hypotheses:
        """Translate a batch into symbol numbers.

        Args:
            inputs: Source sentences with at least one symbol each, int64 of shape (source, batch),
                on any device.
            lengths: Symbols of each, integers of shape (batch,).

        Returns:
            The hypotheses of each sentence, best first, without the start and with the end symbol.
        """
        inputs = inputs.to(self.model.decoder.classifier.weight.device)
        start = inputs.new_full((inputs.shape[1],), self.bos)
        with evaluation_mode(self.model):
            state = GNMTState(self.model, inputs, lengths)
            # The search does not count the start symbol.
            return search(LogitProposer(state), start, self.options, self.max_seq_len - 1)

    def _words_of_each(self, ids: Tensor, lengths: Tensor) -> list[list[int]]:
        """Return the words of each sentence of a batch."""
        if ids.dim() != 2 or lengths.shape != ids.shape[1:]:
            raise ValueError(
                "sentences and lengths must have the shapes (words, batch) and (batch,), not "
                f"{tuple(ids.shape)} and {tuple(lengths.shape)}"
            )
        words = []
        # Sentences are the columns of a time-first batch.
        for row, end in zip(ids.t().tolist(), lengths.tolist(), strict=True):
            words.append(self._words(row[:end]))
        return words

    def _words(self, ids: list[int]) -> list[int]:
        """Return the symbols before the end symbol, without start symbols and padding."""
        if self.options.eos in ids:
            ids = ids[: ids.index(self.options.eos)]
        return [number for number in ids if number not in (self.bos, self.options.pad)]

    def _text(self, ids: list[int]) -> str:
        if not ids:
            return ""
        return self.trg_tokenizer.detokenize(ids)
