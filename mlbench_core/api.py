"""The import path of version 3.0 for :mod:`mlbench_core.client.api`."""

import sys

from mlbench_core.client import api
from mlbench_core.client.api import *  # noqa: F403

# The same module, so that a name that is set here is set there.
sys.modules[__name__] = api
