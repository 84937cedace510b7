"""Read a run's result from the metrics that it sent to a master, those of version 3.0 included."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlbench_core.calling_environment import split_observed
from mlbench_core.run_terms import PHASES, STEPS, TRACKER_PHASES, GoalAim
from mlbench_core.tasks import TASKS, Task, command_options, find_image

__all__ = [
    "UNKNOWN",
    "Metrics",
    "count_ranks",
    "describe_run",
    "latest_json",
    "number",
    "read_fields",
    "state_of_run",
]

Metrics = Mapping[str, Sequence[Mapping[str, Any]]]

UNKNOWN = "unknown"
"""State of a run whose record is missing, as in a zip file of an earlier version."""

_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)"
# "80% Top 1 Validation Accuracy reached in 407.123 seconds, Compute: 300.000 seconds,
# Communication: 80.500 seconds"
_TIME_IN_RESULT = re.compile(rf"\b(?:in|after) {_NUMBER} seconds", re.IGNORECASE)
_PHASE_IN_RESULT = re.compile(rf"\b(compute|communication|metrics|preprocess): {_NUMBER} seconds")
# The goal in such a text, of which version 3.0 and this one have several forms.
_GOAL_IN_RESULT = (
    re.compile(
        rf"(?P<threshold>{_NUMBER}) ?% (?:Top (?P<k>\d+) )?(?:Validation )?Accuracy\b",
        re.IGNORECASE,
    ),
    re.compile(
        rf"\b(?P<metric>Perplexity|BLEU(?:-Score)?|Loss|Accuracy) of (?P<threshold>{_NUMBER})",
        re.IGNORECASE,
    ),
)
# The script of task 0 of version 3.0 sends these, with one entry for each all-reduce that it
# measures.
_ALL_REDUCE_TIMES = ("avg_time", "val_avg_time")
_ALL_REDUCE_SIZES = ("tensor_size", "val_tensor_size")
# Version 3.0 sends this default (in Mbit/s) with every run. No engine limits the bandwidth.
_NOT_LIMITED = 1000.0
# Every custom command of version 3.0 has this image name, which says nothing about the run.
_CUSTOM_IMAGE = "custom_image"


def state_of_run(run: Mapping[str, Any]) -> str:
    """Return the state of a run as the master describes it: ``"stopped"`` if a user stopped it.

    The master calls such a run ``"failed"``, as in version 3.0. Its field ``stopped`` or, in older
    files, its reason shows the difference.

    Example:
        >>> state_of_run({"state": "failed", "stopped": True}), state_of_run({"state": "finished"})
        ('stopped', 'finished')
        >>> state_of_run({})
        'unknown'
    """
    if run.get("stopped") is True:
        return "stopped"
    state, metadata = run.get("state"), run.get("job_metadata")
    # The file of a saved run may hold anything.
    if state == "failed" and isinstance(metadata, Mapping):
        reason = str(metadata.get("reason"))
        if reason.startswith("stopped by a user"):
            return "stopped"
    return str(state or UNKNOWN)


def describe_run(run: Mapping[str, Any], workers: int | None = None) -> dict[str, Any]:
    """Return the configuration of a run without a result folder, from the master's description.

    Args:
        run: The run as the master describes it. Its command line has the task, the options and the
            seed.
        workers: Its number of workers. It is removed from the name to get ``series`` if the command
            is unknown.

    Returns:
        Entries as in the ``configuration`` of a result file; one that is unknown is missing.
        ``image``, ``max_bandwidth`` (in Mbit/s) and ``series`` are further entries, because two
        runs may differ in them only.
    """
    job = run.get("job_metadata")
    command = run.get("command")
    if not command and isinstance(job, Mapping):
        command = job.get("command")
    configuration: dict[str, Any] = {"workers": workers, "backend": run.get("backend")}
    if isinstance(job, Mapping):
        configuration["network"] = job.get("network")
    if not isinstance(command, str) or not command.strip():
        with contextlib.suppress(ValueError):
            configuration["task"] = find_image(str(run.get("image")))[0].key
        # 'mlbench run NAME 1 2 4' names its runs NAME-1, NAME-2 and NAME-4: one series.
        configuration["series"] = str(run.get("name") or "run").removesuffix(f"-{workers}")
        return _without_unknown(configuration)
    task, program, options = _split(command)
    if task:
        configuration["task"] = task.key
    else:
        configuration["program"] = program
    observed = split_observed(_words(command))
    if observed is not None:
        configuration["algorithm"] = observed[0].get("--method", ["as-is"])[-1]
    configuration["preset"] = options.pop("preset", None)
    default_dataset = None
    if task and task.has_goal:
        default_dataset = task.dataset_of(configuration["preset"])
    configuration["dataset"] = options.pop("dataset", default_dataset)
    configuration["options"] = options
    configuration["threads"] = number(run.get("num_cpus"))
    # The master adds both options to the command line; records of earlier versions lack the fields.
    gpu = options.pop("gpu", run.get("gpu_enabled"))
    light = options.pop("light", run.get("light_target"))
    if gpu is not None:
        configuration["device"] = "cpu"
        if gpu:
            configuration["device"] = "cuda"
    if light is not None:
        configuration["light"] = bool(light)
    configuration["seed"] = _integer(options.pop("seed", None))
    if not task and run.get("image") != _CUSTOM_IMAGE:
        configuration["image"] = run.get("image")
    bandwidth = number(run.get("max_bandwidth"))
    if bandwidth != _NOT_LIMITED:
        configuration["max_bandwidth"] = bandwidth
    if task:
        # The goal of a task has this option. Of another program, it is an option as any other.
        after_s = number(options.pop("goal_after", None))
        configuration["goal"] = _goal_of(task, configuration, after_s)
    return _without_unknown(configuration)


def _without_unknown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, "")}


def _goal_of(
    task: Task, configuration: Mapping[str, Any], after_s: float | None
) -> dict[str, Any] | None:
    """Return the goal of a task on the data set of a run, or None if the task has none on it."""
    dataset, preset = configuration["dataset"], configuration["preset"]
    metric = f"val_global_{task.stand_in_metrics.get(dataset, task.metric)}"
    if after_s is not None:
        return GoalAim(metric, minimize=task.minimize, budget_s=after_s).to_dict()
    light = configuration.get("light", False)
    try:
        threshold = task.goal_on(str(dataset), light, preset)
    except ValueError:
        return None
    return GoalAim(metric, threshold, task.minimize).to_dict()


def _split(command: str) -> tuple[Task | None, str, dict[str, Any]]:
    """Split a command line into task, program and options, see ``command_options``."""
    words: Sequence[str] = _words(command)
    observed = split_observed(words)
    if observed is not None:
        words = observed[1]
    # The program ends at the script, as in "python -u main.py"; without a script, it is the first
    # word.
    start = 0
    if words[0] == "-m" and len(words) > 1:
        start = 1
    for index, word in enumerate(words[:4]):
        if word.endswith(".py"):
            start = index
            break
    options = command_options(words[start + 1 :])
    program = " ".join(words[: start + 1])
    # A task is recognized by its folder, because the rest of the path depends on the installation.
    path = Path(words[start])
    for task in TASKS.values():
        if (task.folder, "main.py") == (path.parent.name, path.name):
            return task, program, options
    return None, program, options


# The dashboard describes all runs of a list each time one of them changes.
@functools.lru_cache(maxsize=2048)
def _words(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError:
        # A quote is not closed, which a custom command may have.
        return tuple(command.split())


def latest_json(metrics: Metrics, name: str) -> dict[str, Any]:
    """Return the latest value of a metric that is JSON text of an object, or an empty dict."""
    value = _latest(metrics, name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    if not isinstance(value, dict):
        return {}
    return value


def read_fields(metrics: Metrics, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a run's record that its metrics contain.

    The record is a :class:`~mlbench_core.comparison.result_record.RunRecord`. The metric
    ``summary @ 0``, which a training script sends at its end, and ``goal @ 0``, which its tracker
    sends, take precedence. A run without them has reached its goal if it has the metric
    ``TaskResult @ 0``. Times then come from the text of this metric, and times that it
    lacks from the cumulative times of the steps.

    Args:
        metrics: Entries of every metric, oldest first: ``{name: [{"date", "value", ...}, ...]}``.
        run: The run as the master describes it. Without ``state`` the state is ``"unknown"``.
    """
    summary, goal = latest_json(metrics, "summary @ 0"), latest_json(metrics, "goal @ 0")
    times = _times(summary)
    steps = _steps(metrics, "global_cum") or _steps(metrics, "cum")
    text = _latest(metrics, "TaskResult @ 0")
    result = ""
    if text is not None:
        result = str(text).strip()
    reached = _is_reached(goal, summary, result)
    # The parts of the goal that count only if it was reached.
    reached_goal: dict[str, Any] = {}
    time_to_goal_s: float | None = None
    if reached:
        reached_goal = goal
        time_to_goal_s = _time_to_goal([goal, summary], result, metrics)
    workers = _workers(run, summary, metrics)
    sent = number(summary.get("bytes_sent"), summary.get("communication_size_bytes"))
    exposed_s = number(times.get("exposed_communication"))
    phases_s = _phases(reached_goal.get("phases_s"), times, steps, result)
    measured = sent or exposed_s or phases_s.get("communication")
    if summary and workers != 1 and not measured:
        # torch's own DistributedDataParallel reports nothing.
        sent = exposed_s = None
        phases_s.pop("communication", None)
    all_reduces = _first_of(metrics, _ALL_REDUCE_TIMES)
    configuration = _configuration(run, workers, goal, result, metrics)
    epochs: int | None = None
    epochs_to_goal: int | None = None
    if goal.get("unit") == "steps":
        # The epochs of such a run are intervals of steps, which cannot be compared.
        configuration["unit"] = "steps"
    else:
        epochs = _integer(summary.get("epochs"))
        epochs_to_goal = _integer(reached_goal.get("epochs"))
    remarks = []
    if isinstance(all_reduces, list):
        sizes = _first_of(metrics, _ALL_REDUCE_SIZES)
        remarks.append(_all_reduces_text(all_reduces, sizes))
    return {
        "name": str(run.get("name") or "run"),
        "state": state_of_run(run),
        "configuration": configuration,
        "started_at": run.get("started_at") or run.get("created_at"),
        "reached": reached,
        "goal_value": number(reached_goal.get("value")),
        "time_to_goal_s": time_to_goal_s,
        "train_s": number(times.get("train"), _latest(metrics, "TotalCumulativeTrainTime @ 0")),
        "validation_s": number(times.get("validation")),
        "wall_s": number(times.get("wall")),
        "phases_s": phases_s,
        "communication_exposed_s": exposed_s,
        "steps_s": steps,
        "epochs": epochs,
        "epochs_to_goal": epochs_to_goal,
        "steps_to_goal": _integer(reached_goal.get("steps")),
        "samples_per_s": number(summary.get("samples_per_s")),
        "tokens_per_s": number(summary.get("tokens_per_s")),
        "best": number(summary.get("best"), summary.get("best_metric_value")),
        "bytes_sent": _of_all_workers(sent, workers),
        "bytes_on_wire": _of_all_workers(number(summary.get("bytes_on_wire")), workers),
        "exchanges": _integer(summary.get("exchanges")),
        "remarks": tuple(remarks),
    }


