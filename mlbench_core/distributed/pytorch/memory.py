"""Control the memory of the host and query that of the device."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

__all__ = ["fits_on_gpu", "keep_freed_memory", "return_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST_THRESHOLDS_BYTES = (1 << 30, 32 << 20)  # one of them is the largest that the C library accepts
_NEVER = 2**31 - 1
_ADAPTED_BYTES = 32 << 20  # up to which glibc adapts its own threshold


def keep_freed_memory() -> bool:
    """Let this process keep the memory that CPU tensors free, instead of giving it back to the system each time.

    By default the GNU C library maps memory for every large tensor and unmaps it when the tensor is freed. A training
    step then pays tens of thousands of page faults for memory that it had a step before. Computations and their results
    stay the same. The process's memory stays at its peak. :func:`~mlbench_core.distributed.pytorch.initialize_backends`
    calls this, and :func:`return_freed_memory` at its end.

    Returns:
        True if the C library accepted the setting; False if it is not GNU's.

    Example:
        >>> keep_freed_memory() in (True, False)
        True
    """
    library = _gnu_library()
    if library is None:
        return False
    mallopt = library.mallopt
    # mallopt refuses a threshold above the largest that the library was built for, so the smaller one is tried next.
    is_mapping_off = any(mallopt(_M_MMAP_THRESHOLD, size) == 1 for size in _LARGEST_THRESHOLDS_BYTES)
    return is_mapping_off and mallopt(_M_TRIM_THRESHOLD, _NEVER) == 1


def return_freed_memory() -> None:
    """Undo :func:`keep_freed_memory`, and return the memory that is free now.

    By itself, the GNU C library adapts its thresholds to the blocks that a program frees, up to 32 MiB. After
    :func:`keep_freed_memory` it does not, so this function sets the values to which it would adapt them at most.

    Example:
        >>> return_freed_memory()
    """
    library = _gnu_library()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _ADAPTED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _ADAPTED_BYTES)
        library.malloc_trim(0)


def _gnu_library() -> Any:
    """Return the GNU C library of this process, or None if it has another one."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def fits_on_gpu(size_bytes: int, share: float = 0.25) -> bool:
    """Return True if the current GPU has room for data in addition to the memory that training needs.

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
