"""Optimizers whose workers all take the same step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.optimizer import required

from mlbench_core.aggregation.pytorch.aggregation import Aggregation, Denominator
from mlbench_core.aggregation.pytorch.all_reduce import AVG_CUSTOM
from mlbench_core.aggregation.pytorch.overlap import BUCKET_SIZE_BYTES
from mlbench_core.optim.pytorch.generic import (
    Closure,
    GenericCentralizedOptimizer,
    OptimizerOrFactory,
    Overlap,
    check_lr,
)
from mlbench_core.optim.pytorch.inner import is_dense
from mlbench_core.optim.pytorch.optim import CentralizedSparsifiedSGD
from mlbench_core.optim.pytorch.power_sgd import PowerSGD

__all__ = [
    "CentralizedAdam",
    "CentralizedSGD",
    "CentralizedSparsifiedSGD",
    "CustomCentralizedOptimizer",
    "GenericCentralizedOptimizer",
    "PowerSGD",
]


class CustomCentralizedOptimizer(GenericCentralizedOptimizer):
    r"""A given torch optimizer with averaged gradients, clipped by norm, divided by a denominator of choice.

    The losses are sums (not means), with gradients :math:`g_i`, and ``denom`` is the number of samples or tokens
    :math:`n` of all workers. Then ``average_custom=True`` steps along :math:`\frac{1}{n} \sum_i g_i`, which is right
    for workers with different amounts of data.

    Args:
        model: The model.
        world_size: Number of workers; None takes that of the process group.
        optimizer: A torch optimizer over the model's parameters.
        use_cuda: True if training runs on GPUs.
        by_layer: One message per parameter instead of one for the whole model.
        agg_grad: Average gradients before the step; False averages weights after it.
        grad_clip: Largest norm of the gradient over all parameters; larger ones are scaled down to it after they were
            aggregated. Infinite: no clipping.
        average_world: Divide sums by the number of workers. It is the default if neither flag is set.
        average_custom: Divide sums by the ``denom`` given to :meth:`step`.
        divide_before: Divide before the sum instead of after it, for half-precision gradients.
        aggregation: How to aggregate, instead of a plain all-reduce.
        overlap: Average gradients during the backward pass, see :class:`GenericCentralizedOptimizer`.
        comm_dtype: The dtype in which gradients travel; None for their own.
        shared_memory: Sum through memory that the workers of one machine share, see the base class.
        process_group: A subgroup of workers, see the base class.

    Raises:
        ValueError: ``grad_clip`` is not positive, both averages are asked for, ``overlap`` and ``average_custom`` come
            with ``comm_dtype=torch.float16``, or as in the base class.

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
        optimizer: OptimizerOrFactory,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
        grad_clip: float = float("inf"),
        average_world: bool = False,
        average_custom: bool = False,
        divide_before: bool = False,
        *,
        aggregation: Aggregation | None = None,
        overlap: Overlap = False,
        comm_dtype: torch.dtype | None = None,
        shared_memory: bool = False,
        process_group: Any = None,
    ) -> None:
        if average_world and average_custom:
            raise ValueError("average_world and average_custom are both True: set the one to divide by")
        if not grad_clip > 0:
            raise ValueError(f"grad_clip must be positive, or inf for no clipping, not {grad_clip}")
        if average_custom and overlap and getattr(aggregation, "comm_dtype", comm_dtype) == torch.float16:
            raise ValueError(
                "comm_dtype must not be torch.float16 with overlap and average_custom, because sums are sent before "
                "step() gets the denom and may overflow: use torch.bfloat16, or overlap=False"
            )
        if optimizer is None:
            raise ValueError("optimizer is missing: give a torch optimizer over the model's parameters")
        super().__init__(
            world_size,
            model,
            use_cuda=use_cuda,
            by_layer=by_layer,
            divide_before=divide_before,
            agg_grad=agg_grad,
            optimizer=optimizer,
            aggregation=aggregation,
            overlap=overlap,
            comm_dtype=comm_dtype,
            shared_memory=shared_memory,
            process_group=process_group,
        )
        self.grad_clip = grad_clip
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
        world_size: Number of workers; None takes that of the process group.
        model: The model.
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening for momentum.
        weight_decay: L2 penalty.
        nesterov: Use Nesterov momentum.
        use_cuda: True if training runs on GPUs.
        by_layer: One message per parameter instead of one for the whole model.
        agg_grad: Average gradients before the step; False averages weights after it.
        divide_before: Divide before the sum instead of after it, for half-precision gradients.
        aggregation: How to aggregate, instead of a plain all-reduce.
        overlap: Average gradients during the backward pass, or until the step with ``"step"``, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.
        comm_dtype: The dtype in which gradients or weights travel, for example ``torch.float16``; None for their own.
        shared_memory: Sum through memory that the workers of one machine share instead of the backend's all-reduce, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.
        bucket_size_bytes: With ``overlap``, a message is sent when it holds this number of bytes.
        fused: Update in torch's fused kernel: one pass over the memory, to rounding the same. None does so with
            ``overlap``, if no parameter is a part of a larger tensor, and leaves it to torch otherwise.
        process_group: A subgroup of workers, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model`` or ``lr`` is missing, ``world_size`` is not that of the process group, or ``fused`` is
            True for a parameter that is a part of a larger tensor.

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
        divide_before: bool = False,
        aggregation: Aggregation | None = None,
        overlap: Overlap = False,
        comm_dtype: torch.dtype | None = None,
        shared_memory: bool = False,
        bucket_size_bytes: int = BUCKET_SIZE_BYTES,
        fused: bool | None = None,
        process_group: Any = None,
    ) -> None:
        make = partial(
            SGD,
            lr=check_lr(lr, "CentralizedSGD"),
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            fused=_with_fused_kernel(fused, overlap, model),
        )
        super().__init__(
            world_size,
            model,
            use_cuda,
            by_layer,
            divide_before,
            agg_grad,
            optimizer=make,
            aggregation=aggregation,
            overlap=overlap,
            comm_dtype=comm_dtype,
            shared_memory=shared_memory,
            bucket_size_bytes=bucket_size_bytes,
            process_group=process_group,
        )


