"""1-bit Adam (Tang et al. 2021, arXiv:2102.02888) on one tensor, k workers in one process; Adam's
corrections."""

import torch


def scaled_sign(p):
    return p.abs().mean() * torch.where(p >= 0, 1, -1)


def one_bit_adam(
    x, gradient, k, eta, steps, warmup, compress=scaled_sign, beta1=0.9, beta2=0.999, eps=1e-8
):
    """Run ``steps`` steps from x, ``warmup`` of Adam first; gradient(i, x, t) is worker i's
    stochastic gradient."""
    m, v, delta = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    e = [torch.zeros_like(x)] * k
    for t in range(steps):
        g = [gradient(i, x, t) for i in range(k)]
        if t < warmup:
            mean = sum(g) / k
            m = beta1 * m + (1 - beta1) * mean
            v = beta2 * v + (1 - beta2) * mean**2
        else:
            p = [beta1 * m + (1 - beta1) * g[i] + e[i] for i in range(k)]
            e = [p[i] - compress(p[i]) for i in range(k)]
            average = sum(compress(p[i]) for i in range(k)) / k + delta
            delta = average - compress(average)
            m = compress(average)
        size = (v / (1 - beta2 ** min(t + 1, warmup))).sqrt() + eps
        x = x - eta * torch.where(v > 0, m / (1 - beta1 ** (t + 1)) / size, 0)
    return x, e, delta
