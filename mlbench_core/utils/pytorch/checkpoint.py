"""The import path of version 3.0 for :mod:`mlbench_core.controlflow.pytorch.checkpoint`."""

import sys

from mlbench_core.controlflow.pytorch import checkpoint
from mlbench_core.controlflow.pytorch.checkpoint import *  # noqa: F403

# The same module, so that a name that is set here is set there.
sys.modules[__name__] = checkpoint
