"""WMT16: the tokenizer and the batches of task 4a."""

from mlbench_core.dataset.nlp.pytorch.batches import build_collate_fn
from mlbench_core.dataset.nlp.pytorch.wmt16 import wmt16_config
from mlbench_core.dataset.nlp.pytorch.wmt16.wmt16_tokenizer import WMT16Tokenizer

__all__ = ["WMT16Tokenizer", "build_collate_fn", "wmt16_config"]
