"""Compile the CUDA kernels, under the module name of version 3.0.

``python -m mlbench_core.install_cuda_extensions`` does the same as ``python setup.py build_cuda`` in the checkout that
this package is imported from; see docs/howto/cuda.md. The library works without the kernels.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["main"]


def main() -> int:
    """Compile the kernels that have changed.

    Returns:
        The exit status: 0, or another one after one line on standard error that names the missing part.
    """
    checkout = _checkout()
    if checkout is None:
        sys.stderr.write(
            "error: the CUDA kernels are compiled in a checkout of the sources, which are not part of an installed "
            "package: run MLBENCH_CUDA=1 pip install --no-build-isolation . in a checkout\n"
        )
        return 1
    return subprocess.call([sys.executable, "setup.py", "build_cuda"], cwd=checkout)


def _checkout() -> Path | None:
    """Return the checkout that this package is imported from, or None."""
    # A wheel contains neither of the two, so an installed package has no checkout around it.
    root = Path(__file__).resolve().parents[1]
    return root if (root / "setup.py").is_file() and (root / "csrc").is_dir() else None


if __name__ == "__main__":
    raise SystemExit(main())
