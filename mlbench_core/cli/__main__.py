"""``python -m mlbench_core.cli``, another name for ``python -m mlbench_cli``."""

from __future__ import annotations

from mlbench_cli import main

if __name__ == "__main__":
    main()
