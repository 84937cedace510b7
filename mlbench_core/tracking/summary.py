"""Summarize a run in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mlbench_core.run_terms import TRACKER_PHASES

__all__ = ["Counters", "Totals", "TrackerSummary"]


@dataclass
class Counters:
    """Numbers that only grow during a run; :class:`TrackerSummary` describes them."""

    train_s: float = 0.0
    validation_s: float = 0.0
    batches: int = 0
    samples: int = 0
    tokens: int = 0
    communication_total_s: float = 0.0
    communication_exposed_s: float = 0.0
    # None until it is measured, and from the first wait on for which it was not.
    communication_cpu_s: float | None = None
    # None as soon as a part of it is not known.
    compute_cpu_s: float | None = 0.0
    communication_size_bytes: int = 0
    # None if a checkpoint of an earlier version lacks the first part.
    exchanges: int | None = 0
    communication_measured: bool = False


@dataclass(frozen=True)
class Totals:
    """Seconds and training data since the start of the run, as they were at one moment."""

    train_s: float = 0.0
    validation_s: float = 0.0
    steps_s: Mapping[str, float] = field(default_factory=dict)
    hidden_communication_s: float = 0.0
    samples: int = 0
    tokens: int = 0

    def of(self, steps: Iterable[str]) -> float:
        """Return the seconds of some of the steps."""
        return sum(self.steps_s.get(name, 0.0) for name in steps)


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
        samples: Training samples counted.
        tokens: Training tokens counted.
        batch_p50_s: Median seconds of a batch, with an error of at most 1 %, or None before any
            batch.
        batch_p90_s: 90th percentile of the seconds of a batch, likewise.
        batch_p99_s: 99th percentile of the seconds of a batch, likewise.
        communication_total_s: Seconds during which communication ran, as optimizers reported it.
        communication_exposed_s: Seconds of it that training waited for (exposed communication).
        communication_cpu_s: Seconds of processor time that this worker's thread used while training
            waited for communication: packing, compressing, summing. None if it was not measured, as
            on a GPU.
        compute_cpu_s: Seconds of processor time that this worker's thread used inside training
            batches, without ``communication_cpu_s``. Other load on the machine does not change it.
            None if it was not measured, as on a GPU, or if torch computes with several threads.
        communication_size_bytes: Bytes that this worker handed to collectives, as optimizers
            reported it.
        communication_wire_bytes: Bytes that this worker put on the wire, see
            :func:`~mlbench_core.wire_bytes.wire_bytes`; None if unknown.
        exchanges: Exchanges of gradients or weights in which this worker took part: one for each
            batch in which it sent something, and one for each average that a validation needed.
            None if unknown.
        communication_measured: True if an optimizer reported its communication. Otherwise, the
            numbers of communication are 0 because nothing was measured.
        memory_peak_bytes: Peak of the GPU memory in bytes, or None without a GPU.
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
    samples: int
    tokens: int
    batch_p50_s: float | None
    batch_p90_s: float | None
    batch_p99_s: float | None
    communication_total_s: float
    communication_exposed_s: float
    communication_cpu_s: float | None
    compute_cpu_s: float | None
    communication_size_bytes: int
    communication_wire_bytes: int | None
    exchanges: int | None
    communication_measured: bool
    memory_peak_bytes: int | None
    energy_j: float | None
    best_metric_value: float | None
    best_epoch: int | None
    goal_reached: bool
    goal_text: str | None
    time_to_goal_s: float | None

    @property
    def shares(self) -> dict[str, float]:
        """Return the shares of ``train_s`` by phase, with ``"other"`` for the rest.

        Before any training they are empty.
        """
        if self.train_s <= 0:
            return {}
        phases = TRACKER_PHASES.values()
        shares = {phase: getattr(self, f"{phase}_s") / self.train_s for phase in phases}
        # A step may belong to two groups. The sum of the shares can then exceed 1, but "other" is
        # never negative.
        return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}

    @property
    def other_s(self) -> float:
        """Return the seconds inside batches that belong to no step."""
        return self.train_s - sum(self.steps_s.values())

    @property
    def outside_s(self) -> float:
        """Return the seconds of ``wall_s`` outside batches and validation, as for checkpoints."""
        return self.wall_s - self.train_s - self.validation_s

    def gaps(self, tolerance: float = 0.01) -> list[str]:
        """Compare the steps with the batches, and training and validation with the wall clock.

        Args:
            tolerance: The largest difference that is not named, as a share of the longer time.

        Returns:
            A sentence with the numbers for each difference that is larger.
        """
        sentences = []
        if abs(self.other_s) > tolerance * self.train_s:
            sentences.append(
                f"the steps take {self.train_s - self.other_s:.3f} s of {self.train_s:.3f} s "
                f"inside batches, so {self.other_s:.3f} s belong to no step: call "
                "record_batch_step(NAME) after each part of a batch"
            )
        if abs(self.outside_s) > tolerance * self.wall_s:
            sentences.append(
                f"training ({self.train_s:.3f} s) and validation ({self.validation_s:.3f} s) take "
                f"{self.wall_s - self.outside_s:.3f} s of {self.wall_s:.3f} s of wall time, so "
                f"{self.outside_s:.3f} s are outside batches and validation"
            )
        return sentences

    @property
    def samples_per_s(self) -> float | None:
        """Return ``samples / train_s``, or None if no samples were counted."""
        return self._rate(self.samples)

    @property
    def tokens_per_s(self) -> float | None:
        """Return ``tokens / train_s``, or None if no tokens were counted."""
        return self._rate(self.tokens)

    def _rate(self, count: int, world_size: int = 1) -> float | None:
        """Return the throughput of the workers, or None if nothing was counted."""
        if not count or self.train_s <= 0:
            return None
        return count / self.train_s * world_size

    def report(self, world_size: int) -> dict[str, Any]:
        """Return the numbers of a whole run.

        :meth:`Tracker.publish_summary` sends them in the metric ``summary``.

        Args:
            world_size: Number of workers. All have parts of equal size and wait for one another in
                every step, so the throughput of the run is this worker's throughput times this
                number.

        Returns:
            Plain containers that can be written as JSON. Times are in seconds.
        """
        total_s: dict[str, float | None] = {
            "train": self.train_s,
            "compute": self.compute_s,
            "communication": self.communication_s,
            "exposed_communication": self.communication_exposed_s,
            "metrics": self.metrics_s,
            "preprocess": self.preprocess_s,
            "validation": self.validation_s,
        }
        numbers: dict[str, Any] = {
            "workers": world_size,
            "goal_reached": self.goal_reached,
            "time_to_goal_s": self.time_to_goal_s,
            "total_s": total_s,
            "other_s": self.other_s,
            "outside_s": self.outside_s,
            "samples_per_s": self._rate(self.samples, world_size),
            "tokens_per_s": self._rate(self.tokens, world_size),
            "memory_peak_bytes": self.memory_peak_bytes,
            "epochs": self.epochs,
            "best": self.best_metric_value,
            "bytes_sent": self.communication_size_bytes,
            "bytes_on_wire": self.communication_wire_bytes,
            "exchanges": self.exchanges,
        }
        # One worker sends nothing. With several workers, zeros that nobody measured would look like
        # free communication.
        if not self.communication_measured and world_size != 1:
            numbers.update(dict.fromkeys(("bytes_sent", "bytes_on_wire", "exchanges")))
            total_s["exposed_communication"] = None
            if not self.communication_s:
                total_s["communication"] = None
        return numbers

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the properties as plain containers that can be written as JSON."""
        numbers = asdict(self)
        for name in ("shares", "samples_per_s", "tokens_per_s", "other_s", "outside_s"):
            numbers[name] = getattr(self, name)
        return numbers
