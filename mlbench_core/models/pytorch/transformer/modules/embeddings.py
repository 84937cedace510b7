"""The import path of version 3.0 for the positions of the Transformer. Its arguments are those of this version."""

from mlbench_core.models.pytorch.transformer.modules.positions import (
    LearnedPositions as LearnedPositionalEmbedding,
)
from mlbench_core.models.pytorch.transformer.modules.positions import (
    SinusoidalPositions as SinusoidalPositionalEmbedding,
)

__all__ = ["LearnedPositionalEmbedding", "SinusoidalPositionalEmbedding"]