def _is_reached(goal: Mapping[str, Any], summary: Mapping[str, Any], result: str) -> bool | None:
    """Return the flag of the goal, else that of the summary, else True if a result has a text."""
    for flag in (goal.get("reached"), summary.get("goal_reached")):
        if isinstance(flag, bool):
            return flag
    # Version 3.0 sent this text when the goal was reached, and sent nothing if it was missed.
    if result:
        return True
    return None


def _of_all_workers(value: float | None, workers: int | None) -> float | None:
    # The summary has the bytes of rank 0. All workers send the same number, because their parts
    # have equal size.
    if value is None or workers is None:
        return None
    return value * workers


def _configuration(
    run: Mapping[str, Any],
    workers: int | None,
    goal: Mapping[str, Any],
    result: str,
    metrics: Metrics,
) -> dict[str, Any]:
    """Return the configuration of a run, with the goal and the task that its metrics name."""
    configuration = describe_run(run, workers)
    if "metric" in goal:
        aim = GoalAim.from_dict(goal)
        configuration["goal"] = None
        if aim.metric:
            configuration["goal"] = aim.to_dict()
    elif "goal" not in configuration:
        goal_in_text = _goal_in_text(result)
        if goal_in_text:
            configuration["goal"] = goal_in_text
    if configuration.keys().isdisjoint({"task", "program"}):
        key = _task_of(run, configuration, metrics)
        if key:
            configuration["task"] = key
    return configuration


