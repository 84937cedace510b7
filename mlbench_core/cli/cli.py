"""The import path of version 3.0 for :mod:`mlbench_cli.cli`."""

import sys

from mlbench_cli import cli
from mlbench_cli.cli import *  # noqa: F403

# The same module, so that a name that is set here is set there.
sys.modules[__name__] = cli
