"""Divide data sets among workers, and iterate over batches that can be resumed."""

from mlbench_core._optional import _torch as _torch
from mlbench_core.dataset.pytorch.partition import (
    DataPartitioner,
    Partition,
    Partitioner,
    parse_partition,
    partition_dataset_by_rank,
    stratified_split,
)

__all__ = [
    "DataPartitioner",
    "Partition",
    "Partitioner",
    "parse_partition",
    "partition_dataset_by_rank",
    "stratified_split",
]
