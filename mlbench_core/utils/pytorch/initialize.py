"""The import path of version 3.0 for :mod:`mlbench_core.distributed.pytorch.initialize`."""

import sys

from mlbench_core.distributed.pytorch import initialize
from mlbench_core.distributed.pytorch.initialize import *  # noqa: F403

# The same module, so that a name that is set here is set there.
sys.modules[__name__] = initialize
