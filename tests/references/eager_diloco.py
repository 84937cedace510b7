"""Eager updates of DiLoCo (Kale et al. 2025, arXiv:2502.12996), k workers in one process."""

import torch


def eager_diloco(theta, gradient, k, H, T, lr, weight_decay=0.1, outer_lr=0.7, mu=0.9):
    """Run T outer steps of H inner ones; gradient(i, x, t) is worker i's stochastic gradient.

    Return the weights of all workers after each outer step.
    """
    theta, history = [theta] * k, []
    workers = [theta_i.clone().requires_grad_() for theta_i in theta]
    inner = [torch.optim.AdamW([x], lr=lr, weight_decay=weight_decay) for x in workers]
    momentum = [torch.zeros_like(theta_i) for theta_i in theta]
    old = [torch.zeros_like(theta_i) for theta_i in theta]  # D_i(t - 1)
    for t in range(T):
        new = []
        for i in range(k):
            for h in range(H):
                workers[i].grad = gradient(i, workers[i].detach(), t * H + h)
                inner[i].step()
            new.append(theta[i] - workers[i].detach())
        for i in range(k):
            delta = sum(old) / k + (new[i] - old[i]) / k
            momentum[i] = mu * momentum[i] + delta
            theta[i] = theta[i] - outer_lr * (delta + mu * momentum[i])  # Nesterov
            workers[i].data.copy_(theta[i])
        old = new
        history.append(list(theta))
    return history
