"""Sub-words: byte pair encoding of words.

The encoding is learned from a text, or read from files in the format of subword-nmt.

Words are divided into parts; each part except the last one ends with a separator, ``@@``. A model
has two files. ``bpe.NAME`` has the merges, one pair of parts per line, after a line ``#version:
0.2``; ``</w>`` marks a part at the end of a word. ``vocab.bpe.NAME`` has the symbols, one per line.
The number of a symbol depends only on its line, so it is the same in every process and on every
platform.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlbench_core import files
from mlbench_core.dataset.nlp.pytorch.words import SPACING_MARK, join_words
from mlbench_core.errors import DatasetError, DatasetNotFoundError, require

__all__ = ["UNKNOWN", "Subwords", "join_parts", "learn_subwords", "learn_words"]

UNKNOWN = 0
"""The number of text without a symbol.

Symbol i of the vocabulary, counted from 0, has the number i + 1.
"""

_END = "</w>"
_VERSION = "#version: 0.2"
_REPEATS = 1 << 16

Pair = tuple[str, str]


class Subwords:
    """A vocabulary of symbols, with the rules that divide words into them.

    Attributes:
        symbols: The symbols. Parts that do not end a word end with the separator.
        merges: Pairs of parts in the order in which they are merged. None if words are not divided,
            because each symbol is a whole word or the text is divided already.
        separator: As given.

    Args:
        symbols: The symbols, each of them once.
        merges: The merges; parts at the end of a word end with ``</w>``.
        separator: Mark of a part that does not end its word.

    Raises:
        ValueError: A symbol occurs twice, or the separator is empty or contains white space.

    Example:
        >>> subwords = Subwords(["l@@", "o@@", "w", "lo@@", "low"], [("l", "o"), ("lo", "w</w>")])
        >>> [numbers.tolist() for numbers in subwords.encode(["low lo?", "ll"])]
        [[5, 4, 0], [1, 0]]
    """

    def __init__(
        self, symbols: Sequence[str], merges: Sequence[Pair] | None = None, separator: str = "@@"
    ) -> None:
        if not separator or any(map(str.isspace, separator)):
            raise ValueError(f"separator must be a text without white space, not {separator!r}")
        self.symbols = list(symbols)
        self.merges: list[Pair] | None = None
        if merges is not None:
            self.merges = list(merges)
        self.separator = separator
        self._numbers: dict[str, int] = {}
        for number, symbol in enumerate(self.symbols, 1):
            if symbol in self._numbers:
                raise ValueError(f"symbols must be different, not contain {symbol!r} twice")
            self._numbers[symbol] = number
        self._encoder: Any = None
        self._table: npt.NDArray[np.int32] | None = None

    def encode(self, lines: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the numbers of the symbols in lines of text.

        Args:
            lines: Words with white space between them.

        Returns:
            For each line the numbers of its symbols, int32; :data:`UNKNOWN` for text without a
            symbol.

        Raises:
            MissingDependencyError: The model has merges, and the package tokenizers is not
                installed.
        """
        # Whole words need neither an encoder nor the package tokenizers.
        if self.merges is None:
            return list(map(self._encode_words, lines))
        if self._encoder is None:
            self._encoder, self._table = self._build_encoder(self.merges)
        assert self._table is not None
        return [self._table[encoding.ids] for encoding in self._encoder.encode_batch_fast(lines)]

    def _encode_words(self, line: str) -> npt.NDArray[np.int32]:
        numbers = []
        for word in line.split():
            numbers.append(self._numbers.get(word, UNKNOWN))
        return np.array(numbers, dtype=np.int32)

    def _build_encoder(self, merges: list[Pair]) -> tuple[Any, npt.NDArray[np.int32]]:
        """Build the fast encoder, and a table from its numbers of parts to this vocabulary's."""
        tokenizers: Any = require("tokenizers", "text")
        # No part contains white space, so a space can represent unknown text.
        unknown = " "
        parts = [unknown]
        for symbol in self.symbols:
            parts.append(_part(symbol, self.separator))
        # The encoder must number every part that a merge can create, even if it has no symbol in
        # this vocabulary.
        for left, right in merges:
            parts += [left, right, left + right]
        ids = {part: number for number, part in enumerate(dict.fromkeys(parts))}
        model = tokenizers.models.BPE(
            vocab=ids, merges=merges, unk_token=unknown, end_of_word_suffix=_END
        )
        encoder = tokenizers.Tokenizer(model)
        encoder.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        # A part without a symbol has the number of unknown text here.
        table = np.zeros(len(ids), dtype=np.int32)
        for part, number in ids.items():
            table[number] = self._numbers.get(_symbol(part, self.separator), UNKNOWN)
        return encoder, table

    def join(self, text: str) -> str:
        """Return the text that symbols represent, with normal punctuation.

        Args:
            text: Symbols, or whole words, with spaces between them.

        Returns:
            The text.
        """
        return join_words(join_parts(text.split(), self.separator))

    @property
    def size(self) -> int:
        """Return the number of symbols and :data:`UNKNOWN`; all numbers are below it."""
        return len(self.symbols) + 1

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of symbols, merges and separator in hexadecimal digits."""
        # A store records it, so that it is never read with another vocabulary.
        content = json.dumps([self.separator, self.symbols, self.merges], ensure_ascii=True)
        return files.digest(content.encode("ascii"))

    def save(self, folder: Path, name: str) -> None:
        """Write ``bpe.NAME``, then ``vocab.bpe.NAME``, each completely or not at all.

        Args:
            folder: Destination folder; it is created if it does not exist.
            name: For example ``"32000"``.
        """
        # Write the vocabulary last: its existence means that the model is complete.
        if self.merges is not None:
            lines = [_VERSION]
            for left, right in self.merges:
                lines.append(f"{left} {right}")
            _write_lines(folder / f"bpe.{name}", lines)
        _write_lines(folder / f"vocab.bpe.{name}", self.symbols)

    @classmethod
    def load(cls, folder: Path, separator: str = "@@", skip: Iterable[str] = ()) -> Subwords:
        """Read the model in a folder; words are not divided if the file of merges is missing.

        Args:
            folder: Folder with one ``vocab.bpe.NAME``.
            separator: Mark of a part that does not end its word.
            skip: Symbols of the file to leave out, such as special symbols that other programs
                write.

        Returns:
            The model.

        Raises:
            DatasetNotFoundError: The vocabulary does not exist.
            DatasetError: There are several vocabularies, or a file is damaged.
        """
        paths = sorted(filter(Path.is_file, folder.glob("vocab.bpe.*")))
        if not paths:
            raise DatasetNotFoundError(
                f"{folder} has no vocabulary vocab.bpe.NAME, for example vocab.bpe.32000"
            )
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise DatasetError(f"{folder} has several vocabularies, {names}: remove all but one")
        left_out = set(skip)
        symbols = []
        for symbol in _read_symbols(paths[0]):
            if symbol not in left_out:
                symbols.append(symbol)
        merges_file = folder / paths[0].name.removeprefix("vocab.")
        merges = None
        try:
            if merges_file.is_file():
                merges = _read_merges(merges_file)
            return cls(symbols, merges, separator)
        except ValueError as error:
            raise DatasetError(f"{paths[0]} is not a vocabulary: {error}") from error

    def __len__(self) -> int:
        """Return the number of symbols."""
        return len(self.symbols)

    def __repr__(self) -> str:
        merges = "whole words"
        if self.merges is not None:
            merges = f"{len(self.merges)} merges"
        return f"{type(self).__name__}({len(self)} symbols, {merges})"


def join_parts(symbols: Iterable[str], separator: str = "@@") -> list[str]:
    """Join parts to whole words.

    Args:
        symbols: Parts; those that do not end their word end with the separator.
        separator: The separator.

    Returns:
        The words.

    Example:
        >>> join_parts(["lo@@", "w", "@", "s@@"])
        ['low', '@', 's']
    """
    words, open_word = [], ""
    for symbol in symbols:
        # A text may have the separator itself as a word.
        if symbol.endswith(separator) and symbol != separator:
            open_word += symbol.removesuffix(separator)
        else:
            words.append(open_word + symbol)
            open_word = ""
    # A model may end a sentence within a word.
    if open_word:
        words.append(open_word)
    return words


def learn_subwords(
    lines: Iterable[str],
    *,
    merges: int | None = None,
    size: int | None = None,
    separator: str = "@@",
    min_count: int = 2,
    min_character_count: int = 1,
) -> Subwords:
    """Learn a vocabulary of parts of words.

    The most frequent pair of neighboring parts is merged again and again.

    The first symbols are the characters inside words, then those at the end of words, both sorted
    by code point. The results of the merges follow in the order of the merges.

    Args:
        lines: Words with white space between them.
        merges: Number of merges. Pass either this or ``size``.
        size: Number of symbols. Pass either this or ``merges``.
        separator: Mark of a part that does not end its word.
        min_count: Minimum count of a pair to be merged.
        min_character_count: Minimum count of a character; a rarer one gets no symbol.

    Returns:
        The model. It depends only on the text, not on the order of lines.

    Raises:
        ValueError: Both or none of ``merges`` and ``size`` are given, or ``size`` is smaller than
            the alphabet.
        MissingDependencyError: tokenizers is not installed.

    References:
        Sennrich, Haddow and Birch 2016, Neural Machine Translation of Rare Words with Subword
        Units, arXiv 1508.07909.

    Example:
        >>> learn_subwords(["low low lower"], merges=2).merges
        [('l', 'o'), ('lo', 'w</w>')]
    """
    if (merges is None) == (size is None):
        raise ValueError(f"exactly one of merges and size must be given, not {merges} and {size}")
    words = _common_words(lines, separator, min_character_count)
    # Characters inside words and at their ends are different symbols, and always in the vocabulary.
    inner: set[str] = set()
    final = {SPACING_MARK}
    for word in words:
        inner.update(word[:-1])
        final.add(word[-1])
    symbols = [character + separator for character in sorted(inner)] + sorted(final)
    if size is not None:
        if size < len(symbols):
            raise ValueError(
                f"size must be at least {len(symbols)}, the number of characters of the text, "
                f"not {size}"
            )
        merges = size - len(symbols)
    assert merges is not None
    learned = _learn_merges(words, sorted(final), merges, min_count)
    symbols += [_symbol(left + right, separator) for left, right in learned]
    # Different merges can create the same part.
    return Subwords(list(dict.fromkeys(symbols)), learned, separator)


def learn_words(lines: Iterable[str], *, min_count: int = 2, separator: str = "@@") -> Subwords:
    """Return a vocabulary of whole words, the most frequent first.

    Equally frequent words are in the order of code points.

    Args:
        lines: Words with white space between them.
        min_count: Minimum count of a word; a rarer one gets no symbol.
        separator: Words that end with this text are left out, because it marks parts of words.

    Returns:
        The vocabulary.

    Example:
        >>> learn_words(["a b b", "c c b"]).symbols[:2]
        ['b', 'c']
    """
    counts = _count_words(lines)
    frequent = []
    for word, count in counts.items():
        if count >= min_count and not word.endswith(separator):
            frequent.append(word)
    frequent.sort(key=lambda word: (-counts[word], word))
    return Subwords(list(dict.fromkeys([*frequent, SPACING_MARK])), None, separator)


def _count_words(lines: Iterable[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.split())
    return counts


def _common_words(lines: Iterable[str], separator: str, min_character_count: int) -> dict[str, int]:
    """Count the words without a rare character and without the separator."""
    counts = _count_words(lines)
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            characters[character] += count
    rare = set()
    for character, count in characters.items():
        if count < min_character_count:
            rare.add(character)
    words = {}
    # Sorted words make the result independent of the order of lines.
    for word in sorted(counts):
        if rare.isdisjoint(word) and separator not in word:
            words[word] = counts[word]
    return words


def _learn_merges(
    words: dict[str, int], final: list[str], merges: int, min_count: int
) -> list[Pair]:
    """Learn the merges, the same in every process.

    The trainer resolves ties between equally frequent pairs by the numbers of their parts. It
    numbers characters by code point, but characters at the end of words in the order of a hash
    table. As special tokens, they get numbers in the given order.
    """
    tokenizers: Any = require("tokenizers", "text")
    finals = [character + _END for character in final]
    alphabet = set("".join(words))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=len(finals) + len(alphabet) + merges,
        min_frequency=min_count,
        special_tokens=finals,
        end_of_word_suffix=_END,
        show_progress=False,
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(end_of_word_suffix=_END))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(_repeated(words), trainer)
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


def _repeated(words: dict[str, int]) -> Iterator[str]:
    """Yield each word as often as it was counted."""
    for word, count in words.items():
        # Split long repetitions, so that a frequent word does not make one huge line.
        for start in range(0, count, _REPEATS):
            yield " ".join([word] * min(_REPEATS, count - start))


def _symbol(part: str, separator: str) -> str:
    """Return the form of a part in the vocabulary."""
    if part.endswith(_END):
        return part.removesuffix(_END)
    return part + separator


def _part(symbol: str, separator: str) -> str:
    """Return the part of a word that a symbol represents."""
    if symbol.endswith(separator) and symbol != separator:
        return symbol.removesuffix(separator)
    return symbol + _END


def _read_symbols(path: Path) -> list[str]:
    """Read the symbols of a vocabulary."""
    lines = [line.split(" ") for line in _read_lines(path) if line]
    # subword-nmt writes a count after each symbol.
    has_counts = all(len(line) == 2 and line[1].isdecimal() for line in lines)
    symbols = []
    for line in lines:
        if not has_counts and (len(line) > 1 or line[0].endswith("\r")):
            raise DatasetError(
                f"{path} is not a vocabulary: {' '.join(line)!r} is not one symbol without "
                "white space"
            )
        symbols.append(line[0])
    return symbols


def _read_merges(path: Path) -> list[Pair]:
    lines = _read_lines(path)
    if not lines or lines[0].strip() != _VERSION:
        raise DatasetError(
            f"{path} does not begin with {_VERSION!r}: other versions of the format are not "
            "supported"
        )
    merges = []
    for number, line in enumerate(filter(None, lines[1:]), 2):
        # Split at spaces only: a part may contain other white space of Unicode.
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts) or parts[1].endswith("\r"):
            raise DatasetError(f"{path}, line {number}: {line!r} is not a pair of parts")
        merges.append((parts[0], parts[1]))
    return merges


def _read_lines(path: Path) -> list[str]:
    # Split at line feeds only: a symbol may contain characters that Python's `splitlines` treats as
    # line ends.
    try:
        return path.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8 text: {error}") from error


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    with files.replacing(path) as temporary:
        temporary.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8"))
