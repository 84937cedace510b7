"""Layers that models of this package share."""

from mlbench_core.models.pytorch.layers.dropout_layers import LockedDropout, WeightDrop, embedded_dropout

__all__ = ["LockedDropout", "WeightDrop", "embedded_dropout"]
