r"""The vocabulary of MLPerf's Transformer reference: sub-tokens in Tensor2Tensor's format.

A file has one sub-token per line, in single or double quotes; padding and end come first. The
number of a sub-token is that of its line, from 0. Text becomes numbers in three steps:

1. Tokens are the longest runs of letters and digits, and of other characters. A space between two
   tokens of letters and digits is left out, because two such tokens in a row always have a space
   between them.
2. Escapes: ``\`` becomes ``\\``, ``_`` becomes ``\u``, and a character that no sub-token has
   becomes ``\NUMBER;`` with its code point. Then ``_`` marks the end of the token.
3. From left to right, the longest sub-token that fits is cut off.

Every step can be reversed, so any text is restored exactly. No text is unknown.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlbench_core import files
from mlbench_core.dataset.local_files import read_lines
from mlbench_core.errors import DatasetError, DatasetNotFoundError

__all__ = ["SubtokenVocabulary"]

_PAD, _EOS = 0, 1
# MLPerf's reference writes the first form, Tensor2Tensor the second one, with the mark of a token's
# end.
_SPECIAL = (("<pad>", "<pad>_"), ("<EOS>", "<EOS>_"))
# Letters and digits: `isalnum` is true for the Unicode categories L and N alone, and `\w` for these
# and "_".
_TOKENS = re.compile(r"[^\W_]+|[\W_]+")
_ESCAPE_CHARACTERS = "\\_u;0123456789"
_ESCAPES = re.compile(r"\\u|\\\\|\\([0-9]+);")
_WHITE_SPACE = re.compile(r"\s")
_UNDEFINED = "\u3013"  # Tensor2Tensor's text for a code point that does not exist
_KEPT_TOKENS = 1 << 16


class SubtokenVocabulary:
    r"""A vocabulary of sub-tokens, with the rules that divide text into them and restore it.

    Files such as ``vocab.translate_ende_wmt32k.32768.subwords`` of Tensor2Tensor and
    ``vocab.ende.32768`` of MLPerf's reference have this format. The numbers are those of these
    programs.

    Attributes:
        subtokens: The sub-tokens, as given.
        symbols: The same, in a form that can be separated by spaces: white space in a sub-token is
            escaped, for example a space as ``\32;``.

    Args:
        subtokens: The sub-tokens in their order, each of them once: ``<pad>``, ``<EOS>``, and then
            all others. Among them must be each of their characters as a sub-token, and ``\``,
            ``_``, ``u``, ``;`` and ``0`` to ``9`` for escapes.

    Raises:
        ValueError: The first two sub-tokens are others, a sub-token occurs twice or is empty, or a
            character is missing.

    Example:
        >>> characters = "dogs\\_u;0123456789"
        >>> vocabulary = SubtokenVocabulary(["<pad>", "<EOS>", "dog_", "do", *characters])
        >>> (numbers,) = vocabulary.encode(["dog dogs"])
        >>> [vocabulary.symbols[number] for number in numbers], vocabulary.decode(numbers)
        (['dog_', 'do', 'g', 's', '_'], 'dog dogs')

    References:
        The class ``SubwordTextEncoder`` of https://github.com/tensorflow/tensor2tensor, described
        in: Vaswani et al. 2018, Tensor2Tensor for Neural Machine Translation, arXiv 1803.07416. The
        benchmark "translation" with a Transformer: Mattson et al. 2019, MLPerf Training Benchmark,
        arXiv 1910.01500.
    """

    def __init__(self, subtokens: Sequence[str]) -> None:
        self.subtokens = list(subtokens)
        self.symbols = [_WHITE_SPACE.sub(_escape, subtoken) for subtoken in self.subtokens]
        for number, allowed in enumerate(_SPECIAL):
            subtoken = "nothing"
            if number < len(self.subtokens):
                subtoken = self.subtokens[number]
            if subtoken not in allowed:
                raise ValueError(
                    f"line {number + 1} must be the sub-token {allowed[0]}, not {subtoken}"
                )
        first: dict[str, int] = {}
        for number, symbol in enumerate(self.symbols):
            if not symbol:
                raise ValueError(f"line {number + 1} must be a sub-token, not empty")
            if first.setdefault(symbol, number) != number:
                raise ValueError(
                    f"sub-tokens must be different, not {self.subtokens[number]!r} in both lines "
                    f"{first[symbol] + 1} and {number + 1}"
                )
        # The special sub-tokens are not text.
        self._numbers = {
            subtoken: number for number, subtoken in enumerate(self.subtokens) if number > _EOS
        }
        # A character that is in a longer sub-token only could neither be cut off nor escaped.
        characters = {*_ESCAPE_CHARACTERS}.union(*self._numbers)
        missing = sorted(characters - self._numbers.keys())
        if missing:
            raise ValueError(
                "each character of sub-tokens and of escapes must also be a sub-token, but "
                f"{len(missing)} are missing: {' '.join(map(repr, missing[:10]))}"
            )
        self._longest = max(map(len, self._numbers))
        self._cut_tokens: dict[str, list[int]] = {}

    def encode(self, lines: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the numbers of the sub-tokens in lines of text.

        Args:
            lines: Any text. White space counts.

        Returns:
            For each line the numbers of its sub-tokens, int32, without an end.
        """
        return [np.array(self._encode(line), dtype=np.int32) for line in lines]

    def decode(self, numbers: Iterable[int]) -> str:
        """Return the text that numbers of sub-tokens represent; the reverse of :meth:`encode`.

        Args:
            numbers: Numbers of one text. Numbers after the end are ignored, and so is padding.

        Returns:
            The text. Sequences that :meth:`encode` never returns have one too.

        Raises:
            IndexError: A number is not in the vocabulary.
        """
        pieces = []
        for number in numbers:
            if not 0 <= number < len(self.subtokens):
                raise IndexError(
                    f"numbers must be from 0 to {len(self.subtokens) - 1}, not {number}"
                )
            if number == _EOS:
                break
            if number != _PAD:
                pieces.append(self.subtokens[number])
        return _restore("".join(pieces))

    def join(self, text: str) -> str:
        """Return the text that symbols represent.

        Args:
            text: :attr:`symbols` of one text, with spaces between them.

        Returns:
            The text, as :meth:`decode` returns it for the numbers.
        """
        return _restore(text.replace(" ", ""))

    @property
    def size(self) -> int:
        """Return the number of sub-tokens; all numbers are below it."""
        return len(self.subtokens)

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of the file with these sub-tokens, in hexadecimal digits.

        The file has single quotes, as Tensor2Tensor and MLPerf's reference write them. Therefore
        ``sha256sum`` shows the same digits for their files.
        """
        content = "".join(f"'{subtoken}'\n" for subtoken in self.subtokens)
        return files.digest(content.encode("utf-8"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SubtokenVocabulary:
        """Read a vocabulary.

        Args:
            path: The file, plain or compressed.

        Returns:
            The vocabulary.

        Raises:
            DatasetNotFoundError: The file does not exist.
            DatasetError: The file is not UTF-8 text, or not such a vocabulary.
        """
        file = Path(path)
        if not file.is_file():
            raise DatasetNotFoundError(f"the vocabulary {file} does not exist")
        subtokens = []
        for number, line in enumerate(read_lines(file), 1):
            quoted = line.rstrip()
            if len(quoted) < 2 or quoted[0] not in "'\"" or quoted[-1] != quoted[0]:
                raise DatasetError(
                    f"{file} is not a vocabulary of sub-tokens: line {number} is {quoted[:40]!r}, "
                    "not a sub-token in quotes"
                )
            subtokens.append(quoted[1:-1])
        try:
            return cls(subtokens)
        except ValueError as error:
            raise DatasetError(f"{file} is not a vocabulary of sub-tokens: {error}") from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size} sub-tokens)"

    def _encode(self, line: str) -> list[int]:
        tokens = _TOKENS.findall(line)
        numbers: list[int] = []
        for position, token in enumerate(tokens):
            # Kinds of tokens alternate, so the neighbors of this space are letters or digits.
            if token == " " and 0 < position < len(tokens) - 1:
                continue
            # A few words make up most of a text.
            if token not in self._cut_tokens:
                if len(self._cut_tokens) >= _KEPT_TOKENS:
                    self._cut_tokens.clear()
                self._cut_tokens[token] = self._cut(token)
            numbers += self._cut_tokens[token]
        return numbers

    def _cut(self, token: str) -> list[int]:
        """Return the numbers of the longest sub-tokens of a token, from left to right."""
        escaped = token.replace("\\", "\\\\").replace("_", "\\u")
        # The characters of escapes are sub-tokens, so no escape is escaped again.
        for character in set(escaped) - self._numbers.keys():
            escaped = escaped.replace(character, f"\\{ord(character)};")
        escaped += "_"
        numbers, start = [], 0
        while start < len(escaped):
            end = min(start + self._longest, len(escaped))
            # This ends, because each character that is left is a sub-token.
            while escaped[start:end] not in self._numbers:
                end -= 1
            numbers.append(self._numbers[escaped[start:end]])
            start = end
        return numbers


def _restore(escaped: str) -> str:
    """Return the text that escaped tokens represent, each of them ended by ``_``."""
    tokens = [_ESCAPES.sub(_unescape, token) for token in escaped.split("_") if token]
    pieces = tokens[:1]
    for before, token in itertools.pairwise(tokens):
        # The space between two tokens of letters and digits was left out.
        if before[0].isalnum() and token[0].isalnum():
            pieces.append(" ")
        pieces.append(token)
    return "".join(pieces)


def _escape(character: re.Match[str]) -> str:
    return f"\\{ord(character[0])};"


def _unescape(escape: re.Match[str]) -> str:
    """Return the character that an escape represents."""
    if escape[1] is None:
        return "_" if escape[0] == "\\u" else "\\"
    try:
        character = chr(int(escape[1]))
    except (ValueError, OverflowError):
        return _UNDEFINED
    # Half of a surrogate pair is not a character, and could not be written to a file.
    return _UNDEFINED if "\ud800" <= character <= "\udfff" else character
