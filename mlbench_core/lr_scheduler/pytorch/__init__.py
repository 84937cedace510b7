"""Learning rate schedules."""

from mlbench_core.lr_scheduler.pytorch import lr
from mlbench_core.lr_scheduler.pytorch.lr import *  # noqa: F403

__all__ = ["lr", *lr.__all__]
