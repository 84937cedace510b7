"""Partitions of data sets over workers, and conversions."""

from mlbench_core.dataset.util.pytorch.partition import (
    DataPartitioner,
    Partition,
    Partitioner,
    partition_dataset_by_rank,
    stratified_split,
)

__all__ = ["DataPartitioner", "Partition", "Partitioner", "partition_dataset_by_rank", "stratified_split"]
