"""The functions of version 3.0 that make columns orthonormal and pack tensors into one vector."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from mlbench_core.aggregation.pytorch.compression.compressed import normalize_, orthonormal_rows
from mlbench_core.aggregation.pytorch.transport.messages import pack
from mlbench_core.arguments import check_at_least

__all__ = ["orthogonalize", "pack_tensors", "unpack_tensors"]


@torch.no_grad()
def orthogonalize(matrix: torch.Tensor, eps: float | torch.Tensor = 1e-16) -> None:
    r"""Make the columns of a matrix orthonormal, in place.

    :func:`orthonormal_rows` is applied to the columns, from left to right. A column that is zero,
    or depends exactly on those before it, is then replaced by a unit vector that is orthogonal to
    all others. This vector is computed from the coordinate axis that is farthest from the span of
    the others. So the result is orthonormal for every rank, and its span contains the span of the
    columns. Workers with equal input get equal output, because no random generator is used. Columns
    beyond the number of rows become 0, because no orthogonal vector is left.

    Args:
        matrix: Shape (n, r), any floating dtype (half precision is computed in float32), changed in
            place.
        eps: Norm at or below which a column counts as zero: a number, or a tensor with one element.

    Raises:
        TypeError: ``matrix`` is not a floating-point tensor.
        ValueError: ``matrix`` does not have two dimensions, or ``eps`` is negative.

    Example:
        >>> p = torch.tensor([[3.0, 6.0], [4.0, 8.0]])  # rank 1
        >>> orthogonalize(p)
        >>> torch.allclose(p.T @ p, torch.eye(2), atol=1e-6)
        True
    """
    if not (isinstance(matrix, torch.Tensor) and matrix.is_floating_point()):
        kind = type(matrix).__name__
        if isinstance(matrix, torch.Tensor):
            kind = str(matrix.dtype)
        raise TypeError(f"matrix must be a floating-point tensor, not {kind}")
    if matrix.dim() != 2:
        raise ValueError(
            f"matrix must have two dimensions (rows, columns), not shape {tuple(matrix.shape)}"
        )
    floor = float(eps)
    check_at_least("eps", floor, 0)
    if matrix.numel() == 0:
        return
    # Half precision rounds so coarsely that independent columns would look dependent.
    columns = matrix[:, : len(matrix)].t().to(torch.promote_types(matrix.dtype, torch.float32))
    is_zero = torch.linalg.vector_norm(columns, dim=1, keepdim=True) <= floor
    basis = orthonormal_rows(columns.masked_fill(is_zero, 0))
    # On a GPU, reading the values would make the host wait.
    if basis.is_cuda or not basis.any(dim=1).all():
        _fill_zero_rows(basis)
    matrix.zero_()
    matrix[:, : len(basis)] = basis.t()


def _fill_zero_rows(basis: torch.Tensor) -> None:
    """Replace zero rows among orthonormal ones by unit vectors orthogonal to all others."""
    for row in basis:
        axis = torch.zeros_like(row)
        axis[basis.square().sum(dim=0).argmin()] = 1
        # The result of the first projection may be short, and its relative error large. The second
        # one removes the error.
        for _ in range(2):
            axis -= (basis @ axis) @ basis
            normalize_(axis)
        row.copy_(torch.where(row.any(), row, axis))


@torch.no_grad()
def pack_tensors(
    tensors: Sequence[torch.Tensor], use_cuda: bool = False
) -> tuple[torch.Tensor, list[int], list[torch.Size]]:
    """Copy tensors one after another into one flat vector.

    Args:
        tensors: Tensors of one dtype on one device, of any shapes and memory formats; each is read
            in row-major order.
        use_cuda: True to move the vector to the current GPU. Otherwise it stays on the device of
            the tensors.

    Returns:
        ``(vec, indices, sizes)``. ``vec`` is the vector. ``indices`` has ``len(tensors) + 1``
        numbers: the start of each tensor in the vector, and the length of the vector. ``sizes`` has
        the shapes of the tensors.

    Raises:
        TypeError: The tensors have different dtypes.
        ValueError: The tensors lie on different devices.

    Example:
        >>> vec, indices, sizes = pack_tensors([torch.ones(2, 2), torch.tensor(5.0)])
        >>> vec.tolist(), indices
        ([1.0, 1.0, 1.0, 1.0, 5.0], [0, 4, 5])
    """
    tensors = list(tensors)
    dtypes = {tensor.dtype for tensor in tensors}
    devices = {tensor.device for tensor in tensors}
    if len(dtypes) > 1:
        raise TypeError(
            "tensors must have one dtype, not "
            f"{sorted(map(str, dtypes))}: pack those of each dtype alone"
        )
    if len(devices) > 1:
        raise ValueError(
            "tensors must be on one device, not on "
            f"{sorted(map(str, devices))}: pack those of each device alone"
        )
    indices, sizes = [0], []
    for tensor in tensors:
        indices.append(indices[-1] + tensor.numel())
        sizes.append(tensor.size())
    vec = torch.empty(0)
    if tensors:
        vec = pack(tensors)
    if use_cuda:
        vec = vec.cuda()
    return vec, indices, sizes


def unpack_tensors(
    aggregated: torch.Tensor, indices: Sequence[int], sizes: Sequence[torch.Size]
) -> list[torch.Tensor]:
    """Return the tensors in a vector that :func:`pack_tensors` made, without a copy.

    Args:
        aggregated: The vector, with one dimension.
        indices: The start of each tensor, and the vector's length (``len(sizes) + 1`` numbers).
        sizes: Shape of each tensor.

    Returns:
        Views into ``aggregated`` in the given shapes: writing to one changes the vector.

    Raises:
        ValueError: The numbers of indices and sizes, or an index and the vector's length, do not
            fit.

    Example:
        >>> shapes = [torch.Size([]), torch.Size([2])]
        >>> [t.tolist() for t in unpack_tensors(torch.arange(3), [0, 1, 3], shapes)]
        [0, [1, 2]]
    """
    if len(indices) != len(sizes) + 1:
        raise ValueError(
            "indices must have one number more than sizes, the end of the last tensor, "
            f"not {len(indices)} for {len(sizes)} sizes"
        )
    if aggregated.dim() != 1 or indices[-1] > aggregated.numel():
        raise ValueError(
            f"aggregated must be a vector of at least {indices[-1]} "
            f"elements, not shape {tuple(aggregated.shape)}"
        )
    tensors = []
    for (start, end), size in zip(itertools.pairwise(indices), sizes, strict=True):
        tensors.append(aggregated[start:end].view(size))
    return tensors
