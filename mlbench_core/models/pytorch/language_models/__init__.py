"""Language models."""

from mlbench_core.models.pytorch.language_models.lstm import LSTMLanguageModel

__all__ = ["LSTMLanguageModel"]
