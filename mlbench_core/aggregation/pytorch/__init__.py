"""Aggregation of PyTorch tensors."""

from mlbench_core.aggregation.pytorch.aggregation import Aggregation
from mlbench_core.aggregation.pytorch.centralized import AVG_CUSTOM, AVG_WORLD, AllReduceAggregation

__all__ = ["AVG_CUSTOM", "AVG_WORLD", "Aggregation", "AllReduceAggregation"]
