"""The optional library of CUDA kernels for this package's operators.

The operators are complete without it: each has a plain PyTorch implementation, and the library adds
another one for CUDA tensors. See docs/howto/cuda.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mlbench_core.torch_private import mark_constant

__all__ = ["LIBRARY", "define_operator", "why_not"]

LIBRARY = Path(__file__).parent / "lib" / "libmlbench_cuda.so"
"""The library, which exists if it was built.

:meta hide-value:
"""


def define_operator(
    name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Define an operator ``mlbench::NAME`` with its plain implementation for all devices.

    Args:
        name: The name.
        schema: Arguments and results, as :func:`torch.library.define` takes them.
        implementation: The plain computation.
        fake: The same for tensors without data, which gives shapes and dtypes.
    """
    # torch rejects a second definition, which importlib.reload would otherwise make.
    if hasattr(torch.ops.mlbench, name):
        return
    torch.library.define(f"mlbench::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"mlbench::{name}", "default", implementation)
    torch.library.register_fake(f"mlbench::{name}", fake)


@functools.cache
def _load_error() -> str | None:
    """Load the library once in a process, and return the reason if it cannot be."""
    if not LIBRARY.is_file():
        return "the kernels are not built: python -m mlbench_core.install_cuda_extensions"
    try:
        torch.ops.load_library(LIBRARY)
    except (OSError, RuntimeError) as error:
        return f"{LIBRARY} cannot be loaded: {' '.join(str(error).split())}"
    return None


def why_not() -> str | None:
    """Return the reason why the kernels cannot run; None if they can.

    The first call loads the library. It needs neither a GPU nor a CUDA build of torch for that.
    Compiled code (:func:`torch.compile`) keeps the answer that it got when it was compiled.
    """
    if error := _load_error():
        return error
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "there is no NVIDIA GPU"
    # Asynchronous copies and products in bfloat16 came with Ampere.
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


# torch.compile cannot follow the loading of a library.
mark_constant(why_not)
