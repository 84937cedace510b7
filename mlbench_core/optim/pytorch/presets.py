"""Optimizers by name: a torch optimizer together with an aggregation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.aggregation import Aggregation, Denominator, UnknownOperationError
from mlbench_core.aggregation.pytorch.all_reduce import AVG_CUSTOM, AllReduceAggregation
from mlbench_core.aggregation.pytorch.choco import ChocoAggregation
from mlbench_core.aggregation.pytorch.consensus import average_weights, consensus_distance
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from mlbench_core.aggregation.pytorch.periodic import DiLoCoAggregation, PeriodicAggregation
from mlbench_core.aggregation.pytorch.power import PowerAggregation
from mlbench_core.arguments import check_finite_at_least_0
from mlbench_core.optim.pytorch.compressed import CentralizedSparsifiedSGD
from mlbench_core.optim.pytorch.distributed import (
    Closure,
    GenericCentralizedOptimizer,
    OptimizerFactory,
    check_aggregation,
    check_denominator_and_clipping,
    check_lr,
)
from mlbench_core.optim.pytorch.fused import is_dense, suits_fused
from mlbench_core.optim.pytorch.one_pass_sgd import OnePassSGD

__all__ = [
    "CentralizedAdam",
    "CentralizedSGD",
    "CentralizedSparsifiedSGD",
    "ChocoSGD",
    "CustomCentralizedOptimizer",
    "DecentralizedSGD",
    "DiLoCo",
    "GenericCentralizedOptimizer",
    "LocalSGD",
    "PowerSGD",
]


class CustomCentralizedOptimizer(GenericCentralizedOptimizer):
    r"""A given torch optimizer with averaged gradients, clipped by norm, divided by a denominator of choice.

    The losses are sums (not means), with gradients :math:`g_i`, and ``denom`` is the number of samples or tokens
    :math:`n` of all workers. Then ``average_custom=True`` steps along :math:`\frac{1}{n} \sum_i g_i`, which is right
    for workers with different amounts of data.

    Args:
        model: The model.
        optimizer: A torch optimizer over the model's parameters, or a function that makes one of them.
        grad_clip: Largest norm of the gradient over all parameters; larger ones are scaled down to it after they were
            aggregated. Infinite: no clipping.
        average_world: Divide sums by the number of workers. It is the default if neither flag is set.
        average_custom: Divide sums by the ``denom`` given to :meth:`step`.

    Other arguments: see :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``grad_clip`` is not positive, both averages are asked for, ``average_custom`` comes with an
            aggregation that overlaps and sends ``torch.float16``, or as in the base class.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> inside = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> optimizer = CustomCentralizedOptimizer(model, None, inside, average_custom=True)
        >>> before = model.weight.item()
        >>> model(torch.full((4, 1), 2.0)).sum().backward()
        >>> optimizer.step(denom=4)
        True
        >>> round(before - model.weight.item(), 4)
        2.0
    """

    def __init__(
        self,
        model: nn.Module,
        world_size: int | None,
        optimizer: Optimizer | OptimizerFactory,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
        grad_clip: float = float("inf"),
        average_world: bool = False,
        average_custom: bool = False,
        divide_before: bool = False,
        *,
        aggregation: Aggregation | None = None,
    ) -> None:
        check_denominator_and_clipping(average_world, average_custom, grad_clip)
        overlaps = isinstance(aggregation, AllReduceAggregation) and aggregation.overlap
        if average_custom and overlaps and aggregation.comm_dtype == torch.float16:  # type: ignore[union-attr]
            raise ValueError(
                "comm_dtype must not be torch.float16 with overlap and average_custom, because sums are sent before "
                "step() gets the denom and may overflow: use torch.bfloat16, or overlap=False"
            )
        if optimizer is None:
            raise ValueError("optimizer is missing: give a torch optimizer over the model's parameters")
        super().__init__(
            world_size, model, use_cuda, by_layer, divide_before, agg_grad, optimizer=optimizer, aggregation=aggregation
        )
        self.grad_clip = grad_clip
        # After the constructor of the base class, which sets the average over workers.
        if average_custom:
            self.agg_mode = AVG_CUSTOM

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure | None = None, tracker: Any | None = None, denom: Denominator | None = None
    ) -> Any:
        """Aggregate, clip and take one step.

        A script can step its scheduler only after a step that was taken: ``if optimizer.step(): scheduler.step()``.

        Args:
            closure: As in the base class.
            tracker: As in the base class.
            denom: With ``average_custom``, the divisor of sums over workers: a positive number or a tensor with one
                element, the same on every worker. Otherwise it is not used.

        Returns:
            Without a closure, True if the step was taken, and False if a :class:`torch.amp.GradScaler` found an
            overflow on any worker. With a closure, its result, as for every torch optimizer.

        Raises:
            ValueError: ``average_custom`` without a positive ``denom``.
        """
        loss = self._step(closure, tracker, denom, self.grad_clip)
        return not self._was_skipped if closure is None else loss


class CentralizedSGD(GenericCentralizedOptimizer):
    """Stochastic gradient descent with averaged gradients (or weights); see :class:`torch.optim.SGD`.

    Args:
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening for momentum.
        weight_decay: L2 penalty.
        nesterov: Use Nesterov momentum.
        overlap: Average gradients during the backward pass, short for
            ``aggregation=AllReduceAggregation(overlap=True)``.
        fused: Update in torch's fused kernel: one pass over the memory, to rounding the same. None does so with
            overlap, if torch has a kernel for all parameters and none of them is a part of a larger tensor. Otherwise
            None keeps every bit of torch's plain update.

    Other arguments: see :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model`` or ``lr`` is missing, ``world_size`` is not that of the process group, or ``fused`` is
            True for a parameter that is a part of a larger tensor, or ``overlap`` contradicts the aggregation.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = CentralizedSGD(world_size=1, model=model, lr=0.1, momentum=0.9)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
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
        agg_grad: bool = True,
        *,
        aggregation: Aggregation | None = None,
        overlap: bool = False,
        fused: bool | None = None,
    ) -> None:
        aggregation = _overlapping(overlap, aggregation, world_size, use_cuda)
        fused = _fused(fused, aggregation, model)
        make = _sgd("CentralizedSGD", lr, momentum, dampening, weight_decay, nesterov, fused=fused)
        super().__init__(
            world_size, model, use_cuda, by_layer, agg_grad=agg_grad, optimizer=make, aggregation=aggregation
        )


