"""Energy used by the GPU of this process, where NVML counts it."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["energy_counter"]


def energy_counter() -> Callable[[], float] | None:
    """A function that gives the joules used by torch's current CUDA device since its driver was loaded.

    Returns:
        The function, or None where there is no GPU in use, no NVML, or no counter on the device.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

        def joules() -> float:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

        joules()
    except Exception:  # NVML's errors have no common base where pynvml itself is missing or broken
        return None
    return joules
