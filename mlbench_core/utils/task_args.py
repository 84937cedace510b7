"""The import path of version 3.0 for :mod:`mlbench_core.controlflow.task_arguments`."""

import sys

from mlbench_core.controlflow import task_arguments
from mlbench_core.controlflow.task_arguments import *  # noqa: F403

# The same module, so that a name that is set here is set there.
sys.modules[__name__] = task_arguments
