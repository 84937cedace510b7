"""Translate torch's dtypes and reductions into MPI's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Datatypes", "Reduction"]

# Elements that our own reductions take at a time: few enough that torch starts no threads for them.
_BLOCK_ELEMENTS = 16384

_NAMES = {
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.uint16: "UINT16_T",
    torch.int16: "INT16_T",
    torch.uint32: "UINT32_T",
    torch.int32: "INT32_T",
    torch.uint64: "UINT64_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.bool: "C_BOOL",
}
# Datatypes for moving elements without interpreting them, by their size in bytes.
# MPI has no integer of 16 bytes, so a complex number stands for it.
_BY_SIZE = {1: "BYTE", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}

# torch's operators and MPI's. MPI has no average: it is a sum that is divided afterwards.
_ARITHMETIC = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_BITWISE = {"BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
_COMPLEX = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD"}
# For bool: the sum and the maximum of truth values are "or", their product and minimum "and".
_LOGICAL = {
    "SUM": "LOR",
    "MAX": "LOR",
    "BOR": "LOR",
    "PRODUCT": "LAND",
    "MIN": "LAND",
    "BAND": "LAND",
    "BXOR": "LXOR",
}
_HALF: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


@dataclass(frozen=True)
class Reduction:
    """A reduction of one dtype in MPI's terms.

    Attributes:
        datatype: MPI's datatype of an element.
        op: MPI's operator.
        divide: True to divide the result by the number of workers, for ``AVG``.
        on_host: True if it runs on the host only, because the operator is ours.
    """

    datatype: Any
    op: Any
    divide: bool = False
    on_host: bool = False


class Datatypes:
    """MPI's datatypes and operators for torch's.

    No MPI standard before 5.0 knows float16 and bfloat16. They are reduced by operators of our own:
    torch combines two blocks of elements, computing in float32, and rounds the result.

    Args:
        mpi: The module ``mpi4py.MPI``.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._moving = {size: getattr(mpi, name) for size, name in _BY_SIZE.items()}
        self._reductions: dict[tuple[torch.dtype, str], Reduction] = {}

    def moving(self, dtype: torch.dtype) -> Any:
        """Return the datatype for sending elements as they are, of any dtype."""
        return self._moving[dtype.itemsize]

    def reduction(self, op: Any, dtype: torch.dtype) -> Reduction:
        """Return the reduction for a torch operator.

        Args:
            op: A ``ReduceOp`` or one of its members.
            dtype: The elements' dtype.

        Raises:
            ValueError: This operator is not defined for this dtype, or not by MPI.
            TypeError: Elements of this dtype cannot be reduced.

        Example:
            >>> from mpi4py import MPI  # doctest: +SKIP
            >>> average = torch.distributed.ReduceOp.AVG  # doctest: +SKIP
            >>> Datatypes(MPI).reduction(average, torch.float32).divide  # doctest: +SKIP
            True
        """
        name = str(getattr(op, "op", op).name)
        # Kept: MPI has room for a limited number of operators, and a new
        # one for each call would leak.
        key = (dtype, name)
        if key not in self._reductions:
            self._reductions[key] = self._make(name, dtype)
        return self._reductions[key]

    def _make(self, name: str, dtype: torch.dtype) -> Reduction:
        if dtype not in _NAMES and dtype not in (torch.float16, torch.bfloat16):
            reducible = ", ".join(map(str, (*_NAMES, torch.float16, torch.bfloat16)))
            reducible = reducible.replace("torch.", "")
            raise TypeError(f"MPI cannot reduce elements of {dtype}; it can reduce {reducible}")
        allowed = _allowed(dtype)
        if name not in allowed:
            raise ValueError(
                f"ReduceOp.{name} is not defined over MPI for tensors of "
                f"{dtype}; defined are {', '.join(allowed)}"
            )
        divide = name == "AVG"
        if dtype in (torch.float16, torch.bfloat16):
            operator = self._half_operator(allowed[name], dtype)
            # MPI moves them as integers of two bytes, and only the operator knows their dtype.
            return Reduction(self._moving[2], operator, divide, on_host=True)
        datatype, operator = getattr(self._mpi, _NAMES[dtype]), getattr(self._mpi, allowed[name])
        return Reduction(datatype, operator, divide)

    def _half_operator(self, name: str, dtype: torch.dtype) -> Any:
        combine = _HALF[name]

        def reduce(incoming: Any, inout: Any, _: Any) -> None:
            if not len(inout):
                return
            ours = torch.frombuffer(inout, dtype=dtype).split(_BLOCK_ELEMENTS)
            theirs = torch.frombuffer(incoming, dtype=dtype).split(_BLOCK_ELEMENTS)
            for mine, other in zip(ours, theirs, strict=True):
                combine(mine, other, out=mine)

        return self._mpi.Op.Create(reduce, commute=True)


def _allowed(dtype: torch.dtype) -> dict[str, str]:
    """Return MPI's operators for a dtype, by torch's names."""
    if dtype == torch.bool:
        return _LOGICAL
    if dtype.is_complex:
        return _COMPLEX
    if dtype.is_floating_point:
        return _ARITHMETIC
    return {name: op for name, op in (_ARITHMETIC | _BITWISE).items() if name != "AVG"}
