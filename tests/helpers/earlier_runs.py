"""Four result folders of task 1a that an earlier version wrote.

They have no bytes on the wire and no exchanges.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.helpers.archives import unpack

ARCHIVE = Path(__file__).parents[1] / "results" / "earlier_runs.tar.xz"


@cache
def earlier_runs() -> Path:
    """Unpack the runs once per process.

    They are ``centralized-sgd-1-r1``, ``-2-r1`` and ``-2-r2``, and ``power-sgd-2-r1``.
    """
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    unpack(ARCHIVE, folder)
    return folder / "runs"
