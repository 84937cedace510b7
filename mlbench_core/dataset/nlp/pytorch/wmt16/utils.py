"""The import path of version 3.0 for the batches of GNMT."""

import sys

from mlbench_core.dataset.nlp.pytorch import batches
from mlbench_core.dataset.nlp.pytorch.batches import *  # noqa: F403

sys.modules[__name__] = batches  # the same module, so that a name that is set here is set there
