"""Muon with rows of equal length (NorMuon) for matrices, and AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mlbench_core.arguments import check_at_least
from mlbench_core.optim.pytorch.updates.muon import MuonAdamW
from mlbench_core.optim.pytorch.updates.orthonormal import orthonormalize

__all__ = ["NorMuon", "check_beta2", "normalize_rows"]


class NorMuon(MuonAdamW):
    r"""Muon whose rows get about equal lengths (NorMuon), and AdamW for all other parameters.

    With :math:`g` the gradient of an :math:`n \times m` matrix, NorMuon's step is

    .. math::

        M &\leftarrow \mu M + g, \qquad O = \operatorname{orthonormal}(M) \\
        v_i &\leftarrow \beta_2 v_i + (1 - \beta_2) \frac{1}{m} \sum_j O_{ij}^2 \\
        N_{ij} &= O_{ij} / (\sqrt{v_i} + 10^{-8}) \\
        x &\leftarrow (1 - \eta \lambda) x
        - 0.2 \sqrt{\max(n, m)} \; \eta \frac{\|O\|}{\|N\|} N.

    The norms are those of all numbers of the matrix, so the step is as long as Muon's. It does not
    have Nesterov's momentum. The state of a matrix is :math:`M`, with its size, and :math:`v`, one
    number per row. :math:`v` starts at zero and has no bias correction: the norms take it back.

    This class follows github.com/microsoft/dion. That code has no Nesterov step by default, and
    also offers the factor :math:`\sqrt{n / m}` instead of :math:`0.2 \sqrt{\max(n, m)}`. The first
    author's code, github.com/zichongli5/NorMuon, has Nesterov's step, a running average as
    :math:`M`, the factor :math:`\sqrt{\max(1, n / m)}`, and :math:`10^{-10}` in place of
    :math:`10^{-8}`. The paper has a running average as :math:`M`, which gives the same steps as
    here.

    According to a secondary text, the paper scales each step to the norm
    :math:`0.2 \, \eta \sqrt{n m}`. Here it has Muon's norm,
    :math:`0.2 \, \eta \sqrt{\max(n, m)} \, \|O\|`. That is shorter if the squares of the singular
    values of :math:`O` are below 1 on average.

    Args:
        params: Parameters, or groups of parameters.
        lr: Learning rate :math:`\eta`.
        beta2: Decay :math:`\beta_2` of the mean squares of the rows.
        polar_express: False for Newton-Schulz iterations, as in Muon, and True for Polar Express;
            see :func:`~mlbench_core.optim.pytorch.updates.orthonormal.orthonormalize`.
        **options: Other arguments: see
            :class:`~mlbench_core.optim.pytorch.updates.muon.MuonAdamW`.

    Raises:
        TypeError: ``lr`` is not a number.
        ValueError: A number is out of range.

    Example:
        >>> x = torch.nn.Parameter(torch.zeros(2, 4))
        >>> optimizer = NorMuon([x], lr=1.0)
        >>> x.grad = torch.tensor([[3.0, 0.0, 0.0, 0.0], [1.0, 0.1, 0.0, 0.0]])
        >>> optimizer.step()
        >>> first, second = x.norm(dim=1)
        >>> torch.allclose(first, second)
        True

    References:
        Z. Li, L. Liu, C. Liang, W. Chen, T. Zhao: NorMuon: Making Muon more efficient and scalable.
        arXiv:2510.05491
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        beta2: float = 0.95,
        polar_express: bool = False,
        **options: Any,
    ) -> None:
        check_beta2(beta2)
        super().__init__(params, lr, **options)
        self._add_options(beta2=beta2, polar_express=polar_express)

    def _update_matrices(
        self, matrices: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]
    ) -> None:
        lr = float(group["lr"])
        for matrix, state in zip(matrices, states, strict=True):
            assert matrix.grad is not None
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                state["row_squares"] = matrix.new_zeros(len(matrix), 1)
            momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(matrix.grad)
            update = orthonormalize(momentum, group["polar_express"]).to(matrix.dtype)
            update = normalize_rows(update, state["row_squares"], group["beta2"])
            matrix.mul_(1 - lr * group["weight_decay"])
            matrix.add_(update, alpha=-lr * 0.2 * math.sqrt(max(matrix.shape)))


def normalize_rows(update: Tensor, squares: Tensor, beta2: float) -> Tensor:
    """Divide each row by its running size, and keep the norm of the whole matrix.

    Args:
        update: A matrix with n rows.
        squares: Running means of the squares of each row, a matrix of n rows and one column; they
            are updated.
        beta2: Their decay.

    Returns:
        A new matrix of the same shape.
    """
    squares.lerp_(update.square().mean(1, keepdim=True), 1 - beta2)
    rows = update / (squares.sqrt() + 1e-8)
    # An update of zeros has no norm to keep, and stays zero.
    return rows * (update.norm() / rows.norm().clamp(min=1e-8))


def check_beta2(beta2: float) -> None:
    """Raise a ValueError if a decay is not at least 0 and below 1."""
    check_at_least("beta2", beta2, 0)
    if not beta2 < 1:
        raise ValueError(f"beta2 must be below 1, not {beta2}: 1 keeps the sizes of rows at zero")
