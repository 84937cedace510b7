"""Stochastic gradient descent with gradients compressed to low rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.all_reduce import AVG_CUSTOM
from mlbench_core.aggregation.pytorch.power import PowerAggregation
from mlbench_core.optim.pytorch.generic import Closure, GenericCentralizedOptimizer, check_lr

__all__ = ["PowerSGD"]


class PowerSGD(GenericCentralizedOptimizer):
    r"""Stochastic gradient descent whose gradients are averaged at low rank, with error feedback.

    :math:`P Q^\top` is the result of :class:`~mlbench_core.aggregation.pytorch.power.PowerAggregation` for the workers'
    gradients. With the momentum buffer :math:`v`, every worker takes the same step, that of :class:`torch.optim.SGD`:

    .. math::
        v &\leftarrow \text{momentum} \cdot v + (1 - \text{dampening})\, P Q^\top \\
        x &\leftarrow x - \text{lr} \cdot v

    Weight decay acts after the compression. (The paper's last line is :math:`x - \text{lr}\,(P Q^\top + v)`; torch has
    :math:`x - \text{lr}\,(P Q^\top + \text{momentum} \cdot v)` with ``nesterov=True``.)

    Args:
        model: The model.
        lr: Learning rate.
        momentum: Momentum factor.
        weight_decay: L2 penalty.
        dampening: Dampening for momentum.
        nesterov: Use Nesterov momentum.
        average_world: Divide the sum over workers by their number; False steps along the sum.
        use_cuda: True if training runs on GPUs.
        by_layer: Two messages per parameter instead of two for the whole model.
        reuse_query: Start the power iteration from the last step's result (warm start).
        world_size: Number of workers; None takes that of the process group.
        rank: Largest rank of the approximation, 1 or more. It is not the worker's number.
        error_feedback: Add the error of this approximation to the next gradient.
        comm_dtype: Type in which the factors travel, for example ``torch.bfloat16``; None is that of the computation.
        start_after_steps: For this number of steps, first average gradients uncompressed.
        seed: Seed of the aggregation's own random generator; the same on all workers.
        process_group: A subgroup of workers, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model`` or ``lr`` is missing, ``world_size`` is not that of the process group, or a number is
            out of range.

    Example:
        >>> model = nn.Linear(8, 6)
        >>> optimizer = PowerSGD(model, lr=0.1, momentum=0.9, reuse_query=True, rank=2)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()

    References:
        Vogels, Karimireddy and Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization.
        arXiv:1905.13727
    """

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
        error_feedback: bool = True,
        comm_dtype: torch.dtype | None = None,
        start_after_steps: int = 0,
        seed: int = 0,
        process_group: Any = None,
    ) -> None:
        make = partial(
            SGD,
            lr=check_lr(lr, "PowerSGD"),
            momentum=momentum,
            weight_decay=weight_decay,
            dampening=dampening,
            nesterov=nesterov,
        )
        aggregation = PowerAggregation(
            model,  # type: ignore[arg-type]  # which refuses None
            use_cuda=use_cuda,
            reuse_query=reuse_query,
            world_size=world_size,
            rank=rank,
            error_feedback=error_feedback,
            comm_dtype=comm_dtype,
            start_after_steps=start_after_steps,
            seed=seed,
            process_group=process_group,
        )
        super().__init__(world_size, model, use_cuda, by_layer, optimizer=make, aggregation=aggregation)
        if not average_world:
            self.agg_mode = AVG_CUSTOM

    @torch.no_grad()
    def step(self, closure: Closure | None = None, tracker: Any | None = None) -> Any:  # type: ignore[override]
        """Aggregate the gradients and take one step.

        Args:
            closure: Clears the gradients, computes the loss and its gradients, and returns the loss.
            tracker: A :class:`~mlbench_core.tracking.tracker.Tracker`, or None.

        Returns:
            The closure's result, this worker's loss; None without a closure.
        """
        return self._step(closure, tracker, denom=1)  # used only if the sum is not averaged
