"""SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706) with AdamW, k workers in one process; bits of a value as here."""

import torch


def compress(e, kept, bits, chunk):
    """Keep the largest coordinates of each chunk of a flat tensor, as sign and middle of an interval of sizes."""
    sent = torch.zeros_like(e)
    for start in range(0, len(e), chunk):
        part = e[start : start + chunk]
        for j in (top := part.abs().topk(min(kept, len(part)))).indices:
            low, high, n = top.values.min(), top.values.max(), 2 ** (bits - 1)
            interval = min(int((part[j].abs() - low) / (high - low) * n), n - 1) if high > low else 0
            sent[start + j] = part[j].sign() * (low + (interval + 0.5) * (high - low) / n)
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
