"""The import path of version 3.0 for :mod:`mlbench_core.dataset.pytorch.partition`."""

import sys

from mlbench_core.dataset.pytorch import partition
from mlbench_core.dataset.pytorch.partition import *  # noqa: F403

sys.modules[__name__] = partition  # the same module, so that a name that is set here is set there
