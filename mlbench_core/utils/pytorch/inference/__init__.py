"""The import path of version 3.0 for :mod:`mlbench_core.models.pytorch.generation`."""

from mlbench_core.models.pytorch.generation import *  # noqa: F403
