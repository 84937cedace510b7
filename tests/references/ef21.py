"""EF21 (Richtárik et al. 2021, arXiv:2106.05203) and EF21-SGDM (Fatkhullin et al. 2023,
arXiv:2305.15155) on one tensor, k workers in one process; EF21-Muon with another direction."""

import torch


def top_k(m, k):
    """The k largest coordinates of m by absolute value, the others 0."""
    kept = torch.zeros_like(m).view(-1)
    largest = m.abs().view(-1).argsort(descending=True)[:k]
    kept[largest] = m.view(-1)[largest]
    return kept.view(m.shape)


def ef21(x, gradient, k, eta, steps, K, beta=1.0, direction=lambda G: G):
    """Run ``steps`` steps from x; gradient(i, x, t) is worker i's stochastic gradient, beta = 1 is
    EF21, and K is the number of coordinates sent.

    Returns the last iterate, each worker's M_i and G_i, and G."""
    M = [gradient(i, x, 0) for i in range(k)]
    G_i = list(M)  # by one all-reduce; EF21 itself starts with top_k(M[i], K)
    G = sum(G_i) / k
    for t in range(steps):
        x = x - eta * direction(G)
        if t + 1 < steps:
            M = [(1 - beta) * M[i] + beta * gradient(i, x, t + 1) for i in range(k)]
            R = [top_k(M[i] - G_i[i], K) for i in range(k)]
            G_i = [G_i[i] + R[i] for i in range(k)]
            G = G + sum(R) / k
    return x, M, G_i, G
