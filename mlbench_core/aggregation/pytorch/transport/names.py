"""Handle the names of parameters, which are the keys of saved states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

__all__ = [
    "COMPILED",
    "Parameters",
    "by_plain_name",
    "check_keys",
    "check_names",
    "copies_by_plain_name",
    "counts_by_plain_name",
    "is_buffer",
    "name_of_buffer",
    "plain_name",
]

Parameters: TypeAlias = "nn.Module | Mapping[str, Tensor]"
COMPILED = "_orig_mod."
"""The part that :func:`torch.compile` adds to the names of parameters."""

_BUFFER = ":buffer:"  # no name of a parameter begins with it


def plain_name(name: str) -> str:
    """Return a parameter's name without the ``_orig_mod.`` that :func:`torch.compile` adds.

    The keys of states are plain names. So a compiled model can resume from the checkpoint of one
    that is not compiled, and the reverse.

    Args:
        name: The name, for example from ``named_parameters()``.

    Example:
        >>> plain_name("_orig_mod.layer.weight")
        'layer.weight'
    """
    return name.replace(COMPILED, "")


def name_of_buffer(name: str) -> str:
    """Return the name under which a buffer takes part in an aggregation of weights.

    Args:
        name: Its name in the model, for example from ``named_buffers()``.

    Example:
        >>> is_buffer(name_of_buffer("norm.running_mean"))
        True
    """
    return _BUFFER + plain_name(name)


def is_buffer(name: str) -> bool:
    """Return True if a tensor among weights is a buffer, which is only averaged or mixed.

    Args:
        name: The name of the tensor.
    """
    return name.startswith(_BUFFER)


def by_plain_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with the names replaced by plain names.

    Args:
        values: One value per parameter, by name.

    Example:
        >>> by_plain_name({"_orig_mod.weight": 3})
        {'weight': 3}
    """
    return {plain_name(name): value for name, value in values.items()}


def copies_by_plain_name(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of a state's tensors, by plain name; a step may change them in place."""
    return {plain_name(name): value.detach().clone() for name, value in values.items()}


def counts_by_plain_name(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the counters in a state, by plain name, as integers."""
    return {plain_name(name): int(count) for name, count in values.items()}


def check_keys(
    owner: object, state: Mapping[str, Any], needed: Iterable[str], optional: Iterable[str] = ()
) -> None:
    """Raise an error for the state of another aggregation.

    Args:
        owner: The aggregation that loads the state, for the message.
        state: The state.
        needed: The keys that the state must have.
        optional: Keys that the state may have.

    Raises:
        ValueError: A key is missing or unknown.
    """
    needed = set(needed)
    allowed = needed.union(optional)
    if not needed <= set(state) <= allowed:
        raise ValueError(
            f"the state of {type(owner).__name__} must have the keys {sorted(allowed)}, "
            f"not {sorted(state)}: the checkpoint was written with another "
            "aggregation, so build the optimizer with that one"
        )


def check_names(remembered: Iterable[str], known: Iterable[str]) -> None:
    """Raise an error if a state names an unknown parameter; its values would be lost silently.

    Args:
        remembered: The names in the state.
        known: The names of the existing parameters.

    Raises:
        ValueError: A name is not known.
    """
    here = sorted(set(map(plain_name, known)))
    unknown = sorted(set(map(plain_name, remembered)).difference(here))
    if unknown:
        raise ValueError(
            "the names in the state must be those of parameters "
            f"({_first(here)}), not {_first(unknown)}: give the parameters the "
            "names that they had when the state was saved"
        )


def _first(names: list[str], count: int = 5) -> str:
    # A large model has thousands of names, and a few are enough to show how they differ.
    shown = list(map(repr, names[:count]))
    if len(names) > count:
        shown.append("...")
    return ", ".join(shown)
