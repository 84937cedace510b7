"""SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706) with AdamW, k workers in one process."""

import torch


def compress(e, kept, bits, chunk):
    """Keep each chunk's largest coordinates, as sign and mean of their interval of sizes."""
    sent = torch.zeros_like(e)
    for part, result in zip(e.split(chunk), sent.split(chunk), strict=True):
        top = part.abs().topk(min(kept, len(part)))
        n, top = min(2 ** (bits - 1), len(top.values)), top.indices[top.values > 0]
        if len(top):
            sizes = part[top].abs()
            width = (sizes.max() - sizes.min()) / n
            interval = ((sizes - sizes.min()) / (width or 1)).floor().clamp(max=n - 1)
            means = [sizes[interval == i].mean() for i in interval]
            result[top] = part[top].sign() * torch.stack(means)
    return sent


def sparse_loco(
    theta, gradient, k, H, T, lr, kept, bits, chunk, beta=0.95, alpha=1.0, weight_decay=0.1
):
    """Run T exchanges of H inner steps; gradient(i, theta_i, t) is that of worker i."""
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
