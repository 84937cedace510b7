"""DiLoCo (Douillard et al. 2023, arXiv:2311.08105), k workers in one process."""

import torch


def diloco(theta, gradient, k, H, T, lr, weight_decay=0.1, outer_lr=0.7, mu=0.9):
    """Run T outer steps of H inner ones; gradient(i, theta_i, t) is worker i's stochastic
    gradient."""
    workers = [theta.clone().requires_grad_() for _ in range(k)]
    inner = [torch.optim.AdamW([theta_i], lr=lr, weight_decay=weight_decay) for theta_i in workers]
    momentum = torch.zeros_like(theta)
    for t in range(T):
        for i in range(k):
            for h in range(H):
                workers[i].grad = gradient(i, workers[i].detach(), t * H + h)
                inner[i].step()
        delta = sum(theta - theta_i.detach() for theta_i in workers) / k  # the outer gradient
        momentum = mu * momentum + delta
        theta = theta - outer_lr * (delta + mu * momentum)  # Nesterov
        for theta_i in workers:
            theta_i.data.copy_(theta)
    return theta
