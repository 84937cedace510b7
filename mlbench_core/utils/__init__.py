"""The import path of version 3.0 for the tracker, its meters and the metrics logger.

Example:
    >>> from mlbench_core.utils import AverageMeter
    >>> meter = AverageMeter()
    >>> meter.update(2.0)
    >>> meter.avg
    2.0
"""

from __future__ import annotations

from mlbench_core._optional.lazy import lazy_subpackages
from mlbench_core.client.log_metrics import LogMetrics
from mlbench_core.running_statistics import AverageMeter
from mlbench_core.tracking import Tracker

__all__ = ["AverageMeter", "LogMetrics", "Tracker"]

__getattr__ = lazy_subpackages(
    __name__, "emulated_network", "log_metrics", "pytorch", "task_args", "tensorflow", "tracker"
)
