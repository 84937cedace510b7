"""Track the time of a run: the Tracker, its clocks and its sinks."""

from mlbench_core.tracking.tracker import Tracker

__all__ = ["Tracker"]
