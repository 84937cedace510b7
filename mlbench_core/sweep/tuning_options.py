"""Read the table ``tuning`` of a sweep's file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlbench_core.arguments import check_positive, hint_for
from mlbench_core.client.series import FIRST_SEED

__all__ = ["FACTORS", "Trial", "Tuning", "parse_tuning"]

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors of the default that are tried if a file has no others."""

_PARAMETER = re.compile(r"--[A-Za-z][A-Za-z0-9_.-]*")
_KEYS = ("parameter", "default", "factors", "seed", "horizon")


@dataclass(frozen=True)
class Tuning:
    """The table ``tuning`` of a sweep's file.

    Attributes:
        defaults: For each parameter, in the order in which they are tuned, the value around which
            the factors go, by the name of the algorithm.
        factors: The factors, ascending.
        seed: Seed of all trials, which no result has.
        horizon: Arguments of all trials after those of the results, for example to end them sooner.
    """

    defaults: Mapping[str, Mapping[str, float]]
    factors: tuple[float, ...] = FACTORS
    seed: int = 1
    horizon: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the parameters in the order in which they are tuned."""
        return tuple(self.defaults)


@dataclass(frozen=True)
class Trial:
    """A value that is tried.

    Attributes:
        parameter: The option of the script.
        factor: Factor of the default.
        value: The value.
    """

    parameter: str
    factor: float
    value: float


def parse_tuning(table: Any, algorithms: Sequence[str]) -> Tuning:
    """Read the table ``tuning`` of a sweep's file.

    Args:
        table: The table.
        algorithms: Names of the sweep's algorithms, variants or methods.

    Raises:
        ValueError: A key is unknown or missing, or has a wrong value.

    Example:
        >>> tuning = parse_tuning({"parameter": "--lr", "default": 0.1}, ["power_sgd"])
        >>> tuning.defaults, tuning.factors
        ({'--lr': {'power_sgd': 0.1}}, (0.25, 0.5, 1.0, 2.0, 4.0))
    """
    if not isinstance(table, Mapping):
        raise ValueError(
            f'tuning must be a table, not {table!r}: write [tuning], then parameter = "--lr"'
        )
    for key in table:
        if key not in _KEYS:
            hint = hint_for(key, _KEYS, "the keys are")
            raise ValueError(f"key {key!r} of tuning must be one that it has: {hint}")
    parameters = _parameters(table.get("parameter"))
    default = table.get("default")
    if isinstance(table["parameter"], str):
        default = {parameters[0]: default}
    if not isinstance(default, Mapping) or set(default) != set(parameters):
        raise ValueError(
            f"default of tuning must have an entry for each parameter, not {default!r}: "
            'write for example default = {"--lr" = 0.1}'
        )
    defaults = {}
    for parameter in parameters:
        defaults[parameter] = _by_algorithm(default[parameter], parameter, algorithms)
    seed = table.get("seed", 1)
    # Trials with a seed of the results would choose the value that suits these results best.
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < FIRST_SEED:
        raise ValueError(
            f"seed of tuning must be a whole number from 0 to {FIRST_SEED - 1}, not {seed!r}: "
            f"results have the seeds from {FIRST_SEED}"
        )
    horizon = table.get("horizon", [])
    if not isinstance(horizon, list) or not all(isinstance(word, str) for word in horizon):
        raise ValueError(
            f"horizon of tuning must be a list of arguments, not {horizon!r}: "
            'write for example horizon = ["--epochs", "10"]'
        )
    factors = _factors(table.get("factors", list(FACTORS)))
    return Tuning(defaults, factors, seed, tuple(horizon))


def _parameters(value: Any) -> tuple[str, ...]:
    words = value
    # One parameter may be written without brackets.
    if isinstance(value, str):
        words = [value]
    if not isinstance(words, list) or not words:
        raise ValueError(
            f'parameter of tuning must be an option, not {value!r}: write parameter = "--lr"'
        )
    names = set()
    for word in words:
        if not isinstance(word, str) or not _PARAMETER.fullmatch(word):
            raise ValueError(
                f"parameter of tuning must be an option such as --lr, not {word!r}: "
                "write it as on the command line"
            )
        # The letters and digits are part of the name of a run.
        names.add(re.sub("[^a-z0-9]+", "-", word.lower()))
    if len(names) < len(words):
        raise ValueError(
            f"parameters of tuning must differ in letters and digits, not {words!r}: remove one"
        )
    return tuple(words)


def _by_algorithm(value: Any, parameter: str, algorithms: Sequence[str]) -> dict[str, float]:
    """Return the default of a parameter for each algorithm."""
    values = value
    # One number is the default of all algorithms.
    if not isinstance(value, Mapping):
        values = dict.fromkeys(algorithms, value)
    for name in values:
        if name not in algorithms:
            hint = hint_for(name, algorithms, "they are")
            raise ValueError(
                f"default of {parameter} must name algorithms of the sweep, not {name!r}: {hint}"
            )
    numbers = {}
    for name in algorithms:
        if name not in values:
            raise ValueError(
                f"default of {parameter} must have all algorithms, not only {list(values)}: "
                f"add {name!r}"
            )
        _check_positive(f"default of {parameter} for {name}", values[name])
        numbers[name] = float(values[name])
    return numbers


def _factors(value: Any) -> tuple[float, ...]:
    # The ratio of two factors is that by which the grid grows.
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError(
            f"factors of tuning must be a list of at least two numbers, not {value!r}: "
            "write for example factors = [0.5, 1, 2]"
        )
    for factor in value:
        _check_positive("a factor of tuning", factor)
    # Equal ones would be the same run twice, and a grid that grows by the factor 1.
    if len(set(value)) < len(value):
        raise ValueError(f"factors of tuning must differ, not {value!r}: remove one")
    return tuple(sorted(map(float, value)))


def _check_positive(name: str, value: Any) -> None:
    try:
        check_positive(name, value)
    # The file of a sweep has no types, so every wrong value is a ValueError.
    except TypeError as error:
        raise ValueError(str(error)) from None
