"""Import path of version 3.0 for :mod:`mlbench_core.aggregation.pytorch.compression.tensors`."""

import sys

from mlbench_core.aggregation.pytorch.compression import tensors
from mlbench_core.aggregation.pytorch.compression.tensors import *  # noqa: F403

# The same module, so that a name that is set here is set there.
sys.modules[__name__] = tensors
