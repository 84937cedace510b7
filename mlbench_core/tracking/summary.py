"""Summarize a run in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["TrackerSummary"]


@dataclass(frozen=True)
class TrackerSummary:
    """Totals of one worker's run, including the parts before it was resumed.

    Attributes:
        run_id: The run.
        rank: The worker.
        epochs: Finished epochs.
        batches: Finished training batches.
        wall_s: All seconds since ``start()``.
        train_s: Seconds inside training batches, validation excluded.
        validation_s: Seconds of validation.
        compute_s: Seconds of the compute steps.
        communication_s: Seconds of the communication steps.
        metrics_s: Seconds of the metrics steps.
        preprocess_s: Seconds of the preprocess steps.
        steps_s: Seconds of every step.
        shares: Shares of ``train_s`` by phase, with ``"other"`` for the rest; empty before any training.
        samples: Training samples counted.
        tokens: Training tokens counted.
        samples_per_s: ``samples / train_s``, or None if no samples were counted.
        tokens_per_s: ``tokens / train_s``, or None if no tokens were counted.
        batch_p50_s: Median seconds of a batch, with an error of at most 1 %.
        batch_p90_s: 90th percentile of the seconds of a batch.
        batch_p99_s: 99th percentile of the seconds of a batch.
        communication_total_s: Seconds during which communication ran, as optimizers reported it.
        communication_exposed_s: Seconds of it that training waited for (exposed communication).
        communication_size_bytes: Bytes sent, as optimizers reported it.
        energy_j: Joules used by the GPU, or None if NVML does not count them.
        best_metric_value: Best value of the primary metric, or None.
        best_epoch: Epoch of that value, or None.
        goal_reached: True if the goal was reached.
        goal_text: The goal's text, or None.
        time_to_goal_s: ``train_s`` when the goal was reached, or None.
    """

    run_id: str
    rank: int
    epochs: int
    batches: int
    wall_s: float
    train_s: float
    validation_s: float
    compute_s: float
    communication_s: float
    metrics_s: float
    preprocess_s: float
    steps_s: dict[str, float]
    shares: dict[str, float]
    samples: int
    tokens: int
    samples_per_s: float | None
    tokens_per_s: float | None
    batch_p50_s: float | None
    batch_p90_s: float | None
    batch_p99_s: float | None
    communication_total_s: float
    communication_exposed_s: float
    communication_size_bytes: int
    energy_j: float | None
    best_metric_value: float | None
    best_epoch: int | None
    goal_reached: bool
    goal_text: str | None
    time_to_goal_s: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain containers that can be written as JSON."""
        return asdict(self)
