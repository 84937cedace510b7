"""Read the energy used by the GPU of this process, if NVML counts it."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["energy_counter"]


def energy_counter() -> Callable[[], float] | None:
    """Return a function that gives the joules used by torch's current CUDA device since this call.

    Returns:
        The function. None if no GPU is in use, NVML is not installed, or the device has no energy
        counter.
    """
    # Looked up and not imported: a process that has not imported torch does not use a GPU through
    # it.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        # By UUID and not by index: CUDA_VISIBLE_DEVICES renumbers torch's devices, but not those of
        # NVML.
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

        def joules() -> float:
            # NVML counts millijoules since the driver was loaded.
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

        # If the device has no counter, this first call raises, and not one in the middle of
        # training.
        start = joules()
    # All errors, because NVML's own error type cannot be named if the import of pynvml fails.
    except Exception:
        return None
    return lambda: joules() - start
