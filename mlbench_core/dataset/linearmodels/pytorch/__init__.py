"""Data of linear models for PyTorch."""

from mlbench_core._optional import _torch as _torch
from mlbench_core.dataset.linearmodels.pytorch.batches import BlockBatchSampler, LinearBatches
from mlbench_core.dataset.linearmodels.pytorch.dataloader import LMDBDataset, collate_rows

__all__ = ["BlockBatchSampler", "LMDBDataset", "LinearBatches", "collate_rows"]
