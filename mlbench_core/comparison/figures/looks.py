"""Give each method one fixed look in all figures: color, marker, dash and hatch depend on its name alone.

The methods of the library have a place in a table. The name of another method is spelled as a
number, which gives its place behind the table, so that it has the same look on every page, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

__all__ = ["METHODS", "method_look", "method_looks"]

METHODS = (
    *(
        "centralized_sgd",
        "local_sgd",
        "muloco",
        "diloco",
        "power_sgd",
        "one_bit_adam",
        "streaming_diloco",
    ),
    *("ef_sign_sgd", "qsgd", "sparse_loco", "demo", "choco_sgd", "dion", "centralized_adam"),
    *("sign_sgd", "scaffold", "muon", "lars", "lamb", "decentralized_sgd", "sparsified_sgd"),
)
"""Methods with a fixed look, those that stand on one page most often first. Append new ones at the end."""

# Seven colors with three hatches distinguish 21 methods on a map; markers and dashes repeat at
# other lengths.
_HATCHES = ("", "....", "xxxx")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (3, 1, 1, 1)),
    (0, (1.5, 1)),
    (0, (7, 1.5, 1, 1.5)),
)
_COLORS = 7


def method_look(label: str) -> dict[str, Any]:
    """Return the look of a method: ``color``, ``marker``, ``linestyle`` and ``hatch``.

    Args:
        label: Label of a group; its first part that is a known method gives the color and the
            hatch.
    """
    import matplotlib

    words = re.split(r"[^A-Za-z0-9_]+", label.lower().replace("-", "_"))
    known = next((word for word in words if word in METHODS), None)
    rest = "".join(label.lower().replace("-", "_").split()).replace(known or "", "", 1)
    place = METHODS.index(known) if known is not None else len(METHODS) + _number(label)
    # Settings such as "rank 2" keep the method's color and hatch.
    shift = _number(rest) if known is not None and rest else 0
    color = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"][place % _COLORS]
    return {
        "color": color if color.startswith("#") else f"#{color}",
        "marker": _MARKERS[(place + shift) % len(_MARKERS)],
        "linestyle": _DASHES[(place + shift) % len(_DASHES)],
        "hatch": _HATCHES[place // _COLORS % len(_HATCHES)],
    }


def method_looks(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the look of each line of a figure, without hatches; of two equal looks, the later label's is changed.

    Args:
        labels: The labels of the lines.
    """
    found: dict[str, dict[str, Any]] = {}
    for label in labels:
        look = {name: value for name, value in method_look(label).items() if name != "hatch"}
        for step in range(len(_MARKERS) * len(_DASHES)):
            if look not in found.values():
                break
            start = _MARKERS.index(look["marker"]) + 1
            look["marker"] = _MARKERS[start % len(_MARKERS)]
            if step % len(_MARKERS) == len(_MARKERS) - 1:
                look["linestyle"] = _DASHES[(_DASHES.index(look["linestyle"]) + 1) % len(_DASHES)]
        found[label] = look
    return found


def _number(text: str) -> int:
    """Read a text as a number in base 31, which is the same in every process, unlike Python's hash."""
    value = 0
    for character in text:
        value = (31 * value + ord(character)) % 1_000_003
    return value
