"""Read the result of a run from its metrics, which come from the master, a JSON file, or a downloaded zip file.

Results can be compared if their runs had the same :class:`Setup`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import re
import shlex
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbench_core.cli._output import clean, number, print_table, remark
from mlbench_core.errors import ConfigurationError
from mlbench_core.files import replacing
from mlbench_core.tasks import TASKS

__all__ = [
    "PHASES",
    "STEPS",
    "RunResult",
    "Setup",
    "comparable",
    "labels",
    "load_folder",
    "matches",
    "print_results",
    "save",
]

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

UNKNOWN = "unknown"
"""State of a run whose record is missing, as in a zip file of an earlier version."""

_NAME_IN_ZIP = re.compile(r"(?:^|/)result_(.+)\.json$")
# A file with metrics of one worker, as this master, its earlier versions and version 3.0 name it.
_WORKER_IN_ZIP = re.compile(r"(?:pod_)?(.+-worker-\d+)(?:_.*)?\.json$")
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)"
# "80% Top 1 Validation Accuracy reached in 407.123 seconds, Compute: 300.000 seconds, Communication: 80.500 seconds"
_TIME_IN_RESULT = re.compile(rf"\b(?:in|after) {_NUMBER} seconds", re.IGNORECASE)
_PHASE_IN_RESULT = re.compile(rf"\b(compute|communication|metrics|preprocess): {_NUMBER} seconds")
# Version 3.0 sends this default (in Mbit/s) with every run. No launcher limits the bandwidth.
_NOT_LIMITED = 1000.0
_PLACEHOLDER = re.compile(r"\{(run_id|rank|hosts|backend)\}")


@dataclass(frozen=True)
class Setup:
    """The program of a run and its resources, except the number of workers.

    Runs with equal setups and equal numbers of workers are repeats of each other. Runs with equal setups and different
    numbers of workers show how the setup scales. A seed is not part of a setup. ``None`` means unknown.

    Attributes:
        program: The task (``"task 1a"``), or the script or program of a custom command.
        arguments: Its arguments, each option together with its value, for example the optimizer and the network.
        image: The container image of a custom command.
        backend: Communication backend.
        gpu: True if the workers use GPUs.
        light: True if the goal is the light goal of the task.
        num_cpus: Cores of each worker.
        max_bandwidth: Bandwidth of each worker in Mbit/s.
        series: Name of the run without the number of workers, only if the command is unknown.
    """

    program: str | None = None
    arguments: tuple[str, ...] = ()
    image: str | None = None
    backend: str | None = None
    gpu: bool | None = None
    light: bool | None = None
    num_cpus: float | None = None
    max_bandwidth: float | None = None
    series: str | None = None

    @classmethod
    def of(cls, run: Mapping[str, Any], workers: int | None = None) -> Setup:
        """Read the setup from the master's description of a run.

        Args:
            run: The run.
            workers: Its number of workers. It is removed from the name to get ``series`` if the command is unknown.
        """
        job = run.get("job_metadata")
        command = run.get("command") or (job.get("command") if isinstance(job, Mapping) else None)
        backend = run.get("backend") or None
        if not isinstance(command, str) or not command.strip():
            # 'mlbench run NAME 1 2 4' names its runs NAME-1, NAME-2 and NAME-4: one series.
            return cls(series=str(run.get("name") or "run").removesuffix(f"-{workers}"), backend=backend)
        program, items = _split(command)
        image = run.get("image") or None
        return cls(
            program=program,
            arguments=tuple(item for item in items if item not in ("--gpu", "--light")),
            # Every custom command of version 3.0 has the image name "custom_image", which says nothing about the setup.
            image=None if program.startswith("task ") or image == "custom_image" else image,
            backend=backend,
            # The master adds both options to the command line; records of earlier versions lack the fields.
            gpu="--gpu" in items or run.get("gpu_enabled"),
            light="--light" in items or run.get("light_target"),
            num_cpus=_number(run.get("num_cpus")),
            max_bandwidth=_number(run.get("max_bandwidth")),
        )

    def parts(self) -> tuple[str, ...]:
        """Describe the setup with one text for each property in which two setups can differ."""
        program = self.program or ""
        known = (
            self.series,
            # "python -u /long/path/train.py" is shown as "train.py".
            program if program.startswith("task ") else Path(program.rsplit(" ", 1)[-1]).name,
            *self.arguments,
            self.image,
            self.backend,
            {True: "GPU", False: "CPU", None: ""}[self.gpu],
            "light goal" if self.light else "",
            f"{self.num_cpus:g} core{'' if self.num_cpus == 1 else 's'}" if self.num_cpus is not None else "",
            f"{self.max_bandwidth:g} Mbit/s" if self.max_bandwidth not in (None, _NOT_LIMITED) else "",
        )
        return tuple(part for part in known if part)

    def __str__(self) -> str:
        return ", ".join(self.parts()) or "unknown"


def labels(setups: Iterable[Setup]) -> dict[Setup, str]:
    """Give each setup a short label: the parts that it does not share with all the others.

    Args:
        setups: The setups.

    Returns:
        Labels, all different. A setup without a part in which it differs from the others is called ``"default"``.

    Example:
        >>> plain, ddp = Setup("task 1a", backend="gloo"), Setup("task 1a", ("--optimizer ddp",), backend="gloo")
        >>> labels([plain, ddp]) == {plain: "default", ddp: "--optimizer ddp"}
        True
    """
    distinct = sorted(dict.fromkeys(setups), key=str)
    shared = set.intersection(*(set(setup.parts()) for setup in distinct)) if distinct else set()
    found: dict[Setup, str] = {}
    for setup in distinct:
        text = ", ".join(part for part in setup.parts() if part not in shared) or "default"
        same = sum(label.partition(" #")[0] == text for label in found.values())
        found[setup] = f"{text} #{same + 1}" if same else text
    return found


def _split(command: str) -> tuple[str, list[str]]:
    """Split a command line into program and arguments, without placeholders and seed."""
    try:
        words = shlex.split(command)
    except ValueError:
        # A quote is not closed, which a custom command may have.
        words = command.split()
    # The program ends at the script, as in "python -u main.py"; without a script, it is the first word.
    start = next((i for i, word in enumerate(words[:4]) if word.endswith(".py")), 0)
    items: list[str] = []
    for word in words[start + 1 :]:
        # A word that follows an option is the value of the option.
        if items and items[-1].startswith("-") and " " not in items[-1] and "=" not in items[-1] and word[:1] != "-":
            items[-1] += f" {word}"
        else:
            items.append(word)
    items = [item for item in items if not _PLACEHOLDER.search(item) and not re.match(r"--seed[ =]", item)]
    # A task is recognized by its folder, because the rest of the path depends on the installation.
    path = Path(words[start])
    task = next((task for task in TASKS.values() if (task.folder, "main.py") == (path.parent.name, path.name)), None)
    return f"task {task.key}" if task else " ".join(words[: start + 1]), items


@dataclass(frozen=True)
class RunResult:
    """The result of a run; times are in seconds, and a value that the run did not report is ``None``.

    Attributes:
        name: The run's name.
        workers: Number of its workers.
        state: State in the master, ``"unknown"`` without the run's record.
        setup: The program and its resources; only runs with equal setups can be compared.
        goal_reached: True if the run reached its goal.
        time_to_goal_s: Training time until the goal was reached.
        train_s: All training time, without validation.
        phases_s: Training time by phase, see :data:`PHASES`.
        exposed_communication_s: The part of the communication time that training waited for.
        validation_s: Time spent in validation.
        steps_s: Training time by step, see :data:`STEPS`.
        samples_per_s: Training samples per second, all workers together.
        epochs: Number of epochs that the run began.
        best: Best value of the goal's metric.
        bytes_sent: Bytes that one worker sent.
    """

    name: str
    workers: int | None
    state: str = "finished"
    setup: Setup = field(default_factory=Setup)
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
        """Return the time by which runs are compared: until the goal if it was reached, else all training time."""
        if self.time_to_goal_s is not None:
            return self.time_to_goal_s
        return self.train_s if self.train_s is not None else (sum(self.phases_s.values()) or None)

    @property
    def without_communication_s(self) -> float | None:
        """Return :attr:`total_s` without the exposed communication."""
        communication = self.exposed_communication_s
        if communication is None:
            communication = self.phases_s.get("communication")
        if self.total_s is None or communication is None:
            return None
        return max(self.total_s - communication, 0.0)

    @classmethod
    def from_metrics(cls, metrics: Metrics, run: Mapping[str, Any]) -> RunResult:
        """Read the result from a run's metrics.

        The metric ``summary @ 0``, which a training script sends at its end, takes precedence. A run without a summary
        has reached its goal if it has the metric ``TaskResult @ 0``. Times then come from the text of this metric, and
        times that it lacks from the cumulative times of the steps.

        Args:
            metrics: Entries of every metric, oldest first: ``{name: [{"date", "value", ...}, ...]}``.
            run: The run as the master describes it: ``name``, ``num_workers``, ``state``, and the fields that
                :class:`Setup` reads. Without ``state`` the state is ``"unknown"``.
        """
        summary = _summary(metrics)
        times = _times(summary)
        steps = _steps(metrics, "global_cum") or _steps(metrics, "cum")
        result = _latest(metrics, "TaskResult @ 0")
        result = "" if result is None else str(result).strip()
        reached = summary.get("goal_reached")
        if not isinstance(reached, bool):
            reached = True if result else None
        workers, epochs = _workers(run, summary, metrics), _number(summary.get("epochs"))
        return cls(
            name=str(run.get("name") or "run"),
            workers=workers,
            state=str(run.get("state") or UNKNOWN),
            setup=Setup.of(run, workers),
            goal_reached=reached,
            time_to_goal_s=_time_to_goal(summary, result, metrics) if reached else None,
            train_s=_number(times.get("train"), _latest(metrics, "TotalCumulativeTrainTime @ 0")),
            phases_s=_phases(times, steps) or _phases(dict(_PHASE_IN_RESULT.findall(result.lower())), {}),
            exposed_communication_s=_number(times.get("exposed_communication")),
            validation_s=_number(times.get("validation")),
            steps_s=steps,
            samples_per_s=_number(summary.get("samples_per_s")),
            epochs=None if epochs is None else int(epochs),
            best=_number(summary.get("best"), summary.get("best_metric_value")),
            bytes_sent=_number(summary.get("bytes_sent"), summary.get("communication_size_bytes")),
        )

    def as_json(self) -> dict[str, Any]:
        """Return all fields and the two derived times as JSON-ready values."""
        derived = {"total_s": self.total_s, "without_communication_s": self.without_communication_s}
        return {**dataclasses.asdict(self), **derived}


def _latest(metrics: Metrics, name: str) -> Any:
    entries = metrics.get(name)
    return entries[-1].get("value") if entries else None


def _summary(metrics: Metrics) -> dict[str, Any]:
    value = _latest(metrics, "summary @ 0")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def _times(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return total times by name, from the entry ``total_s`` or else from the fields of the tracker's summary."""
    # A script may publish the report of publish_summary or the whole summary of its tracker.
    times = summary.get("total_s")
    if isinstance(times, dict):
        return times
    names = ("train", "compute", "communication", "metrics", "preprocess", "validation")
    found = {name: summary.get(f"{name}_s") for name in names}
    return {**found, "exposed_communication": summary.get("communication_exposed_s")}


