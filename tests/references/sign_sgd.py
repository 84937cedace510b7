"""SignSGD with majority vote (Bernstein et al. 2018, arXiv:1802.04434), k workers in one
process."""

import torch


def one_bit(v, turn):
    """The sign of v; a zero, for which one bit has no room, is sent as 1 and -1 in turn."""
    return torch.where(v == 0, torch.tensor((-1.0) ** turn, dtype=v.dtype), torch.sign(v))


def sign_sgd(x, gradient, k, eta, steps, beta=0.0):
    """Run ``steps`` steps from x; gradient(i, x, t) is worker i's gradient, eta(t) the step size,
    beta the momentum."""
    v = [torch.zeros_like(x)] * k
    for t in range(steps):
        v = [beta * v[i] + gradient(i, x, t) for i in range(k)]
        votes = sum(one_bit(v[i], t + i) for i in range(k))
        x = x - eta(t) * torch.sign(votes)
    return x
