"""The training time after which a run ends without its goal, as a sweep sets it."""

from __future__ import annotations

import logging
import math
import os

from mlbench_core.distributed.pytorch.process_groups import smallest
from mlbench_core.errors import ConfigurationError
from mlbench_core.tasks import TRAIN_LIMIT
from mlbench_core.tracking.tracker import Tracker

__all__ = ["TrainLimit", "any_is_over"]

logger = logging.getLogger(__name__)


class TrainLimit:
    """The limit of the variable ``MLBENCH_TRAIN_LIMIT_S``.

    Attributes:
        seconds: Seconds of training, without validation; None if the variable is absent or empty.

    Raises:
        ConfigurationError: The variable is not a positive number.
    """

    def __init__(self) -> None:
        text = os.environ.get(TRAIN_LIMIT)
        self.seconds: float | None = None
        if not text:
            return
        try:
            self.seconds = float(text)
        except ValueError:
            # Fails the comparison below.
            self.seconds = math.nan
        if not 0 < self.seconds < math.inf:
            raise ConfigurationError(
                f"{TRAIN_LIMIT} must be a positive number of seconds, not {text!r}: leave it out"
            )

    def is_over(self, tracker: Tracker) -> bool:
        """Return True on all workers if one has trained for the limit without the goal."""
        if self.seconds is None or tracker.goal_reached:
            return False
        return any_is_over(tracker.get_total_train_time(), self.seconds)

    def ends(self, tracker: Tracker) -> bool:
        """Return the result of :meth:`is_over`, and log that the training ends."""
        is_over = self.is_over(tracker)
        if is_over:
            logger.info(
                "the training ends without its goal: it took the seconds of %s", TRAIN_LIMIT
            )
        return is_over


def any_is_over(train_time_s: float, limit_s: float) -> bool:
    """Return True on all workers as soon as the time of one is over.

    The time of a run is that of its slowest worker.

    Args:
        train_time_s: Seconds of training of this worker. Every worker calls the function.
        limit_s: The limit.
    """
    return smallest(int(train_time_s < limit_s)) == 0
