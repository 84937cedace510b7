"""Layers shared by the models of this package."""

from mlbench_core.models.pytorch.layers.dropout_layers import (
    LockedDropout,
    WeightDrop,
    embedded_dropout,
)

__all__ = ["LockedDropout", "WeightDrop", "embedded_dropout"]
