"""The import path of version 3.0 for :mod:`mlbench_core.distributed.pytorch.process_groups`."""

import sys

from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.distributed.pytorch.process_groups import *  # noqa: F403

# The same module, so that a name that is set here is set there.
sys.modules[__name__] = process_groups
