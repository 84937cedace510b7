"""Orthonormal steps on a part of the rows (Dion2, Dion3), and AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mlbench_core.optim.pytorch.updates.muon import MuonAdamW
from mlbench_core.optim.pytorch.updates.normuon import check_beta2, normalize_rows
from mlbench_core.optim.pytorch.updates.orthonormal import orthonormalize

__all__ = ["Dion2", "Dion3"]


class Dion2(MuonAdamW):
    r"""Muon on the rows or columns with the largest momentum (Dion2), and AdamW for the others.

    With :math:`g` the gradient of an :math:`n \times m` matrix, :math:`K` the
    :math:`\lceil f n \rceil` rows of :math:`M` with the largest sums of absolute values, and
    :math:`M_K` these rows alone, Dion2's step is

    .. math::

        M &\leftarrow M + g, \qquad U = \operatorname{orthonormal}(M_K) \\
        M_K &\leftarrow \mu M_K \\
        x &\leftarrow (1 - \eta \lambda) x \\
        x_K &\leftarrow x_K - \eta \sqrt{n / m} \, U.

    A matrix with fewer columns than rows takes :math:`\lceil f m \rceil` columns instead. The
    momentum of a row that was not chosen does not decay, so it is chosen later. With :math:`f = 1`
    these are Muon's steps without Nesterov's momentum. The matrix of the iterations is :math:`f`
    times as large, so its Gram matrix takes :math:`f^2` of the work. The state of a matrix is
    :math:`M`.

    The gradients must be averages over all workers. Then all workers choose the same rows, because
    of equal sums the lowest index is chosen. The authors' code divides this work among the workers
    and gathers :math:`U`, about twice :math:`f` times the bytes of the weights in bfloat16. Here
    each worker does all of it, without a message.

    Args:
        params: Parameters, or groups of parameters.
        lr: Learning rate :math:`\eta`. The factor :math:`\sqrt{n / m}` differs from that of
            ``MuonAdamW``, so good rates are larger than AdamW's. A group for AdamW may have its own
            rate.
        weight_decay: Decoupled weight decay :math:`\lambda`.
        fraction: Part :math:`f` of the rows or columns.
        polar_express: False for Newton-Schulz iterations, as in Muon, and True for Polar Express;
            see :func:`~mlbench_core.optim.pytorch.updates.orthonormal.orthonormalize`.
        **options: Other arguments: see
            :class:`~mlbench_core.optim.pytorch.updates.muon.MuonAdamW`.

    Raises:
        TypeError: ``lr`` is not a number.
        ValueError: A number is out of range.

    Example:
        >>> x = torch.nn.Parameter(torch.zeros(4, 4))
        >>> optimizer = Dion2([x], lr=0.1)
        >>> x.grad = torch.tensor([1.0, 2.0, 4.0, 3.0]).diag()
        >>> optimizer.step()
        >>> x.nonzero().tolist()
        [[2, 2]]

    References:
        K. Ahn, N. Amsel, J. Langford: Dion2: A Simple Method to Shrink Matrix in Muon.
        arXiv:2512.16928
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        weight_decay: float = 0.01,
        *,
        fraction: float = 0.25,
        polar_express: bool = False,
        **options: Any,
    ) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, not {fraction}")
        super().__init__(params, lr, weight_decay, **options)
        self._add_options(fraction=fraction, polar_express=polar_express)

    def _update_matrices(
        self, matrices: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]
    ) -> None:
        lr = float(group["lr"])
        for matrix, state in zip(matrices, states, strict=True):
            assert matrix.grad is not None
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix.grad)
            # A matrix without elements has no ratio of rows to columns.
            if not matrix.numel():
                continue
            momentum = state["momentum_buffer"].add_(matrix.grad)
            weights = matrix
            if self._takes_columns(matrix):
                momentum, weights = momentum.T, weights.T
            chosen = _largest_rows(momentum, group["fraction"])
            update = self._direction(momentum[chosen], chosen, state, group)
            # The momentum of the other rows is not multiplied: it accumulates gradients until they
            # are chosen.
            momentum[chosen] *= group["momentum"]
            matrix.mul_(1 - lr * group["weight_decay"])
            rows, columns = matrix.shape
            weights[chosen] -= lr * math.sqrt(rows / columns) * update

    def _takes_columns(self, matrix: Tensor) -> bool:
        """Return True if the step is one of columns."""
        return matrix.shape[1] < matrix.shape[0]

    def _direction(
        self, momentum: Tensor, chosen: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        """Return the update of the chosen rows from their momentum."""
        return orthonormalize(momentum, group["polar_express"]).to(momentum.dtype)


class Dion3(Dion2):
    r"""Dion2 on rows whose updates get about equal lengths (Dion3), and AdamW for the others.

    It always takes rows. Their orthonormal update is normalized as in
    :class:`~mlbench_core.optim.pytorch.updates.normuon.NorMuon`. The running squares of a row
    change when it is chosen. The state of a matrix is the momentum and one number per row.

    According to secondary sources, the paper divides the rate by :math:`\sqrt{f}`. The
    authors' code does not divide, and neither does this class.

    Args:
        params: Parameters, or groups of parameters.
        lr: Learning rate.
        beta2: Decay of the mean squares of the rows.
        **options: Other arguments: see :class:`Dion2`.

    Raises:
        TypeError: ``lr`` is not a number.
        ValueError: A number is out of range.

    References:
        N. Amsel et al.: Dion3: Full-Stack Orthogonal Updates. arXiv:2608.11612
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.01, *, beta2: float = 0.95, **options: Any
    ) -> None:
        check_beta2(beta2)
        super().__init__(params, lr, **options)
        self._add_options(beta2=beta2)

    def _takes_columns(self, matrix: Tensor) -> bool:
        return False

    def _direction(
        self, momentum: Tensor, chosen: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        update = super()._direction(momentum, chosen, state, group)
        if "row_squares" not in state:
            state["row_squares"] = update.new_zeros(len(state["momentum_buffer"]), 1)
        squares = state["row_squares"][chosen]
        update = normalize_rows(update, squares, group["beta2"])
        state["row_squares"][chosen] = squares
        return update


def _largest_rows(matrix: Tensor, fraction: float) -> Tensor:
    """Return the indices of the rows with the largest l1 norms, in ascending order."""
    order = matrix.abs().sum(1).sort(descending=True, stable=True).indices
    # In ascending order, the matrix of all rows is the matrix itself.
    return order[: math.ceil(fraction * len(matrix))].sort().values
