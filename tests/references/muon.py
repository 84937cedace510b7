"""Muon (Jordan et al. 2024) with the step size of Liu et al. (arXiv:2502.16982), k workers in one
process."""

import torch


def newton_schulz(g, steps=5, a=3.4445, b=-4.7750, c=2.0315):
    """Bring the singular values near 1, and keep the singular vectors."""
    x = (g.T if g.shape[0] > g.shape[1] else g) / g.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def muon(x, gradient, k, T, lr, weight_decay=0.1, mu=0.95):
    """Run T steps on a matrix; gradient(i, x, t) is worker i's stochastic gradient."""
    momentum = torch.zeros_like(x)
    for t in range(T):
        g = sum(gradient(i, x, t) for i in range(k)) / k
        momentum = mu * momentum + (1 - mu) * g
        update = newton_schulz((1 - mu) * g + mu * momentum)  # Nesterov
        x = (1 - lr * weight_decay) * x - lr * 0.2 * max(x.shape) ** 0.5 * update
    return x
