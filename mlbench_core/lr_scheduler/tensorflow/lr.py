"""Learning rate schedules for TensorFlow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mlbench_core.arguments import check_finite_at_least_0, check_int

__all__ = ["PlateauWithWarmup", "manual_stepping"]


def manual_stepping(
    global_step: Any, boundaries: Sequence[int], rates: Sequence[float], warmup: bool = False
) -> Any:
    r"""Return a learning rate that changes at given steps.

    It is the rate number i if ``boundaries`` has i numbers up to the current step. With ``warmup``,
    the rate rises linearly from ``rates[0]`` at step 0 to ``rates[1]`` at step ``boundaries[0]``.

    Args:
        global_step: The current step, an integer or an integer tensor without dimensions.
        boundaries: Steps at which the rate changes, positive and increasing.
        rates: Rates, one more than ``boundaries``.
        warmup: True for the linear warm-up.

    Returns:
        The rate, a float32 tensor without dimensions.

    Raises:
        ValueError: ``boundaries`` or ``rates`` is not as listed above.

    Example:
        >>> rates = [manual_stepping(t, [2, 4], [0.1, 0.3, 0.03], warmup=True) for t in range(5)]
        >>> [round(float(rate), 3) for rate in rates]
        [0.1, 0.2, 0.3, 0.3, 0.03]
    """
    steps = list(map(int, boundaries))
    if any(later <= earlier for earlier, later in itertools.pairwise([0, *steps])):
        raise ValueError(
            f"boundaries must be positive and increasing steps, not {list(boundaries)}"
        )
    if len(rates) != len(steps) + 1:
        raise ValueError(
            f"rates must have {len(steps) + 1} numbers, one more than boundaries, not {len(rates)}"
        )
    step = tf.cast(global_step, tf.int64)
    # By operations, because the step may be a tensor of a graph, whose value Python does not know.
    passed = tf.reduce_sum(tf.cast(step >= tf.constant(steps, tf.int64), tf.int32))
    rate = tf.gather(tf.constant(rates, tf.float32), passed)
    # Without a boundary, there is no step at which the warm-up would end.
    if not (warmup and steps):
        return rate
    share = tf.cast(step, tf.float32) / steps[0]
    return tf.where(step < steps[0], rates[0] + share * (rates[1] - rates[0]), rate)


class PlateauWithWarmup:
    """Linear warm-up by batches, then a smaller rate whenever the loss stops improving.

    The rules are those of :class:`mlbench_core.lr_scheduler.pytorch.lr.ReduceLROnPlateauWithWarmup`
    with ``mode="min"`` and ``threshold_mode="abs"``. The schedule is plain Python: pass
    :attr:`rate` to the update.

    Args:
        warmup_init_lr: Rate at the start.
        scaled_lr: Rate at the end of the warm-up.
        warmup_epochs: Duration of the warm-up in epochs; 0 starts at ``scaled_lr``.
        batches_per_epoch: Number of batches in an epoch.
        factor: The rate is multiplied by it.
        patience: Number of epochs without an improvement after which the next such epoch changes
            the rate.
        threshold: Smallest improvement of the loss that counts.
        min_lr: The rate does not become smaller.

    Attributes:
        rate: The current rate.

    Raises:
        ValueError: An argument is negative or not finite.

    Example:
        >>> schedule = PlateauWithWarmup(
        ...     0.02, 0.04, 1, batches_per_epoch=2, factor=0.5, patience=1, min_lr=0.02)
        >>> rates = []
        >>> for loss in [1.0] * 5:
        ...     for _ in range(2):
        ...         rates.append(schedule.rate)
        ...         schedule.batch_step()
        ...     schedule.step(loss)
        >>> rates
        [0.02, 0.03, 0.04, 0.04, 0.04, 0.04, 0.02, 0.02, 0.02, 0.02]
    """

    def __init__(
        self,
        warmup_init_lr: float,
        scaled_lr: float,
        warmup_epochs: float,
        batches_per_epoch: int,
        *,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        min_lr: float = 0.0,
    ) -> None:
        numbers = {
            "warmup_init_lr": warmup_init_lr,
            "scaled_lr": scaled_lr,
            "warmup_epochs": warmup_epochs,
            "factor": factor,
            "threshold": threshold,
            "min_lr": min_lr,
        }
        for name, value in numbers.items():
            check_finite_at_least_0(name, value)
        check_int("batches_per_epoch", batches_per_epoch)
        check_int("patience", patience, 0)
        self.warmup_init_lr, self.scaled_lr = warmup_init_lr, scaled_lr
        self.warmup_duration = warmup_epochs * batches_per_epoch
        self.factor, self.min_lr = factor, min_lr
        self.patience, self.threshold = patience, threshold
        self._batches = 0
        self._best = math.inf
        self._bad_epochs = 0
        self.rate = scaled_lr
        if self.warmup_duration > 0:
            self.rate = warmup_init_lr

    def batch_step(self) -> None:
        """Advance the warm-up by one batch; do nothing after its end."""
        if self._batches < self.warmup_duration:
            self._batches += 1
            # The duration may be a fraction of an epoch, and end within a batch.
            share = min(1.0, self._batches / self.warmup_duration)
            self.rate = self.warmup_init_lr + share * (self.scaled_lr - self.warmup_init_lr)

    def step(self, loss: float) -> None:
        """End an epoch: reduce the rate if the loss has not improved; the warm-up ignores the loss.

        Args:
            loss: The validation loss of the epoch.
        """
        if self._batches < self.warmup_duration:
            return
        # The difference is absolute, as with threshold_mode="abs" in torch.
        if loss < self._best - self.threshold:
            self._best, self._bad_epochs = loss, 0
        else:
            self._bad_epochs += 1
        if self._bad_epochs > self.patience:
            self.rate, self._bad_epochs = max(self.rate * self.factor, self.min_lr), 0
