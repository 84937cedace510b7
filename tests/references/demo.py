"""DeMo (Peng et al. 2024, arXiv:2411.19870) on one matrix, k workers in one process."""

import math

import torch


def dct(n):
    """The orthonormal DCT-II."""
    rows = [[math.cos(math.pi * p * (2 * j + 1) / (2 * n)) for j in range(n)] for p in range(n)]
    matrix = torch.tensor(rows, dtype=torch.float64) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def largest(m, a, b, kept):
    """The inverse transform of the largest coefficients of each block of a rows and b columns."""
    result = torch.zeros_like(m)
    for i in range(0, m.shape[0], a):
        for j in range(0, m.shape[1], b):
            coefficients = dct(a) @ m[i : i + a, j : j + b] @ dct(b).T
            threshold = coefficients.abs().flatten().topk(min(kept, a * b)).values.min()
            coefficients[coefficients.abs() < threshold] = 0
            result[i : i + a, j : j + b] = dct(a).T @ coefficients @ dct(b)
    return result


def demo(x, gradient, k, eta, steps, a, b, kept, beta=0.999, signs=True):
    """Run ``steps`` steps from x; gradient(i, x, t) is worker i's stochastic gradient."""
    m = [torch.zeros_like(x) for _ in range(k)]
    for t in range(steps):
        m = [beta * m[i] + eta * gradient(i, x, t) for i in range(k)]
        sent = [largest(m[i], a, b, kept) for i in range(k)]
        m = [m[i] - sent[i] for i in range(k)]
        step = sum(sent) / k
        x = x - (eta * step.sign() if signs else step)
    return x, m
