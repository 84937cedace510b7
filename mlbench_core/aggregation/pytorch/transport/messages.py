"""Flat messages: many tensors in one, and back."""

from __future__ import annotations

import bisect
import cmath
import itertools
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Denominator",
    "Flattened",
    "KeptMemory",
    "all_finite",
    "as_bytes",
    "as_real",
    "by_dtype_and_device",
    "check_denominator",
    "compare",
    "divide",
    "fill",
    "from_bytes",
    "in_blocks",
    "nbytes_of",
    "pack",
    "unpack",
]

Denominator: TypeAlias = "float | Tensor"

# Elements that a CPU processes at a time, so that intermediate results stay in its cache. Four
# blocks of float32 fit into 2 MB.
BLOCK_ELEMENTS = 1 << 17


class KeptMemory:
    """Memory for intermediate results that is kept from call to call.

    Outside of :func:`~mlbench_core.distributed.pytorch.initialize_backends`, the C library returns
    large tensors to the system when they are freed. On a CPU, the first access to the pages of a
    new one then takes about eight times as long as a pass over old ones. Copies and pickles are
    empty.

    Example:
        >>> memory = KeptMemory()
        >>> first = memory.like("gradient", torch.zeros(2, 3))
        >>> memory.like("gradient", torch.zeros(2, 3)) is first
        True
    """

    def __init__(self) -> None:
        self._tensors: dict[Hashable, Tensor] = {}

    def like(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Return memory of a tensor's shape, dtype and device, with the values of the last use."""
        kept = self._tensors.get(key)
        kind = tensor.shape, tensor.dtype, tensor.device
        # A model may have moved to another device or dtype since the last call.
        if kept is None or (kept.shape, kept.dtype, kept.device) != kind:
            # A tensor made in inference mode could not be changed outside of it.
            with torch.inference_mode(False):
                kept = self._tensors[key] = torch.empty_like(tensor)
        return kept

    def flat(self, key: Hashable, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return flat memory of ``numel`` elements: the beginning of the longest so far."""
        key = (key, dtype, device)
        kept = self._tensors.get(key)
        if kept is None or len(kept) < numel:
            with torch.inference_mode(False):
                kept = self._tensors[key] = torch.empty(numel, dtype=dtype, device=device)
        return kept[:numel]

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptMemory, ()


def by_dtype_and_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors that can share a message, in the order of each group's first tensor."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def pack(tensors: Iterable[Tensor], out: Tensor | None = None) -> Tensor:
    """Copy tensors of one dtype and device, in logical order, into flat memory, ``out`` or new."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors], out=out)


def unpack(message: Tensor, tensors: Iterable[Tensor]) -> None:
    """Copy a flat tensor into tensors, one after another; memory, strides and dtypes stay."""
    # Used twice, and may be an iterator.
    tensors = list(tensors)
    parts = message.split(list(map(torch.numel, tensors)))
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


class Flattened:
    """Tensors of one dtype and device as one flat tensor, which is read and written in parts.

    A part that fits into the cache of a CPU saves two passes over the memory of all tensors: that
    of :func:`pack` and that of :func:`unpack`.

    Attributes:
        numel: Number of elements of all tensors.

    Args:
        tensors: The tensors, of any shapes and strides.

    Example:
        >>> tensors = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
        >>> flat = Flattened(tensors)
        >>> flat.read(1, torch.empty(3))
        tensor([2., 3., 0.])
        >>> flat.write(1, torch.tensor([5.0, 6.0, 7.0]))
        >>> flat.finish()
        >>> tensors
        [tensor([1., 5.]), tensor([[6.]])]
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        # Copies of tensors in another memory order, and else views.
        self._flat = [tensor.reshape(-1) for tensor in self._tensors]
        self._begins = list(itertools.accumulate(map(len, self._flat), initial=0))
        self.numel = self._begins[-1]

    def read(self, begin: int, into: Tensor) -> Tensor:
        """Copy the elements from a position on into a flat tensor, with zeros after the last."""
        parts = self._parts(begin, begin + len(into))
        count = sum(map(len, parts))
        if parts:
            torch.cat(parts, out=into[:count])
        into[count:] = 0
        return into

    def view(self, begin: int, like: Tensor) -> Tensor | None:
        """Return the elements from a position on without a copy, as many as another tensor has.

        It is None if they are not in one tensor, or of another dtype.
        """
        parts = self._parts(begin, begin + len(like))
        if len(parts) == 1 and len(parts[0]) == len(like) and parts[0].dtype == like.dtype:
            return parts[0]
        return None

    def write(self, begin: int, values: Tensor) -> None:
        """Replace the elements from a position on; values after the last have no place."""
        start = 0
        for part in self._parts(begin, begin + len(values)):
            part.copy_(values[start : start + len(part)])
            start += len(part)

    def finish(self) -> None:
        """Take over what was written to tensors in another memory order."""
        for tensor, flat in zip(self._tensors, self._flat, strict=True):
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))

    def _parts(self, begin: int, end: int) -> list[Tensor]:
        """Return views of the elements between two positions."""
        parts = []
        first = max(0, bisect.bisect_right(self._begins, begin) - 1)
        for flat, start in zip(self._flat[first:], self._begins[first:], strict=False):
            if start >= end:
                break
            part = flat[max(0, begin - start) : end - start]
            if len(part):
                parts.append(part)
        return parts


def divide(tensor: Tensor, divisor: Denominator) -> Tensor:
    """Divide by a number, or by a tensor with one element on any device, in place."""
    if isinstance(divisor, Tensor):
        divisor = divisor.to(tensor.device)
    return tensor.div_(divisor)


def check_denominator(denom: Denominator | None) -> Denominator:
    """Check a custom divisor as far as possible without waiting for a GPU.

    Args:
        denom: A positive number, or a tensor with one element.

    Returns:
        The number, or the tensor without dimensions.

    Raises:
        ValueError: It is missing, has several elements, or is not positive and finite.

    Example:
        >>> check_denominator(torch.tensor([4.0])).shape
        torch.Size([])
    """
    if denom is None:
        raise ValueError(
            "op 'avg_custom' divides by denom, which is None: give denom, the sum over all workers"
        )
    if isinstance(denom, Tensor):
        if denom.numel() != 1:
            raise ValueError(
                f"denom must have one element, not shape {tuple(denom.shape)}: sum it first"
            )
        denom = denom.detach().reshape(())
        # Reading the value would wait for the device.
        if denom.device.type != "cpu":
            return denom
    if not (math.isfinite(denom) and denom > 0):
        raise ValueError(f"denom must be a positive finite number, not {float(denom)}")
    return denom


def compare(
    x: Tensor, op: Literal["less", "less_equal", "greater", "greater_equal"], value: float
) -> Tensor:
    """Compare each element with a number; on a CPU, NumPy is three times as fast as torch.

    Args:
        x: A tensor.
        op: The name of the comparison in NumPy and in torch. It is false for nan.
        value: The number.

    Returns:
        The shape of ``x``, bool.

    Example:
        >>> compare(torch.tensor([1.0, 0.0, -1.0]), "greater_equal", 0)
        tensor([ True,  True, False])
    """
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(getattr(np, op)(x.detach().numpy(), value))
    result: Tensor = getattr(torch, op)(x, value)
    return result


def all_finite(tensor: Tensor) -> Tensor:
    """Return a flag, without dimensions: True if no element is infinite or nan.

    Example:
        >>> all_finite(torch.tensor([1.0, torch.inf]))
        tensor(False)
    """
    # On a CPU, a sum takes a fiftieth of the time. That of finite numbers may overflow, so it only
    # proves them finite. On a GPU, reading it would make the host wait.
    if tensor.device.type == "cpu" and cmath.isfinite(tensor.sum().item()):
        return torch.tensor(True)
    return tensor.isfinite().all()


def in_blocks(flat: Tensor) -> tuple[Tensor, ...]:
    """Split a flat tensor into views that fit into a CPU's cache; on a GPU into itself alone.

    Example:
        >>> [len(block) for block in in_blocks(torch.zeros(300_000))]
        [131072, 131072, 37856]
    """
    if flat.device.type == "cpu":
        return flat.split(BLOCK_ELEMENTS)
    return (flat,)


def fill(tensor: Tensor, values: Callable[[int, int], Tensor]) -> None:
    """Write values into a tensor, in its logical order, in blocks that fit into a CPU's cache.

    Args:
        tensor: The tensor, of any strides.
        values: Returns the values of the elements from ``start`` to before ``stop``.

    Example:
        >>> tensor = torch.zeros(2, 2)
        >>> fill(tensor, lambda start, stop: torch.arange(start, stop))
        >>> tensor
        tensor([[0., 1.],
                [2., 3.]])
    """
    if tensor.is_contiguous():
        flat = tensor.view(-1)
    else:
        flat = tensor.new_empty(tensor.numel())
    start = 0
    for block in in_blocks(flat):
        block.copy_(values(start, start + len(block)))
        start += len(block)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def as_real(flat: Tensor) -> Tensor:
    """View a flat tensor of n complex numbers as 2n real ones; return a real tensor as it is.

    Example:
        >>> as_real(torch.tensor([1 + 2j]))
        tensor([1., 2.])
    """
    if not flat.is_complex():
        return flat
    return torch.view_as_real(flat).view(-1)


def as_bytes(*tensors: Tensor) -> Tensor:
    """Put tensors one after another into one message of bytes (uint8)."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def from_bytes(message: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """Read ``count`` numbers from a message of bytes.

    The result may share the message's memory, so do not change it.

    Example:
        >>> message = as_bytes(torch.tensor([7], dtype=torch.uint8), torch.tensor([0.5, 2.0]))
        >>> from_bytes(message, 1, 2, torch.float32)
        tensor([0.5000, 2.0000])
    """
    part = message[start : start + count * dtype.itemsize]
    # torch views bytes as a wider dtype only at an aligned offset, which a copy always has.
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype)
