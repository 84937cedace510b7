"""WMT17: the vocabulary, the batches and the data set of task 4b."""

from mlbench_core.dataset.nlp.pytorch.batches import collate_batch
from mlbench_core.dataset.nlp.pytorch.wmt17.wmt17_dictionary import Dictionary

__all__ = ["Dictionary", "collate_batch"]
