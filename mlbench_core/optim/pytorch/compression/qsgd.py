"""SGD on gradients that each worker rounds at random to a few levels (QSGD)."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.compression.qsgd import QSGDAggregation
from mlbench_core.optim.pytorch.distributed import (
    GenericCentralizedOptimizer,
    check_aggregation,
    check_lr,
)

__all__ = ["QSGD"]


class QSGD(GenericCentralizedOptimizer):
    r"""Stochastic gradient descent on the average of randomly rounded gradients.

    With :math:`Q` the rounding of
    :class:`~mlbench_core.aggregation.pytorch.compression.qsgd.QSGDAggregation`,
    which is right on average, every worker takes the step of :class:`torch.optim.SGD` with the
    gradient

    .. math:: \frac{1}{k} \sum_{i=1}^{k} Q(g_i).

    Args:
        world_size: Number of workers; None takes that of the process group.
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening for momentum.
        weight_decay: L2 penalty; it acts after the compression.
        nesterov: Use Nesterov momentum.
        levels: Number of levels above zero: with 7, a coordinate takes 4 bits.
        aggregation: The compression with all its settings, instead of ``levels``.

    Other arguments: see
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model`` or ``lr`` is missing, ``world_size`` is not that of the process group,
            a number is out of range, or ``levels`` contradicts the aggregation.
        TypeError: The aggregation is not a
            :class:`~mlbench_core.aggregation.pytorch.compression.qsgd.QSGDAggregation`.

    Example:
        >>> import torch
        >>> model = nn.Linear(8, 6)
        >>> optimizer = QSGD(model=model, lr=0.1, momentum=0.9)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient
        Quantization and Encoding. arXiv:1610.02132
    """

    def __init__(
        self,
        world_size: int | None = None,
        model: nn.Module | None = None,
        lr: float = required,  # type: ignore[assignment]
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        use_cuda: bool = False,
        by_layer: bool = False,
        *,
        levels: int | None = None,
        aggregation: QSGDAggregation | None = None,
    ) -> None:
        if aggregation is None:
            chosen_levels = 7
            if levels is not None:
                chosen_levels = levels
            aggregation = QSGDAggregation(use_cuda, levels=chosen_levels, world_size=world_size)
        check_aggregation(aggregation, QSGDAggregation, world_size=world_size, levels=levels)
        make = partial(
            SGD,
            lr=check_lr(lr, "QSGD"),
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )
        super().__init__(
            world_size, model, use_cuda, by_layer, optimizer=make, aggregation=aggregation
        )
