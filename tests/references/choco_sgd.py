"""CHOCO-SGD (Koloskova et al. 2019, arXiv:1902.00340, algorithm 2), n workers in one process."""

import torch


def top_k(x, ratio):
    """Keep the entries of largest magnitude."""
    k = max(1, round(ratio * x.numel()))
    kept = x.flatten().abs().topk(k).indices
    q = torch.zeros_like(x.flatten())
    q[kept] = x.flatten()[kept]
    return q.view_as(x)


def scaled_sign(x):
    """||x||_1 / d sign(x), where sign(0) = 1."""
    return torch.where(x >= 0, x.abs().mean(), -x.abs().mean())


def choco_sgd(x, gradient, W, Q, eta, gamma, steps):
    """Run ``steps`` rounds; x[i] is worker i's tensor, gradient(i, x_i, t) its stochastic
    gradient."""
    n = len(x)
    x_hat = [torch.zeros_like(x[i]) for i in range(n)]
    for t in range(steps):
        x = [x[i] - eta * gradient(i, x[i], t) for i in range(n)]
        q = [Q(x[i] - x_hat[i]) for i in range(n)]
        x_hat = [x_hat[i] + q[i] for i in range(n)]
        x = [
            x[i] + gamma * sum(W[i, j] * (x_hat[j] - x_hat[i]) for j in range(n)) for i in range(n)
        ]
    return x
