"""Text data sets for PyTorch."""

from mlbench_core._optional import _torch as _torch
from mlbench_core.dataset.nlp.pytorch.batches import (
    BucketBatchSampler,
    TeacherForcedBatches,
    build_collate_fn,
    get_batches,
    shard_batches,
)
from mlbench_core.dataset.nlp.pytorch.multi30k import Multi30k
from mlbench_core.dataset.nlp.pytorch.wikitext2_dataset import Wikitext2Dataset
from mlbench_core.dataset.nlp.pytorch.wmt16_dataset import WMT16Dataset
from mlbench_core.dataset.nlp.pytorch.wmt17_dataset import WMT17Dataset

__all__ = [
    "BucketBatchSampler",
    "Multi30k",
    "TeacherForcedBatches",
    "WMT16Dataset",
    "WMT17Dataset",
    "Wikitext2Dataset",
    "build_collate_fn",
    "get_batches",
    "shard_batches",
]
