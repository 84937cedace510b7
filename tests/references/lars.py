"""LARS (You, Gitman and Ginsburg, arXiv:1708.03888), k workers in one process."""

import torch


def lars(x, gradient, k, T, lr, momentum=0.9, weight_decay=1e-4, trust=0.001):
    """Run T steps on one layer; gradient(i, x, t) is worker i's stochastic gradient."""
    v = torch.zeros_like(x)
    for t in range(T):
        g = sum(gradient(i, x, t) for i in range(k)) / k
        local_lr = 1.0
        if x.norm() > 0 and g.norm() > 0:
            local_lr = trust * x.norm() / (g.norm() + weight_decay * x.norm())
        v = momentum * v + lr * local_lr * (g + weight_decay * x)
        x = x - v
    return x
