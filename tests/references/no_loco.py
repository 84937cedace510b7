"""NoLoCo (Kolehmainen et al. 2025, arXiv:2506.10911) with AdamW, k workers in one process."""

import torch


def no_loco(phi, gradient, groups, H, lr, alpha=0.7, gamma=0.7, mu=0.5, weight_decay=0.1):
    """Run exchanges of H inner steps from phi, a list with one tensor for each worker.

    groups has one list of pairs (and of workers alone) for each exchange; gradient(i, theta_i, t)
    is that of worker i. Return phi and m after each exchange.
    """
    k, history = len(phi), []
    m = [torch.zeros_like(phi_i) for phi_i in phi]
    theta = [phi_i.clone().requires_grad_() for phi_i in phi]
    inner = [torch.optim.AdamW([theta_i], lr=lr, weight_decay=weight_decay) for theta_i in theta]
    for t, pairs in enumerate(groups):
        for i in range(k):
            for h in range(H):
                theta[i].grad = gradient(i, theta[i].detach(), t * H + h)
                inner[i].step()
        new = [None] * k
        for pair in pairs:
            change = sum(theta[i].detach() - phi[i] for i in pair) / len(pair)
            center = sum(phi[i] for i in pair) / len(pair)
            for i in pair:
                m[i] = mu * m[i] + alpha * change + gamma * (center - phi[i])
                new[i] = phi[i] + m[i]
        phi = new
        for theta_i, phi_i in zip(theta, phi, strict=True):
            theta_i.data.copy_(phi_i)
        history.append((phi, list(m)))
    return history
