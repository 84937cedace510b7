"""The import path of version 3.0 for the Transformer's decoder, with the current arguments."""

from mlbench_core.models.pytorch.transformer.transformer import TransformerDecoder

__all__ = ["TransformerDecoder"]
