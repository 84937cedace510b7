"""The result of one run, read from its metrics: from the master, a JSON file, or a downloaded zip."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbench_core.cli import _settings
from mlbench_core.cli._output import number, print_table
from mlbench_core.errors import ConfigurationError

__all__ = ["PHASES", "STEPS", "RunResult", "load_folder", "print_results", "save"]

Metrics = Mapping[str, Sequence[Mapping[str, Any]]]

STEPS: dict[str, str] = {
    "batch_load": "data",
    "fwd_pass": "compute",
    "comp_loss": "compute",
    "backprop": "compute",
    "opt_step": "compute",
    "agg": "communication",
    "comp_metrics": "metrics",
}
"""Steps of a batch as the tracker names them, and the phase that each belongs to."""

PHASES = ("compute", "communication", "metrics", "data")
"""Phases of the training time, in the order in which charts stack them."""

_NAME_IN_ZIP = re.compile(r"(?:^|/)result_(.+)\.json$")


@dataclass(frozen=True)
class RunResult:
    """What a run came to. Times are in seconds; what the run did not report is ``None``.

    Attributes:
        name: The run's name.
        workers: How many workers it had.
        state: State in the master.
        goal_reached: Whether it reached its goal.
        time_to_goal_s: Training time until then.
        train_s: All training time, validation left out.
        phases_s: Training time by phase, see :data:`PHASES`.
        exposed_communication_s: The part of the communication during which nothing was computed.
        validation_s: Time spent in validation.
        steps_s: Training time by step, see :data:`STEPS`.
        samples_per_s: Training samples a second, all workers together.
        epochs: Epochs begun.
        best: Best value of the goal's metric.
        bytes_sent: Bytes that one worker sent.
    """

    name: str
    workers: int
    state: str = "finished"
    goal_reached: bool | None = None
    time_to_goal_s: float | None = None
    train_s: float | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    exposed_communication_s: float | None = None
    validation_s: float | None = None
    steps_s: Mapping[str, float] = field(default_factory=dict)
    samples_per_s: float | None = None
    epochs: int | None = None
    best: float | None = None
    bytes_sent: float | None = None

    @property
    def total_s(self) -> float | None:
        """The time to compare by: until the goal where it was reached, else all training time."""
        if self.time_to_goal_s is not None:
            return self.time_to_goal_s
        return self.train_s if self.train_s is not None else (sum(self.phases_s.values()) or None)

    @property
    def without_communication_s(self) -> float | None:
        """:attr:`total_s` less the communication that nothing hid."""
        communication = self.exposed_communication_s
        if communication is None:
            communication = self.phases_s.get("communication")
        if self.total_s is None or communication is None:
            return None
        return max(self.total_s - communication, 0.0)

    @classmethod
    def from_metrics(cls, metrics: Metrics, run: Mapping[str, Any]) -> RunResult:
        """Read the result from a run's metrics.

        The metric ``summary @ 0``, which a training script posts at its end, is believed first; the cumulative times
        of the steps fill in for a run without one.

        Args:
            metrics: Entries of every metric, oldest first: ``{name: [{"date", "value", ...}, ...]}``.
            run: The run as the master describes it; ``name``, ``num_workers`` and ``state`` are used.
        """
        summary = _summary(metrics)
        steps = {step: s for step in STEPS if (s := _last(metrics, f"global_cum_{step} @ 0")) is not None}
        phases = _phases(_times(summary), steps)
        times = _times(summary)
        result = _last(metrics, "TaskResult @ 0")
        to_goal = _float(summary.get("time_to_goal_s")) if summary else result
        reached = summary.get("goal_reached")
        name = str(run.get("name") or "run")
        return cls(
            name=name,
            workers=_workers(run, summary, name, metrics),
            state=str(run.get("state") or "finished"),
            goal_reached=reached if isinstance(reached, bool) else (True if result is not None else None),
            time_to_goal_s=to_goal,
            train_s=_first(_float(times.get("train")), _last(metrics, "TotalCumulativeTrainTime @ 0")),
            phases_s=phases,
            exposed_communication_s=_float(times.get("exposed_communication")),
            validation_s=_float(times.get("validation")),
            steps_s=steps,
            samples_per_s=_float(summary.get("samples_per_s")),
            epochs=_integer(_float(summary.get("epochs"))),
            best=_first(_float(summary.get("best")), _float(summary.get("best_metric_value"))),
            bytes_sent=_first(_float(summary.get("bytes_sent")), _float(summary.get("communication_size_bytes"))),
        )

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON-ready values, with the two derived times."""
        derived = {"total_s": self.total_s, "without_communication_s": self.without_communication_s}
        return {**dataclasses.asdict(self), **derived}


