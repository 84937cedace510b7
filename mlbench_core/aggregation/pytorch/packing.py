"""Pack small integers of a few bits each into bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.sign import pack_bits, unpack_bits

__all__ = ["bits_for", "pack_codes", "packed_bytes", "unpack_codes"]


def bits_for(count: int) -> int:
    """Return the number of bits that tell ``count`` values apart.

    Example:
        >>> bits_for(1), bits_for(4), bits_for(15)
        (0, 2, 4)
    """
    return (count - 1).bit_length()


def packed_bytes(count: int, bits: int) -> int:
    """Return the size of ``count`` packed codes in bytes."""
    return (count * bits + 7) // 8


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack integers of a few bits, one after another, the highest bit of each first. Zeros fill the last byte.

    Args:
        codes: Shape (n,), integers from 0 to ``2**bits - 1``.
        bits: Bits per integer.

    Returns:
        Shape (ceil(n * bits / 8),), uint8, on the same device.

    Example:
        >>> pack_codes(torch.tensor([1, 3, 0, 2]), bits=2)
        tensor([114], dtype=torch.uint8)
    """
    return pack_bits((codes[:, None] >> _places(bits, codes.device) & 1).view(-1).bool())


def unpack_codes(packed: Tensor, count: int, bits: int) -> Tensor:
    """Return the integers that :func:`pack_codes` packed.

    Args:
        packed: Shape (ceil(count * bits / 8),), uint8.
        count: Number of integers.
        bits: Bits per integer, at most 31.

    Returns:
        Shape (count,), int32, on the same device.

    Example:
        >>> unpack_codes(torch.tensor([114], dtype=torch.uint8), 4, bits=2)
        tensor([1, 3, 0, 2], dtype=torch.int32)
    """
    codes = torch.zeros(count, dtype=torch.int32, device=packed.device)
    # Bit by bit, because a matrix of shifted bits would take four bytes for each of them.
    for bit in unpack_bits(packed, count * bits).view(count, bits).unbind(dim=1):
        codes.mul_(2).add_(bit)
    return codes


def _places(bits: int, device: torch.device) -> Tensor:
    """Return the shifts of the bits of a code, the highest first."""
    return torch.arange(bits - 1, -1, -1, device=device, dtype=torch.int32)
