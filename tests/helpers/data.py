"""Where the real data sets for tests lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def test_data(*parts: str) -> Path:
    """The path of real test data, or a skip with the reason.

    The root is ``MLBENCH_TEST_DATA``, or ``../shared/data`` beside the checkout.
    """
    root = Path(
        os.environ.get("MLBENCH_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data"
    )
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(
            f"real data is not here: {path} (set MLBENCH_TEST_DATA "
            f"to the folder that holds {parts[0]}/)"
        )
    return path


test_data.__test__ = False  # type: ignore[attr-defined]
