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

_LEAST_ELEMENTS = (
    1 << 14
)  # smaller tensors stay in the cache between the passes of the plain update
_UNIT_ELEMENTS = 64  # a multiple of the elements that a CPU adds up in one instruction
_OPTIONS = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


class OnePassSGD(SGD):
    """Torch's SGD on CPUs, at the speed of its fused kernel and with the results of its plain update.

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
            buffer = self.state[parameter].get("momentum_buffer") if group["momentum"] else None
            if group["momentum"] and buffer is None:  # the plain update makes the buffer
                new[parameter] = len(plain)
            elif _is_alike(parameter, parameter.grad, buffer):
                end = parameter.numel() // _UNIT_ELEMENTS * _UNIT_ELEMENTS
                flat = [
                    None if t is None else _flat(t) for t in (parameter, parameter.grad, buffer)
                ]
                fused.append(tuple(None if t is None else t[:end] for t in flat))
                if end == parameter.numel():
                    continue
                plain.append(tuple(None if t is None else t[end:] for t in flat))
                continue
            plain.append((parameter, parameter.grad, buffer))
        options = {name: group[name] for name in _OPTIONS}
        if fused:
            parameters, gradients, buffers = map(list, zip(*fused, strict=True))
            sgd(parameters, gradients, buffers, fused=True, **options)
        if plain:
            parameters, gradients, buffers = map(list, zip(*plain, strict=True))
            sgd(parameters, gradients, buffers, foreach=False, fused=False, **options)
            for parameter, row in new.items():
                self.state[parameter]["momentum_buffer"] = buffers[row]


def sgd_step(optimizer: SGD, closure: Closure | None = None) -> Any:
    """Take SGD's own step without hooks, for a subclass whose step has run them.

    Torch adds the hooks to the step of a class with its first object. So ``super().step()`` would
    run them again if the process has made an ``SGD`` before.

    Args:
        optimizer: The optimizer of the subclass.
        closure: As for ``step``.
    """
    step: Any = SGD.step
    return (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer, closure)


def _is_plain(group: dict[str, Any]) -> bool:
    """Return whether torch would update a group parameter by parameter on the CPU."""
    asked = group.get("foreach") or group.get("fused") or group.get("differentiable")
    return not asked and all(p.device.type == "cpu" and not p.is_complex() for p in group["params"])


def _is_alike(parameter: Tensor, gradient: Tensor, buffer: Tensor | None) -> bool:
    """Return whether the fused kernel can update a large parameter: its tensors have one dtype and memory order."""
    others = [gradient] if buffer is None else [gradient, buffer]
    return (
        parameter.numel() >= _LEAST_ELEMENTS
        # In half precision the kernel rounds differently, and that of torch 2.13 leaves most
        # elements as they are.
        and parameter.dtype in (torch.float32, torch.float64)
        and all(t.layout == torch.strided and t.dtype == parameter.dtype for t in others)
        and all(t.stride() == parameter.stride() for t in others)
        and is_dense(parameter)
    )


def _flat(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor as a vector."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


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