def _phases(times: Mapping[str, Any], steps: Mapping[str, float]) -> dict[str, float]:
    named = {phase: times.get("preprocess" if phase == "data" else phase) for phase in PHASES}
    found = {phase: value for phase, raw in named.items() if (value := _number(raw)) is not None}
    if found:
        return found
    # Without total times, the times of the steps add up to those of the phases.
    phases: dict[str, float] = {}
    for step, value in steps.items():
        phases[STEPS[step]] = phases.get(STEPS[step], 0.0) + value
    return {phase: phases[phase] for phase in PHASES if phase in phases}


def _steps(metrics: Metrics, prefix: str) -> dict[str, float]:
    return {step: s for step in STEPS if (s := _number(_latest(metrics, f"{prefix}_{step} @ 0"))) is not None}


def _time_to_goal(summary: Mapping[str, Any], result: str, metrics: Metrics) -> float | None:
    in_text = _TIME_IN_RESULT.search(result)
    return _number(
        summary.get("time_to_goal_s"),
        # A goal of the user may return only the number of seconds as its text.
        result,
        in_text[1] if in_text else None,
        _latest(metrics, "TotalCumulativeTrainTime @ 0"),
    )


def _workers(run: Mapping[str, Any], summary: Mapping[str, Any], metrics: Metrics) -> int | None:
    """Find the number of workers. The name of the run is not used, because ``exp-2024`` need not have 2024 workers."""
    for value in (run.get("num_workers"), summary.get("workers")):
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1:
            return int(value)
    # Names of metrics end with the rank that sent them. If there is only one rank, the number of workers stays unknown,
    # because rank 0 may be the only one that sends.
    ranks = {match[1] for metric in metrics if (match := re.search(r" @ (\d+)$", metric))}
    return len(ranks) if len(ranks) > 1 else None


