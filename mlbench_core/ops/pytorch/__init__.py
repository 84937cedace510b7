"""Operators of attention, some of which have CUDA kernels."""

from mlbench_core import _torch as _torch
from mlbench_core.ops.pytorch.attention import draw_seed, short_attention, short_attention_kv, short_attention_qkv
from mlbench_core.ops.pytorch.attention_score import attention_score, attention_score_reference, masked_softmax

__all__ = [
    "attention_score",
    "attention_score_reference",
    "draw_seed",
    "masked_softmax",
    "short_attention",
    "short_attention_kv",
    "short_attention_qkv",
]
