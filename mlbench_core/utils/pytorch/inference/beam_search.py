"""The import path of version 3.0 for :mod:`mlbench_core.models.pytorch.generation.beam_search`."""

import sys

from mlbench_core.models.pytorch.generation import beam_search
from mlbench_core.models.pytorch.generation.beam_search import *  # noqa: F403

# The same module, so that a name that is set here is set there.
sys.modules[__name__] = beam_search
