"""Control the memory of the host and query that of the device."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch

__all__ = ["fits_on_gpu", "keep_freed_memory", "return_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
# One of them is the largest that the C library accepts.
_LARGEST_THRESHOLDS_BYTES = (1 << 30, 32 << 20)
_NEVER = -1
# glibc adapts its own threshold up to this size.
_ADAPTED_BYTES = 32 << 20
_SETTINGS = ("mmap_max", "mmap_threshold", "top_pad", "trim_threshold")


def keep_freed_memory() -> bool:
    """Let glibc keep the memory of freed CPU tensors for the next step, in the whole process.

    By default, glibc takes memory from the system for a large tensor, and returns it when the
    tensor is freed. A training step then has thousands of page faults for memory that it had a step
    before. Results stay the same, and the process stays at its peak size. Blocks of 1 GiB and more
    (with some versions of glibc, of more than 32 MiB) are returned as before.

    :func:`~mlbench_core.distributed.pytorch.initialize_backends` calls this at the start of its
    block, and :func:`return_freed_memory` at the end.

    Returns:
        True if glibc accepted the setting. False if the process has another C library, or if the
        environment already has such settings, for example ``MALLOC_TRIM_THRESHOLD_``.

    Example:
        >>> if keep_freed_memory():
        ...     return_freed_memory()
    """
    library = _glibc()
    if library is None or _is_set_by_environment():
        return False
    # mallopt refuses a threshold above the largest that the library was built for, so the smaller
    # one is tried next.
    for size_bytes in _LARGEST_THRESHOLDS_BYTES:
        if library.mallopt(_M_MMAP_THRESHOLD, size_bytes) == 1:
            return bool(library.mallopt(_M_TRIM_THRESHOLD, _NEVER) == 1)
    return False


def return_freed_memory() -> None:
    """Return the memory that is free now to the system, and let glibc return more of it later.

    By itself, glibc raises its thresholds to at most 32 and 64 MiB. :func:`keep_freed_memory` ends
    this, so these values are set here. Settings that were made before are not restored.

    Example:
        >>> return_freed_memory()
    """
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _ADAPTED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _ADAPTED_BYTES)
        library.malloc_trim(ctypes.c_size_t(0))


def _glibc() -> Any:
    """Return the GNU C library of this process, or None if it has another one."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        return library
    return None


def _is_set_by_environment() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    for name in _SETTINGS:
        if f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}=" in tunables:
            return True
    return False


def fits_on_gpu(size_bytes: int, share: float = 0.25) -> bool:
    """Return True if the current GPU has room for data beside the memory of training.

    Args:
        size_bytes: Bytes of the data.
        share: The part of the free memory that it may take.

    Returns:
        False without a GPU.

    Raises:
        ValueError: ``share`` is not from 0 to 1.

    Example:
        >>> fits_on_gpu(2**60)
        False
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be from 0 to 1, not {share}")
    if not torch.cuda.is_available():
        return False
    free, _ = torch.cuda.mem_get_info()
    return size_bytes <= share * free
