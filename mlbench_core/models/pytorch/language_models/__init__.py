"""Language models."""

from mlbench_core.models.pytorch.language_models.carried_state import CarriedState, detached
from mlbench_core.models.pytorch.language_models.lstm import LSTMLanguageModel

__all__ = ["CarriedState", "LSTMLanguageModel", "detached"]
