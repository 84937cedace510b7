"""Translation data sets in the formats of the two families of models."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mlbench_core.arguments import check_at_least
from mlbench_core.dataset.nlp.pytorch.batches import collate_batch
from mlbench_core.dataset.nlp.pytorch.pair_part import Part
from mlbench_core.dataset.nlp.pytorch.subtoken_vocabulary import SubtokenVocabulary
from mlbench_core.dataset.nlp.pytorch.wmt16.wmt16_tokenizer import WMT16Tokenizer
from mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary import Dictionary
from mlbench_core.errors import DatasetError

__all__ = ["RecurrentPairs", "TransformerPairs"]

_log = logging.getLogger(__name__)

_UNKNOWN_SYMBOL = "<UNK>_"
_FIRST_SYMBOL = 3  # in the Transformer's dictionary, padding, end and unknown come first

Lengths = npt.NDArray[np.int64]
Item = TypeVar("Item", covariant=True)


class _PartPairs(Dataset[Item]):
    """Some pairs of a part."""

    part: Part
    indices: Lengths

    def references(self) -> list[str]:
        """Return the targets as they are in the text, in this data set's order.

        Raises:
            ValueError: This is a training part, from which pairs were left out, or its text is not
                raw.
        """
        return self.part.read_targets(self.indices)

    def _numbers(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the store's numbers of the source and the target of a pair."""
        if not 0 <= index < len(self.indices):
            raise IndexError(
                f"index must be at least 0 and below {len(self.indices)}, the number of pairs, "
                f"not {index}"
            )
        number = int(self.indices[index])
        return self.part.store.source[number], self.part.store.target[number]

    def __len__(self) -> int:
        return len(self.indices)


