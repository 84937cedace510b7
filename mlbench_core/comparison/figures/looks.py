"""Give each method one fixed look in all figures.

Color, marker, dash and hatch depend on the name of the method alone. The methods of the library
have a place in a table. The name of another method is spelled as a number, which gives its place
behind the table, so that it has the same look on every page, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

__all__ = ["METHODS", "method_look", "method_looks"]

METHODS = (
    *("centralized_sgd", "local_sgd", "muloco", "diloco", "power_sgd", "one_bit_adam"),
    *("streaming_diloco", "ef_sign_sgd", "qsgd", "sparse_loco", "demo", "choco_sgd", "dion"),
    *("centralized_adam", "sign_sgd", "scaffold", "muon", "lars", "lamb"),
    *("decentralized_sgd", "sparsified_sgd", "normuon", "dion2", "dion3", "no_loco"),
    *("quantized_sgd", "loco", "ef21", "ef21_muon", "acp_sgd", "edit", "eager_diloco"),
    *("sgp", "arc_top_k", "des_loc", "sparta", "adamw", "local_adamw"),
)
"""Methods with a fixed look, those that are most often on one page first.

Append new ones at the end, so that no look changes.
"""

# Seven colors with six hatches distinguish 42 methods on a map; markers and dashes repeat at
# other lengths.
_HATCHES = ("", "....", "xxxx", "////", "oooo", "++++")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[Any, ...] = (
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

    spelled = label.lower().replace("-", "_")
    methods = [word for word in re.split(r"[^A-Za-z0-9_]+", spelled) if word in METHODS]
    if methods:
        index = METHODS.index(methods[0])
        # Settings such as "rank 2" keep the method's color and hatch.
        shift = _number("".join(spelled.split()).replace(methods[0], "", 1))
    else:
        index, shift = len(METHODS) + _number(label), 0
    # The colors in mlbench.mplstyle have no "#", which would begin a comment there.
    color = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"][index % _COLORS]
    return {
        "color": f"#{color.removeprefix('#')}",
        "marker": MARKERS[(index + shift) % len(MARKERS)],
        "linestyle": DASHES[(index + shift) % len(DASHES)],
        "hatch": _HATCHES[index // _COLORS % len(_HATCHES)],
    }


def method_looks(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the look of each line of a figure, without hatches.

    Of two equal looks, that of the later label is changed.

    Args:
        labels: The labels of the lines.
    """
    looks: dict[str, dict[str, Any]] = {}
    for label in labels:
        look = method_look(label)
        del look["hatch"]
        for step in range(len(MARKERS) * len(DASHES)):
            if look not in looks.values():
                break
            marker = MARKERS.index(look["marker"]) + 1
            look["marker"] = MARKERS[marker % len(MARKERS)]
            # After all markers, the next dash.
            if step % len(MARKERS) == len(MARKERS) - 1:
                dash = DASHES.index(look["linestyle"]) + 1
                look["linestyle"] = DASHES[dash % len(DASHES)]
        looks[label] = look
    return looks


def _number(text: str) -> int:
    """Read a text as a number in base 31; unlike Python's hash, it is equal in all processes."""
    value = 0
    for character in text:
        value = (31 * value + ord(character)) % 1_000_003
    return value
