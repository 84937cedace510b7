"""Sparsified SGD with memory (Stich et al. 2018, arXiv:1809.07599) on one tensor, n workers in one
process."""

import torch


def top_k(m, k):
    """The k largest coordinates of m by absolute value, the others 0."""
    kept = torch.zeros_like(m).view(-1)
    largest = m.abs().view(-1).argsort(descending=True)[:k]
    kept[largest] = m.view(-1)[largest]
    return kept.view(m.shape)


def sparsified_sgd(x, gradient, n, eta, steps, comp, a=1.0):
    """Run ``steps`` steps from x; gradient(i, x, t) is worker i's stochastic gradient, eta(t) the
    step size.

    Returns the last iterate, the memories, and the average of the iterates with weights w_t = (a +
    t)^2."""
    m = [torch.zeros_like(x)] * n
    weighted, w = torch.zeros_like(x), []
    for t in range(steps):
        w.append((a + t) ** 2)
        weighted = weighted + w[t] * x
        m = [m[i] + eta(t) * gradient(i, x, t) for i in range(n)]
        g = [comp(m[i], t) for i in range(n)]
        x = x - sum(g) / n
        m = [m[i] - g[i] for i in range(n)]
    return x, m, weighted / sum(w)
