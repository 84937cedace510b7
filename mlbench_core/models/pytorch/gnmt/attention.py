"""The import path of version 3.0 for the attention of GNMT, with the arguments of this version."""

from mlbench_core.models.pytorch.gnmt.modules import (
    NormalizedBahdanauAttention as BahdanauAttention,
)

__all__ = ["BahdanauAttention"]
