"""The import path of version 3.0 for the encoder of the Transformer. Its arguments are those of this version."""

from mlbench_core.models.pytorch.transformer.transformer import TransformerEncoder

__all__ = ["TransformerEncoder"]
