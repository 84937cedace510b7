"""SGD on gradients averaged in few bits (ZeRO++, arXiv:2306.10209), with the error feedback of LoCo
(arXiv:2407.04480), on one tensor, k workers in one process."""

import torch


def quantize(v, L, block):
    """Q(v) for a flat tensor in blocks."""
    parts = []
    for part in v.split(block):
        s = part.abs().max() / L
        parts.append(s * torch.round(part / s) if s > 0 else torch.zeros_like(part))
    return torch.cat(parts)


def quantized_all_reduce(x, gradient, k, eta, steps, L=127, block=256, beta=None):
    """Run ``steps`` steps; gradient(i, x, t) is worker i's gradient. Return x, each worker's e and
    the owners' errors in one tensor."""
    length = -(-x.numel() // k)
    if L == 7:
        length += length % 2  # two numbers of 4 bits are a byte
    parts = [slice(j * length, (j + 1) * length) for j in range(k)]
    e, epsilon = [torch.zeros(x.numel()).to(x)] * k, torch.zeros(x.numel()).to(x)

    def q(h):
        return torch.cat([quantize(h[part], L, block) for part in parts if len(h[part])])

    for t in range(steps):
        h = [gradient(i, x, t).reshape(-1) for i in range(k)]
        if beta is not None:
            h = [h[i] + e[i] for i in range(k)]
            e = [beta * e[i] + (1 - beta) * (h[i] - q(h[i])) for i in range(k)]
        a = sum(q(h[i]) for i in range(k)) / k
        if beta is not None:
            a = a + epsilon
            epsilon = beta * epsilon + (1 - beta) * (a - q(a))
        x = x - eta * q(a).view(x.shape)
    return x, e, epsilon
