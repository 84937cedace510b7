"""Optimizers whose workers take several steps between two averages (local SGD, DiLoCo)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.aggregation import Aggregation
from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation
from mlbench_core.aggregation.pytorch.local_steps.periodic import (
    DiLoCoAggregation,
    PeriodicAggregation,
)
from mlbench_core.arguments import check_finite_at_least_0
from mlbench_core.optim.pytorch.distributed import (
    GenericCentralizedOptimizer,
    OptimizerFactory,
    check_aggregation,
    check_lr,
)
from mlbench_core.optim.pytorch.updates.fused import suits_fused
from mlbench_core.optim.pytorch.updates.one_pass_sgd import make_sgd

__all__ = ["DiLoCo", "LocalSGD"]


class LocalSGD(GenericCentralizedOptimizer):
    r"""Stochastic gradient descent on every worker, and an average of all weights every H steps.

    With :math:`g_i` the gradient of worker :math:`i` of :math:`k`, :math:`\eta` the learning rate
    and steps counted from :math:`t = 1`,

    .. math::

        x_i &\leftarrow x_i - \eta g_i \\
        x_i &\leftarrow \frac{1}{k} \sum_{j=1}^{k} x_j \quad \text{if } H \mid t.

    The steps in between send nothing, and workers differ then. So evaluate and save right after a
    multiple of H steps, or call :func:`~mlbench_core.aggregation.pytorch.consensus.average_weights`
    before. Momentum is local to a worker.

    Layers may be frozen and unfrozen at any time, on all workers or on some. After the next average
    all workers have one model. A layer that was trainable once is averaged also while it is frozen.

    With a delay :math:`\tau > 0`, the workers do not wait for the average. They take :math:`\tau`
    more steps, and then

    .. math:: x_i \leftarrow x_i(t + \tau) + \left( \frac{1}{k} \sum_{j=1}^{k} x_j(t) - x_i(t)
        \right) \quad \text{if } H \mid t.

    Their weights are never all equal then: average them before you evaluate, with
    :func:`~mlbench_core.aggregation.pytorch.consensus.averaged_weights`.

    Args:
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening for momentum.
        weight_decay: L2 penalty.
        nesterov: Use Nesterov momentum.
        period: H, the number of steps from one average to the next.
        delay: :math:`\tau`, the number of steps during which an average travels; less than H.
        aggregation: How weights are averaged every H steps; None for an all-reduce. With a delay,
            an :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation` without
            shared memory.

    Other arguments: see
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        TypeError: ``period`` or ``delay`` is not an integer, or there is a delay and the
            aggregation is not an ``AllReduceAggregation``.
        ValueError: ``model`` or ``lr`` is missing, ``period`` is not positive, ``delay`` is
            negative or not less than ``period``, or ``world_size`` is not that of the process
            group. Or the aggregation has a period too, overlaps with the backward pass, is for
            gradients, or with a delay sums through shared memory.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = LocalSGD(model=model, lr=0.1, period=4)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()

    References:
        S. Stich: Local SGD Converges Fast and Communicates Little. arXiv:1805.09767

        Q. Zhou et al.: DaSGD: Squeezing SGD Parallelization Performance in Distributed Training
        Using Delayed Averaging. arXiv:2006.00441
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
        delay: int = 0,
        aggregation: Aggregation | None = None,
    ) -> None:
        if aggregation is None:
            aggregation = AllReduceAggregation(world_size, use_cuda=use_cuda)
        check_aggregation(
            aggregation,
            Aggregation,  # type: ignore[type-abstract]
            world_size=world_size,
            use_cuda=use_cuda or None,
        )
        if isinstance(aggregation, PeriodicAggregation):
            raise ValueError(
                "aggregation must be the average of every H-th step, not a PeriodicAggregation: "
                f"write LocalSGD(..., period={aggregation.period}, "
                f"aggregation={type(aggregation.inside).__name__}(...))"
            )
        super().__init__(
            None,
            model,
            by_layer=by_layer,
            agg_grad=False,
            optimizer=make_sgd("LocalSGD", lr, momentum, dampening, weight_decay, nesterov),
            # Counts the steps of each parameter, also of those that are unfrozen later.
            aggregation=PeriodicAggregation(aggregation, period, delay),
        )


class DiLoCo(GenericCentralizedOptimizer):
    r"""AdamW on every worker, and every H steps an outer step along the average of their changes.

    With :math:`\theta` the weights that all workers share, every worker takes H inner steps from
    them to :math:`\theta_i`; then

    .. math::

        \Delta &= \frac{1}{k} \sum_{i=1}^{k} (\theta - \theta_i) \\
        \theta &\leftarrow \operatorname{OuterOptimizer}(\theta, \Delta), \qquad
        \theta_i \leftarrow \theta.

    The outer optimizer is SGD with Nesterov momentum: with the default 0.9 and the outer learning
    rate 0.7 as in the paper. Each worker keeps its own state of the inner optimizer. The steps in
    between send nothing; see :class:`LocalSGD` for when to evaluate, and for frozen layers. A layer
    that is unfrozen later is plainly averaged at its first synchronization, and takes outer steps
    from then on.

    Attributes:
        outer_optimizer: The outer optimizer; its learning rate may be changed.

    Args:
        lr: Inner learning rate.
        betas: Decay of the inner running averages of the gradient and of its square.
        eps: Added to the inner denominator.
        weight_decay: Inner, decoupled weight decay.
        period: H, the number of inner steps from one outer step to the next.
        outer_lr: Outer learning rate.
        outer_momentum: Outer Nesterov momentum; 0 for none.
        inner_optimizer: A function that makes another inner optimizer of an iterable of parameters.
            Its learning rate is its own: leave out ``lr``; the other inner arguments are not used.
        outer_optimizer: A function that makes another outer optimizer; leave out ``outer_lr`` and
            ``outer_momentum``.
        aggregation: The outer step with all its settings, instead of ``outer_lr``,
            ``outer_momentum`` and ``outer_optimizer``. With an
            :class:`~mlbench_core.aggregation.pytorch.local_steps.eager.EagerDiLoCoAggregation`, its
            message travels during the next period.

    Other arguments: see
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`. The ``model`` must
    have the same weights on every worker when the first step is taken.

    Raises:
        TypeError: ``period`` is not an integer, a learning rate is not a number,
            ``outer_optimizer`` does not make a torch optimizer, or the aggregation is not a
            :class:`~mlbench_core.aggregation.pytorch.local_steps.periodic.DiLoCoAggregation`.
        ValueError: ``model`` or ``lr`` is missing, a learning rate is negative or not finite,
            ``period`` is not positive, ``world_size`` is not that of the process group, or an
            argument contradicts the aggregation.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = DiLoCo(model=model, lr=0.001, period=50)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.outer_optimizer.param_groups[0]["lr"]
        0.7

    References:
        A. Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models.
        arXiv:2311.08105
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
        aggregation: DiLoCoAggregation | None = None,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        inner_optimizer = make_inner_optimizer("DiLoCo", inner_optimizer, model, lr, **options)
        # The defaults of outer_lr and outer_momentum count as left out.
        if outer_optimizer is not None and (outer_lr, outer_momentum) != (0.7, 0.9):
            raise ValueError(
                "outer_lr and outer_momentum must be left out, because outer_optimizer has its own"
            )
        if aggregation is None:
            if outer_optimizer is None:
                outer_optimizer = make_outer_optimizer(outer_lr, outer_momentum)
            aggregation = DiLoCoAggregation(outer_optimizer, world_size, use_cuda=use_cuda)
        elif (outer_lr, outer_momentum, outer_optimizer) != (0.7, 0.9, None):
            raise ValueError(
                "outer_lr, outer_momentum and outer_optimizer must be left out if aggregation is "
                "given: write DiLoCoAggregation(outer_optimizer)"
            )
        self._outer = check_aggregation(
            aggregation, DiLoCoAggregation, world_size=world_size, use_cuda=use_cuda or None
        )
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

    def _before_step(self) -> None:
        """Share the weights before the first step with the aggregation."""
        # Not in the constructor: a script may load a checkpoint into the model after it made the
        # optimizer.
        self._outer.start(self.model)


