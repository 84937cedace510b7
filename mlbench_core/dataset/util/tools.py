"""The import path of version 3.0 for :mod:`mlbench_core.dataset.download`."""

import sys

from mlbench_core.dataset import download
from mlbench_core.dataset.download import *  # noqa: F403

sys.modules[__name__] = download  # the same module, so that a name that is set here is set there
