"""Compile the CUDA kernels into the installed package, under the module name of version 3.0.

``python -m mlbench_core.install_cuda_extensions`` needs nvcc and torch; docs/howto/cuda.md has
more. The library works without the kernels.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Compile all kernels, and print the architectures.

    Returns:
        The exit status: 0, or 1 after one line on standard error that names what is missing.
    """
    # A wheel has the sources as a package, and a checkout has them beside this one.
    is_checkout = (ROOT / "csrc" / "build.py").is_file()
    if is_checkout:
        sys.path.insert(0, str(ROOT))
    sources = importlib.import_module("csrc.build" if is_checkout else "mlbench_csrc.build")
    library = ROOT / "mlbench_core" / "ops" / "pytorch" / "lib" / "libmlbench_cuda.so"
    try:
        sys.stdout.write(f"{sources.build(library)}\n")
    except (sources.BuildError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
