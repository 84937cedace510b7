"""One look for each method and each phase, on every page."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib
import pytest

import mlbench_master
from mlbench_core.comparison.figures import bars
from mlbench_core.comparison.figures import styles as styles_of_methods
from mlbench_core.comparison.figures.canvas import style
from mlbench_core.comparison.figures.styles import METHODS, method_look, method_looks
from mlbench_core.observe.methods.names import METHODS as SCRIPT_METHODS

STYLE = Path(str(files(mlbench_master))) / "web" / "static" / "style.css"


# Methods of scripts with settings, labels of runs, variants of sweeps and classes of users.
SETTINGS = (
    *("power_sgd:rank=2", "power_sgd:rank=4", "power_sgd, rank 8", "diloco:period=50"),
    *("local_sgd:period=4", "local_sgd:period=16", "qsgd:levels=15", "train.py, as-is"),
    *("train.py, bf16", "quantized_sgd:bits=4", "sparse_loco, muon", "acp_sgd:rank=8"),
)
OWN = (
    *("Half", "MyTopK", "TopK", "Mean", "MyAggregation", "Sum", "half-36ede459.py:Half"),
    *("work/half.py:Half:bits=8", "adam", "adam_bf16", "sgd", "baseline", "ours", "a", "b"),
)
# A script writes as-is with a hyphen.
NAMES = (*sorted({*METHODS, *SCRIPT_METHODS} - {"as_is"}), *SETTINGS, *OWN)


def alike(looks: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the pairs that cannot be told apart as points or lines, or as areas."""
    return [
        (a, b)
        for a, b in itertools.combinations(looks, 2)
        if looks[a]["color"] == looks[b]["color"]
        and (looks[a]["marker"] == looks[b]["marker"] or looks[a]["hatch"] == looks[b]["hatch"])
    ]


def test_every_method_of_the_library_has_a_look_of_its_own() -> None:
    with style():
        assert alike({name: method_look(name) for name in METHODS}) == []
        exchanges = {name: method_look(name) for name in SCRIPT_METHODS}
        assert alike(exchanges) == [], "every method of a script, too"


def test_two_methods_of_a_figure_never_look_alike() -> None:
    """Two named "as-is" and "bf16" were drawn with one color, one mark and one hatch."""
    chance = random.Random(11)
    with style():
        known = {name: method_look(name) for name in NAMES}
        assert alike(known), "names alone are not enough"
        for one, other in itertools.combinations(NAMES, 2):
            assert alike(method_looks([one, other])) == []
        for _ in range(2000):
            names = chance.sample(NAMES, chance.randint(3, 12))
            looks = method_looks(names)
            assert list(looks) == names and alike(looks) == []
            for name in names:
                if name in SCRIPT_METHODS or name in METHODS:
                    assert looks[name] == known[name], "of the table, beside any others"
        whole = method_looks(chance.sample(NAMES, 42))
        assert len(whole) == 42 and alike(whole) == [], "as many as there are looks"


def test_settings_have_the_color_of_their_method_beside_any_own_names() -> None:
    ranks = [f"power_sgd:rank={rank}" for rank in (1, 2, 4, 8)]
    with style():
        looks = method_looks([*OWN, *ranks, "power_sgd", "bf16"])
        assert {looks[name]["color"] for name in ranks} == {method_look("power_sgd")["color"]}
        assert looks["power_sgd"] == method_look("power_sgd")
        many = method_looks([f"power_sgd:rank={rank}" for rank in range(1, 13)])
        assert alike(many) == [], "more than one color has marks"


def test_a_class_has_the_same_look_from_its_file_and_from_the_copy_in_a_sweep() -> None:
    with style():
        looks = [
            method_look(name) for name in ("Half", "half.py:Half", "sweep/half-36ede459.py:Half")
        ]
        assert looks[0] == looks[1] == looks[2]
        two = method_looks(["a.py:Half", "b.py:Half"])
    assert alike(two) == [], "two files may have a class of the same name"


def test_the_looks_of_own_names_are_those_of_the_published_figures() -> None:
    """They moved with each method that was added to the table."""
    with style():
        adam, rounded = method_look("adam"), method_look("adam_bf16")
    assert (adam["color"], adam["marker"]) == ("#56B4E9", "^")
    assert (rounded["color"], rounded["marker"]) == ("#D55E00", "o")


def test_a_method_has_the_same_look_beside_any_others() -> None:
    with style():
        for names in (
            ("muloco", "diloco"),
            ("diloco", "muloco"),
            ("x", "diloco", "adam 7", "muloco"),
        ):
            found = method_looks(names)
            assert {name: found[name]["color"] for name in ("muloco", "diloco")} == {
                "muloco": method_look("muloco")["color"],
                "diloco": method_look("diloco")["color"],
            }
        ranks = method_looks(["power_sgd, rank 2", "power_sgd, rank 4", "power_sgd, rank 8"])
        assert len({look["color"] for look in ranks.values()}) == 1, "settings keep the color"
        assert len({(look["marker"], str(look["linestyle"])) for look in ranks.values()}) == 3
        many = method_looks([f"own {number}" for number in range(40)])
        assert alike(many) == []


def test_another_method_has_the_same_look_in_every_process() -> None:
    code = (
        "from mlbench_core.comparison.figures.styles import method_look\n"
        "from mlbench_core.comparison.figures.canvas import style\n"
        "with style(): print(method_look('mine'))"
    )
    with style():
        expected = str(method_look("mine"))
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin", "MPLCONFIGDIR": "/tmp"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected


@pytest.mark.parametrize("phase", ["compute", "communication", "metrics", "data"])
def test_the_dashboard_has_the_colors_of_the_figures(phase: str) -> None:
    """The variables --c1 to --c7 are the colors of the figures, darkened or lightened for a
    theme."""
    with style():
        cycle = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    number = re.search(
        rf"\.phase-{phase} {{ fill: var\(--c(\d)\); }}", STYLE.read_text(encoding="utf-8")
    )
    assert number is not None
    assert f"#{cycle[int(number[1]) - 1].lstrip('#')}" == bars._PHASE_LOOKS[phase]["facecolor"]


def test_the_table_of_methods_has_no_name_twice() -> None:
    assert (
        len(set(METHODS))
        == len(METHODS)
        <= styles_of_methods._COLORS * len(styles_of_methods._HATCHES)
    )
