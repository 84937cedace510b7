"""One look for each method and each phase, on every page."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import matplotlib
import pytest

import mlbench_master
from mlbench_core.comparison.figures import bars
from mlbench_core.comparison.figures import looks as looks_of_methods
from mlbench_core.comparison.figures.canvas import style
from mlbench_core.comparison.figures.looks import METHODS, method_look, method_looks

STYLE = Path(str(files(mlbench_master))) / "web" / "static" / "style.css"


def test_every_method_of_the_library_has_a_look_of_its_own() -> None:
    with style():
        looks = [method_look(name) for name in METHODS]
    for a, b in itertools.combinations(looks, 2):
        assert (a["color"], a["hatch"]) != (b["color"], b["hatch"])


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
        assert len({str(sorted(look.items())) for look in many.values()}) == 40


def test_another_method_has_the_same_look_in_every_process() -> None:
    code = (
        "from mlbench_core.comparison.figures.looks import method_look\n"
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
        <= looks_of_methods._COLORS * len(looks_of_methods._HATCHES)
    )