def _number(*values: object) -> float | None:
    """Return the first finite number among values, which may be texts; ``None`` if none of them is one."""
    for value in values:
        # In Python a bool is an int, but it is not a measurement.
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                found = float(value)
            except ValueError:
                continue
            if math.isfinite(found):
                return found
    return None


def save(path: Path, run: Mapping[str, Any], metrics: Metrics) -> None:
    """Write a run and its metrics to a JSON file that :func:`load_folder` reads.

    Args:
        path: The file. It is written atomically, and its folder is created.
        run: The run as the master describes it.
        metrics: Entries of every metric.
    """
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"run": dict(run), "metrics": dict(metrics)}, indent=1), encoding="utf-8")


def load_folder(folder: Path) -> list[RunResult]:
    """Read every result in a folder: JSON files of ``run --wait`` and zip files of ``download``.

    Args:
        folder: The folder. One that does not exist has no results.

    Returns:
        Results, fewest workers first, then by name. Other files are skipped.

    Raises:
        ConfigurationError: A zip file is damaged.
    """
    if not folder.is_dir():
        return []
    # Other files in the folder, such as the charts of an earlier call, are skipped.
    readers = {".json": _load_json, ".zip": _load_zip}
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in readers]
    results = [result for path in paths if (result := readers[path.suffix](path)) is not None]
    return sorted(results, key=lambda result: (result.workers or 0, result.name))


