"""Mixed precision with loss scaling (arXiv:1710.03740), k workers in one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def train(
    x: Tensor,
    gradient: Callable[[int, int, Tensor, float], Tensor],
    k: int,
    steps: int,
    lr: float,
    s: float,
    f: float,
    w: int,
) -> tuple[Tensor, list[float]]:
    """Return the float32 master weights after SGD, and the loss scale after each step.

    ``gradient(i, t, x16, s)`` is worker i's float16 gradient of s L_i at the half-precision weights
    x16 in step t."""
    scales, clean = [], 0
    for t in range(steps):
        x16 = x.half()  # the model computes with rounded weights
        sent = torch.stack([gradient(i, t, x16, s) for i in range(k)])  # in half precision
        g = (sent.sum(0) / k).float() / s  # unscaled in float32
        if g.norm().isfinite():
            x = x - lr * g  # small updates add up in float32
            clean += 1
            if clean == w:  # w updates running without an overflow
                s, clean = s * f, 0
        else:  # the update is skipped
            s, clean = s / f, 0
        scales.append(s)
    return x, scales
