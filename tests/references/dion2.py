"""Dion2 (Ahn et al., arXiv:2512.16928) and Dion3 (Amsel et al., arXiv:2608.11612), k workers in one
process."""

import math

import torch


def dion2(x, gradient, k, T, lr, orthonormal, fraction, weight_decay=0.01, mu=0.95, beta2=None):
    """Run T steps on a matrix; gradient(i, x, t) is worker i's stochastic gradient.
    orthonormal is for example newton_schulz of the reference of Muon.
    With beta2 these are the steps of Dion3."""
    n, m = x.shape
    momentum = torch.zeros_like(x)
    v = torch.zeros(n, dtype=x.dtype)
    columns = beta2 is None and m < n
    for t in range(T):
        momentum = momentum + sum(gradient(i, x, t) for i in range(k)) / k
        norms = momentum.abs().sum(0 if columns else 1)
        best = sorted(range(len(norms)), key=lambda i: (-norms[i], i))
        chosen = sorted(best[: math.ceil(fraction * len(norms))])
        part = (slice(None), chosen) if columns else (chosen,)
        update = orthonormal(momentum[part])
        if beta2 is not None:
            v[chosen] = beta2 * v[chosen] + (1 - beta2) * (update**2).mean(1)
            rows = update / (v[chosen].sqrt()[:, None] + 1e-8)
            update = rows * update.norm() / rows.norm()
        momentum[part] = mu * momentum[part]
        x = (1 - lr * weight_decay) * x
        x[part] = x[part] - lr * math.sqrt(n / m) * update
    return x