def matches(name: str, pattern: str | None) -> bool:
    """Return whether a name matches a shell pattern or contains a text; without a pattern every name matches."""
    if not pattern:
        return True
    return fnmatch.fnmatchcase(name, pattern) if any(c in pattern for c in "*?[") else pattern in name


def comparable(results: Sequence[RunResult]) -> list[RunResult]:
    """Select the results that charts may show, and write to standard error why each other result is left out."""
    kept = []
    for result in results:
        if result.state not in ("finished", UNKNOWN):
            remark(f"{clean(result.name)} is {clean(result.state)} and not finished: left out of the charts")
        elif result.workers is None:
            remark(f"{clean(result.name)} does not say how many workers it had: left out of the charts")
        else:
            kept.append(result)
    return kept


def _load_json(path: Path) -> RunResult | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("metrics"), dict):
        return None
    run = content.get("run")
    return RunResult.from_metrics(content["metrics"], run if isinstance(run, dict) else {"name": path.stem})


def _load_zip(path: Path) -> RunResult | None:
    metrics: dict[str, Any] = {}
    run: dict[str, Any] = {"name": path.stem.removeprefix("results_")}
    workers: set[str] = set()
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for name in names:
                if name == "run.json":
                    record = json.loads(archive.read(name))
                    run.update(record if isinstance(record, dict) else {})
                elif name == "official_result.txt":
                    text = archive.read(name).decode("utf-8", errors="replace")
                    # The file of the metric itself, if the archive has one, takes precedence.
                    metrics.setdefault("TaskResult @ 0", [{"value": text}])
                elif match := _NAME_IN_ZIP.search(name):
                    content = json.loads(archive.read(name))
                    metrics.update(content if isinstance(content, dict) else {match[1]: content})
                elif match := _WORKER_IN_ZIP.match(name):
                    workers.add(match[1])
    except (zipfile.BadZipFile, ValueError) as error:
        raise ConfigurationError(f"{path} is damaged ({error}); download it again") from error
    if not any(_NAME_IN_ZIP.search(name) or name == "run.json" for name in names):
        return None
    if workers:
        # Archives of earlier versions have no run.json, but one file or more for each worker.
        run.setdefault("num_workers", len(workers))
    return RunResult.from_metrics(metrics, run)


def print_results(results: Sequence[RunResult]) -> None:
    """Write the table of results: one row per run, ``-`` for a value that it did not report."""
    rows = []
    for result in results:
        outcome = {True: "yes", False: "no", None: "-"}[result.goal_reached]
        # If the run's record is missing, only the goal can show how the run ended.
        if result.state != "finished" and not (result.state == UNKNOWN and result.goal_reached is not None):
            outcome = result.state
        phases = (number(result.phases_s.get(phase)) for phase in PHASES)
        workers = "-" if result.workers is None else result.workers
        rows.append((result.name, workers, outcome, number(result.total_s), *phases, number(result.samples_per_s, 0)))
    header = ("RUN", "WORKERS", "REACHED", "SECONDS", "COMPUTE", "COMMUNICATION", "METRICS", "DATA", "SAMPLES/S")
    print_table(header, rows, right=(1, 3, 4, 5, 6, 7, 8))
