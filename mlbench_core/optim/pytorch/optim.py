"""The import path of version 3.0 for :mod:`mlbench_core.optim.pytorch.compressed`."""

import sys

from mlbench_core.optim.pytorch import compressed
from mlbench_core.optim.pytorch.compressed import *  # noqa: F403

sys.modules[__name__] = compressed  # the same module, so that a name that is set here is set there
