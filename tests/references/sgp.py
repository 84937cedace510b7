"""Stochastic gradient push (Assran et al. 2019, arXiv:1811.10792, algorithm 1), k workers in one
process."""

import torch


def sgp(x, gradient, peers, eta, steps, mu=0.0):
    """Run ``steps`` steps from x, a list with one tensor for each worker.

    peers[t % len(peers)][i] is the worker to which worker i sends in step t; gradient(i, z_i, t) is
    that of worker i at z_i = x_i / w_i, and mu its momentum. Return x and w after each step.
    """
    k, history = len(x), []
    w = [1.0] * k
    m = [torch.zeros_like(x_i) for x_i in x]
    for t in range(steps):
        for i in range(k):
            m[i] = mu * m[i] + gradient(i, x[i] / w[i], t)
        half_x = [(x[i] - eta * m[i]) / 2 for i in range(k)]
        half_w = [w_i / 2 for w_i in w]
        # Each worker keeps one half and sends the other.
        x, w = list(half_x), list(half_w)
        for i, j in enumerate(peers[t % len(peers)]):
            x[j] = x[j] + half_x[i]
            w[j] = w[j] + half_w[i]
        history.append((x, w))
    return history