def _goal_in_text(result: str) -> dict[str, Any] | None:
    """Return the goal that the text of a result names, or None.

    An example of such a text is ``"BLEU-Score of 24 reached in 28848 seconds"``.
    """
    # The times follow "reached".
    before, reached, _ = result.partition(" reached")
    match: re.Match[str] | None = None
    for pattern in _GOAL_IN_RESULT:
        match = match or pattern.search(before)
    if not reached or match is None:
        return None
    named = match.groupdict()
    names = {"perplexity": "Perplexity", "loss": "Loss", "accuracy": f"Prec@{named.get('k') or 1}"}
    metric = names.get((named.get("metric") or "accuracy").lower(), "BLEU-Score")
    minimize = metric in ("Perplexity", "Loss")
    return GoalAim(f"val_global_{metric}", number(match["threshold"]), minimize).to_dict()


def _task_of(
    run: Mapping[str, Any], configuration: Mapping[str, Any], metrics: Metrics
) -> str | None:
    """Return the key of the task of a run of version 3.0 whose command is not recorded.

    Archives of several backends of one task have different names, but their metrics and the goal
    are those of one task. The key is None if the task is not clear.
    """
    sent = {name.partition(" @ ")[0] for name in metrics}
    if sent & set(_ALL_REDUCE_TIMES):
        return "0"
    goal = configuration.get("goal") or {}
    # Without a goal, every metric that the run sent may be that of its task.
    metrics_of_goal = sent
    if goal:
        metrics_of_goal = {goal["metric"]}
    fitting = []
    for task in TASKS.values():
        same_metric = f"val_global_{task.metric}" in metrics_of_goal
        same_threshold = not goal or goal.get("threshold") in (task.goal, task.light_goal)
        if task.has_goal and task.images and same_metric and same_threshold:
            fitting.append(task)
    words = set(re.split(r"[^a-z0-9]+", str(run.get("name")).lower()))
    for task in fitting:
        # "task1a", "resnet20", "cifar10": the words in the name of its folder.
        if words & ({*task.folder.split("_"), task.key} - {"small"}):
            return task.key
    metrics_of_tasks = list(map(operator.attrgetter("metric"), fitting))
    if metrics_of_tasks == ["Prec@1", "Prec@1"]:
        # Of the two, only the images have a fifth class, and only the logistic regression an F1
        # score.
        has_fifth = has_f1 = False
        for name in sent:
            has_fifth = has_fifth or name.endswith("Prec@5")
            has_f1 = has_f1 or name.endswith("F1-Score")
        if has_fifth == has_f1:
            return None
        if has_fifth:
            return "1a"
        return "2a"
    if len(fitting) != 1:
        return None
    return fitting[0].key


