"""Draw the figures of a comparison, as ``mlbench compare --output`` does.

The latest figures are kept in memory. matplotlib needs 90 MB and draws for seconds, during which
other threads of its process hardly run. So figures are drawn in a separate process, with a low
priority, because runs may be measured at the same time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_core.calling_environment import module_command, safe_environment

if TYPE_CHECKING:
    from mlbench_core.comparison.group_repeats import Group

__all__ = ["TITLES", "Figures", "can_draw", "draw", "figures_key", "main"]

TITLES = {
    "total_time_by_phase": "Training time by phase",
    "speedup": "Speed-up",
    "time_all_phases": "Training time by step of a batch",
    "price_index": "Price index",
    "communication_share": "Share of communication",
    "time_to_goal_against_price": "Time to the goal against the price",
    "performance_profile": "Performance profile",
}
"""The figures, and their titles for people."""

# The overview repeats two figures. Learning curves need the raw lines, and the page has live ones.
_LEFT_OUT = (
    "overview",
    *("learning_curves_epochs", "learning_curves_steps", "learning_curves_tokens"),
    *("learning_curves_time", "learning_curves_bytes"),
)
_INDEX = "figures.json"
_LONGEST_S = 120.0
# The figures of one comparison have about 2 MB.
_MOST_KEPT = 8

# Each waiting request holds one of the threads that answer all requests.
_MOST_WAITING = 4
_BUSY = "The master is drawing other figures: open this page again in some seconds."

_turns = threading.BoundedSemaphore(_MOST_WAITING)
_drawing = threading.Lock()
_keeping = threading.Lock()
_kept: OrderedDict[str, Figures] = OrderedDict()


@dataclass(frozen=True)
class Figures:
    """The figures of a comparison.

    Attributes:
        captions: The captions of the figures, by their names.
        files: The files, for example ``"speedup.svg"``.
        missing: A sentence for each figure that is not drawn, with the reason.
    """

    captions: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def figures_key(groups: Sequence[Group], price_per_hour: float | None) -> str:
    """Return a text that is equal for the figures of equal results."""
    return hashlib.sha256(_input(groups, price_per_hour)).hexdigest()[:16]


def draw(groups: Sequence[Group], price_per_hour: float | None = None) -> Figures:
    """Draw the figures of some groups, or return those that were drawn of the same results before.

    Args:
        groups: The groups of runs.
        price_per_hour: Price of one worker for an hour; None if it is unknown.
    """
    key = figures_key(groups, price_per_hour)
    figures = _find(key)
    if figures is not None:
        return figures
    if not _turns.acquire(blocking=False):
        return Figures(missing=[_BUSY])
    try:
        # One process at a time: it needs a core, and the request before may draw the same figures.
        with _drawing:
            return _find(key) or _keep(key, _draw(_input(groups, price_per_hour)))
    finally:
        _turns.release()


def _find(key: str) -> Figures | None:
    with _keeping:
        if key in _kept:
            _kept.move_to_end(key)
        return _kept.get(key)


def _keep(key: str, figures: Figures) -> Figures:
    # After a failure, the next request tries again.
    if figures.files:
        with _keeping:
            _kept[key] = figures
            while len(_kept) > _MOST_KEPT:
                _kept.popitem(last=False)
    return figures


def _input(groups: Sequence[Group], price_per_hour: float | None) -> bytes:
    records: list[dict[str, Any]] = []
    for group in groups:
        records += map(dataclasses.asdict, group.records)
    return json.dumps({"records": records, "price_per_hour": price_per_hour}, default=str).encode()


def _draw(content: bytes) -> Figures:
    with tempfile.TemporaryDirectory(prefix="mlbench-figures-") as folder:
        command = module_command("mlbench_master.web.figures", folder)
        try:
            subprocess.run(
                command,
                input=content,
                capture_output=True,
                check=True,
                timeout=_LONGEST_S,
                cwd=folder,
                env=safe_environment(),
            )
        except subprocess.TimeoutExpired:
            problem = f"Drawing took longer than {_LONGEST_S:.0f} s: choose fewer runs."
            return Figures(missing=[problem])
        except subprocess.CalledProcessError as error:
            last = error.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return Figures(missing=[f"The figures could not be drawn: {last[:300]}"])
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        return Figures(**json.loads(files.pop(_INDEX)), files=files)


def main() -> None:
    """Draw the figures of the results on standard input into the folder of the first argument."""
    from mlbench_core.comparison.figures import drawings, save
    from mlbench_core.comparison.group_repeats import pool
    from mlbench_core.comparison.result_record import RunRecord

    with contextlib.suppress(AttributeError, OSError):  # Windows has no nice
        os.nice(10)
    folder = Path(sys.argv[1])
    content = json.load(sys.stdin)
    groups = pool([RunRecord(**record) for record in content["records"]])
    captions: dict[str, str] = {}
    missing: list[str] = []
    for drawing in drawings(groups, content["price_per_hour"], missing.append, _LEFT_OUT):
        save(drawing, folder)
        captions[drawing.name] = drawing.caption
    index = json.dumps({"captions": captions, "missing": missing})
    (folder / _INDEX).write_text(index, encoding="utf-8")


if __name__ == "__main__":
    main()