class CentralizedAdam(GenericCentralizedOptimizer):
    """Adam with averaged gradients (or weights); see :class:`torch.optim.Adam`.

    Args:
        lr: Learning rate.
        betas: Decay of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: L2 penalty.
        amsgrad: Use the maximum of the second moment so far.

    Other arguments and errors: see :class:`CentralizedSGD`.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = CentralizedAdam(world_size=1, model=model, lr=0.001)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()

    References:
        Kingma and Ba: Adam: A Method for Stochastic Optimization. arXiv:1412.6980
    """

    def __init__(
        self,
        world_size: int | None = None,
        model: nn.Module | None = None,
        lr: float = required,  # type: ignore[assignment]
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
        *,
        aggregation: Aggregation | None = None,
        overlap: bool = False,
        fused: bool | None = None,
    ) -> None:
        aggregation = _overlapping(overlap, aggregation, world_size, use_cuda)
        make = partial(
            Adam,
            lr=check_lr(lr, "CentralizedAdam"),
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            fused=_fused(fused, aggregation, model),
        )
        super().__init__(
            world_size, model, use_cuda, by_layer, agg_grad=agg_grad, optimizer=make, aggregation=aggregation
        )


def _overlapping(
    overlap: bool, aggregation: Aggregation | None, world_size: int | None, use_cuda: bool
) -> Aggregation | None:
    """Return the aggregation that an optimizer with the shortcut ``overlap`` uses; None for the default."""
    if not overlap:
        return aggregation
    if aggregation is None:
        return AllReduceAggregation(world_size, use_cuda=use_cuda, overlap=overlap)
    name = type(aggregation).__name__
    if isinstance(aggregation, Aggregation) and not aggregation.overlap:
        how = f"write overlap=True in {name}(...)" if isinstance(aggregation, AllReduceAggregation) else "leave it out"
        raise ValueError(f"overlap must be False, not True, because the {name} given too does not overlap: {how}")
    return aggregation


def _fused(fused: bool | None, aggregation: Aggregation | None, model: nn.Module | None) -> bool | None:
    """Return torch's argument ``fused``: the user's choice, or one that fits the overlap and the parameters."""
    overlaps = isinstance(aggregation, Aggregation) and aggregation.overlap
    if fused is False or not isinstance(model, nn.Module) or not (fused or overlaps):
        return fused
    if not fused:
        return suits_fused(model) or None
    gap = next((name for name, parameter in model.named_parameters() if not is_dense(parameter)), None)
    if gap is not None:
        raise ValueError(
            f"fused must be False or None, not True: {gap!r} is a part of a larger tensor, and torch's fused kernel "
            "would write into the rest of this tensor"
        )
    return True


