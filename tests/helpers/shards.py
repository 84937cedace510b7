"""Shards of tokens, written without the library."""

from __future__ import annotations

import struct


def shard_bytes(
    tokens: list[int],
    *,
    magic: int = 20240520,
    version: int = 1,
    count: int | None = None,
    order: str = "<",
) -> bytes:
    """The community's format; the arguments other than the tokens make a damaged one."""
    numbers = (magic, version, len(tokens) if count is None else count)
    header = struct.pack(f"{order}3i", *numbers) + bytes(4 * 253)
    return header + struct.pack(f"{order}{len(tokens)}H", *tokens)
