"""Print that there are no CUDA extensions to compile, under the module name of version 3.0.

Users of version 3.0 ran ``python -m mlbench_core.install_cuda_extensions``, so their scripts still
find this module.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Print one sentence.

    Returns:
        The exit status, 0.
    """
    sys.stdout.write(
        "There is nothing to build: MLBench has no CUDA extensions any more and uses torch's "
        "kernels, see docs/explanation/cuda_kernels.md\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
