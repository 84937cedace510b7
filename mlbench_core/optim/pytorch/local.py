"""Optimizers whose workers train by themselves for H steps and then synchronize."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation
from mlbench_core.aggregation.pytorch.periodic import DiLoCoAggregation, PeriodicAggregation
from mlbench_core.arguments import check_finite_at_least_0
from mlbench_core.optim.pytorch.generic import Closure, GenericCentralizedOptimizer, check_lr

__all__ = ["DiLoCo", "LocalSGD"]

OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]


class LocalSGD(GenericCentralizedOptimizer):
    r"""Stochastic gradient descent on every worker, and an average of all weights every H steps.

    With :math:`g_i` the gradient of worker :math:`i` of :math:`k`, :math:`\eta` the learning rate and steps counted
    from :math:`t = 1`,

    .. math::

        x_i &\leftarrow x_i - \eta g_i \\
        x_i &\leftarrow \frac{1}{k} \sum_{j=1}^{k} x_j \quad \text{if } H \mid t.

    The steps in between send nothing, and workers differ then. So evaluate and save right after a multiple of H steps,
    or call :func:`~mlbench_core.aggregation.pytorch.consensus.average_weights` before. Momentum is local to a worker.

    Every parameter counts its own steps, those in which it requires a gradient. If a layer is unfrozen (or frozen)
    during training, do it right after a multiple of H steps. Otherwise the layer is averaged at other steps than the
    rest, and workers are not all equal after a multiple of H steps.

    Args:
        world_size: Number of workers; None takes that of the process group.
        model: The model.
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening for momentum.
        weight_decay: L2 penalty.
        nesterov: Use Nesterov momentum.
        use_cuda: True if training runs on GPUs.
        by_layer: One message per parameter instead of one for the whole model.
        period: H, the number of steps from one average to the next.
        process_group: A subgroup of workers, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.

    Raises:
        TypeError: ``period`` is not an integer.
        ValueError: ``model`` or ``lr`` is missing, ``period`` is not positive, or ``world_size`` is not that of the
            process group.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = LocalSGD(model=model, lr=0.1, period=4)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()

    References:
        S. Stich: Local SGD Converges Fast and Communicates Little. arXiv:1805.09767
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
        period: int = 8,
        process_group: Any = None,
    ) -> None:
        make = partial(
            SGD,
            lr=check_lr(lr, "LocalSGD"),
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )
        every_time = AllReduceAggregation(world_size, use_cuda=use_cuda, process_group=process_group)
        aggregation = PeriodicAggregation(every_time, period)
        super().__init__(None, model, by_layer=by_layer, agg_grad=False, optimizer=make, aggregation=aggregation)


class DiLoCo(GenericCentralizedOptimizer):
    r"""AdamW on every worker, and every H steps an outer step along the average of their changes (DiLoCo).

    With :math:`\theta` the weights that all workers share, every worker takes H inner steps from them to
    :math:`\theta_i`; then

    .. math::

        \Delta &= \frac{1}{k} \sum_{i=1}^{k} (\theta - \theta_i) \\
        \theta &\leftarrow \operatorname{OuterOptimizer}(\theta, \Delta), \qquad \theta_i \leftarrow \theta.

    The outer optimizer is SGD with Nesterov momentum: with the default 0.9 and the outer learning rate 0.7 as in the
    paper. Each worker keeps its own state of the inner optimizer. The steps in between send nothing; see
    :class:`LocalSGD` for when to evaluate, and when to freeze or unfreeze layers. A layer that is unfrozen later is
    plainly averaged at its first synchronization, and takes outer steps from then on.

    Attributes:
        outer_optimizer: The outer optimizer; its learning rate may be changed.

    Args:
        world_size: Number of workers; None takes that of the process group.
        model: The model; the same weights on every worker when the first step is taken.
        lr: Inner learning rate.
        betas: Decay of the inner running averages of the gradient and of its square.
        eps: Added to the inner denominator.
        weight_decay: Inner, decoupled weight decay.
        use_cuda: True if training runs on GPUs.
        by_layer: One message per parameter instead of one for the whole model.
        period: H, the number of inner steps from one outer step to the next.
        outer_lr: Outer learning rate.
        outer_momentum: Outer Nesterov momentum; 0 for none.
        inner_optimizer: A function that makes another inner optimizer of an iterable of parameters. Its learning rate
            is its own: ``lr`` and the other inner arguments are then not used and may be left out.
        outer_optimizer: A function that makes another outer optimizer; ``outer_lr`` and ``outer_momentum`` are then
            not used.
        process_group: A subgroup of workers, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.

    Raises:
        TypeError: ``period`` is not an integer, a learning rate is not a number, or ``outer_optimizer`` does not make a
            torch optimizer.
        ValueError: ``model`` or ``lr`` is missing, a learning rate is negative or not finite, ``period`` is not
            positive, or ``world_size`` is not that of the process group.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = DiLoCo(model=model, lr=0.001, period=50)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.outer_optimizer.param_groups[0]["lr"]
        0.7

    References:
        A. Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models. arXiv:2311.08105
    """

    def __init__(
        self,
        world_size: int | None = None,
        model: nn.Module | None = None,
        lr: float = required,  # type: ignore[assignment]
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        use_cuda: bool = False,
        by_layer: bool = False,
        *,
        period: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        inner_optimizer: OptimizerFactory | None = None,
        outer_optimizer: OptimizerFactory | None = None,
        process_group: Any = None,
    ) -> None:
        if inner_optimizer is None:
            inner_optimizer = partial(AdamW, lr=check_lr(lr, "DiLoCo"), betas=betas, eps=eps, weight_decay=weight_decay)
        if outer_optimizer is None:
            check_finite_at_least_0("outer_lr", outer_lr)
            check_finite_at_least_0("outer_momentum", outer_momentum)
            outer_optimizer = partial(SGD, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
        self._outer = DiLoCoAggregation(outer_optimizer, world_size, use_cuda=use_cuda, process_group=process_group)
        super().__init__(
            None,
            model,
            by_layer=by_layer,
            agg_grad=False,
            optimizer=inner_optimizer,
            aggregation=PeriodicAggregation(self._outer, period),
        )

    @property
    def outer_optimizer(self) -> Optimizer:
        """Return the optimizer of the weights that all workers share."""
        return self._outer.outer_optimizer

    def _step(
        self,
        closure: Closure | None,
        tracker: Any | None,
        denom: Denominator | None = None,
        grad_clip: float = math.inf,
    ) -> Any:
        """Take a step; the weights before the first step are the shared ones."""
        self._outer.start(self.model)
        return super()._step(closure, tracker, denom, grad_clip)
