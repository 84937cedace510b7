"""The import path of version 3.0 for :mod:`mlbench_core.controlflow.pytorch.batches`."""

import sys

from mlbench_core.controlflow.pytorch import batches
from mlbench_core.controlflow.pytorch.batches import *  # noqa: F403

# The same module, so that a name that is set here is set there.
sys.modules[__name__] = batches
