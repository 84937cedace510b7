"""D-PSGD (Lian et al. 2017, arXiv:1705.09056), n workers in one process."""

import torch


def mixing_matrix(neighbours):
    """Metropolis-Hastings weights: W_ij = 1 / (1 + max(deg i, deg j)) on edges, rows filled up to 1
    on the diagonal."""
    n = len(neighbours)
    W = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in neighbours[i]:
            W[i, j] = 1 / (1 + max(len(neighbours[i]), len(neighbours[j])))
    return W + torch.diag(1 - W.sum(1))


def decentralized_sgd(x, gradient, W, eta, steps):
    """Run ``steps`` rounds; x[i] is worker i's tensor, gradient(i, x_i, t) its stochastic
    gradient."""
    n = len(x)
    for t in range(steps):
        y = [x[i] - eta * gradient(i, x[i], t) for i in range(n)]
        x = [sum(W[i, j] * y[j] for j in range(n)) for i in range(n)]
    return x
