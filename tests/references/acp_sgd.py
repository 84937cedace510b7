"""ACP-SGD of k workers (arXiv 2306.08881, algorithm 2), one matrix, in one process."""

from __future__ import annotations

import torch
from torch import Tensor


def acp_sgd(
    gradients: list[list[Tensor]], Q: Tensor
) -> tuple[list[Tensor], list[list[Tensor]], list[list[Tensor]]]:
    """Compress one matrix, with P and Q in turns.

    Args:
        gradients: For every step, one gradient for each worker, shape (n, m).
        Q: Start of the first step, shape (m, r).

    Returns:
        For every step, the common result P Q^T, and for each worker the sum of gradient and error
        before the step, and the error after it.
    """
    errors = [torch.zeros_like(g_i) for g_i in gradients[0]]
    results, all_deltas, all_errors = [], [], []
    for t, g in enumerate(gradients):
        deltas = [g_i + e_i for g_i, e_i in zip(g, errors, strict=True)]
        if t % 2 == 0:
            Q = torch.linalg.qr(Q).Q
            P_own = [M @ Q for M in deltas]
            errors = [M - P_i @ Q.T for M, P_i in zip(deltas, P_own, strict=True)]
            P = torch.stack(P_own).mean(0)  # all-reduce
        else:
            P = torch.linalg.qr(P).Q
            Q_own = [M.T @ P for M in deltas]
            errors = [M - P @ Q_i.T for M, Q_i in zip(deltas, Q_own, strict=True)]
            Q = torch.stack(Q_own).mean(0)  # all-reduce
        results.append(P @ Q.T)
        all_deltas.append(deltas)
        all_errors.append(errors)
    return results, all_deltas, all_errors
