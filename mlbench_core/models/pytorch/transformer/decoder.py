"""The import path of version 3.0 for the decoder of the Transformer. Its arguments are those of this version."""

from mlbench_core.models.pytorch.transformer.transformer import TransformerDecoder

__all__ = ["TransformerDecoder"]
