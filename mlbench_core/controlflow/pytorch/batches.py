"""Convert batches to the type of the model and move them to its device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mlbench_core.arguments import check_at_least

__all__ = ["convert_dtype", "iterate_dataloader", "maybe_range", "prepare_batch"]

# Not int64: those are token ids, which a float32 would round above 2^24.
_INTEGERS_OF_IMAGES = (torch.uint8, torch.int8, torch.int16, torch.int32)

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


class UnknownDtypeError(ValueError, NotImplementedError):
    """The name of a floating-point type is unknown.

    It is also a ``NotImplementedError``, as in version 3.0.
    """


_TensorOrModule = TypeVar("_TensorOrModule", Tensor, nn.Module)


def maybe_range(maximum: int | None) -> Iterable[int]:
    """Count from 0 up to a maximum, or indefinitely.

    Args:
        maximum: How many numbers to count; None for no limit.

    Returns:
        An iterable of 0, 1, 2, ...

    Raises:
        ValueError: ``maximum`` is negative.

    Example:
        >>> list(maybe_range(3))
        [0, 1, 2]
        >>> from itertools import islice
        >>> list(islice(maybe_range(None), 4))
        [0, 1, 2, 3]
    """
    if maximum is None:
        return itertools.count()
    check_at_least("maximum", maximum, 0)
    return range(maximum)


def convert_dtype(dtype: str | None, obj: _TensorOrModule) -> _TensorOrModule:
    """Convert a tensor or the parameters of a module to a floating-point type.

    Args:
        dtype: ``"fp16"``, ``"bf16"``, ``"fp32"`` or ``"fp64"``; None returns ``obj`` unchanged.
        obj: A tensor of any type, integers included, or a module (converted in place).

    Returns:
        The converted tensor, or the module itself.

    Raises:
        UnknownDtypeError: ``dtype`` has another value. It is a ``ValueError`` and a
            ``NotImplementedError``.

    Example:
        >>> convert_dtype("fp64", torch.tensor([1, 2]))
        tensor([1., 2.], dtype=torch.float64)
    """
    if dtype is None:
        return obj
    return obj.to(_torch_dtype(dtype))


def _torch_dtype(dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise UnknownDtypeError(
            f"dtype must be one of {', '.join(map(repr, DTYPES))}, not {dtype!r}"
        )
    return DTYPES[dtype]


def prepare_batch(
    data: Any,
    target: Any,
    dtype: str | None,
    transform_target_dtype: bool | None = False,
    use_cuda: bool = False,
) -> tuple[Any, Any]:
    """Convert a batch to the type of the model and move it to its device.

    Floating-point data is converted, and so are 8-, 16- and 32-bit integers such as images of
    bytes. 64-bit integers are not converted, because they are token ids, and float32 is exact only
    below :math:`2^{24}`. Booleans and all integers in a list, tuple or dict (lengths) are not
    converted either.

    Args:
        data: A tensor, or lists, tuples and dicts of tensors. Other values are passed through.
        target: The same kinds of values.
        dtype: Type for the data, as in :func:`convert_dtype`.
        transform_target_dtype: True to convert the target too, integers included; losses on
            probabilities need it.
        use_cuda: True to move both to the current GPU.

    Returns:
        ``(data, target)``.

    Raises:
        UnknownDtypeError: ``dtype`` is unknown.

    Example:
        >>> values = torch.ones(1, dtype=torch.float64)
        >>> data, target = prepare_batch(values, torch.tensor([1]), "fp32")
        >>> data.dtype, target.dtype
        (torch.float32, torch.int64)
        >>> images, tokens = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
        >>> [prepare_batch(data, target, "fp32")[0].dtype for data in (images, tokens)]
        [torch.float32, torch.int64]
    """

    def prepare_data(tensor: Tensor) -> Tensor:
        # Integers in a list or a dictionary are lengths, not an image.
        is_image = tensor is data and tensor.dtype in _INTEGERS_OF_IMAGES
        if tensor.is_floating_point() or is_image:
            return convert_dtype(dtype, tensor)
        return tensor

    # An unknown name raises here, even if the batch has nothing to convert.
    if dtype is not None:
        _torch_dtype(dtype)
    # Data is moved before it is converted, because bytes travel faster than the floats made from
    # them.
    if use_cuda:
        data, target = _map_tensors(_to_gpu, data), _map_tensors(_to_gpu, target)
    prepare_target = partial(convert_dtype, dtype if transform_target_dtype else None)
    return _map_tensors(prepare_data, data), _map_tensors(prepare_target, target)


def _to_gpu(tensor: Tensor) -> Tensor:
    # From pinned memory the host does not wait for the copy; from other memory the argument has no
    # effect.
    return tensor.cuda(non_blocking=True)


def _map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply a function to each tensor of a nested batch."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: _map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [_map_tensors(function, value) for value in batch]
        # A named tuple takes its fields as separate arguments.
        if hasattr(batch, "_fields"):
            return type(batch)(*values)
        return type(batch)(values)
    return batch


def iterate_dataloader(
    dataloader: Iterable[Any],
    dtype: str | None,
    max_batch_per_epoch: int | None = None,
    use_cuda: bool = False,
    transform_target_type: bool | None = False,
) -> Iterator[tuple[Any, Any]]:
    """Iterate over prepared batches.

    Args:
        dataloader: Iterable over pairs (data, target).
        dtype: Type for the data, as in :func:`prepare_batch`.
        max_batch_per_epoch: Largest number of batches to draw; None for all.
        use_cuda: True to move batches to the current GPU.
        transform_target_type: True to convert targets to ``dtype`` too.

    Yields:
        ``(data, target)``.

    Raises:
        UnknownDtypeError: ``dtype`` is unknown.
        ValueError: ``max_batch_per_epoch`` is negative.
    """
    # The range comes first: zip() stops at its end before it draws another batch.
    for _, (data, target) in zip(maybe_range(max_batch_per_epoch), dataloader, strict=False):
        yield prepare_batch(data, target, dtype, transform_target_type, use_cuda)


def batch_size(data: Any, output: Any) -> int:
    """Return the number of samples in a batch: the length of the output, or else of the data.

    Raises:
        TypeError: Neither has a length.
    """
    for candidate in (output, data):
        # A tensor without dimensions has a __len__ that raises.
        if isinstance(candidate, Tensor) and candidate.dim() == 0:
            continue
        if hasattr(candidate, "__len__"):
            return len(candidate)
    raise TypeError(
        f"neither the model's output ({type(output).__name__}) nor the data "
        f"({type(data).__name__}) has a length, so the size of the batch is unknown; "
        "give tensors whose first dimension is the batch, or lists"
    )
