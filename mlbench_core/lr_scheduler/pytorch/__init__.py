"""Learning rate schedules."""

from mlbench_core.lr_scheduler.pytorch import lr

__all__ = ["lr"]
