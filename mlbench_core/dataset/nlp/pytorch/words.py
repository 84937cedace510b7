"""Reversible tokenization: split lines of text into words, and join them again.

Words are those of the Moses tokenizer, without its escapes. The detokenizer of Moses restores the
usual spaces around words, which is correct for about 98 % of the lines of a news text. For the
other lines, the words contain :data:`SPACING_MARK`, which reverses the rule for the next word.
Therefore every line is restored exactly, and a vocabulary of plain Moses words can still be used.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from mlbench_core.errors import require

__all__ = [
    "SPACING_MARK",
    "clean_line",
    "escape_words",
    "join_words",
    "split_words",
    "unescape_words",
]

SPACING_MARK = "\uffed"
"""The mark before a word whose spacing is the reverse of Moses' rules.

It is ``U+FFED``, a small black square.
"""

_REPLACEMENT = "\u25a0"
_ESCAPES = {
    "|": "&#124;",
    "<": "&lt;",
    ">": "&gt;",
    "'": "&apos;",
    '"': "&quot;",
    "[": "&#91;",
    "]": "&#93;",
}
_HYPHEN = "@-@"  # Moses' optional mark for a hyphen at which a word was split


def clean_line(line: str) -> str:
    """Normalize white space in a line and remove control characters.

    A run of white space, no-break spaces included, becomes one space. If the text contains the
    spacing mark, it becomes U+25A0, the large black square.

    Args:
        line: Text, with or without its line end.

    Returns:
        The text, without white space at its ends.

    Example:
        >>> clean_line("  Two\\u00a0 words\\x07 \\n")
        'Two words'
    """
    kept = "".join(c for c in line if c.isprintable() or c.isspace() or ord(c) >= 0xA0)
    return " ".join(kept.replace(SPACING_MARK, _REPLACEMENT).split())


def split_words(line: str, lang: str = "en", tokenizer: str = "moses") -> list[str]:
    """Split a line into words.

    Args:
        line: Text; it is cleaned by :func:`clean_line` first.
        lang: Its language, for abbreviations and apostrophes.
        tokenizer: ``"moses"``, or ``"spacy"`` for the rules of ``spacy.blank(lang)``, which need
            spaCy but no model.

    Returns:
        Words without white space in them, with spacing marks; ``join_words`` restores the cleaned
        line from them.

    Raises:
        ValueError: The tokenizer is unknown.
        MissingDependencyError: sacremoses or spaCy is not installed.

    Example:
        >>> split_words("It's fine, isn't it?")
        ['It', "'s", 'fine', ',', 'isn', "'t", 'it', '?']
        >>> split_words("and/or"), join_words(split_words("and/or"))
        (['and', '￭', '/', '￭', 'or'], 'and/or')
    """
    text = clean_line(line)
    words = _splitter(tokenizer, lang)(text)
    if "".join(words) != text.replace(" ", ""):
        # A tokenizer that changed a character could not be reversed; white space alone always can.
        words = text.split()
    return _mark_spacing(words, _spaces(text))


def join_words(words: Iterable[str], delim: str = " ") -> str:
    """Restore the text from its words.

    Args:
        words: Words and spacing marks, as :func:`split_words` returns them or a model generates
            them.
        delim: Text to put between words instead of a space.

    Returns:
        The text.

    Example:
        >>> join_words(["Well", ",", "it", "'s", "fine", "."])
        "Well, it's fine."
    """
    plain, toggled, position = [], set[int](), 0
    for word in words:
        # Two marks at the same position cancel each other.
        if word == SPACING_MARK:
            toggled ^= {position}
        elif word:
            plain.append(word)
            position += len(word)
    # Positions count characters without spaces, so they are the same before and after joining.
    spaces = _usual_spaces(plain) ^ toggled
    pieces, position = [], 0
    for word in plain:
        if position and position in spaces:
            pieces.append(delim)
        pieces.append(word)
        position += len(word)
    return "".join(pieces)


def escape_words(words: Iterable[str]) -> list[str]:
    """Escape words as Moses does, for vocabularies of other programs.

    Example:
        >>> escape_words(["It", "'s", "&"])
        ['It', '&apos;s', '&amp;']
    """
    table = str.maketrans({"&": "&amp;", **_ESCAPES})
    return [word.translate(table) for word in words]


def unescape_words(words: Iterable[str]) -> list[str]:
    """Remove Moses' escapes from words, and restore the hyphens that ``@-@`` represents.

    Example:
        >>> unescape_words(["It", "&apos;s", "well", "@-@", "known"])
        ['It', "'s", 'well-known']
    """
    # Join the words first, so that `@-@` can be replaced together with the spaces around it.
    joined = " ".join(words).replace(f" {_HYPHEN} ", "-")
    # The ampersand comes last: `&amp;lt;` is an escaped `&lt;`, not `<`.
    for character, escape in (*_ESCAPES.items(), ("&", "&amp;")):
        joined = joined.replace(escape, character)
    return joined.split()


def _mark_spacing(words: list[str], spaces: set[int]) -> list[str]:
    """Return words with marks at unusual spacing."""
    unusual = _usual_spaces(words) ^ spaces
    if not unusual:
        return words
    marked, position = [], 0
    for word in words:
        if position in unusual:
            marked.append(SPACING_MARK)
        marked.append(word)
        position += len(word)
    return marked


def _spaces(text: str) -> set[int]:
    """Return the positions of spaces in a text, as the number of other characters before each."""
    return set(itertools.accumulate(map(len, text.split(" ")[:-1])))


def _usual_spaces(words: list[str]) -> set[int]:
    """Return the positions at which Moses' detokenizer puts spaces between words.

    It uses the English rules for every language, so that the language of a text need not be known.
    (German rules differ in apostrophes alone.)
    """
    text = str(_detokenizer().detokenize(words, unescape=False))
    # If the detokenizer changed a character, its positions are not usable. The rule is then a space
    # between all words.
    if text.replace(" ", "") != "".join(words):
        text = " ".join(words)
    return _spaces(text)


@functools.lru_cache(maxsize=8)
def _splitter(tokenizer: str, lang: str) -> Callable[[str], list[str]]:
    """Return the function that splits cleaned lines into words."""
    if tokenizer == "moses":
        sacremoses: Any = require("sacremoses", "text")
        return functools.partial(sacremoses.MosesTokenizer(lang).tokenize, escape=False)
    if tokenizer == "spacy":
        spacy: Any = require("spacy", "spacy")
        rules = spacy.blank(lang).tokenizer
        return lambda text: [word.text for word in rules(text) if not word.is_space]
    raise ValueError(f"tokenizer must be 'moses' or 'spacy', not {tokenizer!r}")


@functools.lru_cache(maxsize=1)
def _detokenizer() -> Any:
    sacremoses: Any = require("sacremoses", "text")
    return sacremoses.MosesDetokenizer("en")