def _all_reduces_text(times: Sequence[Any], sizes: Any) -> str:
    """Return a sentence on the all-reduces of task 0 of version 3.0, which have no total time."""
    text = f"it measured {len(times)} all-reduces and has no training time"
    if not isinstance(sizes, list) or len(sizes) != len(times):
        return text
    pairs = []
    for size, time in zip(sizes, times, strict=True):
        elements, seconds = number(_value(size)), number(_value(time))
        if elements is not None and seconds is not None:
            pairs.append((elements, seconds))
    if not pairs:
        return text
    most, longest = max(pairs)
    return f"{text}; the longest mean time with {most:,.0f} elements is {longest:.4g} s"


def _first_of(metrics: Metrics, names: Sequence[str]) -> Any:
    """Return the entries of the first of some metrics that rank 0 sent; None if it sent none."""
    for name in names:
        if f"{name} @ 0" in metrics:
            return metrics[f"{name} @ 0"]
    return None


def _value(entry: Any) -> Any:
    # The file of a saved run may hold anything.
    if not isinstance(entry, Mapping):
        return None
    return entry.get("value")


def _latest(metrics: Metrics, name: str) -> Any:
    # The file of a saved run may hold anything.
    entries = metrics.get(name)
    if not isinstance(entries, list) or not entries:
        return None
    return _value(entries[-1])


