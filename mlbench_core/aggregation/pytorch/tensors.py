"""Tensors for communication: orthonormal bases, and many tensors packed as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mlbench_core.aggregation.pytorch.messages import pack

__all__ = ["orthogonalize", "pack_tensors", "unpack_tensors"]


@torch.no_grad()
def orthogonalize(matrix: torch.Tensor, eps: float | torch.Tensor = 1e-16) -> None:
    r"""Make the columns of a matrix orthonormal, in place.

    Gram-Schmidt from left to right, with every column projected twice ("twice is enough", Giraud et al.), so that
    :math:`Q^\top Q = I` holds to rounding however badly the columns are conditioned:

    .. math:: q_i = \frac{(I - Q_{<i} Q_{<i}^\top)\, p_i}{\lVert (I - Q_{<i} Q_{<i}^\top)\, p_i \rVert}

    If a column depends on those before it, only rounding noise remains (and nothing of a zero column). Normalized,
    noise would point into the span of the other columns. Such a column is therefore replaced by a unit vector
    orthogonal to all before it: the remainder of the coordinate axis that is farthest from their span. The result is
    orthonormal for every rank, and its span contains that of the columns. It uses no random generator, so workers with
    equal input get equal output. Columns beyond the number of rows have no such vector and become 0.

    Args:
        matrix: Shape (n, r), any floating dtype (half precision is computed in float32), changed in place.
        eps: Norm at or below which a column counts as zero: a number, or a tensor with one element.

    Raises:
        TypeError: ``matrix`` is not a floating-point tensor.
        ValueError: ``matrix`` does not have two dimensions, or ``eps`` is negative.

    Example:
        >>> p = torch.tensor([[3.0, 6.0], [4.0, 8.0]])  # rank 1
        >>> orthogonalize(p)
        >>> torch.allclose(p.T @ p, torch.eye(2), atol=1e-6)
        True

    References:
        L. Giraud, J. Langou, M. Rozloznik, E. van den Eshof: Rounding error analysis of the classical Gram-Schmidt
        orthogonalization process. Numerische Mathematik 101, 2005.
        Its use in compression: T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD, arXiv:1905.13727.
    """
    if not (isinstance(matrix, torch.Tensor) and matrix.is_floating_point()):
        kind = matrix.dtype if isinstance(matrix, torch.Tensor) else type(matrix).__name__
        raise TypeError(f"matrix is {kind}; it must be a floating-point tensor")
    if matrix.dim() != 2:
        raise ValueError(f"matrix has shape {tuple(matrix.shape)}; it must have two dimensions (rows, columns)")
    floor = float(eps)
    if floor < 0:
        raise ValueError(f"eps is {floor}; it must not be negative")
    # With the rounding of half precision, ``noise`` below would count independent columns as dependent.
    if matrix.dtype in (torch.float16, torch.bfloat16):
        wide = matrix.float()
        orthogonalize(wide, floor)
        matrix.copy_(wide)
        return
    rows, columns = matrix.shape
    for i in range(columns):
        if i >= rows:
            matrix[:, i:] = 0
            return
        matrix[:, i] = _next_basis_vector(matrix[:, :i], matrix[:, i], floor)


def _next_basis_vector(basis: torch.Tensor, column: torch.Tensor, floor: float) -> torch.Tensor:
    """Return the unit vector that ``column`` adds to an orthonormal ``basis``; any other one if it adds none."""
    noise = 10 * math.sqrt(len(column)) * torch.finfo(column.dtype).eps
    norm = torch.linalg.vector_norm(column)
    unit = column / torch.where(norm > 0, norm, torch.ones_like(norm))
    remainder = _project_out(basis, unit)
    remaining = torch.linalg.vector_norm(remainder)
    dependent = (norm <= floor) | (remaining <= noise)
    vector = _normalized(_project_out(basis, _normalized(remainder)))
    if column.is_cuda or bool(dependent):  # on a GPU reading the flag would make the host wait for the device
        axis = torch.zeros_like(column)
        axis[basis.square().sum(dim=1).argmin()] = 1
        axis = _normalized(_project_out(basis, _normalized(_project_out(basis, axis))))
        vector = torch.where(dependent, axis, vector)
    return vector


def _project_out(basis: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return vector - basis @ (basis.T @ vector)


def _normalized(vector: torch.Tensor) -> torch.Tensor:
    norm = torch.linalg.vector_norm(vector)
    return vector / torch.where(norm == 0, torch.ones_like(norm), norm)


@torch.no_grad()
def pack_tensors(
    tensors: Sequence[torch.Tensor], use_cuda: bool = False
) -> tuple[torch.Tensor, list[int], list[torch.Size]]:
    """Copy tensors one after another into one flat vector.

    Args:
        tensors: Tensors of one dtype on one device, of any shapes and memory formats; each is read in row-major order.
        use_cuda: Put the vector on the current GPU; otherwise it stays on the device of the tensors.

    Returns:
        ``(vec, indices, sizes)``: the vector; the start of each tensor in it, and at the end its length
        (``len(tensors) + 1`` numbers); the shapes.

    Raises:
        TypeError: The tensors have different dtypes.
        ValueError: The tensors lie on different devices.

    Example:
        >>> vec, indices, sizes = pack_tensors([torch.ones(2, 2), torch.tensor(5.0)])
        >>> vec.tolist(), indices
        ([1.0, 1.0, 1.0, 1.0, 5.0], [0, 4, 5])
    """
    tensors = list(tensors)
    dtypes, devices = {tensor.dtype for tensor in tensors}, {tensor.device for tensor in tensors}
    if len(dtypes) > 1:
        raise TypeError(f"the tensors have dtypes {sorted(map(str, dtypes))}; pack tensors of one dtype at a time")
    if len(devices) > 1:
        raise ValueError(f"the tensors lie on {sorted(map(str, devices))}; pack tensors of one device at a time")
    indices, sizes = [0], []
    for tensor in tensors:
        indices.append(indices[-1] + tensor.numel())
        sizes.append(tensor.size())
    vec = pack(tensors) if tensors else torch.empty(0)
    return vec.cuda() if use_cuda else vec, indices, sizes


def unpack_tensors(aggregated: torch.Tensor, indices: Sequence[int], sizes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Return the tensors in a vector that :func:`pack_tensors` made, without a copy.

    Args:
        aggregated: The vector, with one dimension.
        indices: The start of each tensor, and the vector's length (``len(sizes) + 1`` numbers).
        sizes: Shape of each tensor.

    Returns:
        Views into ``aggregated`` in the given shapes: writing to one changes the vector.

    Raises:
        ValueError: The numbers of indices and sizes, or an index and the vector's length, do not fit.

    Example:
        >>> [t.tolist() for t in unpack_tensors(torch.arange(3), [0, 1, 3], [torch.Size([]), torch.Size([2])])]
        [0, [1, 2]]
    """
    if len(indices) != len(sizes) + 1:
        raise ValueError(
            f"{len(indices)} indices and {len(sizes)} sizes; there must be one index more (the end of the last tensor)"
        )
    if aggregated.dim() != 1 or indices[-1] > aggregated.numel():
        raise ValueError(
            f"aggregated has shape {tuple(aggregated.shape)}; it must be a vector of at least {indices[-1]} elements"
        )
    return [aggregated[start:end].view(size) for start, end, size in zip(indices, indices[1:], sizes, strict=False)]
