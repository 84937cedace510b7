"""The optional library of CUDA kernels for this package's operators.

The operators are complete without it. Each has a plain PyTorch implementation, and the library adds another one for
CUDA tensors. It is experimental and is loaded only if the environment variable ``MLBENCH_CUDA_KERNELS`` is 1.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

from mlbench_core.torch_private import mark_constant

__all__ = ["VARIABLE", "is_available", "is_built", "library_path", "load", "why_not"]

VARIABLE = "MLBENCH_CUDA_KERNELS"
"""The environment variable that turns the kernels on if it is 1."""

_LEAST_CAPABILITY = (8, 0)
"""The kernels need asynchronous copies and bfloat16 matrix products, which NVIDIA GPUs have since Ampere."""


class _Library:
    """The result of loading the library, which a process tries at most once.

    Attributes:
        is_loaded: True if its kernels are registered.
        is_usable: True if a device was found that runs them.
        error: The reason why it could not be loaded, or None.
    """

    def __init__(self) -> None:
        self.is_loaded = False
        self.is_usable = False
        self.error: str | None = None
        self._lock = threading.Lock()

    def load(self, path: Path) -> bool:
        """Load the library at ``path`` if this was not tried before, and return True if it is loaded."""
        if self.is_loaded or self.error is not None:
            return self.is_loaded
        with self._lock:
            # Check again: another thread may have loaded the library while this one waited for the lock.
            if not self.is_loaded and self.error is None:
                try:
                    torch.ops.load_library(path)
                    self.is_loaded = True
                except (OSError, RuntimeError) as error:
                    self.error = " ".join(str(error).split())
        return self.is_loaded


_library = _Library()


def library_path() -> Path:
    """Return the path of the library, which exists if it was built.

    Example:
        >>> library_path().name
        'libmlbench_cuda.so'
    """
    return Path(__file__).parent / "lib" / "libmlbench_cuda.so"


def is_built() -> bool:
    """Return whether the library file exists, without loading it."""
    return library_path().is_file()


def load() -> bool:
    """Load the library into this process, unless an earlier call in any thread has loaded it.

    Loading needs neither a CUDA device nor a CUDA build of torch. The library replaces the operators' computation on
    CUDA tensors only. A library that exists but fails to load is not tried again.

    Returns:
        True if the library is loaded; False if it is not turned on, not built, or cannot be loaded. :func:`why_not`
        returns the reason.
    """
    return _is_turned_on() and (_library.is_loaded or is_built()) and _library.load(library_path())


def is_available() -> bool:
    """Return whether the operators run their CUDA kernels for CUDA tensors.

    Compiled code (:func:`torch.compile`) keeps the answer that it got when it was compiled.

    Returns:
        True if the kernels are turned on, built and loaded (by the first call), and the device can run them. A positive
        answer is cached; only the environment variable is read each time.
    """
    return _is_turned_on() and (_library.is_usable or why_not() is None)


def why_not() -> str | None:
    """Return the reason why the CUDA kernels cannot be used.

    Compiled code (:func:`torch.compile`) keeps the answer that it got when it was compiled.

    Returns:
        One line that names the missing part and the way to provide it; None if the kernels are available.

    Example:
        >>> (why_not() is None) == is_available()
        True
    """
    if not _is_turned_on():
        return f"the CUDA kernels are experimental and off; set the environment variable {VARIABLE}=1 to use them"
    if not load():
        if _library.error is None:
            return (
                f"the CUDA kernels are not built: {library_path()} is missing; run `make cuda` on a machine with nvcc"
            )
        return f"{library_path()} cannot be loaded, build it again with `make cuda`: {_library.error}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is not None or capability < _LEAST_CAPABILITY:
        least = ".".join(map(str, _LEAST_CAPABILITY))
        found = "ROCm" if torch.version.hip is not None else f"compute capability {'.'.join(map(str, capability))}"
        return f"the device has {found}; the kernels need an NVIDIA GPU of compute capability {least} or later"
    # Only success is cached: each call looks again for a missing library or device.
    _library.is_usable = True
    return None


# torch.compile cannot follow the loading of a library, so it keeps the answer that it gets while it compiles.
mark_constant(is_available)
mark_constant(why_not)


def _is_turned_on() -> bool:
    return os.environ.get(VARIABLE) == "1"
