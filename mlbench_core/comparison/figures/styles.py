"""Give each method one fixed look in all figures.

Color, marker, dash and hatch depend on the name of the method alone. The methods of the library
have a place in a table. The name of another method is spelled as a number, which gives its look on
every page, unless another method of the figure has it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

__all__ = ["METHODS", "line_looks", "method_look", "method_looks"]

METHODS = (
    *("centralized_sgd", "local_sgd", "muloco", "diloco", "power_sgd", "one_bit_adam"),
    *("streaming_diloco", "ef_sign_sgd", "qsgd", "sparse_loco", "demo", "choco_sgd", "dion"),
    *("centralized_adam", "sign_sgd", "scaffold", "muon", "lars", "lamb"),
    *("decentralized_sgd", "sparsified_sgd", "normuon", "dion2", "dion3", "no_loco"),
    *("quantized_sgd", "loco", "ef21", "ef21_muon", "acp_sgd", "edit", "eager_diloco"),
    *("sgp", "arc_top_k", "des_loc", "sparta", "adamw", "local_adamw"),
    *("centralized_sparsified_sgd", "fp16", "bf16", "as_is"),
)
"""Methods with a fixed look, those that are most often on one page first.

All 42 places are taken, and no look may change, so a further method has that of an own name.
"""

# Seven colors with six hatches, and with six markers, distinguish 42 methods. Dashes repeat at
# another length.
_HATCHES = ("", "....", "xxxx", "////", "oooo", "||||")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (3, 1, 1, 1)),
    (0, (1.5, 1)),
    (0, (7, 1.5, 1, 1.5)),
)
_COLORS = 7
# The looks of own names are counted from here. The number is that of the published figures.
_OWN = 21


def method_look(label: str) -> dict[str, Any]:
    """Return the look of a method: ``color``, ``marker``, ``linestyle`` and ``hatch``.

    Args:
        label: Label of a group; its first part that is a known method gives the color and the
            hatch.
    """
    method, settings = _read(label)
    if method:
        index = METHODS.index(method)
        # Settings such as "rank 2" keep the method's color and hatch.
        shift = _number(settings)
    else:
        index, shift = _OWN + _number(settings), 0
    return {
        "color": _colors()[index % _COLORS],
        "marker": MARKERS[(index + shift) % len(MARKERS)],
        "linestyle": DASHES[(index + shift) % len(DASHES)],
        "hatch": _HATCHES[index // _COLORS % len(_HATCHES)],
    }


def method_looks(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the look of each method of a figure; no two are alike.

    Two of the same color differ in marker and hatch, so that lines, points and areas can all be
    told apart, in figures of up to 42 methods. A method of the table has its look of
    :func:`method_look` beside any others. Its settings have its color while that has a free marker
    and a free hatch. Own names take what remains.

    Args:
        labels: The labels.
    """
    labels = list(dict.fromkeys(labels))
    looks: dict[str, dict[str, Any]] = {}
    for label in sorted(labels, key=_turn):
        looks[label] = _free(method_look(label), looks.values())
    return {label: looks[label] for label in labels}


def line_looks(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the looks of :func:`method_looks` without hatches, which a line does not have.

    Args:
        labels: The labels.
    """
    looks = method_looks(labels)
    for look in looks.values():
        del look["hatch"]
    return looks


def _read(label: str) -> tuple[str, str]:
    """Return the known method in a label and the rest; of an own name, only the rest."""
    # The file of an own class has another name in the folder of a sweep.
    text = re.sub(r"[^\s,]+\.py:", "", label)
    spelled = text.lower().replace("-", "_")
    for word in re.split(r"[^A-Za-z0-9_]+", spelled):
        if word in METHODS:
            return word, "".join(spelled.split()).replace(word, "", 1)
    return "", text


def _turn(label: str) -> int:
    """Return whether a label chooses its look first, second or last."""
    method, settings = _read(label)
    if not method:
        return 2
    return 1 if settings else 0


def _free(look: dict[str, Any], taken: Collection[dict[str, Any]]) -> dict[str, Any]:
    """Return the first look, beginning with the given one, that is unlike those that are taken."""
    for color in _beginning_with(look["color"], _colors()):
        same = [other for other in taken if other["color"] == color]
        markers = _beginning_with(look["marker"], MARKERS, [other["marker"] for other in same])
        hatches = _beginning_with(look["hatch"], _HATCHES, [other["hatch"] for other in same])
        if markers and hatches:
            return look | {"color": color, "marker": markers[0], "hatch": hatches[0]}
    return look


def _beginning_with(first: str, choices: tuple[str, ...], taken: Collection[str] = ()) -> list[str]:
    """Return the choices from the first on, and then those before it, without those taken."""
    start = choices.index(first)
    return [choice for choice in choices[start:] + choices[:start] if choice not in taken]


def _colors() -> tuple[str, ...]:
    import matplotlib

    # The colors in mlbench.mplstyle have no "#", which would begin a comment there.
    cycle = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"][:_COLORS]
    return tuple(f"#{color.removeprefix('#')}" for color in cycle)


def _number(text: str) -> int:
    """Read a text as a number in base 31; unlike Python's hash, it is equal in all processes."""
    value = 0
    for character in text:
        value = (31 * value + ord(character)) % 1_000_003
    return value
