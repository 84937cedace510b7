"""QSGD (Alistarh et al. 2016, arXiv:1610.02132) on one tensor, k workers in one process."""

import torch


def quantize(v, s, u, size=512):
    """Q(v) for a flat tensor in buckets; u holds uniform numbers from [0, 1), one for each
    coordinate."""
    parts = []
    for bucket, draws in zip(v.split(size), u.split(size), strict=True):
        norm = bucket.norm()
        xi = (
            torch.floor(s * bucket.abs() / norm + draws) / s
            if norm > 0
            else torch.zeros_like(bucket)
        )
        parts.append(norm * bucket.sign() * xi)
    return torch.cat(parts)


def qsgd(x, gradient, k, eta, steps, s, uniform, size=512):
    """Run ``steps`` steps; gradient(i, x, t) is worker i's gradient, uniform(i, t) its draws, of
    the shape of x."""
    for t in range(steps):
        sent = [
            quantize(gradient(i, x, t).reshape(-1), s, uniform(i, t).reshape(-1), size).view(
                x.shape
            )
            for i in range(k)
        ]
        x = x - eta(t) * sum(sent) / k
    return x
