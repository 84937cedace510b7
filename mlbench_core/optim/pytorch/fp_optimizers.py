"""The import path of version 3.0 for :mod:`mlbench_core.optim.pytorch.half_precision`."""

import sys

from mlbench_core.optim.pytorch import half_precision
from mlbench_core.optim.pytorch.half_precision import *  # noqa: F403

sys.modules[__name__] = half_precision  # the same module, so that a name that is set here is set there
