"""Random bits as a function of a seed and a position, for dropout masks that are never stored.

Philox turns a counter and a key into four random words. The seed is the key and a weight's position
is the counter. The backward pass therefore recomputes the mask of the forward pass instead of
reading it from memory. The CUDA kernels and plain PyTorch compute the same mask.

One call gives the bits for eight keys of a query, which are the keys that one thread of a CUDA
kernel holds. The counter is (group, query, sentence x heads + head, offset), and the first 32 keys
have these groups and words::

    group   word 0   word 1   word 2   word 3
    0       0, 1     8, 9     16, 17   24, 25
    1       2, 3     10, 11   18, 19   26, 27
    2       4, 5     12, 13   20, 21   28, 29
    3       6, 7     14, 15   22, 23   30, 31

The lower half of a word belongs to the even key and the upper half to the odd one. Each further 32
keys have the next four groups.

References:
    Salmon, Moraes, Dror and Shaw 2011, Parallel Random Numbers: As Easy as 1, 2, 3 (SC11), section
    3.3; seven rounds are the fewest that pass all of its tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ROUNDS", "attention_dropout_mask", "draw_seed", "dropout_threshold", "philox4x32"]

ROUNDS = 7
"""Rounds of Philox, the fewest that pass all tests of the paper."""

_WORD = 0xFFFFFFFF
# Multipliers and key increments (Weyl constants) of Philox4x32 as in the paper.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LEVELS = 1 << 16
"""Dropout compares 16 bits, so that probabilities are multiples of 1/65536."""


def draw_seed(device: torch.device | str, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw a new seed for dropout, which stays on its device.

    The device's own random generator draws it. Therefore ``torch.manual_seed`` reproduces it, and
    every replay of a captured CUDA graph draws another one.

    Args:
        device: Device of the dropout.
        generator: Generator to draw from; the device's default generator if None.

    Returns:
        int64 of shape (1,).

    Example:
        >>> draw_seed("cpu").shape
        torch.Size([1])
    """
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device, generator=generator)


def dropout_threshold(dropout_p: float) -> int:
    """Convert a probability to units of 1/65536, which dropout compares 16 random bits with.

    Args:
        dropout_p: Probability, at least 0 and at most 65535/65536.

    Returns:
        The nearest whole number. The actual probability is this number divided by 65536.

    Raises:
        ValueError: The probability is out of range.

    Example:
        >>> dropout_threshold(0.1), dropout_threshold(0.1) / 65536
        (6554, 0.100006103515625)
    """
    if not 0.0 <= dropout_p <= 1.0 - 1.0 / _LEVELS:
        raise ValueError(f"dropout_p must be from 0 to 65535/65536, not {dropout_p}")
    return round(dropout_p * _LEVELS)


def philox4x32(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Compute Philox4x32: four random words for every counter.

    One round maps the words :math:`c` of the counter and :math:`k` of the key to

    .. math::
        c' = (\mathrm{hi}(M_1 c_2) \oplus c_1 \oplus k_0,\; \mathrm{lo}(M_1 c_2),\;
              \mathrm{hi}(M_0 c_0) \oplus c_3 \oplus k_1,\; \mathrm{lo}(M_0 c_0)), \qquad
        k' = k + W \bmod 2^{32}

    Args:
        key: Two words: int64 tensors of values below 2^32, of shapes that broadcast with the
            counter's.
        counter: Four words of the same kind.
        rounds: Number of rounds.

    Returns:
        Four words, int64 tensors of values below 2^32, of the common shape.

    Example:
        >>> zero = torch.zeros((), dtype=torch.int64)
        >>> [hex(int(word)) for word in philox4x32((zero, zero), (zero, zero, zero, zero))]
        ['0x5f6fb709', '0xd893f64', '0x4f121f81', '0x4f730a48']
    """
    (k0, k1), (c0, c1, c2, c3) = key, counter
    # int64 tensors hold the unsigned 32-bit words, since torch computes little in uint32.
    for _ in range(rounds):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def attention_dropout_mask(
    seed: Tensor, offset: int, shape: tuple[int, int, int, int], threshold: int
) -> Tensor:
    """Return which attention weights dropout keeps.

    The module's docstring has the layout of the bits. A weight is dropped if its 16 bits are below
    ``threshold``.

    Args:
        seed: int64 of one element; its two 32-bit halves are the key.
        offset: Number of the layer among those that share a seed; only its low 32 bits are used.
        shape: Sentences, heads, queries and keys.
        threshold: :func:`dropout_threshold` of the probability.

    Returns:
        bool of that shape, True if the weight is kept.

    Example:
        >>> shape, threshold = (2, 4, 64, 64), dropout_threshold(0.5)
        >>> kept = attention_dropout_mask(torch.tensor([7]), 0, shape, threshold)
        >>> kept.shape, round(kept.double().mean().item(), 1)
        (torch.Size([2, 4, 64, 64]), 0.5)
    """
    batch, heads, queries, keys = shape
    device = seed.device
    seed = seed.reshape(())
    key = (seed & _WORD, (seed >> 32) & _WORD)
    # 32 keys need four groups, and a partial block of 32 needs them all.
    groups = torch.arange(-(-keys // 32) * 4, device=device)
    query = torch.arange(queries, device=device).unsqueeze(-1)
    row = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    last = torch.full((), offset & _WORD, device=device)
    words = torch.stack(
        torch.broadcast_tensors(*philox4x32(key, (groups, query, row, last))), dim=-1
    )
    j = torch.arange(keys, device=device)
    # The place of key j in the layout of the module's docstring.
    group, word = j // 32 * 4 + j % 8 // 2, j % 32 // 8
    fields = words.flatten(-2)[..., group * 4 + word] >> (j % 2 * 16) & (_LEVELS - 1)
    return fields >= threshold


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower word of the product, by halves: no term exceeds 63 bits."""
    low, high = constant * (word & 0xFFFF), constant * (word >> 16)
    middle = high + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF
