"""Parts of the Transformer."""

from mlbench_core.models.pytorch.transformer.modules.incremental import (
    IncrementalState,
    KeyValueCache,
)
from mlbench_core.models.pytorch.transformer.modules.layers import DecoderLayer, EncoderLayer
from mlbench_core.models.pytorch.transformer.modules.multihead_attention import MultiheadAttention
from mlbench_core.models.pytorch.transformer.modules.positions import (
    LearnedPositions,
    SinusoidalPositions,
)

__all__ = [
    "DecoderLayer",
    "EncoderLayer",
    "IncrementalState",
    "KeyValueCache",
    "LearnedPositions",
    "MultiheadAttention",
    "SinusoidalPositions",
]
