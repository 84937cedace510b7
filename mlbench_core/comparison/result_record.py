"""Describe the result of one run for tables, figures and comparisons, whatever its source is."""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbench_core.comparison.master_metrics import (
    UNKNOWN,
    Metrics,
    known_numbers,
    latest_json,
    number,
    read_fields,
    state_of_run,
)
from mlbench_core.results.raw_lines import read_lines, statistics
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
        tokens: Training tokens of all workers by then, see :meth:`RunRecord.tokens_at`.
    """

    epoch: int
    step: int
    time_s: float
    bytes: float | None
    value: float
    train_s: float | None = None
    tokens: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """The result of a run; times are in seconds, and a value that is not reported is ``None``.

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
        compute_cpu_s: Processor time that it used in training batches otherwise; None likewise.
        steps_s: Training time by step, see :data:`STEPS`.
        epochs_to_goal: Number of epochs until the goal was reached; None if :attr:`unit` is
            ``"steps"``, as is ``epochs``.
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
        tokens: Training tokens of all workers; None if they were not counted.
        collectives: The collectives of one worker in these batches, as in ``result.json``; None if
            they are not known.
        collectives_to_goal: Those in its batches until the goal; None likewise.
        folder: The result folder with the raw lines, if there is one.
        remarks: Notes for people, for example that the run was killed.
        not_measured: What was not measured in a script that ran unchanged, each with the reason.
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
    compute_cpu_s: float | None = None
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
    tokens: int | None = None
    collectives: Sequence[Mapping[str, Any]] | None = None
    collectives_to_goal: Sequence[Mapping[str, Any]] | None = None
    folder: Path | None = None
    remarks: tuple[str, ...] = ()
    not_measured: tuple[str, ...] = ()

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
    def lacks_goal_metric(self) -> bool:
        """Return True if the script never printed the metric of its goal."""
        if self.reached:
            return False
        metric = (self.goal or {}).get("metric")
        names = [f"{metric}: "]
        if metric == "train_loss":
            # The observer reads the loss of training itself, and calls it by another name.
            names.append("loss: ")
        return any(reason.startswith(tuple(names)) for reason in self.not_measured)

    @property
    def unit(self) -> str:
        """Return the unit of the run's length, one of :data:`~mlbench_core.run_terms.UNITS`."""
        return str(self.configuration.get("unit") or "epochs")

    def tokens_at(self, step: int | None) -> float | None:
        """Return the training tokens of all workers until a step.

        They are interpolated over all batches of the run. None if they were not counted.
        """
        if step is None or self.tokens is None or not self.batches:
            return None
        return self.tokens * step / self.batches

    @property
    def tokens_to_goal(self) -> float | None:
        """Return the training tokens of all workers until the goal, see :meth:`tokens_at`."""
        return self.tokens_at(self.steps_to_goal)

    @property
    def exchanges_to_goal(self) -> float | None:
        """Return the exchanges until the goal, also if the run went on; of all steps without one.

        They are interpolated between the raw lines, of which the goal is one.
        """
        step = self.steps_to_goal
        if self.exchanges is None or step is None or self.folder is None:
            return self.exchanges
        lines = read_lines(self.folder).without_statistics()
        counted = _totals_by_step(lines, "exchanges")
        # A folder may lack its raw lines, and then only the result has the number.
        if 0 not in counted:
            return self.exchanges
        return _at(step, counted[0])

    @property
    def has_fixed_time(self) -> bool:
        """Return True if the goal is the best value after a fixed training time."""
        return (self.goal or {}).get("budget_s") is not None

    @property
    def total_s(self) -> float | None:
        """Return the time by which runs are compared.

        It is the time to the goal if it was reached, else all training time.
        """
        if self.reached and self.time_to_goal_s is not None:
            return self.time_to_goal_s
        if self.train_s is not None:
            return self.train_s
        # A run of version 3.0 may have only the times of its steps, which add up to the phases.
        return sum(self.phases_s.values()) or None

    @property
    def without_communication_s(self) -> float | None:
        """Return :attr:`total_s` without the exposed communication."""
        # Training continues during hidden communication, so only the exposed part counts.
        communication = self.communication_exposed_s
        if communication is None:
            communication = self.phases_s.get("communication")
        if self.total_s is None or communication is None:
            return None
        return max(self.total_s - communication, 0.0)

    @property
    def seconds_per_epoch(self) -> float | None:
        """Return the training time of an epoch: until the goal if it was reached, else of all."""
        if self.reached and self.epochs_to_goal and self.time_to_goal_s is not None:
            return self.time_to_goal_s / self.epochs_to_goal
        if self.epochs and self.train_s is not None:
            return self.train_s / self.epochs
        return None

    def curve(self, name: str) -> list[CurvePoint]:
        """Return the values of a metric that rank 0 recorded, in the order of the steps.

        Args:
            name: Name of the metric in the raw lines, for example ``"val_global_Prec@1"``.

        Returns:
            The points, without values that are not finite; an empty list without raw lines.
        """
        if self.folder is None:
            return []
        # Parsed once; the statistics of another name are most of the lines.
        lines = []
        for line in read_lines(self.folder):
            if line["kind"] != "stat" or line["name"] == name:
                lines.append(line)
        sent = self._bytes_by_step(lines)
        trained = _totals_by_step(lines, "train_s").get(0)
        points = []
        for line in statistics(lines, name):
            # A value that is not finite is null in the raw lines.
            value, step = number(line.get("value")), int(line["step"])
            if value is None:
                continue
            epoch, time_s = int(line["epoch"]), float(line["time_s"])
            sent_bytes: float | None = None
            train_s: float | None = None
            if sent:
                sent_bytes = sum(_at(step, totals) for totals in sent.values())
            if trained:
                train_s = _at(step, trained)
            tokens = self.tokens_at(step)
            points.append(CurvePoint(epoch, step, time_s, sent_bytes, value, train_s, tokens))
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
        for rank, totals in _totals_by_step(lines, "communication_size_bytes").items():
            counted[rank] = [(step, share * value) for step, value in totals]
        return counted

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
        # All workers wait for the slowest one.
        times = _slowest(result.get("times"))
        if not times.get("wall_s") and not times.get("train_s"):
            # No raw line has times: the workers were killed in their first epoch, or the program
            # has no tracker. The zeros are unknown times.
            times = {}
        reached = goal.get("reached")
        # The parts of the goal that count only if it was reached.
        reached_goal: Mapping[str, Any] = {}
        if reached:
            reached_goal = goal
        to_goal = _slowest(reached_goal.get("times"))
        at = {**times, **to_goal}
        exposed_s = number(at.get("communication_exposed_s"))
        hidden_s = number(at.get("communication_hidden_s"))
        # The processor time of the whole run does not replace a missing one until the goal.
        cpu_s = number((to_goal or times).get("communication_cpu_s"))
        configuration = dict(result.get("configuration") or {})
        workers = number(configuration.get("workers"))
        if workers is not None:
            # In JSON, 2.0 is an integer, too.
            configuration["workers"] = int(workers)
        on_wire = result.get("bytes_on_wire") or {}
        bytes_on_wire = number(on_wire.get("all_workers"))
        bytes_sent = number((result.get("bytes_sent") or {}).get("all_workers"))
        collectives = result.get("collectives")
        named_s = {phase: at.get(f"{phase}_s") for phase in PHASES}
        phases_s = known_numbers(named_s)
        if not at.get("communication_total_s"):
            counted_nothing = not (bytes_sent or collectives or on_wire)
            # An optimizer that does not report when it communicates leaves zeros.
            if at.get("communication_s"):
                exposed_s = hidden_s = None
            # So does a script with torch's own DistributedDataParallel in a result of an earlier
            # version.
            elif counted_nothing and configuration.get("workers") != 1:
                exposed_s = hidden_s = bytes_sent = None
                phases_s.pop("communication", None)
        # Results of earlier versions have no bytes on the wire, but some have the collectives.
        if not on_wire:
            bytes_on_wire = _earlier_wire_bytes(bytes_sent, collectives)
        if exposed_s is None and bytes_sent is None and (configuration.get("workers") or 1) > 1:
            remarks = (*remarks, NOT_MEASURED)
        if exposed_s is None:
            cpu_s = None
        if not isinstance(reached, bool):
            reached = None
        if goal and not configuration.get("goal"):
            configuration["goal"] = GoalAim.from_dict(goal).to_dict()
        has_epochs = configuration.get("unit") != "steps"
        train_s = number(times.get("train_s"))
        if not has_epochs and not result.get("batches"):
            # The script may have trained in processes that were not observed.
            train_s = None
        return cls(
            name=str(run.get("name") or run.get("id") or "run"),
            source=source,
            state=str(run.get("state") or UNKNOWN),
            configuration=configuration,
            started_at=run.get("started_at"),
            machine=result.get("machine") or {},
            software=result.get("software") or {},
            reached=reached,
            goal_value=number(reached_goal.get("value")),
            time_to_goal_s=number(_slowest(reached_goal.get("time_to_goal_s"))),
            train_s=train_s,
            validation_s=number(at.get("validation_s")),
            wall_s=number(at.get("wall_s")),
            phases_s=phases_s,
            communication_exposed_s=exposed_s,
            communication_hidden_s=hidden_s,
            communication_cpu_s=cpu_s,
            compute_cpu_s=number((to_goal or times).get("compute_cpu_s")),
            steps_s=_slowest(result.get("steps_s")),
            epochs_to_goal=reached_goal.get("epochs") if has_epochs else None,
            steps_to_goal=reached_goal.get("step"),
            epochs=result.get("epochs") if has_epochs else None,
            samples_per_s=number(result.get("samples_per_s")),
            tokens_per_s=number(result.get("tokens_per_s")),
            best=number((result.get("best") or {}).get("value")),
            bytes_sent=bytes_sent,
            bytes_on_wire=bytes_on_wire,
            exchanges=result.get("exchanges"),
            batches=result.get("batches"),
            # 0 if they were not counted.
            tokens=result.get("tokens") or None,
            collectives=collectives,
            collectives_to_goal=reached_goal.get("collectives"),
            folder=folder,
            remarks=remarks,
            not_measured=tuple(map(str, result.get("not_measured") or ())),
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
            record = cls.from_result(result, source=source)
            # The master knows the name under which the run was started, and if one of its workers
            # failed.
            name = str(run.get("name") or record.name)
            state = record.state
            if run.get("state"):
                state = state_of_run(run)
            return dataclasses.replace(record, name=name, state=state)
        return cls(source=source, **read_fields(metrics, run))

    def as_json(self) -> dict[str, Any]:
        """Return all fields and the derived ones as JSON-ready values."""
        folder: str | None = None
        if self.folder:
            folder = str(self.folder)
        return {
            **dataclasses.asdict(self),
            # Not the path object of the field, which JSON does not know.
            "folder": folder,
            "workers": self.workers,
            "seed": self.seed,
            "goal_text": self.goal_text,
            "total_s": self.total_s,
            "without_communication_s": self.without_communication_s,
            "seconds_per_epoch": self.seconds_per_epoch,
            "tokens_to_goal": self.tokens_to_goal,
        }


def _earlier_wire_bytes(
    bytes_sent: float | None, collectives: Sequence[Mapping[str, Any]] | None
) -> float | None:
    """Return the bytes on the wire of a result without them, from the collectives of a worker."""
    if not bytes_sent:
        return bytes_sent
    on_wire = total_wire_bytes(collectives or ())
    handed_over = sum(map(operator.itemgetter("bytes"), collectives or ()))
    if not handed_over or on_wire is None:
        return None
    # All workers have the same kinds of collectives, and about the same bytes.
    return bytes_sent * on_wire / handed_over


def _slowest(value: Any) -> Any:
    """Return the part of the slowest worker of a value with parts ``slowest`` and ``rank_0``."""
    if isinstance(value, Mapping):
        value = value.get("slowest")
    return value or {}


def _totals_by_step(
    lines: Iterable[Mapping[str, Any]], name: str
) -> dict[int, list[tuple[int, float]]]:
    """Return the values of a named total with their steps, in order, for each rank."""
    by_rank: dict[int, dict[int, float]] = {}
    for line in lines:
        totals = line.get("totals")
        if isinstance(totals, Mapping) and totals.get(name) is not None:
            step = int(line.get("step") or totals.get("batches") or 0)
            # Every total begins with 0 at step 0.
            by_rank.setdefault(int(line["rank"]), {0: 0.0})[step] = float(totals[name])
    ordered = {}
    for rank, by_step in by_rank.items():
        ordered[rank] = sorted(by_step.items())
    return ordered


def _at(step: int, totals: list[tuple[int, float]]) -> float:
    """Interpolate between the totals of some steps; outside of them, the nearest one counts."""
    index = bisect.bisect_left(totals, (step, float("-inf")))
    if index == 0 or index == len(totals):
        return totals[min(index, len(totals) - 1)][1]
    (before, low), (after, high) = totals[index - 1], totals[index]
    return low + (high - low) * (step - before) / (after - before)
