"""Special properties of the torch optimizers that this library wraps."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from mlbench_core import torch_private
from mlbench_core.aggregation.pytorch.aggregation import Denominator

__all__ = [
    "divides_gradients",
    "dividing",
    "evaluates_repeatedly",
    "is_dense",
    "lay_out_like_parameters",
    "parameters_beside",
    "without_momentum",
]


def evaluates_repeatedly(optimizer: Optimizer) -> bool:
    """Return whether an optimizer requires a closure, because it may evaluate the loss several times per step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def parameters_beside(groups: Sequence[dict[str, Any]], known: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the extra parameters in an optimizer's groups, not among the known ones, by name: ``"group{i}.{j}"``."""
    ids = {id(parameter) for parameter in known}
    return {
        f"group{i}.{j}": parameter
        for i, group in enumerate(groups)
        for j, parameter in enumerate(group["params"])
        if id(parameter) not in ids
    }


def without_momentum(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters without momentum in groups of a fused SGD where others have it already."""
    if not isinstance(optimizer, SGD):
        return []
    newcomers, mixed = [], False
    for group in optimizer.param_groups:
        if group.get("fused") and group["momentum"]:
            stepping = [parameter for parameter in group["params"] if parameter.grad is not None]
            new = [p for p in stepping if optimizer.state.get(p, {}).get("momentum_buffer") is None]
            newcomers += new
            mixed = mixed or 0 < len(new) < len(stepping)
    return newcomers if mixed else []


def is_dense(parameter: Tensor) -> bool:
    """Return whether a parameter's memory holds its own numbers only, in any order.

    Example:
        >>> table = torch.zeros(4, 6)
        >>> is_dense(table), is_dense(table.t()), is_dense(table[:2]), is_dense(table[:, :3])
        (True, True, True, False)
    """
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()


def lay_out_like_parameters(optimizer: Optimizer) -> None:
    """Copy the gradients whose strides differ from their parameters', for torch's fused kernels.

    These kernels read the memory of parameter and gradient in parallel and ignore strides.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            for p in group["params"]:
                gradient = p.grad
                if gradient is not None and gradient.stride() != p.stride() and is_dense(p):
                    p.grad = torch.empty_like(p).copy_(gradient)


def divides_gradients(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torch's fused ones, whose kernels can divide gradients by a scale."""
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    return is_fused and torch_private.takes_scale(optimizer)


@contextlib.contextmanager
def dividing(optimizer: Optimizer, divisor: Denominator | None, device: torch.device) -> Iterator[None]:
    """Let a fused optimizer divide gradients, through the attributes a GradScaler uses; None for no division."""
    if divisor is None:
        yield
        return
    optimizer.grad_scale = torch.as_tensor(divisor, dtype=torch.float32, device=device)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
    try:
        yield
    finally:  # a later step would divide again
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
