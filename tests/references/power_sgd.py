"""PowerSGD of k workers (arXiv 1905.13727, algorithms 1 and 2), one matrix, in one process."""

from __future__ import annotations

import torch
from torch import Tensor


def compress(deltas: list[Tensor], Q: Tensor) -> tuple[Tensor, Tensor]:
    """One step of power iteration on the workers' average matrix: P Q^T is close to it."""
    P = torch.stack([M @ Q for M in deltas]).mean(0)  # all-reduce
    P = torch.linalg.qr(P).Q
    Q = torch.stack([M.T @ P for M in deltas]).mean(0)  # all-reduce
    return P, Q


def power_sgd(
    x: Tensor, gradients: list[list[Tensor]], Q: Tensor, lr: float, momentum: float = 0.0
) -> tuple[Tensor, list[Tensor]]:
    """Train one weight matrix with warm start.

    Args:
        x: The weights, shape (n, m).
        gradients: For every step, one gradient for each worker.
        Q: Where the power iteration starts, shape (m, r).
        lr: Learning rate.
        momentum: Factor of torch's momentum.

    Returns:
        The weights and the workers' error memories.
    """
    errors = [torch.zeros_like(x) for _ in gradients[0]]
    v = torch.zeros_like(x)
    for g in gradients:
        deltas = [g_i + e_i for g_i, e_i in zip(g, errors, strict=True)]
        P, Q = compress(deltas, Q)
        errors = [delta - P @ Q.T for delta in deltas]
        v = momentum * v + P @ Q.T
        x = x - lr * v
    return x, errors
