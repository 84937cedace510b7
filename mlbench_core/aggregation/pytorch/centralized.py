"""Aggregation in which every worker gets the same result."""

from mlbench_core.aggregation.pytorch.all_reduce import (
    AVG_CUSTOM,
    AVG_WORLD,
    AllReduceAggregation,
    check_world_size,
)
from mlbench_core.aggregation.pytorch.compression.power import PowerAggregation
from mlbench_core.aggregation.pytorch.compression.sign import EFSignAggregation, SignAggregation
from mlbench_core.aggregation.pytorch.compression.sparsified import SparsifiedAggregation
from mlbench_core.aggregation.pytorch.transport.horovod import AllReduceAggregationHVD

__all__ = [
    "AVG_CUSTOM",
    "AVG_WORLD",
    "AllReduceAggregation",
    "AllReduceAggregationHVD",
    "EFSignAggregation",
    "PowerAggregation",
    "SignAggregation",
    "SparsifiedAggregation",
    "check_world_size",
]
