"""Aggregation in which every worker gets the same result."""

from mlbench_core.aggregation.pytorch.all_reduce import AVG_CUSTOM, AVG_WORLD, AllReduceAggregation, check_world_size
from mlbench_core.aggregation.pytorch.horovod import AllReduceAggregationHVD

__all__ = ["AVG_CUSTOM", "AVG_WORLD", "AllReduceAggregation", "AllReduceAggregationHVD", "check_world_size"]
