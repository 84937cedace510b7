"""Dion (Ahn et al. 2025, arXiv:2504.05295) on one matrix; k workers do what one does with the
average gradient."""

import torch


def dion(x, gradient, k, eta, steps, Q, mu=0.95, weight_decay=0.0):
    """Run ``steps`` steps from x (n x m) and Q (m x r); gradient(i, x, t) is worker i's stochastic
    gradient."""
    n, m = x.shape
    M = torch.zeros_like(x)
    for t in range(steps):
        B = M + sum(gradient(i, x, t) for i in range(k)) / k
        P, _ = torch.linalg.qr(B @ Q)
        R = B.T @ P
        M = B - (1 - mu) * P @ R.T
        Q = R / R.norm(dim=0)
        x = (1 - eta * weight_decay) * x - eta * (n / m) ** 0.5 * P @ Q.T
    return x, M, Q
