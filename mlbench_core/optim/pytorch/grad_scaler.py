"""Loss scaling with automatic mixed precision, agreed on by all workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mlbench_core.aggregation.pytorch.aggregation import Aggregation
from mlbench_core.aggregation.pytorch.all_reduce import AllReduceAggregation

__all__ = ["DistributedGradScaler", "must_skip"]

_TOO_EARLY = 2


class DistributedGradScaler(torch.amp.GradScaler):
    """A :class:`torch.amp.GradScaler` whose scale is the same on all workers.

    Torch's own scaler looks for overflows in the gradients of its worker alone. The optimizers of this library still
    take or skip each step on all workers alike, since they agree on it in ``step``. But only the worker with the
    overflow halves its scale, and from then on each worker has a scale of its own. (That changes no result, because
    each worker unscales its gradients before they are averaged.)

    With this scaler the workers agree in the search for overflows. So the scale, ``unscale_`` and ``update`` are the
    same on all workers, also with other optimizers. It costs a message of 4 bytes per step and device.

    With ``overlap`` it waits for gradients that are on their way before it reads them, and lets a worker without a
    batch take part in their average.

    Args:
        *args: As for :class:`torch.amp.GradScaler`.
        aggregation: The aggregation that exchanges the overflow; None for the optimizer's, or an all-reduce over the
            process group if it has none.
        **kwargs: As for :class:`torch.amp.GradScaler`.

    Example:
        >>> from mlbench_core.optim.pytorch import CentralizedSGD
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer, scaler = CentralizedSGD(model=model, lr=0.1), DistributedGradScaler("cpu", init_scale=8.0)
        >>> with torch.autocast("cpu", dtype=torch.float16):
        ...     loss = model(torch.ones(4, 2)).square().mean()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.get_scale()
        8.0

    References:
        Micikevicius et al.: Mixed Precision Training. arXiv:1710.03740
    """

    def __init__(self, *args: Any, aggregation: Aggregation | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._aggregation = aggregation

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale this worker's gradients and agree on whether there was an overflow."""
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        found_infs = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found_infs.setdefault(found_inf.device, found_inf)  # this worker may have no gradient at all
        found_anywhere = torch.stack([flag.to(found_inf.device) for flag in found_infs.values()]).amax()
        aggregation = self._aggregation or getattr(optimizer, "aggregation", None) or AllReduceAggregation(None)
        aggregation.any_worker(found_anywhere)
        for flag in found_infs.values():
            flag.copy_(found_anywhere)
        return found_infs


@torch.no_grad()
def must_skip(optimizer: Optimizer, aggregation: Aggregation, looked_too_early: bool = False) -> bool:
    """Finish in ``step`` the work that a :class:`torch.amp.GradScaler` left: unscale the gradients, or skip the step.

    During the step a scaler sets ``found_inf`` and ``grad_scale`` on optimizers that have
    ``_step_supports_amp_scaling``. Workers agree on ``found_inf`` before any other message, so that all of them skip a
    step. An aggregation could otherwise remember an overflow as the error of its compression. Gradients are unscaled
    before they are aggregated, since each worker may have a scale of its own.

    Args:
        optimizer: The optimizer whose ``step`` this is.
        aggregation: The aggregation that exchanges the overflow.
        looked_too_early: True if the scaler read the gradients of this worker before they were averaged.

    Returns:
        True if gradients overflowed on any worker; False also without a scaler.

    Raises:
        ValueError: Gradients to be unscaled are float16, in which small ones would vanish; or a scaler read one
            worker's gradients too early (on every worker alike).
    """
    found_inf: Tensor | int | None = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return False
    found_inf = torch.as_tensor(found_inf, dtype=torch.float32)  # torch gives the integer 0 without gradients
    found_inf = torch.full_like(found_inf, _TOO_EARLY) if looked_too_early else found_inf.clamp(max=1)
    aggregation.any_worker(found_inf)
    if found_inf.item() == _TOO_EARLY:
        raise ValueError(
            "a GradScaler read the gradients of a worker before they were averaged (they were still being sent, or "
            "the worker had no backward pass outside no_sync): use mlbench_core.optim.pytorch.DistributedGradScaler, "
            "which waits for the averages"
        )
    if found_inf.item() > 0:
        return True
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is not None:  # None: the caller has called unscale_
        _unscale(optimizer, scale)
    return False


def _unscale(optimizer: Optimizer, scale: Tensor) -> None:
    """Divide all gradients by the scale, in place."""
    inverse = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.dtype == torch.float16:
                raise ValueError(
                    "a GradScaler needs float32 parameters under autocast, but these gradients are float16, in which "
                    "unscaled gradients vanish: train a float16 model with FP16Optimizer"
                )
            parameter.grad.mul_(inverse.to(parameter.grad.device))
