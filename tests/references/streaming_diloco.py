"""Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512), k workers in one process; one tensor
per fragment."""

import torch


def four_bits(x):
    """Round to a sign and an exponent of three bits, relative to the largest size; below, to
    zero."""
    levels = x.abs().max() * torch.tensor([0.0, *(2.0**e for e in range(-6, 1))], dtype=x.dtype)
    return x.sign() * levels[(x.abs()[..., None] - levels).abs().argmin(-1)]


def streaming_diloco(
    theta, gradient, k, H, T, lr, tau, alpha, quantize=False, weight_decay=0.1, outer_lr=0.7, mu=0.9
):
    """Run T steps; theta is a list of fragments, gradient(i, p, x, t) worker i's of fragment p."""
    P = len(theta)
    theta = [x.clone() for x in theta]
    workers = [[x.clone().requires_grad_() for x in theta] for _ in range(k)]
    inner = [torch.optim.AdamW(xs, lr=lr, weight_decay=weight_decay) for xs in workers]
    momentum = [torch.zeros_like(x) for x in theta]
    flights = []
    for t in range(1, T + 1):
        for i in range(k):
            for p in range(P):
                workers[i][p].grad = gradient(i, p, workers[i][p].detach(), t - 1)
            inner[i].step()
        for p in range(P):
            if t % H == p * H // P:
                deltas = [theta[p] - workers[i][p].detach() for i in range(k)]
                flights.append(
                    (t + tau, p, sum(map(four_bits, deltas) if quantize else deltas) / k)
                )
        for _, p, delta in [flight for flight in flights if flight[0] == t]:
            momentum[p] = mu * momentum[p] + delta
            theta[p] = theta[p] - outer_lr * (delta + mu * momentum[p])
            for i in range(k):
                workers[i][p].data.copy_(alpha * workers[i][p].data + (1 - alpha) * theta[p])
    return workers
