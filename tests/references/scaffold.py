"""SCAFFOLD (Karimireddy et al. 2019, arXiv:1910.06378), option II, all k workers take part, in one
process."""

import torch


def scaffold(x, gradient, k, eta, K, rounds):
    """Run rounds of K local steps from x; gradient(i, y, t) is worker i's stochastic gradient."""
    c = torch.zeros_like(x)
    c_i = [torch.zeros_like(x)] * k
    for r in range(rounds):
        y, new = [x] * k, [None] * k
        for i in range(k):
            for t in range(r * K, (r + 1) * K):
                y[i] = y[i] - eta * (gradient(i, y[i], t) - c_i[i] + c)
            new[i] = c_i[i] - c + (x - y[i]) / (K * eta)
        x = x + sum(y[i] - x for i in range(k)) / k
        c = c + sum(new[i] - c_i[i] for i in range(k)) / k
        c_i = new
    return x, c, c_i
