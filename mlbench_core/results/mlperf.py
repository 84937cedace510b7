"""Write the log of a run in the format of MLPerf."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["mlperf_lines"]


def mlperf_lines(
    result: Mapping[str, Any], environment: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Return the lines of ``mlperf.log``."""
    return []
