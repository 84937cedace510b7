"""The former import path of :mod:`mlbench_core.network.emulated`."""

from mlbench_core.network.emulated import *  # noqa: F403
