"""``python -m mlbench_core.cli``: the ``mlbench`` command without its script."""

from __future__ import annotations

from mlbench_core.cli import main

if __name__ == "__main__":
    main()
