"""Fixtures of the tests of the tracker: a frozen clock, and the numbers that reach the master."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock, patch

import freezegun
import pytest
from freezegun import freeze_time

# pytest measures with the same clock how long the tests take.
freezegun.configure(extend_ignore_list=["_pytest.timing"])


@pytest.fixture
def log() -> Iterator[MagicMock]:
    with patch("mlbench_core.tracking.tracker.LogMetrics") as log_metrics:
        yield log_metrics.log


@pytest.fixture
def clock() -> Iterator[Any]:
    # Events of a real device would measure real time, even if an earlier test of this process has
    # initialized CUDA.
    with (
        freeze_time("2026-01-01") as frozen,
        patch("mlbench_core.tracking.tracker.cuda_in_use", return_value=False),
    ):
        yield frozen
