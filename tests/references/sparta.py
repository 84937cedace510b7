"""SPARTA (ExoGym, github.com/exo-explore/gym, without an arXiv number) with AdamW on one tensor, k
workers in one process."""

import torch


def sparta(x, gradient, k, lr, steps, draw, weight_decay=0.01):
    """Run ``steps`` steps from x; gradient(i, x_i, t) is worker i's stochastic gradient, and draw()
    returns the positions that are averaged after the next step. Returns the workers' tensors."""
    x = [x.clone().requires_grad_() for _ in range(k)]
    inner = [torch.optim.AdamW([x_i], lr=lr, weight_decay=weight_decay) for x_i in x]
    for t in range(steps):
        for i in range(k):
            x[i].grad = gradient(i, x[i].detach(), t)
            inner[i].step()
        flat = [x_i.detach().view(-1) for x_i in x]
        positions = draw()
        average = sum(x_i[positions] for x_i in flat) / k
        for x_i in flat:
            x_i[positions] = average
    return [x_i.detach() for x_i in x]
