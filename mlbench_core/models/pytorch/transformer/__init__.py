"""The Transformer for translation, and its decoding."""

from mlbench_core.models.pytorch.transformer.config import TransformerConfig
from mlbench_core.models.pytorch.transformer.sequence_generator import SequenceGenerator
from mlbench_core.models.pytorch.transformer.transformer import TransformerModel

__all__ = ["SequenceGenerator", "TransformerConfig", "TransformerModel"]
