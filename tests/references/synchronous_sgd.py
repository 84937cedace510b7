"""Synchronous SGD (Goyal et al. 2017, arXiv:1706.02677): k workers take the step of one worker on
the joined batch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def synchronous_sgd(
    gradient: Callable[[Tensor, int, int], Tensor],
    w: Tensor,
    k: int,
    steps: int,
    eta: float,
    m: float,
    decay: float,
) -> Tensor:
    """Return the weights after some steps.

    Args:
        gradient: ``gradient(w, t, i)`` is worker i's gradient in step t, the mean over its part of
            the batch.
        w: Weights at the start, the same on all workers.
        k: Number of workers.
        steps: Number of steps.
        eta: Learning rate.
        m: Momentum.
        decay: Weight decay.
    """
    u = w * 0
    for t in range(steps):
        g = (
            sum(gradient(w, t, i) for i in range(k)) / k
        )  # the all-reduce: every worker gets the average
        u = m * u + g + decay * w
        w = w - eta * u
    return w
