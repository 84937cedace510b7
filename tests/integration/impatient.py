"""Runs a script that waits less long than usual for workers who are silent: impatient.py SCRIPT
ARGUMENTS."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from mlbench_core.distributed.pytorch import lost_workers
from mlbench_core.distributed.pytorch.mpi import world

if __name__ == "__main__":
    # Long enough for a thread that gets no core for a moment.
    lost_workers.SILENCE_S = 2.5
    world._ABORT_S = 1.0
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
