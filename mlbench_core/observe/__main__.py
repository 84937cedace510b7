"""Observe a training script: ``python -m mlbench_core.observe [options] SCRIPT ARGS...``."""

from __future__ import annotations

from mlbench_core.observe.command import main

if __name__ == "__main__":
    main()
