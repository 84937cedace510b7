"""SGD whose gradients are averaged at low rank (PowerSGD)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.all_reduce import AVG_CUSTOM
from mlbench_core.aggregation.pytorch.compression.power import PowerAggregation
from mlbench_core.optim.pytorch.distributed import GenericCentralizedOptimizer, check_aggregation
from mlbench_core.optim.pytorch.updates.one_pass_sgd import make_sgd

__all__ = ["PowerSGD"]


class PowerSGD(GenericCentralizedOptimizer):
    r"""Stochastic gradient descent whose gradients are averaged at low rank, with error feedback.

    :math:`P Q^\top` is the result of
    :class:`~mlbench_core.aggregation.pytorch.compression.power.PowerAggregation` for the workers'
    gradients. With the momentum buffer :math:`v`, every worker takes the same step, that of
    :class:`torch.optim.SGD`:

    .. math::
        v &\leftarrow \text{momentum} \cdot v + (1 - \text{dampening})\, P Q^\top \\
        x &\leftarrow x - \text{lr} \cdot v

    Weight decay acts after the compression. (The paper's last line is :math:`x - \text{lr}\,(P
    Q^\top + v)`; torch has :math:`x - \text{lr}\,(P Q^\top + \text{momentum} \cdot v)` with
    ``nesterov=True``.)

    Args:
        lr: Learning rate.
        momentum: Momentum factor.
        weight_decay: L2 penalty.
        dampening: Dampening for momentum.
        nesterov: Use Nesterov momentum.
        average_world: Divide the sum over workers by their number; False steps along the sum.
        by_layer: Two messages per parameter instead of two for the whole model.
        reuse_query: Start the power iteration from the last step's result (warm start).
        world_size: Number of workers; None takes that of the process group. In a group of several,
            the default of 1 is refused rather than letting the workers train apart.
        rank: Largest rank of the approximation, 1 or more. It is not the worker's number.
        aggregation: The compression with all its settings, instead of ``reuse_query``,
            ``world_size`` and ``rank``.

    Other arguments: see
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model`` or ``lr`` is missing, ``world_size`` is not that of the process group,
            a number is out of range, or an argument contradicts the aggregation.
        TypeError: The aggregation is not a
            :class:`~mlbench_core.aggregation.pytorch.compression.power.PowerAggregation`.

    Example:
        >>> import torch
        >>> model = nn.Linear(8, 6)
        >>> optimizer = PowerSGD(model, lr=0.1, momentum=0.9, reuse_query=True, rank=2)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()

    References:
        Vogels, Karimireddy and Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization. arXiv:1905.13727
    """

    # It is used only with average_world=False: divided by 1, the sum stays.
    _denom = 1

    def __init__(
        self,
        model: nn.Module | None = None,
        lr: float = required,  # type: ignore[assignment]
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
        average_world: bool = True,
        use_cuda: bool = False,
        by_layer: bool = False,
        reuse_query: bool = False,
        world_size: int | None = 1,
        rank: int = 1,
        *,
        aggregation: PowerAggregation | None = None,
    ) -> None:
        make = make_sgd("PowerSGD", lr, momentum, dampening, weight_decay, nesterov)
        if aggregation is None:
            aggregation = PowerAggregation(
                model,  # type: ignore[arg-type]
                use_cuda,
                reuse_query,
                world_size,
                rank,
            )
        else:
            settings: dict[str, Any] = {"reuse_query": reuse_query or None}
            # The defaults of 1 come from version 3.0, and count as left out.
            if world_size != 1:
                settings["world_size"] = world_size
            if rank != 1:
                settings["rank"] = rank
            check_aggregation(aggregation, PowerAggregation, **settings)
        super().__init__(None, model, use_cuda, by_layer, optimizer=make, aggregation=aggregation)
        if not average_world:
            self.agg_mode = AVG_CUSTOM
