"""Flat buckets: where gradients lie in memory if they are reduced during the backward pass.

Parameters are laid out in reverse order of registration, which is about the order in which a
backward pass finishes their gradients. A bucket is closed when it holds ``bucket_size_bytes``. One
flat tensor per bucket is sent:

* Small gradients are views into their bucket's memory. The result of autograd is copied there once,
  and stays there.
* A gradient as large as a bucket is sent from the memory in which autograd put it, without any
  copy.
* If gradients are sent in another dtype than their own, buckets hold the values in that dtype, and
  gradients keep their own memory. Complex gradients are converted later, when the bucket is sent.

The last bucket also has one flag per parameter, which shows whether this worker has its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mlbench_core import torch_private

__all__ = ["BUCKET_SIZE_BYTES", "Bucket", "Signature", "plan_buckets", "signature", "strides_of"]

BUCKET_SIZE_BYTES = 1 << 20
"""Size at which a bucket is sent: 1 MiB. See benchmarks/micro/RESULTS.md for others."""

Signature: TypeAlias = "tuple[tuple[Any, ...], ...]"


@dataclass
class Bucket:
    """Gradients that travel in one message.

    Attributes:
        names: Names of the parameters.
        parameters: The parameters.
        holds_gradients: True if gradients are views into ``memory``; otherwise it only holds the
            message.
        memory: The flat message; None for one large gradient that is sent from its own memory.
        views: The part of ``memory`` of each parameter, in the parameter's shape and strides.
        flags: In the last bucket the part of ``memory`` with one flag per parameter of all buckets.
    """

    names: list[str]
    parameters: list[Tensor]
    holds_gradients: bool
    memory: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    flags: Tensor | None = None
    _addresses: list[int] = field(init=False)

    def __post_init__(self) -> None:
        # Module.to() keeps the gradients' tensor objects and gives them other memory, so only
        # addresses show that they have moved.
        self._addresses = [view.data_ptr() for view in self.views]

    def is_intact(self) -> bool:
        """Return whether the views still lie in the memory; converting a model moves gradients."""
        if not self.holds_gradients:
            return True
        return self._addresses == [view.data_ptr() for view in self.views]

    def fill(self, divisor: int | None) -> Tensor:
        """Copy the gradients into the message.

        Args:
            divisor: Number to divide the gradients by on the way; None leaves them as they are.

        Returns:
            The flat message. Parameters without a gradient count as zeros.
        """
        if self.memory is None:
            own = _owned_gradient(self.parameters[0]).detach()
            # Not view(-1), which fails for memory orders such as channels_last.
            flat = own.as_strided((own.numel(),), (1,), own.storage_offset())
            if divisor is not None:
                flat.div_(divisor)
            return flat
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                # The view still holds the values of the last step.
                view.zero_()
            elif gradient is not view:
                if divisor is None:
                    view.copy_(gradient)
                else:  # one pass over the memory instead of two
                    torch.div(gradient, divisor, out=view)
                if self.holds_gradients:
                    # Later passes accumulate in the bucket, and need no copy.
                    parameter.grad = view
            elif divisor is not None:
                view.div_(divisor)
        return self.memory

    def deliver(self) -> None:
        """Copy the received values into gradients that are not views of the message."""
        if self.memory is None or self.holds_gradients:
            return
        gradients, views = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not None:
                gradients.append(parameter.grad)
                views.append(view)
        if gradients:
            # One launch on the device for all gradients instead of one for each.
            torch_private.foreach_copy_(gradients, views)

    def adopt(self, index: int, message: Tensor) -> None:
        """Give a parameter without a gradient on this worker the one that others sent."""
        parameter = self.parameters[index]
        if self.memory is None:
            # The message is the gradient itself. The other workers sent theirs in this memory
            # order.
            strides = strides_of(parameter)
            parameter.grad = message.as_strided(parameter.shape, strides, message.storage_offset())
        elif self.holds_gradients:
            parameter.grad = self.views[index]
        else:
            parameter.grad = self.views[index].to(parameter.dtype)


def signature(parameters: Mapping[str, Tensor]) -> Signature:
    """Return the properties of parameters on which the layout of the buckets depends."""
    properties = []
    for name, p in parameters.items():
        properties.append((name, id(p), p.requires_grad, p.dtype, p.device, p.shape, p.stride()))
    return tuple(properties)


def plan_buckets(
    parameters: Mapping[str, Tensor], bucket_size_bytes: int, comm_dtype: torch.dtype | None = None
) -> list[Bucket]:
    """Lay out the gradients of parameters in buckets, in the order in which these are sent.

    Args:
        parameters: The parameters that require a gradient, by name in order of registration.
        bucket_size_bytes: A bucket is closed when it holds at least this number of bytes.
        comm_dtype: The dtype that travels; None for each gradient's own.

    Returns:
        The buckets. The last one has the flags; it may be small, or hold nothing else.

    Example:
        >>> sizes = {"a": 3, "b": 2, "c": 2}
        >>> layers = {name: torch.nn.Parameter(torch.zeros(n)) for name, n in sizes.items()}
        >>> [(bucket.names, bucket.memory.numel()) for bucket in plan_buckets(layers, 16)]
        [(['c', 'b'], 4), (['a'], 6)]
    """
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device, bool], list[str]] = {}
    for name, parameter in reversed(list(parameters.items())):
        dtype = parameter.dtype
        # Complex gradients are converted when their bucket is sent.
        if comm_dtype is not None and not parameter.is_complex():
            dtype = comm_dtype
        size_bytes = parameter.numel() * dtype.itemsize
        holds_gradients = dtype == parameter.dtype
        # A gradient as large as a bucket travels alone, which saves the copy into a bucket.
        if holds_gradients and size_bytes >= bucket_size_bytes:
            buckets.append(Bucket([name], [parameter], holds_gradients))
            continue
        # A flat tensor has one dtype and one device, so each combination fills its own bucket.
        kind = dtype, parameter.device, holds_gradients
        names = open_buckets.setdefault(kind, [])
        names.append(name)
        if sum(parameters[n].numel() for n in names) * dtype.itemsize >= bucket_size_bytes:
            del open_buckets[kind]
            buckets.append(_bucket(names, parameters, dtype))
    # The flags travel last: only after the backward pass is it known which gradients exist.
    last_names: list[str] = []
    last_dtype = torch.float32
    if open_buckets:
        (last_dtype, _, _), last_names = open_buckets.popitem()
    for (dtype, _, _), names in open_buckets.items():
        buckets.append(_bucket(names, parameters, dtype))
    last = _bucket(last_names, parameters, last_dtype, number_of_flags=len(parameters))
    # All gradients travel in earlier buckets, and the flags alone in the last one.
    if not last_names and parameters:
        device = next(iter(parameters.values())).device
        last.memory = last.flags = torch.zeros(len(parameters), device=device)
    return [*buckets, last]


def _bucket(
    names: Sequence[str],
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    number_of_flags: int = 0,
) -> Bucket:
    members = [parameters[name] for name in names]
    sizes = list(map(torch.numel, members))
    device = torch.device("cpu")
    if members:
        device = members[0].device
    memory = torch.zeros(sum(sizes) + number_of_flags, dtype=dtype, device=device)
    *parts, flags = memory.split([*sizes, number_of_flags])
    views = []
    for part, member in zip(parts, members, strict=True):
        views.append(part.as_strided(member.shape, strides_of(member), part.storage_offset()))
    holds_gradients = not members or members[0].dtype == dtype
    bucket = Bucket(list(names), members, holds_gradients, memory, views)
    if number_of_flags:
        bucket.flags = flags
    return bucket


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Return strides in the memory order of a dense ``tensor``, as autograd gives its gradient."""
    return torch.empty_like(tensor, device="meta").stride()


def _owned_gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient in dense, unshared memory; zeros if it has none.

    Autograd may give two parameters gradients that share memory. Those of W and V in ``W.view(-1) +
    V.view(-1)`` are one tensor. A reduction in place would change both gradients while the other
    one is still to come.
    """
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    if gradient.stride() != strides_of(parameter) or _is_shared(gradient):
        owned = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = owned
        return owned
    return gradient


def _is_shared(tensor: Tensor) -> bool:
    """Return whether another tensor may use the same memory."""
    storage = tensor.untyped_storage()
    # The tensor and the storage object of this function are two users;
    # a third one is somebody else.
    users = torch_private.storage_users(storage)
    return users is None or users > 2
