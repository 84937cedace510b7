"""Describe the result of one run for tables, figures and comparisons, whatever its source is."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbench_core.comparison.published import (
    UNKNOWN,
    Metrics,
    latest_json,
    number,
    read_fields,
    state_of_run,
)
from mlbench_core.results.lines import read_lines, statistics
from mlbench_core.results.schema import check_result
from mlbench_core.run_terms import PHASES, GoalAim, goal_text
from mlbench_core.wire_bytes import total_wire_bytes

__all__ = ["NOT_MEASURED", "UNKNOWN", "CurvePoint", "RunRecord"]


NOT_MEASURED = "its communication was not measured, so it is a part of the other times"
"""Remark on a run of several workers whose optimizer reports no communication."""


@dataclass(frozen=True)
class CurvePoint:
    """One point of a learning curve.

    Attributes:
        epoch: Epoch in which the value was recorded.
        step: Training batches finished by then.
        time_s: Seconds since the start of the run.
        bytes: Bytes that all workers had put on the wire by then, interpolated between the ends of
            epochs; None if unknown.
        value: The recorded value.
        train_s: Training seconds of rank 0 by then, interpolated between the ends of epochs; None
            if unknown.
    """

    epoch: int
    step: int
    time_s: float
    bytes: float | None
    value: float
    train_s: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """The result of a run; times are in seconds, and a value that the run did not report is ``None``.

    Attributes:
        name: The run's name.
        source: Path of the folder or file that it was read from, or ``"master"``.
        state: ``"finished"``, ``"failed"``, ``"unfinished"``, or another state of the master;
            ``"unknown"`` without the run's record.
        configuration: Task, program, options, backend, workers, goal, seed and so on, as in a
            result file. An entry that is unknown is missing.
        started_at: Date and time of the start (ISO 8601, UTC).
        machine: The machine, as in a result file; empty if unknown.
        software: Versions of the software, as in a result file; empty if unknown.
        reached: True if the run reached its goal.
        goal_value: Value of the goal's metric when the goal was reached.
        time_to_goal_s: Training time until the goal was reached.
        train_s: All training time, without validation.
        validation_s: Time spent in validation.
        wall_s: Time since the start of the run, validation and pauses included.
        phases_s: Training time by phase, see :data:`PHASES`: until the goal if it was reached, else
            of the whole run.
        communication_exposed_s: The part of the communication time that training waited for; None
            if it was not measured, as with torch's own DistributedDataParallel.
        communication_hidden_s: The part of the communication time during which training continued.
        communication_cpu_s: Processor time that the training thread of a worker used while training
            waited; None if it was not measured.
        steps_s: Training time by step, see :data:`STEPS`.
        epochs_to_goal: Number of epochs until the goal was reached.
        steps_to_goal: Number of training batches until the goal was reached.
        epochs: Number of epochs.
        samples_per_s: Training samples per second, all workers together.
        tokens_per_s: Training tokens per second, all workers together.
        best: Best value of the goal's metric.
        bytes_sent: Bytes that all workers handed to collectives.
        bytes_on_wire: Bytes that all workers put on the wire, see
            :func:`~mlbench_core.wire_bytes.wire_bytes`.
        exchanges: Exchanges of gradients or weights in which a worker took part, averages for
            validations included.
        batches: Number of training batches of one worker.
        collectives: The collectives of one worker in these batches, as in ``result.json``; None if
            they are not known.
        folder: The result folder with the raw lines, if there is one.
        remarks: Notes for people, for example that the run was killed.
    """

    name: str
    source: str = "master"
    state: str = "finished"
    configuration: Mapping[str, Any] = field(default_factory=dict)
    started_at: str | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, Any] = field(default_factory=dict)
    reached: bool | None = None
    goal_value: float | None = None
    time_to_goal_s: float | None = None
    train_s: float | None = None
    validation_s: float | None = None
    wall_s: float | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    communication_exposed_s: float | None = None
    communication_hidden_s: float | None = None
    communication_cpu_s: float | None = None
    steps_s: Mapping[str, float] = field(default_factory=dict)
    epochs_to_goal: int | None = None
    steps_to_goal: int | None = None
    epochs: int | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    best: float | None = None
    bytes_sent: float | None = None
    bytes_on_wire: float | None = None
    exchanges: int | None = None
    batches: int | None = None
    collectives: Sequence[Mapping[str, Any]] | None = None
    folder: Path | None = None
    remarks: tuple[str, ...] = ()

    @property
    def workers(self) -> int | None:
        """Return the number of workers."""
        return self.configuration.get("workers")

    @property
    def seed(self) -> int | None:
        """Return the seed."""
        return self.configuration.get("seed")

    @property
    def goal(self) -> Mapping[str, Any] | None:
        """Return metric, threshold and direction of the goal."""
        return self.configuration.get("goal")

    @property
    def goal_text(self) -> str:
        """Return the goal as a text such as ``"Prec@1 >= 95"``, or ``"no goal"``."""
        return goal_text(self.goal)

    @property
    def has_fixed_time(self) -> bool:
        """Return True if the goal is the best value after a fixed training time, and not the time to a value."""
        return (self.goal or {}).get("budget_s") is not None

    @property
    def total_s(self) -> float | None:
        """Return the time by which runs are compared: until the goal if it was reached, else all training time."""
        if self.reached and self.time_to_goal_s is not None:
            return self.time_to_goal_s
        return self.train_s if self.train_s is not None else (sum(self.phases_s.values()) or None)

    @property
    def without_communication_s(self) -> float | None:
        """Return :attr:`total_s` without the exposed communication."""
        communication = self.communication_exposed_s
        if communication is None:
            communication = self.phases_s.get("communication")
        if self.total_s is None or communication is None:
            return None
        return max(self.total_s - communication, 0.0)

    @property
    def seconds_per_epoch(self) -> float | None:
        """Return the training time of an epoch: up to the goal if it was reached, else over the whole run."""
        if self.reached and self.epochs_to_goal and self.time_to_goal_s is not None:
            return self.time_to_goal_s / self.epochs_to_goal
        return self.train_s / self.epochs if self.epochs and self.train_s is not None else None

    def curve(self, name: str) -> list[CurvePoint]:
        """Return the values of a metric that rank 0 recorded, in the order of the steps.

        Args:
            name: Name of the metric in the raw lines, for example ``"val_global_Prec@1"``.

        Returns:
            The points, without values that are not finite; an empty list without raw lines.
        """
        if self.folder is None:
            return []
        lines = read_lines(self.folder)
        sent = self._bytes_by_step(lines)
        trained = _totals_by_step(lines, "train_s").get(0)
        points = []
        for line in statistics(lines, name):
            value, step = number(line.get("value")), int(line["step"])
            if value is not None:
                so_far = sum(_at(step, known) for known in sent.values()) if sent else None
                train_s = _at(step, trained) if trained else None
                points.append(
                    CurvePoint(
                        int(line["epoch"]), step, float(line["time_s"]), so_far, value, train_s
                    )
                )
        return points

    def _bytes_by_step(
        self, lines: Iterable[Mapping[str, Any]]
    ) -> dict[int, list[tuple[int, float]]]:
        """Return the bytes on the wire that each worker counted, by step."""
        counted = _totals_by_step(lines, "communication_wire_bytes")
        if counted or not self.bytes_sent or self.bytes_on_wire is None:
            return counted
        # Lines of earlier versions have only the bytes that were handed over.
        share = self.bytes_on_wire / self.bytes_sent
        handed = _totals_by_step(lines, "communication_size_bytes")
        return {
            rank: [(step, share * value) for step, value in known] for rank, known in handed.items()
        }

    @classmethod
    def from_result(
        cls,
        result: Mapping[str, Any],
        folder: Path | None = None,
        source: str = "master",
        remarks: tuple[str, ...] = (),
    ) -> RunRecord:
        """Read the record from the content of a ``result.json``.

        Args:
            result: The content.
            folder: The result folder with the raw lines, if there is one.
            source: Path of the folder or file, or ``"master"``.
            remarks: Notes for people.
        """
        run, goal = result.get("run") or {}, result.get("goal") or {}
        times = _slowest(result.get("times"))
        reached = goal.get("reached")
        to_goal = _slowest(goal.get("times")) if reached else {}
        at = {**times, **to_goal}
        exposed_s, hidden_s = (
            number(at.get(f"communication_{part}_s")) for part in ("exposed", "hidden")
        )
        # That of the whole run does not stand in for one until the goal.
        cpu_s = number((to_goal or times).get("communication_cpu_s"))
        configuration = dict(result.get("configuration") or {})
        if (workers := number(configuration.get("workers"))) is not None:
            # In JSON, 2.0 is an integer, too.
            configuration["workers"] = int(workers)
        sent, on_wire = (result.get(name) or {} for name in ("bytes_sent", "bytes_on_wire"))
        bytes_sent, bytes_on_wire = (number(known.get("all_workers")) for known in (sent, on_wire))
        collectives = result.get("collectives")
        phases_s = {phase: s for phase in PHASES if (s := number(at.get(f"{phase}_s"))) is not None}
        if not at.get("communication_total_s"):
            # An optimizer that does not report when it communicates leaves zeros.
            if at.get("communication_s"):
                exposed_s = hidden_s = None
            # So does a script with torch's own DistributedDataParallel in a result of an earlier
            # version.
            elif (
                configuration.get("workers") != 1
                and not bytes_sent
                and not collectives
                and not on_wire
            ):
                exposed_s = hidden_s = bytes_sent = None
                phases_s.pop("communication", None)
        if not on_wire:
            bytes_on_wire = _earlier_wire_bytes(bytes_sent, collectives)
        if exposed_s is None and bytes_sent is None and (configuration.get("workers") or 1) > 1:
            remarks = (*remarks, NOT_MEASURED)
        if goal and not configuration.get("goal"):
            configuration["goal"] = GoalAim.from_dict(goal).to_dict()
        return cls(
            name=str(run.get("name") or run.get("id") or "run"),
            source=source,
            state=str(run.get("state") or UNKNOWN),
            configuration=configuration,
            started_at=run.get("started_at"),
            machine=result.get("machine") or {},
            software=result.get("software") or {},
            reached=reached if isinstance(reached, bool) else None,
            goal_value=number(goal.get("value")) if reached else None,
            time_to_goal_s=number(_slowest(goal.get("time_to_goal_s"))) if reached else None,
            train_s=number(times.get("train_s")),
            validation_s=number(at.get("validation_s")),
            wall_s=number(at.get("wall_s")),
            phases_s=phases_s,
            communication_exposed_s=exposed_s,
            communication_hidden_s=hidden_s,
            communication_cpu_s=None if exposed_s is None else cpu_s,
            steps_s=_slowest(result.get("steps_s")),
            epochs_to_goal=goal.get("epochs") if reached else None,
            steps_to_goal=goal.get("step") if reached else None,
            epochs=result.get("epochs"),
            samples_per_s=number(result.get("samples_per_s")),
            tokens_per_s=number(result.get("tokens_per_s")),
            best=number((result.get("best") or {}).get("value")),
            bytes_sent=bytes_sent,
            bytes_on_wire=bytes_on_wire,
            exchanges=result.get("exchanges"),
            batches=result.get("batches"),
            collectives=collectives,
            folder=folder,
            remarks=remarks,
        )

    @classmethod
    def from_metrics(
        cls, metrics: Metrics, run: Mapping[str, Any], source: str = "master"
    ) -> RunRecord:
        """Read the record from the metrics that a run sent to the master.

        The metric ``result @ 0`` is the run's whole result file and takes precedence. Without it,
        ``summary @ 0`` and ``goal @ 0`` count, and then the metrics of version 3.0.

        Args:
            metrics: Entries of every metric, oldest first: ``{name: [{"date", "value", ...},
                ...]}``.
            run: The run as the master describes it: ``name``, ``num_workers``, ``state``,
                ``command`` and so on.
            source: Path of the file, or ``"master"``.

        Raises:
            ConfigurationError: The metric ``result @ 0`` does not follow its schema, or has an
                unknown version.
        """
        result = latest_json(metrics, "result @ 0")
        if result:
            check_result(result, f"the result of run {run.get('name')}")
            found = cls.from_result(result, source=source)
            # The master knows the name under which the run was started, and if one of its workers
            # failed.
            state = state_of_run(run) if run.get("state") else found.state
            return dataclasses.replace(found, name=str(run.get("name") or found.name), state=state)
        return cls(source=source, **read_fields(metrics, run))

    def as_json(self) -> dict[str, Any]:
        """Return all fields and the derived ones as JSON-ready values."""
        derived = (
            "workers",
            "seed",
            "goal_text",
            "total_s",
            "without_communication_s",
            "seconds_per_epoch",
        )
        fields = {**dataclasses.asdict(self), "folder": str(self.folder) if self.folder else None}
        return {**fields, **{name: getattr(self, name) for name in derived}}


def _earlier_wire_bytes(
    bytes_sent: float | None, collectives: Sequence[Mapping[str, Any]] | None
) -> float | None:
    """Return the bytes on the wire of a result that lacks them, from the collectives of one worker."""
    if not bytes_sent:
        return bytes_sent
    on_wire = total_wire_bytes(collectives or ())
    handed_over = sum(each["bytes"] for each in collectives or ())
    # All workers have the same kinds of collectives, and about the same bytes.
    return bytes_sent * on_wire / handed_over if handed_over and on_wire is not None else None


def _slowest(value: Any) -> Any:
    """Return the part of the slowest worker from a value that has one for ``slowest`` and one for ``rank_0``."""
    return (value.get("slowest") if isinstance(value, Mapping) else value) or {}


def _totals_by_step(
    lines: Iterable[Mapping[str, Any]], name: str
) -> dict[int, list[tuple[int, float]]]:
    """Return, for each rank, the steps of its lines with totals, and the value of the named total at each."""
    found: dict[int, dict[int, float]] = {}
    for line in lines:
        totals = line.get("totals")
        if isinstance(totals, Mapping) and totals.get(name) is not None:
            step = int(line.get("step") or totals.get("batches") or 0)
            found.setdefault(int(line["rank"]), {0: 0.0})[step] = float(totals[name])
    return {rank: sorted(known.items()) for rank, known in found.items()}


def _at(step: int, known: list[tuple[int, float]]) -> float:
    """Interpolate between known values; outside of them, the nearest one counts."""
    place = bisect.bisect_left(known, (step, float("-inf")))
    if place == 0 or place == len(known):
        return known[min(place, len(known) - 1)][1]
    (before, low), (after, high) = known[place - 1], known[place]
    return low + (high - low) * (step - before) / (after - before)