class RecurrentPairs(_PartPairs[tuple[Tensor, Tensor]]):
    """Pairs for GNMT: each side begins with the id of the beginning and ends with that of the end.

    Attributes:
        tokenizer: The tokenizer that creates the ids.
        indices: Numbers of the pairs in the store, in this data set's order.
        lengths: Number of ids of each pair's source and target, without beginning and end; int64 of
            shape (pairs, 2).

    Args:
        part: The part of the data set.
        tokenizer: A tokenizer with the part's vocabulary.
        sort: If True, sort the pairs by the length of the source, the longest first.
        min_len: Leave out pairs with a side of fewer sub-words.
        max_len: Leave out pairs with a side of more sub-words; None for no limit.
        max_size: Keep at most this number of the remaining pairs, from the start; None keeps all.

    Raises:
        ValueError: ``min_len`` is negative or above ``max_len``, or ``max_size`` is below 1.
    """

    def __init__(
        self,
        part: Part,
        tokenizer: WMT16Tokenizer,
        *,
        sort: bool = False,
        min_len: int = 0,
        max_len: int | None = None,
        max_size: int | None = None,
    ) -> None:
        if min_len < 0 or (max_len is not None and max_len < min_len):
            raise ValueError(
                f"min_len must be from 0 to max_len, not {min_len} with max_len {max_len}"
            )
        if max_size is not None:
            check_at_least("max_size", max_size, 1)
        self.part = part
        self.tokenizer = tokenizer
        self.lang = part.recipe.languages
        lengths = _lengths(part)
        kept = lengths.min(axis=1) >= min_len
        if max_len is not None:
            kept &= lengths.max(axis=1) <= max_len
        # Scores are comparable only on the whole text, so log a warning if pairs of a validation or
        # test part are left out.
        if part.has_references and not kept.all():
            _log.warning(
                "%d of %d pairs are left out, with sides of fewer than %d or more than %s "
                "sub-words: a score is not that of the whole text",
                (~kept).sum(),
                len(kept),
                min_len,
                max_len,
            )
        self.indices: Lengths = np.flatnonzero(kept)[:max_size]
        if sort:
            self.indices = self.indices[np.argsort(-lengths[self.indices, 0], kind="stable")]
        self.lengths: Lengths = lengths[self.indices]

    @property
    def vocab_size(self) -> int:
        """Return the number of ids."""
        return self.tokenizer.vocab_size

    @property
    def sizes(self) -> Lengths:
        """Return the number of ids of each pair's longer side, int64 of shape (pairs,).

        Beginning and end count.
        """
        return self.lengths.max(axis=1, initial=0) + 2

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return source and target, int64 of shape (tokens + 2,)."""
        source, target = map(self.tokenizer.to_ids, self._numbers(index))
        return torch.from_numpy(source), torch.from_numpy(target)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({'-'.join(self.lang)}: {len(self)} pairs, "
            f"{self.vocab_size} ids)"
        )


class TransformerPairs(_PartPairs[dict[str, Any]]):
    """Pairs for the Transformer: each side ends with the end symbol, and both share one dictionary.

    Attributes:
        dictionary: The dictionary; padding is 0, the end 1, text without a symbol 2. With a
            vocabulary of sub-tokens, no text is without a symbol, and all numbers are those of its
            file.
        src_dict: The same dictionary.
        trg_dict: The same dictionary.
        indices: Numbers of the pairs in the store, in this data set's order.
        shuffle: As given.

    Args:
        part: The part of the data set.
        left_pad: For source and target: if True, pad on the left.
        max_positions: Largest number of tokens of source and target, with the end. Longer pairs of
            a training part are left out. Longer sentences of other parts are cut, because these
            parts must stay complete.
        seq_len_multiple: Pad source and target to multiples of this length.
        shuffle: If True, :func:`~mlbench_core.dataset.nlp.pytorch.batches.get_batches` shuffles
            pairs of the same length.
        indices: Numbers of the pairs in the store to take; None for all.

    Raises:
        ValueError: A limit is not positive.
        DatasetError: The vocabulary contains a special symbol of the dictionary.
    """

    def __init__(
        self,
        part: Part,
        *,
        left_pad: tuple[bool, bool] = (True, False),
        max_positions: tuple[int, int] = (256, 256),
        seq_len_multiple: int = 1,
        shuffle: bool = True,
        indices: npt.ArrayLike | None = None,
    ) -> None:
        if min(max_positions) < 2:
            raise ValueError(
                "max_positions must be at least 2 each, one for the end, not "
                f"{tuple(max_positions)}"
            )
        check_at_least("seq_len_multiple", seq_len_multiple, 1)
        self.part = part
        self.lang = part.recipe.languages
        self.left_pad, self.max_positions = left_pad, max_positions
        self.seq_len_multiple, self.shuffle = seq_len_multiple, shuffle
        if isinstance(part.subwords, SubtokenVocabulary):
            pad, eos, *symbols = part.subwords.symbols
            # The file has the special symbols itself, so its numbers stay as they are.
            self.dictionary = Dictionary(pad, eos, symbols=symbols)
            self._shift = 0
        else:
            self.dictionary = Dictionary(symbols=[_UNKNOWN_SYMBOL, *part.subwords.symbols])
            # In the store, unknown text has the number 0 and symbols have numbers from 1.
            self._shift = _FIRST_SYMBOL - 1
        # If a special symbol were in the vocabulary too, the numbers of all later symbols would be
        # wrong.
        if len(self.dictionary) != self._shift + part.subwords.size:
            special = ", ".join(self.dictionary.symbols[:_FIRST_SYMBOL])
            raise DatasetError(
                f"the vocabulary in {part.vocabulary_folder} has one of {special}; delete that line"
            )
        self.src_dict = self.trg_dict = self.dictionary
        # The store has no end symbols, which each side gets when it is read.
        lengths = _lengths(part) + 1
        wanted: Lengths = np.arange(len(lengths))
        if indices is not None:
            wanted = np.asarray(indices, dtype=np.int64)
        too_long = (lengths[wanted] > np.asarray(max_positions)).any(axis=1)
        if too_long.any():
            message = "%d of %d pairs %s: they have more than %s tokens"
            effect = "are cut"
            if part.is_cleaned:
                effect = "are left out"
            limits = " and ".join(map(str, max_positions))
            _log.warning(message, too_long.sum(), len(wanted), effect, limits)
        if part.is_cleaned:
            wanted = wanted[~too_long]
        self.indices: Lengths = wanted
        # Use the lengths after cutting: `get_batches` would refuse a sentence that is longer than a
        # batch.
        self.lengths: Lengths = np.minimum(lengths, np.asarray(max_positions))[self.indices]

    @property
    def sizes(self) -> Lengths:
        """Return the tokens of each pair in a batch, int64 of shape (pairs,).

        They are those of its longer side, rounded up.
        """
        longest = self.lengths.max(axis=1, initial=0)
        return -(-longest // self.seq_len_multiple) * self.seq_len_multiple

    def detokenize(self, text: str) -> str:
        """Join sub-words to text; a generator with ``remove_bpe=None`` returns such sub-words.

        Args:
            text: Symbols of the dictionary with spaces between them. Whole words, which a generator
                with ``remove_bpe="@@ "`` returns, are accepted too, except with a vocabulary of
                sub-tokens.

        Returns:
            Text with normal punctuation.
        """
        return self.part.subwords.join(text)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``id``, the index, and ``source`` and ``target``, int64 of shape (tokens,)."""
        source, target = self._numbers(index)
        source_limit, target_limit = self.max_positions
        return {
            "id": index,
            "source": self._symbols(source, source_limit),
            "target": self._symbols(target, target_limit),
        }

    def _symbols(self, numbers: npt.NDArray[Any], limit: int) -> Tensor:
        """Convert a sentence from the store's numbers to the dictionary's, and cut it."""
        numbers = numbers[: limit - 1]
        # The end symbol fills the array; all but its last element are overwritten.
        symbols = np.full(len(numbers) + 1, self.dictionary.eos(), dtype=np.int64)
        symbols[:-1] = numbers
        symbols[:-1] += self._shift
        return torch.from_numpy(symbols)

    def collater(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make a batch of samples; use this as the ``collate_fn`` of a ``DataLoader``.

        Args:
            samples: Items of the data set.

        Returns:
            The batch that :func:`~mlbench_core.dataset.nlp.pytorch.batches.collate_batch` makes.
        """
        return collate_batch(
            samples,
            self.dictionary.pad(),
            self.dictionary.eos(),
            *self.left_pad,
            self.seq_len_multiple,
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({'-'.join(self.lang)}: {len(self)} pairs, "
            f"{len(self.dictionary)} symbols)"
        )


def _lengths(part: Part) -> Lengths:
    """Return the number of symbols in source and target of each pair, of shape (pairs, 2)."""
    return np.stack((part.store.source.lengths, part.store.target.lengths), axis=1)
