"""The figures of the source tree, on a tree small enough to count by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

METER = '''"""Count things."""

from mlbench_core.client.rest import post  # a tracker may report to the master

LIMIT = 3


# Comments that follow one another
# are one text, so many lines it has.
class Meter:
    def count(self, a, b, c, d, e, f, g, h, i):
        """Counts things.

        >>> what = "a doctest is not prose"
        """
        return self._add(a, b)

    def few(self, a, b, c, d, e, f, g, h):
        """Return the first of eight."""
        return a

    def _add(self, a, b):
        return a + b

    def _twice(self):
        return self._twice_of(1) + self._twice_of(2)

    def _twice_of(self, x):
        return 2 * x


def long():
    """Return a long list."""
    return [
{items}
    ]
'''
REST = '''"""Post; what is sent is JSON. What is posted?"""

from mlbench_core.tracking import meter


def post(data):
    first = data.first
    second = data.second
    third = data.third
    fourth = data.fourth
    return first, second, third, fourth, {value}
'''
FILES = {
    "mlbench_core/__init__.py": '"""The library."""\n\n__version__ = "1"\n',
    "mlbench_core/tracking/meter.py": METER.replace(
        "{items}", "\n".join(f"        {i}," for i in range(50))
    ),
    "mlbench_core/client/rest.py": REST.replace("{value}", "1"),
    "mlbench_core/utils/__init__.py": (
        "from mlbench_core.tracking.meter import Meter\n\n__all__ = ['Meter']\n"
    ),
    "mlbench_core/utils/__main__.py": (
        '"""A face of a face."""\n\nfrom mlbench_core.utils import old\n'
    ),
    "mlbench_core/utils/old.py": '"""An old room."""\n\nX = 1\n',
    "mlbench_core/dataset/util.py": '"""A face."""\n\nimport sys\n\nsys.modules[__name__] = sys\n',
    "mlbench_master/app.py": REST.replace("{value}", "2").replace(
        "core.tracking import meter", "core.utils import old"
    ),
    "benchmarks/task/main.py": (
        '"""Train."""\n\nfrom mlbench_core.client import rest\n\nrest.post(1)  # why\n'
    ),
    "docs/index.md": "Text is drawn anew. `told` is code.\n\n```\ntold\n```\n",
    "docs/algorithms/late.md": "It was told.\n",
}


def test_a_tree_that_was_counted_by_hand(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, str(ROOT / "tools" / "measure_house.py"), str(tmp_path)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)

    figures = found["figures"]
    # The meter has 2 lines before its class, 11 in it and 53 of its long function; the rest can be
    # seen at a glance.
    assert found["packages"]["mlbench_core.tracking"] == {"files": 1, "code": 66, "comments": 2}
    assert figures["code lines: library"] == 1 + 66 + 7 + 2 + 1 + 1 + 2
    assert figures["code lines: master"] == 7
    assert figures["code lines: benchmarks"] == 2
    assert (figures["files"], figures["functions"], figures["private functions"]) == (9, 8, 3)
    assert figures["comment lines per 100 code lines"] == round(100 * 2 / 87, 2)
    assert figures["comments behind code per 100 code lines"] == round(100 * 1 / 87, 2)

    places = found["places"]
    meter = "mlbench_core/tracking/meter.py"
    assert places["functions over 50 code lines"] == [f"{meter}:32 long"]
    assert places["functions over 8 parameters"] == [f"{meter}:11 count"]
    assert places["private functions, one caller, under 6 lines"] == [f"{meter}:22 _add"]
    assert places["repeated code lines"] == [
        f"{file}:{line}"
        for file in ("mlbench_core/client/rest.py", "mlbench_master/app.py")
        for line in range(6, 12)
    ]
    assert places["modules without a docstring summary"] == ["mlbench_core/utils/__init__.py"]
    assert places["public functions without an imperative (D401)"] == [f"{meter}:12"]
    assert places["modules with a name only faces may have"] == ["mlbench_core/utils/old.py"]
    assert places["import circles of modules"] == [
        "mlbench_core.client.rest mlbench_core.tracking.meter"
    ]
    assert places["import circles of packages"] == ["client tracking"]
    assert places["imports that go up"] == [
        "mlbench_core/client/rest.py:3 mlbench_core.tracking.meter"
    ]
    assert places["imports of faces from within"] == [
        "mlbench_master/app.py:3 mlbench_core.utils.old"
    ]
    assert places["modules that are in no layer"] == []
    words = {
        name: listed for name, listed in places.items() if name.startswith("words: ") and listed
    }
    assert words == {
        "words: what (relative)": ["mlbench_core/client/rest.py:1", "mlbench_master/app.py:1"],
        "words: so many": [f"{meter}:8"],
        "words: anew": ["docs/index.md:1"],
        "words: told (settings)": ["docs/algorithms/late.md:1"],
    }
    assert figures["words: all"] == 5


def test_the_table_has_a_row_for_each_package_and_figure() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "measure_house.py"), "/nowhere"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].split() == [
        "package",
        "files",
        "code",
        "lines",
        "comment",
        "lines",
    ]
    assert "code lines: library" in done.stdout
