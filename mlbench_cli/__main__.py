"""``python -m mlbench_cli``: the ``mlbench`` command without its script."""

from __future__ import annotations

from mlbench_cli import main

if __name__ == "__main__":
    main()
