"""The import path of version 3.0 for :mod:`mlbench_core.optim.pytorch.presets`."""

import sys

from mlbench_core.optim.pytorch import presets
from mlbench_core.optim.pytorch.presets import *  # noqa: F403

sys.modules[__name__] = presets  # the same module, so that a name that is set here is set there
