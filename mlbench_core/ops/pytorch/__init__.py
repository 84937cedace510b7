"""Operators of attention, some of which have CUDA kernels."""

from mlbench_core._optional import _torch as _torch
from mlbench_core.ops.pytorch.attention import fused_attention
from mlbench_core.ops.pytorch.attention_score import (
    attention_score,
    attention_score_reference,
    masked_softmax,
)

__all__ = ["attention_score", "attention_score_reference", "fused_attention", "masked_softmax"]
