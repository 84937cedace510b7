"""The import path of version 3.0 for :mod:`mlbench_core.distributed.pytorch.settings`."""

import sys

from mlbench_core.distributed.pytorch import settings
from mlbench_core.distributed.pytorch.settings import *  # noqa: F403

# The same module, so that a name that is set here is set there.
sys.modules[__name__] = settings
