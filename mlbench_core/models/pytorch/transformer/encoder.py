"""The import path of version 3.0 for the Transformer's encoder, with the current arguments."""

from mlbench_core.models.pytorch.transformer.transformer import TransformerEncoder

__all__ = ["TransformerEncoder"]
