"""Read the peak of the GPU memory that torch allocated in this process."""

from __future__ import annotations

import sys

from mlbench_core.tracking.clock import cuda_in_use

__all__ = ["memory_peak_bytes"]


def memory_peak_bytes() -> int | None:
    """Return the most bytes that tensors have occupied on torch's current CUDA device.

    The peak is that since the start of the process, or since the script called
    ``torch.cuda.reset_peak_memory_stats()``. It is not reset here.

    Returns:
        The peak in bytes; None if no GPU is in use.
    """
    if not cuda_in_use():
        return None
    return int(sys.modules["torch"].cuda.max_memory_allocated())
