"""NorMuon (Li et al., arXiv:2510.05491), k workers in one process."""

import torch


def normuon(x, gradient, k, T, lr, orthonormal, weight_decay=0.1, mu=0.95, beta2=0.95):
    """Run T steps on a matrix; gradient(i, x, t) is worker i's stochastic gradient.
    orthonormal is for example newton_schulz of the reference of Muon."""
    n, m = x.shape
    momentum = torch.zeros_like(x)
    v = torch.zeros(n, dtype=x.dtype)
    for t in range(T):
        g = sum(gradient(i, x, t) for i in range(k)) / k
        momentum = mu * momentum + g
        o = orthonormal(momentum)
        v = beta2 * v + (1 - beta2) * (o**2).mean(1)
        rows = o / (v.sqrt()[:, None] + 1e-8)
        rows = rows * o.norm() / rows.norm()
        x = (1 - lr * weight_decay) * x - lr * 0.2 * max(n, m) ** 0.5 * rows
    return x
