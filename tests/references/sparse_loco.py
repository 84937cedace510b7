"""SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706) with AdamW, k workers in one process; bits of a value as here."""

import math

import torch


def compress(e, kept, bits, chunk):
    """Keep the largest coordinates of each chunk of a flat tensor, as sign and mean of their interval of sizes."""
    sent = torch.zeros_like(e)
    for start in range(0, len(e), chunk):
        part = e[start : start + chunk]
        top = [j for j in part.abs().topk(min(kept, len(part))).indices.tolist() if part[j] != 0]
        n = min(2 ** (bits - 1), kept, len(part))
        low, high = (f([abs(float(part[j])) for j in top], default=0.0) for f in (min, max))
        members = {}
        for j in top:
            interval = min(int((abs(float(part[j])) - low) / (high - low) * n), n - 1) if high > low else 0
            members.setdefault(interval, []).append(j)
        for group in members.values():
            mean = sum(abs(float(part[j])) for j in group) / len(group)
            for j in group:
                sent[start + j] = math.copysign(mean, part[j])
    return sent


def sparse_loco(theta, gradient, k, H, T, lr, kept, bits, chunk, beta=0.95, alpha=1.0, weight_decay=0.1):
    """Run T exchanges of H inner steps; gradient(i, theta_i, t) is worker i's stochastic gradient."""
    workers = [theta.clone().requires_grad_() for _ in range(k)]
    inner = [torch.optim.AdamW([theta_i], lr=lr, weight_decay=weight_decay) for theta_i in workers]
    e = [torch.zeros_like(theta) for _ in range(k)]
    for t in range(T):
        sent = [None] * k
        for i in range(k):
            for h in range(H):
                workers[i].grad = gradient(i, workers[i].detach(), t * H + h)
                inner[i].step()
            e[i] = beta * e[i] + theta - workers[i].detach()
            sent[i] = compress(e[i].view(-1), kept, bits, chunk).view(theta.shape)
            e[i] = e[i] - sent[i]
        theta = theta - alpha * sum(sent) / k
        for theta_i in workers:
            theta_i.data.copy_(theta)
    return theta, e
