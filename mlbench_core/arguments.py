"""Check arguments, with errors that name the argument, the allowed values and the given value."""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import reprlib
from collections.abc import Sequence
from typing import Any

__all__ = [
    "check_at_least",
    "check_finite_at_least_0",
    "check_int",
    "check_number",
    "check_positive",
    "check_rank",
    "hint_for",
]


def check_int(name: str, value: Any, least: int = 1) -> int:
    """Return a value as an ``int`` if it is an integer (of Python or numpy) of at least ``least``.

    Args:
        name: Name of the argument, for the message.
        value: The value.
        least: The smallest allowed value.

    Returns:
        The value as an ``int``.

    Raises:
        TypeError: The value is not an integer.
        ValueError: It is too small.

    Example:
        >>> check_int("world_size", 4)
        4
    """
    try:
        # True and False are ints in Python, but a bool as a count is a mistake.
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        # The text of a model or a tensor is long.
        raise TypeError(f"{name} must be an integer, not {reprlib.repr(value)}")
    check_at_least(name, number, least)
    return number


def check_at_least(name: str, value: Any, least: float) -> None:
    """Raise a ValueError if a value is below ``least`` or not a number (NaN).

    Args:
        name: Name of the argument, for the message.
        value: The value.
        least: The smallest allowed value.

    Raises:
        ValueError: The value is below ``least`` or NaN.

    Example:
        >>> check_at_least("beam_size", 0, 1)
        Traceback (most recent call last):
        ValueError: beam_size must be at least 1, not 0
    """
    # "value < least" would accept NaN, for which every comparison is false.
    if not value >= least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def check_number(name: str, value: Any) -> None:
    """Raise a TypeError if a value is not a real number; numbers of numpy are allowed."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {reprlib.repr(value)}")


def check_finite_at_least_0(name: str, value: Any) -> None:
    """Raise a TypeError if a value is not a number, or a ValueError if below 0 or not finite."""
    check_number(name, value)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and at least 0, not {value}")


def check_positive(name: str, value: Any) -> None:
    """Raise a TypeError if a value is not a number, or a ValueError if not finite and above 0."""
    check_number(name, value)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and positive, not {value}")


def check_rank(rank: Any, world_size: Any) -> None:
    """Raise an error if ``rank`` is not a rank of a world of ``world_size`` workers.

    Raises:
        TypeError: One of the two is not an integer.
        ValueError: ``world_size`` is below 1, or ``rank`` is not from 0 to ``world_size - 1``.

    Example:
        >>> check_rank(2, world_size=2)
        Traceback (most recent call last):
        ValueError: rank must be from 0 to 1, not 2: ranks count from 0 and world_size is 2
    """
    check_int("world_size", world_size)
    if not 0 <= operator.index(rank) < world_size:
        raise ValueError(
            f"rank must be from 0 to {world_size - 1}, not {rank}: "
            f"ranks count from 0 and world_size is {world_size}"
        )


def hint_for(word: str, choices: Sequence[str], introduction: str) -> str:
    """Return the choice that an unknown word is most like, or else all choices.

    Args:
        word: The unknown word.
        choices: The known words.
        introduction: Stands before the list of all choices.

    Example:
        >>> hint_for("dilco", ["bf16", "diloco"], "the names are")
        "did you mean 'diloco'?"
        >>> hint_for("adam", ["bf16", "diloco"], "the names are")
        'the names are bf16, diloco'
    """
    similar = difflib.get_close_matches(word, choices, 1)
    if similar:
        return f"did you mean {similar[0]!r}?"
    return f"{introduction} {', '.join(choices)}"