def _times(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return total times by name, from the entry ``total_s`` or else from the other fields."""
    # A script may publish the report of publish_summary or the whole summary of its tracker.
    times = summary.get("total_s")
    if isinstance(times, dict):
        return times
    names = ("train", "compute", "communication", "metrics", "preprocess", "validation", "wall")
    totals = {}
    for name in names:
        totals[name] = summary.get(f"{name}_s")
    totals["exposed_communication"] = summary.get("communication_exposed_s")
    return totals


def _named_phases(times: Mapping[str, Any]) -> dict[str, float]:
    """Return the phases that have a time; the phase "data" is called "preprocess" in summaries."""
    phases = {}
    for phase in PHASES:
        phases[phase] = times.get(phase, times.get(TRACKER_PHASES.get(phase, phase)))
    return known_numbers(phases)


def _phases(
    at_goal: Any, times: Mapping[str, Any], steps: Mapping[str, float], result: str
) -> dict[str, float]:
    """Return the time of each phase from the best source.

    The sources are the goal, the summary, the steps and the text of the goal, best first.
    """
    for source in (at_goal, times):
        if isinstance(source, Mapping):
            phases = _named_phases(source)
            if phases:
                return phases
    if not steps:
        return _named_phases(dict(_PHASE_IN_RESULT.findall(result.lower())))
    # Without total times, the times of the steps add up to those of the phases.
    sums: dict[str, float] = {}
    for step, value in steps.items():
        sums[STEPS[step]] = sums.get(STEPS[step], 0.0) + value
    # In the order of the phases.
    return {phase: sums[phase] for phase in PHASES if phase in sums}


def _steps(metrics: Metrics, prefix: str) -> dict[str, float]:
    seconds = {}
    for step in STEPS:
        seconds[step] = _latest(metrics, f"{prefix}_{step} @ 0")
    return known_numbers(seconds)


def _time_to_goal(
    reports: Sequence[Mapping[str, Any]], result: str, metrics: Metrics
) -> float | None:
    candidates = [report.get("time_to_goal_s") for report in reports]
    # A goal of the user may return only the number of seconds as its text.
    candidates.append(result)
    in_text = _TIME_IN_RESULT.search(result)
    if in_text:
        candidates.append(in_text[1])
    candidates.append(_latest(metrics, "TotalCumulativeTrainTime @ 0"))
    return number(*candidates)


def _workers(run: Mapping[str, Any], summary: Mapping[str, Any], metrics: Metrics) -> int | None:
    """Find the number of workers.

    The name of the run is not used, because ``exp-2024`` need not have 2024 workers.
    """
    for value in (run.get("num_workers"), summary.get("workers")):
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1:
            return int(value)
    # If there is only one rank, the number of workers stays unknown, because rank 0 may be the only
    # one that sends.
    ranks = count_ranks(metrics)
    if ranks <= 1:
        return None
    return ranks


def count_ranks(metrics: Metrics) -> int:
    """Return the number of ranks that sent metrics, whose names end with the rank.

    Example:
        >>> count_ranks({"cum_agg @ 0": [], "cum_agg @ 1": [], "train_loss @ 1": []})
        2
    """
    ranks = set()
    for metric in metrics:
        match = re.search(r" @ (\d+)$", metric)
        if match:
            ranks.add(match[1])
    return len(ranks)


def number(*values: object) -> float | None:
    """Return the first finite number among values, which may be texts; ``None`` without one.

    Example:
        >>> number(None, "nan", "2.5")
        2.5
    """
    for value in values:
        # In Python a bool is an int, but it is not a measurement.
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                converted = float(value)
            # float() cannot convert an integer of hundreds of digits.
            except (ValueError, OverflowError):
                continue
            if math.isfinite(converted):
                return converted
    return None


def known_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the entries that are finite numbers, converted by :func:`number`."""
    numbers = {}
    for name, value in values.items():
        converted = number(value)
        if converted is not None:
            numbers[name] = converted
    return numbers


def _integer(value: object) -> int | None:
    converted = number(value)
    if converted is None:
        return None
    return int(converted)
