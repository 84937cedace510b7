"""EF-SignSGD (Karimireddy et al. 2019, arXiv:1901.09847) on one tensor, k workers in one
process."""

import torch


def ef_sign_sgd(x, gradient, k, gamma, steps):
    """Run ``steps`` steps from x; gradient(i, x, t) is worker i's stochastic gradient, gamma(t) the
    step size."""
    e = [torch.zeros_like(x)] * k
    for t in range(steps):
        p = [gamma(t) * gradient(i, x, t) + e[i] for i in range(k)]
        sign = [torch.where(p[i] >= 0, 1, -1) for i in range(k)]
        delta = [p[i].abs().sum() / p[i].numel() * sign[i] for i in range(k)]
        x = x - sum(delta) / k
        e = [p[i] - delta[i] for i in range(k)]
    return x, e
