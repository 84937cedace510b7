"""Read the energy used by the GPU of this process, if NVML counts it."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["energy_counter"]


def energy_counter() -> Callable[[], float] | None:
    """Return a function that gives the joules used by torch's current CUDA device since this call.

    Returns:
        The function, or None without a GPU in use, without NVML, or if the device has no counter.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        # By UUID and not by index: CUDA_VISIBLE_DEVICES renumbers torch's devices, but not those of NVML.
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

        def joules() -> float:
            # NVML counts millijoules since the driver was loaded.
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

        # Raises here, and not in the middle of training, if the device has no counter.
        start = joules()
    # NVML's errors have no common base if pynvml itself is missing or broken.
    except Exception:
        return None
    return lambda: joules() - start
