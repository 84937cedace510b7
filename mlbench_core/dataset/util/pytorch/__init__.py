"""The import path of version 3.0 for :mod:`mlbench_core.dataset.pytorch`."""

from mlbench_core._optional.lazy import lazy_subpackages
from mlbench_core.dataset.pytorch import (
    DataPartitioner,
    Partition,
    Partitioner,
    partition_dataset_by_rank,
)

__all__ = ["DataPartitioner", "Partition", "Partitioner", "partition_dataset_by_rank"]

__getattr__ = lazy_subpackages(__name__, "libsvm", "partition")
