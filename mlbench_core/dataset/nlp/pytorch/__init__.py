"""Text data sets for PyTorch."""

from mlbench_core.dataset.nlp.pytorch.wikitext2_dataset import Wikitext2Dataset

__all__ = ["Wikitext2Dataset"]
