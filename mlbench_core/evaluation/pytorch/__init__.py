"""Compute metrics and losses with torch."""

from mlbench_core._optional import _torch as _torch
from mlbench_core.evaluation.pytorch import criterion, metrics

__all__ = ["criterion", "metrics"]
