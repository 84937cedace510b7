"""The import path of version 3.0 for the Transformer's positions, with the current arguments."""

from mlbench_core.models.pytorch.transformer.modules.positions import (
    LearnedPositions as LearnedPositionalEmbedding,
)
from mlbench_core.models.pytorch.transformer.modules.positions import (
    SinusoidalPositions as SinusoidalPositionalEmbedding,
)

__all__ = ["LearnedPositionalEmbedding", "SinusoidalPositionalEmbedding"]