def _summary(metrics: Metrics) -> dict[str, Any]:
    entries = metrics.get("summary @ 0") or ()
    value = entries[-1].get("value") if entries else None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def _times(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Total times by name: from the entry ``total_s``, else from the fields of the tracker's own summary."""
    times = summary.get("total_s")
    if isinstance(times, dict):
        return times
    names = ("train", "compute", "communication", "metrics", "preprocess", "validation")
    found = {name: summary.get(f"{name}_s") for name in names}
    return {**found, "exposed_communication": summary.get("communication_exposed_s")}


def _phases(times: Mapping[str, Any], steps: Mapping[str, float]) -> dict[str, float]:
    named = {phase: times.get("preprocess" if phase == "data" else phase) for phase in PHASES}
    found = {phase: value for phase, raw in named.items() if (value := _float(raw)) is not None}
    if found:
        return found
    phases: dict[str, float] = {}
    for step, value in steps.items():
        phases[STEPS[step]] = phases.get(STEPS[step], 0.0) + value
    return {phase: phases[phase] for phase in PHASES if phase in phases}


def _workers(run: Mapping[str, Any], summary: Mapping[str, Any], name: str, metrics: Metrics) -> int:
    for value in (run.get("num_workers"), summary.get("workers")):
        if isinstance(value, int | float) and value >= 1:
            return int(value)
    ranks = {match[1] for metric in metrics if (match := re.search(r" @ (\d+)$", metric))}
    if len(ranks) > 1:
        return len(ranks)
    suffix = re.search(r"-(\d+)$", name)
    return max(int(suffix[1]), 1) if suffix else 1


def _last(metrics: Metrics, name: str) -> float | None:
    entries = metrics.get(name) or ()
    return _float(entries[-1].get("value")) if entries else None


def _float(value: object) -> float | None:
    """A finite number, given as a number or as text; anything else is ``None``."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if abs(found) != float("inf") and found == found else None


def _integer(value: float | None) -> int | None:
    return None if value is None else int(value)


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def save(path: Path, run: Mapping[str, Any], metrics: Metrics) -> None:
    """Write a run and its metrics to a JSON file that :func:`load_folder` reads.

    Args:
        path: The file; written atomically, its folder is created.
        run: The run as the master describes it.
        metrics: Entries of every metric.
    """
    with _settings.replacing(path) as temporary:
        temporary.write_text(json.dumps({"run": dict(run), "metrics": dict(metrics)}, indent=1), encoding="utf-8")


def load_folder(folder: Path, pattern: str | None = None) -> list[RunResult]:
    """Read every result in a folder: JSON files of ``run --wait`` and zip files of ``download``.

    Args:
        folder: Where they lie.
        pattern: Only runs whose name matches: a pattern of the shell, or a part of the name.

    Returns:
        Results, fewest workers first, then by name. JSON files of another kind are passed over.

    Raises:
        ConfigurationError: There is no result, or a zip file is damaged.
    """
    results = []
    for path in sorted(folder.iterdir()):
        loaded = {".json": _load_json, ".zip": _load_zip}.get(path.suffix, lambda _: None)(path)
        if loaded is not None and _matches(loaded.name, pattern):
            results.append(loaded)
    if not results:
        which = f" of a run that matches {pattern!r}" if pattern else ""
        raise ConfigurationError(
            f"no result{which} in {folder}: it needs files of 'mlbench run --wait' (.json) or 'mlbench download' (.zip)"
        )
    return sorted(results, key=lambda result: (result.workers, result.name))


def _matches(name: str, pattern: str | None) -> bool:
    if not pattern:
        return True
    return fnmatch.fnmatchcase(name, pattern) if any(c in pattern for c in "*?[") else pattern in name


def _load_json(path: Path) -> RunResult | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("metrics"), dict):
        return None
    run = content.get("run")
    return RunResult.from_metrics(content["metrics"], run if isinstance(run, dict) else {"name": path.stem})


def _load_zip(path: Path) -> RunResult:
    metrics: dict[str, Any] = {}
    run: dict[str, Any] = {"name": path.stem.removeprefix("results_")}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name == "run.json":
                    run.update(json.loads(archive.read(name)))
                match = _NAME_IN_ZIP.search(name)
                if match:
                    content = json.loads(archive.read(name))
                    metrics.update(content if isinstance(content, dict) else {match[1]: content})
    except (zipfile.BadZipFile, ValueError) as error:
        raise ConfigurationError(f"{path} is damaged ({error}); download it again") from error
    return RunResult.from_metrics(metrics, run)


def print_results(results: Sequence[RunResult]) -> None:
    """Write the table of results: one row a run, ``-`` for what it did not report."""
    reached = {True: "yes", False: "no", None: "-"}
    rows = [
        (
            result.name,
            result.workers,
            result.state if result.state != "finished" else reached[result.goal_reached],
            number(result.total_s),
            *(number(result.phases_s.get(phase)) for phase in PHASES),
            number(result.samples_per_s, 0),
        )
        for result in results
    ]
    header = ("RUN", "WORKERS", "REACHED", "SECONDS", "COMPUTE", "COMMUNICATION", "METRICS", "DATA", "SAMPLES/S")
    print_table(header, rows, right=(1, 3, 4, 5, 6, 7, 8))
