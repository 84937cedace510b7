"""The import path of version 3.0 for the Transformer's encoder, with today's arguments."""

from mlbench_core.models.pytorch.transformer.transformer import TransformerEncoder

__all__ = ["TransformerEncoder"]