def _sgd(
    optimizer: str,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    fused: bool | None = None,
) -> OptimizerFactory:
    """Return a function that makes the wrapped SGD of an optimizer."""
    return partial(
        OnePassSGD,
        lr=check_lr(lr, optimizer),
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        fused=fused,
    )


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
        lr: Learning rate.
        momentum: Momentum factor.
        weight_decay: L2 penalty.
        dampening: Dampening for momentum.
        nesterov: Use Nesterov momentum.
        average_world: Divide the sum over workers by their number; False steps along the sum.
        by_layer: Two messages per parameter instead of two for the whole model.
        reuse_query: Start the power iteration from the last step's result (warm start).
        world_size: Number of workers; None takes that of the process group. In a group of several, the default of 1 is
            refused rather than letting the workers train apart.
        rank: Largest rank of the approximation, 1 or more. It is not the worker's number.
        aggregation: The compression with all its settings, instead of ``reuse_query``, ``world_size`` and ``rank``.

    Other arguments: see :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model`` or ``lr`` is missing, ``world_size`` is not that of the process group, a number is out of
            range, or an argument contradicts the aggregation.
        TypeError: The aggregation is not a
            :class:`~mlbench_core.aggregation.pytorch.power.PowerAggregation`.

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
        aggregation: PowerAggregation | None = None,
    ) -> None:
        make = _sgd("PowerSGD", lr, momentum, dampening, weight_decay, nesterov)
        if aggregation is None:
            aggregation = PowerAggregation(model, use_cuda, reuse_query, world_size, rank)  # type: ignore[arg-type]
        else:
            check_aggregation(
                aggregation,
                PowerAggregation,
                reuse_query=reuse_query or None,
                # Their default of 1 comes from version 3.0, and counts as left out.
                world_size=None if world_size == 1 else world_size,
                rank=None if rank == 1 else rank,
            )
        super().__init__(None, model, use_cuda, by_layer, optimizer=make, aggregation=aggregation)
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
        # The denominator is used only with average_world=False: divided by 1, the sum stays.
        return self._step(closure, tracker, denom=1)


class GossipOptimizer(GenericCentralizedOptimizer):
    """Base of the optimizers whose workers average with a few neighbors; see :class:`DecentralizedSGD`."""

    _kind: ClassVar[type[DecentralizedAggregation] | type[ChocoAggregation]]

    def __init__(
        self,
        rank: int | None = None,
        neighbors: Iterable[int] | None = None,
        model: nn.Module | None = None,
        lr: float = required,  # type: ignore[assignment]
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        average_world: bool = True,
        use_cuda: bool = False,
        by_layer: bool = False,
        *,
        aggregation: Aggregation | None = None,
    ) -> None:
        if not average_world:
            raise UnknownOperationError(f"average_world must be True, not {average_world!r}: neighbors only average")
        if aggregation is None:
            aggregation = self._kind(rank, neighbors, use_cuda=use_cuda)
        else:
            check_aggregation(aggregation, self._kind)
            for name, value in (("rank", rank), ("neighbors", neighbors)):
                if value is not None:
                    raise ValueError(
                        f"{name} must be left out, not {value!r}, because the aggregation has its own: write it in "
                        f"{self._kind.__name__}(...)"
                    )
        super().__init__(
            None,
            model,
            use_cuda,
            by_layer,
            agg_grad=False,
            optimizer=_sgd(type(self).__name__, lr, momentum, dampening, weight_decay, nesterov),
            aggregation=aggregation,
        )

    def consensus_distance(self) -> float:
        """Measure how far the workers are apart; every worker must call it.

        See :func:`~mlbench_core.aggregation.pytorch.consensus.consensus_distance`.
        """
        return consensus_distance(self.model, self.aggregation.group)

    def average_weights(self, tracker: Any = None) -> None:
        """Give every worker the average of all workers' weights, for example to evaluate; every worker must call it.

        Args:
            tracker: See :func:`~mlbench_core.aggregation.pytorch.consensus.average_weights`.
        """
        average_weights(self.model, self.aggregation.group, tracker)


