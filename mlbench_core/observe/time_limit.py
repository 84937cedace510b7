"""End a script whose training takes longer than a sweep allows."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from mlbench_core.observe.steps import StepClock
from mlbench_core.observe.store_messages import StoreWorkers
from mlbench_core.tasks import TRAIN_LIMIT

__all__ = ["ScriptLimit"]

_LOOK_S = 1.0
# Workers look once a second, so within this time all of them know the last step.
_NOTICE_S = 3.0


class ScriptLimit:
    """End the script of all workers after the same step, once rank 0 has trained for the limit.

    Args:
        limit_s: Seconds of training.
        clock: The clock of this worker's steps.
        workers: The messages of all workers; None for a single one.
        rank: Rank of this worker.
    """

    def __init__(
        self, limit_s: float, clock: StepClock, workers: StoreWorkers | None, rank: int
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._workers = workers
        self._rank = rank
        self._last_step: int | None = None
        self._next_look_s = 0.0

    def after_step(self, *_: Any) -> None:
        """Look at the time; a hook after each step of an optimizer.

        Raises:
            SystemExit: This was the last step. The script ends as with ``sys.exit(0)``.
        """
        now = time.perf_counter()
        if self._last_step is None and now >= self._next_look_s:
            self._next_look_s = now + _LOOK_S
            self._last_step = self._find_last_step()
        if self._last_step is not None and self._clock.steps >= self._last_step:
            if self._rank == 0:
                sys.stderr.write(
                    "mlbench observe: the script ends without its goal: its training took the "
                    f"seconds of {TRAIN_LIMIT}\n"
                )
            raise SystemExit(0)

    def _find_last_step(self) -> int | None:
        """Return the step after which all workers end, None as long as the time is not over."""
        if self._rank != 0 and self._workers is not None:
            announced = self._workers.announced()
            if not announced:
                return None
            return int(announced)
        tracker, steps = self._clock.tracker, self._clock.steps
        self._clock.pass_on()
        if not steps or tracker.goal_reached:
            return None
        if tracker.get_total_train_time() < self._limit_s:
            return None
        if self._workers is None:
            return steps
        step_s = tracker.get_total_train_time() / steps
        last_step = steps + math.ceil(_NOTICE_S / step_s) + 1
        self._workers.announce(str(last_step))
        return last_step
