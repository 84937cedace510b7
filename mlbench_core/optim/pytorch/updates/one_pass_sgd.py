"""SGD that passes over the memory once, with the bits of torch's plain SGD."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.sgd import sgd

from mlbench_core.optim.pytorch.distributed import Closure, OptimizerFactory, check_lr, evaluate
from mlbench_core.optim.pytorch.updates.fused import is_dense

__all__ = ["OnePassSGD", "make_sgd", "sgd_step"]

# Smaller tensors stay in the cache between the passes of the plain update.
_LEAST_ELEMENTS = 1 << 14
# A multiple of the number of elements that a CPU adds up in one instruction.
_UNIT_ELEMENTS = 64
_OPTIONS = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


class OnePassSGD(SGD):
    """Torch's SGD on CPUs, at the speed of its fused kernel, with the results of its plain update.

    The plain update passes over the values of a parameter once per operation, two or three times.
    Torch's fused kernel passes over them once. It rounds as the plain update does, except for the
    last few elements of a tensor, which do not fill a vector register. So large tensors are updated
    by the fused kernel up to these elements, and everything else by the plain update. A step that
    the kernel would not compute alike is left to torch: on GPUs, in half precision, with tensors of
    other layouts, or if a group asks for ``foreach``, ``fused`` or ``differentiable``.

    Arguments and state: see :class:`torch.optim.SGD`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(600, 600))
        >>> weight.grad = torch.ones_like(weight)
        >>> OnePassSGD([weight], lr=0.5).step()
        >>> weight.detach().unique()
        tensor([0.5000])
    """

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        """Take one step; see :meth:`torch.optim.SGD.step`."""
        if not all(map(_is_plain, self.param_groups)):
            return sgd_step(self, closure)
        loss = None
        if closure is not None:
            loss = evaluate(closure)
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group that have a gradient."""
        # Each row has a parameter, its gradient and its momentum buffer, or parts of all three.
        fused: list[tuple[Any, ...]] = []
        plain: list[tuple[Any, ...]] = []
        new: dict[Tensor, int] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            buffer = None
            if group["momentum"]:
                buffer = self.state[parameter].get("momentum_buffer")
            row = (parameter, parameter.grad, buffer)
            if group["momentum"] and buffer is None:
                # The plain update makes the buffer.
                new[parameter] = len(plain)
                plain.append(row)
            elif _is_alike(*row):
                size = parameter.numel()
                end = size // _UNIT_ELEMENTS * _UNIT_ELEMENTS
                fused.append(tuple(_part(tensor, 0, end) for tensor in row))
                if end < size:
                    plain.append(tuple(_part(tensor, end, size) for tensor in row))
            else:
                plain.append(row)
        options = {name: group[name] for name in _OPTIONS}
        # torch's function takes a list of parameters, one of gradients and one of buffers.
        if fused:
            parameters, gradients, buffers = map(list, zip(*fused, strict=True))
            sgd(parameters, gradients, buffers, fused=True, **options)
        if plain:
            parameters, gradients, buffers = map(list, zip(*plain, strict=True))
            sgd(parameters, gradients, buffers, foreach=False, fused=False, **options)
            # It has written the new buffers into its list.
            for parameter, position in new.items():
                self.state[parameter]["momentum_buffer"] = buffers[position]


def sgd_step(optimizer: SGD, closure: Closure | None = None) -> Any:
    """Take SGD's own step without hooks, for a subclass whose step has run them.

    Torch adds the hooks to the step of a class with its first object. So ``super().step()`` would
    run them again if the process has made an ``SGD`` before.

    Args:
        optimizer: The optimizer of the subclass.
        closure: As for ``step``.
    """
    step: Any = SGD.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return step(optimizer, closure)


def _is_plain(group: dict[str, Any]) -> bool:
    """Return whether torch would update a group parameter by parameter on the CPU."""
    asked = group.get("foreach") or group.get("fused") or group.get("differentiable")
    return not asked and all(p.device.type == "cpu" and not p.is_complex() for p in group["params"])


def _is_alike(parameter: Tensor, gradient: Tensor, buffer: Tensor | None) -> bool:
    """Return whether a parameter is large, and its tensors have one dtype and memory order."""
    if parameter.numel() < _LEAST_ELEMENTS:
        return False
    # In half precision the kernel rounds differently, and that of torch 2.13 leaves most elements
    # as they are.
    if parameter.dtype not in (torch.float32, torch.float64):
        return False
    others = [gradient]
    if buffer is not None:
        others.append(buffer)
    for other in others:
        # The layout comes first, because a sparse tensor has no strides.
        if other.layout != torch.strided or other.dtype != parameter.dtype:
            return False
        if other.stride() != parameter.stride():
            return False
    return is_dense(parameter)


def _part(tensor: Tensor | None, start: int, end: int) -> Tensor | None:
    """Return a part of the memory of a dense tensor as a vector; None for None."""
    if tensor is None:
        return None
    return tensor.detach().as_strided((end - start,), (1,), tensor.storage_offset() + start)


def make_sgd(
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
