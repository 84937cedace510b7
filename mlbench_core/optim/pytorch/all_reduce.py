"""Optimizers whose workers average gradients, or weights, by an all-reduce."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.aggregation import Aggregation, Denominator
from mlbench_core.aggregation.pytorch.all_reduce import AVG_CUSTOM, AllReduceAggregation
from mlbench_core.optim.pytorch.distributed import (
    Closure,
    GenericCentralizedOptimizer,
    OptimizerFactory,
    check_denominator_and_clipping,
    check_lr,
)
from mlbench_core.optim.pytorch.updates.fused import is_dense, suits_fused
from mlbench_core.optim.pytorch.updates.one_pass_sgd import make_sgd

__all__ = ["CentralizedAdam", "CentralizedSGD", "CustomCentralizedOptimizer"]


class CustomCentralizedOptimizer(GenericCentralizedOptimizer):
    r"""A given torch optimizer with averaged gradients, a denominator of choice and clipping.

    The losses are sums (not means), with gradients :math:`g_i`, and ``denom`` is the number of
    samples or tokens :math:`n` of all workers. Then ``average_custom=True`` steps along
    :math:`\frac{1}{n} \sum_i g_i`, which is right for workers with different amounts of data.

    Args:
        model: The model.
        optimizer: A torch optimizer over the model's parameters, or a function that makes one of
            them.
        grad_clip: Largest norm of the gradient over all parameters; larger ones are scaled down to
            it after they were aggregated. Infinite: no clipping.
        average_world: Divide sums by the number of workers. It is the default if neither flag is
            set.
        average_custom: Divide sums by the ``denom`` given to :meth:`step`.

    Other arguments: see
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``grad_clip`` is not positive, both averages are asked for, ``average_custom``
            comes with an aggregation that overlaps and sends ``torch.float16``, or as in the base
            class.

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
        if (
            average_custom
            and isinstance(aggregation, AllReduceAggregation)
            and aggregation.overlap
            and aggregation.comm_dtype == torch.float16
        ):
            raise ValueError(
                "comm_dtype must not be torch.float16 with overlap and "
                "average_custom, because sums are sent before step() gets the denom "
                "and may overflow: use torch.bfloat16, or overlap=False"
            )
        if optimizer is None:
            raise ValueError(
                "optimizer is missing: give a torch optimizer over the model's parameters"
            )
        super().__init__(
            world_size,
            model,
            use_cuda,
            by_layer,
            divide_before,
            agg_grad,
            optimizer=optimizer,
            aggregation=aggregation,
        )
        self.grad_clip = grad_clip
        # After the constructor of the base class, which sets the average over workers.
        if average_custom:
            self.agg_mode = AVG_CUSTOM

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Closure | None = None,
        tracker: Any | None = None,
        denom: Denominator | None = None,
    ) -> Any:
        """Aggregate, clip and take one step.

        A script can step its scheduler only after a step that was taken: ``if optimizer.step():
        scheduler.step()``.

        Args:
            closure: As in the base class.
            tracker: As in the base class.
            denom: With ``average_custom``, the divisor of sums over workers: a positive number or a
                tensor with one element, the same on every worker. Otherwise it is not used.

        Returns:
            Without a closure, True if the step was taken, and False if a
            :class:`torch.amp.GradScaler` found an overflow on any worker. With a closure, its
            result, as for every torch optimizer.

        Raises:
            ValueError: ``average_custom`` without a positive ``denom``.
        """
        loss = self._step(closure, tracker, denom, self.grad_clip)
        if closure is None:
            return not self._was_skipped
        return loss


class CentralizedSGD(GenericCentralizedOptimizer):
    """SGD with averaged gradients (or weights); see :class:`torch.optim.SGD`.

    Args:
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening for momentum.
        weight_decay: L2 penalty.
        nesterov: Use Nesterov momentum.
        overlap: Average gradients during the backward pass, short for
            ``aggregation=AllReduceAggregation(overlap=True)``.
        fused: Update in torch's fused kernel: one pass over the memory, to rounding the same. None
            does so with overlap, if torch has a kernel for all parameters and none of them is a
            part of a larger tensor. Otherwise None keeps every bit of torch's plain update.

    Other arguments: see
    :class:`~mlbench_core.optim.pytorch.distributed.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model`` or ``lr`` is missing, ``world_size`` is not that of the process group,
            or ``fused`` is True for a parameter that is a part of a larger tensor, or ``overlap``
            contradicts the aggregation.

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
        make = make_sgd(
            "CentralizedSGD", lr, momentum, dampening, weight_decay, nesterov, fused=fused
        )
        super().__init__(
            world_size,
            model,
            use_cuda,
            by_layer,
            agg_grad=agg_grad,
            optimizer=make,
            aggregation=aggregation,
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
            world_size,
            model,
            use_cuda,
            by_layer,
            agg_grad=agg_grad,
            optimizer=make,
            aggregation=aggregation,
        )


def _overlapping(
    overlap: bool, aggregation: Aggregation | None, world_size: int | None, use_cuda: bool
) -> Aggregation | None:
    """Return the aggregation of an optimizer with the option ``overlap``; None for the default."""
    if not overlap:
        return aggregation
    if aggregation is None:
        return AllReduceAggregation(world_size, use_cuda=use_cuda, overlap=overlap)
    name = type(aggregation).__name__
    if isinstance(aggregation, Aggregation) and not aggregation.overlap:
        remedy = "leave it out"
        if isinstance(aggregation, AllReduceAggregation):
            remedy = f"write overlap=True in {name}(...)"
        raise ValueError(
            f"overlap must be False, not True, because the {name} given too does not overlap: "
            f"{remedy}"
        )
    return aggregation


def _fused(
    fused: bool | None, aggregation: Aggregation | None, model: nn.Module | None
) -> bool | None:
    """Return torch's argument ``fused``: the user's choice, or one that fits the parameters."""
    overlaps = isinstance(aggregation, Aggregation) and aggregation.overlap
    # Without overlap, every bit is that of torch's plain update, which the fused one rounds
    # differently.
    if fused is False or not isinstance(model, nn.Module) or not (fused or overlaps):
        return fused
    if not fused:
        # None, not False, with which torch would not use its foreach update on GPUs either.
        return suits_fused(model) or None
    for name, parameter in model.named_parameters():
        if not is_dense(parameter):
            raise ValueError(
                f"fused must be False or None, not True: {name!r} is a part of a larger tensor, "
                "and torch's fused kernel would write into the rest of this tensor"
            )
    return True
