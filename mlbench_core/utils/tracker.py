"""The import path of version 3.0 for :mod:`mlbench_core.tracking.tracker`."""

import sys

from mlbench_core.tracking import tracker
from mlbench_core.tracking.tracker import *  # noqa: F403

# The same module, so that a name that is set here is set there.
sys.modules[__name__] = tracker