class DecentralizedSGD(GossipOptimizer):
    r"""Stochastic gradient descent on every worker, then an average with the neighbors (D-PSGD).

    With :math:`g_i` the gradient of worker :math:`i`, :math:`\eta` the learning rate and :math:`W` the mixing matrix,

    .. math:: x_i \leftarrow \sum_j W_{ij} (x_j - \eta g_j).

    The average over workers takes the step of one worker with the average gradient. The distance of each worker to this
    average is of order :math:`\eta / (1 - |\lambda_2(W)|)`. Each worker has its own momentum. See
    :class:`~mlbench_core.aggregation.pytorch.decentralized.DecentralizedAggregation` for the weights and the bytes.

    Args:
        rank: This worker's number in the process group; None takes it from there.
        neighbors: Ranks of this worker's neighbors. None if the worker is alone, or ``aggregation`` is given.
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening for momentum.
        weight_decay: L2 penalty.
        nesterov: Use Nesterov momentum.
        average_world: Must be True: neighbors only average.
        aggregation: The exchange with all its settings, instead of ``rank`` and ``neighbors``, for example
            ``DecentralizedAggregation(topology=ring(4))`` for the whole graph.

    Other arguments: see :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model``, ``lr`` or, with several workers, ``neighbors`` is missing; ``rank`` is not this
            process's; ``neighbors`` has a rank that is not there; or they are given with ``aggregation``.
        TypeError: The aggregation is of another class.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = DecentralizedSGD(rank=0, neighbors=[], model=model, lr=0.1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.consensus_distance()
        0.0

    References:
        X. Lian, C. Zhang, H. Zhang, C. Hsieh, W. Zhang, J. Liu: Can Decentralized Algorithms Outperform Centralized
        Algorithms? A Case Study for Decentralized Parallel Stochastic Gradient Descent. arXiv:1705.09056
    """

    _kind = DecentralizedAggregation


class ChocoSGD(GossipOptimizer):
    r"""Stochastic gradient descent on every worker, then an average with the neighbors by compressed differences.

    With :math:`x_i` the weights after the local step, public copies :math:`\hat x_i`, a compression :math:`Q`, the
    mixing matrix :math:`W` and the consensus step size :math:`\gamma`,

    .. math::

        q_i &= Q(x_i - \hat x_i) \\
        \hat x_j &\leftarrow \hat x_j + q_j \\
        x_i &\leftarrow x_i + \gamma \sum_j W_{ij} (\hat x_j - \hat x_i).

    Each worker has its own momentum. See :class:`~mlbench_core.aggregation.pytorch.choco.ChocoAggregation` for the
    compressions and the bytes.

    Args:
        aggregation: The exchange with all its settings. None sends the largest tenth of each difference, with
            :math:`\gamma = 0.2`.

    Other arguments and errors: see :class:`DecentralizedSGD`.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = ChocoSGD(
        ...     model=model, lr=0.1, aggregation=ChocoAggregation(neighbors=[], compression="sign", gamma=0.4)
        ... )
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()

    References:
        A. Koloskova, S. Stich, M. Jaggi: Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
        Communication. arXiv:1902.00340
        A. Koloskova, T. Lin, S. Stich, M. Jaggi: Decentralized Deep Learning with Arbitrary Communication Compression.
        arXiv:1907.09356
    """

    _kind = ChocoAggregation


