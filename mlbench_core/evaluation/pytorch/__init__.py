"""Metrics and loss functions."""

from mlbench_core.evaluation.pytorch import criterion, metrics

__all__ = ["criterion", "metrics"]
