"""Convert lines of text to ids and back, for task 4a."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mlbench_core.dataset.nlp.pytorch.pair_part import SPECIAL_SYMBOLS
from mlbench_core.dataset.nlp.pytorch.subwords import UNKNOWN, Subwords, join_parts
from mlbench_core.dataset.nlp.pytorch.wmt16.wmt16_config import BOS, EOS, PAD, UNK
from mlbench_core.dataset.nlp.pytorch.words import (
    escape_words,
    join_words,
    split_words,
    unescape_words,
)

__all__ = ["BOS", "EOS", "PAD", "UNK", "WMT16Tokenizer"]

_MULTIPLES = {None: 1, "fp32": 1, "fp16": 8, "bf16": 8}


class WMT16Tokenizer:
    """Split lines of text into sub-words with ids, and convert ids to text.

    Ids 0 to 3 are padding, unknown, beginning and end of a sentence. The symbols of the vocabulary
    follow in its order. With half precision, unused symbols pad the vocabulary to a multiple of 8,
    for tensor cores.

    Attributes:
        vocab_size: Number of ids.
        pad: Id of padding, 0.
        unk: Id of text without a symbol, 1.
        bos: Id of the beginning of a sentence, 2.
        eos: Id of the end of a sentence, 3.
        symbols: The symbol of each id.

    Args:
        base_dir: Folder with the vocabulary ``vocab.bpe.NAME`` and the merges ``bpe.NAME``, for
            example ``vocab.bpe.32000``, in the format of subword-nmt. Without merges, lines must
            consist of words that are divided already.
        math_precision: ``"fp16"`` and ``"bf16"`` pad the vocabulary; ``"fp32"`` and None do not.
        separator: Mark of a part that does not end its word.
        lang: Default language of lines.
        tokenizer: The splitter of lines into words: ``"moses"`` or ``"spacy"``; None splits at
            white space.
        escaped: If True, the vocabulary consists of words with Moses' escapes, such as ``&apos;``
            for an apostrophe, as other programs create it.

    Raises:
        ValueError: The precision is unknown.
        DatasetNotFoundError: The vocabulary does not exist.
        DatasetError: The files are damaged.

    Example:
        >>> import tempfile
        >>> from mlbench_core.dataset.nlp.pytorch.subwords import learn_subwords
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     learn_subwords(["low lower slow !"], merges=2).save(Path(folder), "2")
        ...     tokenizer = WMT16Tokenizer(folder)
        >>> ids = tokenizer.segment("slow, lower!")
        >>> [tokenizer.symbols[i] for i in ids]
        ['<s>', 's@@', 'low', '<unk>', 'lo@@', 'w@@', 'e@@', 'r', '!', '</s>']
        >>> tokenizer.detokenize(ids)
        'slow <unk> lower!'

    References:
        Wu et al. 2016, Google's Neural Machine Translation System, arXiv 1609.08144.
    """

    def __init__(
        self,
        base_dir: str | os.PathLike[str],
        math_precision: str | None = None,
        separator: str = "@@",
        *,
        lang: str = "en",
        tokenizer: str | None = "moses",
        escaped: bool = False,
    ) -> None:
        if math_precision not in _MULTIPLES:
            allowed = ", ".join(map(repr, _MULTIPLES))
            raise ValueError(f"math_precision must be one of {allowed}, not {math_precision!r}")
        self.separator = separator
        self.lang = lang
        self.escaped = escaped
        self.subwords = Subwords.load(Path(base_dir), separator, skip=SPECIAL_SYMBOLS)
        self.tokenizer = tokenizer
        # Without merges, lines are divided already: splitting would break the marks of parts.
        # spaCy's words have none.
        if self.subwords.merges is None and tokenizer != "spacy":
            self.tokenizer = None
        self.symbols = [*SPECIAL_SYMBOLS, *self.subwords.symbols]
        # Tensor cores need sizes that are multiples of 8 in half precision.
        missing = -len(self.symbols) % _MULTIPLES[math_precision]
        self.symbols += [f"<made-up-{number}>" for number in range(missing)]
        self.pad, self.unk, self.bos, self.eos = PAD, UNK, BOS, EOS

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, including those of unused symbols."""
        return len(self.symbols)

    def segment(self, line: str, *, lang: str | None = None) -> list[int]:
        """Return the ids of a line of text.

        Args:
            line: Text.
            lang: Language of the line; None for the tokenizer's default.

        Returns:
            Ids, including those of the beginning and the end of the sentence.
        """
        if self.tokenizer is not None:
            words = split_words(line, lang or self.lang, self.tokenizer)
            if self.escaped:
                words = escape_words(words)
            line = " ".join(words)
        (numbers,) = self.subwords.encode([line])
        return self.to_ids(numbers).tolist()

    def to_ids(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Convert the numbers of a sentence in a store to ids.

        Args:
            numbers: Result of :meth:`~mlbench_core.dataset.nlp.pytorch.subwords.Subwords.encode`
                for the sentence, shape (tokens,).

        Returns:
            int64 of shape (tokens + 2,), including the beginning and the end of the sentence.
        """
        ids = np.empty(len(numbers) + 2, dtype=np.int64)
        # The store numbers unknown text 0 and symbols from 1; ids put the special symbols first.
        ids[0], ids[-1] = BOS, EOS
        ids[1:-1] = numbers
        ids[1:-1] += len(SPECIAL_SYMBOLS) - 1
        ids[1:-1][numbers == UNKNOWN] = UNK
        return ids

    def detokenize(self, inputs: Iterable[int] | Tensor, delim: str = " ") -> str:
        """Convert ids to text with normal punctuation; no further detokenizer is needed.

        Args:
            inputs: Ids of one sentence, for example a tensor of shape (tokens,). Ids after the end
                of the sentence are ignored, and so are padding and the beginning.
            delim: Text to put between words instead of a space.

        Returns:
            The text.

        Raises:
            IndexError: An id is not in the vocabulary.
        """
        ids = inputs.tolist() if isinstance(inputs, Tensor) else list(map(int, inputs))
        # Ids that a model generates after the end of the sentence have no meaning.
        if EOS in ids:
            ids = ids[: ids.index(EOS)]
        symbols = [self._symbol(i) for i in ids if i not in (PAD, BOS)]
        words = join_parts(symbols, self.separator)
        if self.escaped:
            words = unescape_words(words)
        return join_words(words, delim)

    def _symbol(self, i: int) -> str:
        if not 0 <= i < len(self.symbols):
            raise IndexError(f"ids must be from 0 to {len(self.symbols) - 1}, not {i}")
        return self.symbols[i]

    def __len__(self) -> int:
        return len(self.symbols)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocab_size} ids, {self.subwords})"