class LocalSGD(GenericCentralizedOptimizer):
    r"""Stochastic gradient descent on every worker, and an average of all weights every H steps.

    With :math:`g_i` the gradient of worker :math:`i` of :math:`k`, :math:`\eta` the learning rate and steps counted
    from :math:`t = 1`,

    .. math::

        x_i &\leftarrow x_i - \eta g_i \\
        x_i &\leftarrow \frac{1}{k} \sum_{j=1}^{k} x_j \quad \text{if } H \mid t.

    The steps in between send nothing, and workers differ then. So evaluate and save right after a multiple of H steps,
    or call :func:`~mlbench_core.aggregation.pytorch.consensus.average_weights` before. Momentum is local to a worker.

    Layers may be frozen and unfrozen at any time, on all workers or on some. After the next average all workers have
    one model. A layer that was trainable once is averaged also while it is frozen.

    With a delay :math:`\tau > 0`, the workers do not wait for the average. They take :math:`\tau` more steps, and then

    .. math:: x_i \leftarrow x_i(t + \tau) + \left( \frac{1}{k} \sum_{j=1}^{k} x_j(t) - x_i(t) \right)
        \quad \text{if } H \mid t.

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
        aggregation: How weights are averaged every H steps; None for an all-reduce. With a delay, an
            :class:`~mlbench_core.aggregation.pytorch.all_reduce.AllReduceAggregation` without shared memory.

    Other arguments: see :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        TypeError: ``period`` or ``delay`` is not an integer, or there is a delay and the aggregation is not an
            ``AllReduceAggregation``.
        ValueError: ``model`` or ``lr`` is missing, ``period`` is not positive, ``delay`` is negative or not less than
            ``period``, or ``world_size`` is not that of the process group. Or the aggregation has a period too,
            overlaps with the backward pass, is for gradients, or with a delay sums through shared memory.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = LocalSGD(model=model, lr=0.1, period=4)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()

    References:
        S. Stich: Local SGD Converges Fast and Communicates Little. arXiv:1805.09767
        Q. Zhou et al.: DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed
        Averaging. arXiv:2006.00441
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
                "aggregation must be the average of every H-th step, not a PeriodicAggregation: write LocalSGD(..., "
                f"period={aggregation.period}, aggregation={type(aggregation.inside).__name__}(...))"
            )
        super().__init__(
            None,
            model,
            by_layer=by_layer,
            agg_grad=False,
            optimizer=_sgd("LocalSGD", lr, momentum, dampening, weight_decay, nesterov),
            # Counts the steps of each parameter, also of those that are unfrozen later.
            aggregation=PeriodicAggregation(aggregation, period, delay),
        )


class DiLoCo(GenericCentralizedOptimizer):
    r"""AdamW on every worker, and every H steps an outer step along the average of their changes (DiLoCo).

    With :math:`\theta` the weights that all workers share, every worker takes H inner steps from them to
    :math:`\theta_i`; then

    .. math::

        \Delta &= \frac{1}{k} \sum_{i=1}^{k} (\theta - \theta_i) \\
        \theta &\leftarrow \operatorname{OuterOptimizer}(\theta, \Delta), \qquad \theta_i \leftarrow \theta.

    The outer optimizer is SGD with Nesterov momentum: with the default 0.9 and the outer learning rate 0.7 as in the
    paper. Each worker keeps its own state of the inner optimizer. The steps in between send nothing; see
    :class:`LocalSGD` for when to evaluate, and for frozen layers. A layer that is unfrozen later is
    plainly averaged at its first synchronization, and takes outer steps from then on.

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
        inner_optimizer: A function that makes another inner optimizer of an iterable of parameters. Its learning rate
            is its own: leave out ``lr``; the other inner arguments are not used.
        outer_optimizer: A function that makes another outer optimizer; leave out ``outer_lr`` and ``outer_momentum``.
        aggregation: The outer step with all its settings, instead of ``outer_lr``, ``outer_momentum`` and
            ``outer_optimizer``.

    Other arguments: see :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`. The ``model``
    must have the same weights on every worker when the first step is taken.

    Raises:
        TypeError: ``period`` is not an integer, a learning rate is not a number, ``outer_optimizer`` does not make a
            torch optimizer, or the aggregation is not a
            :class:`~mlbench_core.aggregation.pytorch.periodic.DiLoCoAggregation`.
        ValueError: ``model`` or ``lr`` is missing, a learning rate is negative or not finite, ``period`` is not
            positive, ``world_size`` is not that of the process group, or an argument contradicts the aggregation.

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
        aggregation: DiLoCoAggregation | None = None,
    ) -> None:
        if inner_optimizer is None:
            inner_optimizer = partial(
                AdamW,
                lr=check_lr(lr, "DiLoCo"),
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                fused=suits_fused(model) or None,
            )
        elif lr is not required:
            raise ValueError(f"lr must be left out, not {lr!r}, because inner_optimizer has its own: write it there")
        if outer_optimizer is not None and (outer_lr, outer_momentum) != (0.7, 0.9):
            raise ValueError("outer_lr and outer_momentum must be left out, because outer_optimizer has its own")
        if aggregation is None:
            if outer_optimizer is None:
                check_finite_at_least_0("outer_lr", outer_lr)
                check_finite_at_least_0("outer_momentum", outer_momentum)
                outer_optimizer = partial(SGD, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
            aggregation = DiLoCoAggregation(outer_optimizer, world_size, use_cuda=use_cuda)
        elif (outer_lr, outer_momentum, outer_optimizer) != (0.7, 0.9, None):
            raise ValueError(
                "outer_lr, outer_momentum and outer_optimizer must be left out if aggregation is given: write "
                "DiLoCoAggregation(outer_optimizer)"
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

    def _step(
        self,
        closure: Closure | None,
        tracker: Any | None,
        denom: Denominator | None = None,
        grad_clip: float = math.inf,
    ) -> Any:
        """Take a step; the weights before the first step are the shared ones."""
        # Not in the constructor: a script may load a checkpoint into the model after it made the optimizer.
        self._outer.start(self.model)
        return super()._step(closure, tracker, denom, grad_clip)
