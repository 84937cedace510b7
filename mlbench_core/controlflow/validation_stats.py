"""Record the result of a validation. This module imports no framework."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, SupportsFloat

from mlbench_core.tracking.tracker import Tracker

__all__ = ["record_validation_stats"]

logger = logging.getLogger(__name__)


def record_validation_stats(
    metrics_values: Mapping[Any, float] | None,
    loss: SupportsFloat,
    tracker: Tracker | None = None,
    rank: int = 0,
) -> bool:
    """Record the result of a validation, and return True if it is the best so far.

    Every worker records ``val_loss``, ``val_global_loss``, ``val_<metric>`` and
    ``val_global_<metric>``. The values are those of all workers, so only rank 0 sends them to the
    master. The goal of the tracker receives each value. The tracker also receives the primary
    metric, to find the best epoch.

    Args:
        metrics_values: Value of each metric, an object with a ``name``; may be empty or None.
        loss: The mean loss.
        tracker: The tracker to record with; None records nothing.
        rank: This worker's rank.

    Returns:
        True if the primary metric is better than in all validations before; False without a tracker
        or that metric.
    """
    if tracker is None:
        return False
    tracker.validation()
    for name in ("loss", "global_loss"):
        tracker.record_stat(name, float(loss), log_to_api=rank == 0)
    primary = tracker.primary_metric
    has_primary = False
    for metric, value in (metrics_values or {}).items():
        # The best value is updated before the statistic is recorded, because a goal may read it.
        if primary is not None and metric.name == primary.name:
            tracker.update_primary_metric(value)
            has_primary = True
        for name in (metric.name, f"global_{metric.name}"):
            tracker.record_stat(name, value, log_to_api=rank == 0)
    logger.info("rank %d: %s", rank, tracker)
    return bool(has_primary and tracker.is_best())