def make_outer_optimizer(outer_lr: float, outer_momentum: float) -> OptimizerFactory:
    """Return a function that makes SGD with Nesterov momentum, the outer optimizer of DiLoCo.

    Args:
        outer_lr: Outer learning rate.
        outer_momentum: Outer Nesterov momentum; 0 for none.

    Raises:
        TypeError: One of the two is not a number.
        ValueError: One of the two is negative or not finite.
    """
    check_finite_at_least_0("outer_lr", outer_lr)
    check_finite_at_least_0("outer_momentum", outer_momentum)
    # torch refuses Nesterov momentum without momentum.
    return partial(SGD, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)


def make_inner_optimizer(
    optimizer: str,
    factory: OptimizerFactory | None,
    model: nn.Module | None,
    lr: float,
    **options: Any,
) -> OptimizerFactory:
    """Return the user's function that makes the inner optimizer, or one that makes AdamW.

    Args:
        optimizer: Name of the optimizer, for messages.
        factory: The user's function; None for AdamW.
        model: The model.
        lr: Learning rate of AdamW; ``required`` if it was left out.
        **options: Other options of AdamW.

    Raises:
        TypeError: ``lr`` is not a number.
        ValueError: ``lr`` is missing, negative or not finite, or is given with a function.
    """
    if factory is None:
        lr = check_lr(lr, optimizer)
        # None for fused, not False, with which torch would not use its foreach update either.
        return partial(AdamW, lr=lr, fused=suits_fused(model) or None, **options)
    if lr is not required:
        raise ValueError(
            f"lr must be left out, not {lr!r}, because inner_optimizer has its own: write it there"
        )
    return factory