class CentralizedAdam(GenericCentralizedOptimizer):
    """Adam with averaged gradients (or weights); see :class:`torch.optim.Adam`.

    Args:
        world_size: Number of workers; None takes that of the process group.
        model: The model.
        lr: Learning rate.
        betas: Decay of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: L2 penalty.
        amsgrad: Use the maximum of the second moment so far.
        use_cuda: True if training runs on GPUs.
        by_layer: One message per parameter instead of one for the whole model.
        agg_grad: Average gradients before the step; False averages weights after it.
        divide_before: Divide before the sum instead of after it, for half-precision gradients.
        aggregation: How to aggregate, instead of a plain all-reduce.
        overlap: Average gradients during the backward pass, or until the step with ``"step"``, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.
        comm_dtype: The dtype in which gradients or weights travel, for example ``torch.float16``; None for their own.
        shared_memory: Sum through memory that the workers of one machine share instead of the backend's all-reduce, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.
        bucket_size_bytes: With ``overlap``, a message is sent when it holds this number of bytes.
        fused: Update in torch's fused kernel: one pass over the memory, to rounding the same. None does so with
            ``overlap``, if no parameter is a part of a larger tensor, and leaves it to torch otherwise.
        process_group: A subgroup of workers, see
            :class:`~mlbench_core.optim.pytorch.generic.GenericCentralizedOptimizer`.

    Raises:
        ValueError: ``model`` or ``lr`` is missing, ``world_size`` is not that of the process group, or ``fused`` is
            True for a parameter that is a part of a larger tensor.

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
        divide_before: bool = False,
        aggregation: Aggregation | None = None,
        overlap: Overlap = False,
        comm_dtype: torch.dtype | None = None,
        shared_memory: bool = False,
        bucket_size_bytes: int = BUCKET_SIZE_BYTES,
        fused: bool | None = None,
        process_group: Any = None,
    ) -> None:
        make = partial(
            Adam,
            lr=check_lr(lr, "CentralizedAdam"),
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            fused=_with_fused_kernel(fused, overlap, model),
        )
        super().__init__(
            world_size,
            model,
            use_cuda,
            by_layer,
            divide_before,
            agg_grad,
            optimizer=make,
            aggregation=aggregation,
            overlap=overlap,
            comm_dtype=comm_dtype,
            shared_memory=shared_memory,
            bucket_size_bytes=bucket_size_bytes,
            process_group=process_group,
        )


def _with_fused_kernel(fused: bool | None, overlap: Overlap, model: nn.Module | None) -> bool | None:
    """Return torch's argument ``fused``: the user's choice, or one that fits the overlap and the parameters."""
    if fused is False or not isinstance(model, nn.Module) or not (fused or overlap):
        return fused
    # A fused kernel treats the memory of a parameter as one dense block, gaps included.
    with_gaps = [name for name, parameter in model.named_parameters() if not is_dense(parameter)]
    if fused and with_gaps:
        raise ValueError(
            f"fused must be False or None, not True: {with_gaps[0]!r} is a part of a larger tensor, and torch's fused "
            "kernel would write into the rest of this tensor"
        )
    has_kernel = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in model.parameters())
    return True if fused or (has_kernel and not with_gaps) else None
