"""The conditions under which torch's fused kernels may update parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["is_dense", "suits_fused"]


def is_dense(parameter: Tensor) -> bool:
    """Return whether a parameter's memory holds its own numbers only, in any order.

    A fused kernel treats this memory as one block, gaps included.

    Example:
        >>> table = torch.zeros(4, 6)
        >>> is_dense(table), is_dense(table.t()), is_dense(table[:2]), is_dense(table[:, :3])
        (True, True, True, False)
    """
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()


def suits_fused(model: nn.Module | None) -> bool:
    """Return whether torch's fused SGD, Adam and AdamW are right for all parameters of a model.

    The plain updates pass over the memory more often, and make new tensors of the size of the
    model.

    Args:
        model: The model; False is returned for None or without parameters, because they are not
            known.

    Example:
        >>> suits_fused(nn.Linear(2, 1)), suits_fused(nn.Linear(2, 1, dtype=torch.bfloat16))
        (True, False)
    """
    if not isinstance(model, nn.Module):
        return False
    parameters = list(model.parameters())
    return bool(parameters) and all(is_dense(p) and _has_fused_kernel(p) for p in parameters)


def _has_fused_kernel(parameter: Tensor) -> bool:
    if parameter.device.type == "cpu":
        # On CPUs, the fused SGD of torch 2.13 leaves most elements in half precision as they are.
        return parameter.dtype in (torch.float32, torch.float64)
    return parameter.is_floating_point() and parameter.is_cuda
