"""Write the captions of figures: task, goal, machine, number of runs, and runs that missed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlbench_core.comparison.group_repeats import Group, plural
from mlbench_core.run_terms import goal_text

__all__ = ["INTERVAL", "caption", "name_of", "not_drawn", "shared_goal", "subtitle"]

_T = TypeVar("_T")

INTERVAL = "Error bars: 95 % confidence interval of the geometric mean (Student's t)"
"""Description of the error bars of a mean time."""


def caption(groups: Sequence[Group]) -> str:
    """Describe a measurement: task, goal, machine, number of runs, and the runs that missed.

    Args:
        groups: The groups in the figure or table.

    Returns:
        Sentences in one line.

    Example:
        >>> from mlbench_core.comparison.group_repeats import pool
        >>> from mlbench_core.comparison.result_record import RunRecord
        >>> common = {"task": "1a", "workers": 2}
        >>> runs = [RunRecord(f"a-{n}", configuration={**common, "seed": n}) for n in (1, 2)]
        >>> caption(pool(runs))
        'Task 1a. No goal recorded. Machine not recorded. n = 2 runs.'
    """
    counts = set()
    lost = []
    for group in groups:
        counts.add(len(group.records))
        if group.missed:
            # All repeats are reported, also those that missed the goal.
            lost.append(_with_misses(group))
    noun = "runs"
    if counts == {1}:
        noun = "run"
    runs = f"n = {_range(counts)} {noun}"
    if len(groups) > 1:
        runs += " of each configuration"
    sentences = [_workload(groups), _goal(groups), _machine(groups), runs]
    if lost:
        sentences.append(f"Missed the goal: {', '.join(lost)}")
    return ". ".join(sentences) + "."


def subtitle(groups: Sequence[Group], short: bool = False) -> str:
    """Return task and goal in one line, for the place below a title.

    Args:
        groups: The groups in the figure.
        short: True to leave out the data set, the backend and other settings that all groups share.
    """
    workload, goal = _workload(groups), shared_goal(groups)
    if short:
        workload = workload.partition(" (")[0]
    if goal:
        return f"{workload}, goal: {goal_text(goal)}"
    return workload


def shared_goal(groups: Sequence[Group]) -> Mapping[str, Any] | None:
    """Return the goal that all groups share; None if there is none, or it has no metric."""
    goal = _shared(_configurations(groups), "goal")
    if not goal or goal.get("metric") is None:
        return None
    return goal


def error_bars(cut: bool, interval: str = INTERVAL) -> str:
    """Return a sentence on error bars.

    Args:
        cut: True if an interval leaves the axes.
        interval: Description of the intervals.
    """
    if cut:
        interval += "; an interval that leaves the axes is cut"
    return f"{interval}."


def name_of(group: Group) -> str:
    """Return a group's label and its number of workers, for a list in a sentence."""
    return f"{group.label} with {plural(group.workers, 'worker')}"


def _with_misses(group: Group) -> str:
    """Return the name of a group with the number of its misses, if it has one."""
    name = name_of(group)
    if group.missed:
        name += f" ({group.missed} of {len(group.records)})"
    return name


def not_drawn(groups: Sequence[Group], shown: Iterable[Group]) -> str:
    """Return a sentence with the groups that a figure of means leaves out.

    It begins with a space, and is empty if the figure has all groups.

    Args:
        groups: All groups.
        shown: Those in the figure.
    """
    names = list(map(_with_misses, not_among(groups, shown)))
    if not names:
        return ""
    # A mean over the other runs would make a group look better for its misses.
    return f" Not drawn, because a run missed the goal or no time is known: {', '.join(names)}."


def not_among(items: Iterable[_T], others: Iterable[_T]) -> list[_T]:
    """Return the groups, cells or runs that are not among some others.

    They are compared by identity, because they hold dictionaries and have no hash.
    """
    ids = set(map(id, others))
    return [item for item in items if id(item) not in ids]


def _configurations(groups: Sequence[Group]) -> list[Mapping[str, Any]]:
    return [group.configuration for group in groups]


def _shared(mappings: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Return the value of an entry that all mappings have in common; None if they differ."""
    values = [mapping.get(name) for mapping in mappings]
    if values and values.count(values[0]) == len(values):
        return values[0]
    return None


def _workload(groups: Sequence[Group]) -> str:
    configurations = _configurations(groups)
    programs = sorted(set(map(_program, configurations)))
    tasks = [configuration.get("task") for configuration in configurations]
    if all(tasks):
        keys = sorted(set(map(str, tasks)))
        noun = "Task"
        if len(keys) > 1:
            noun = "Tasks"
        text = f"{noun} {', '.join(keys)}"
    elif len(programs) == 1:
        text = programs[0]
    else:
        text = f"{len(programs)} programs"
    extras = []
    for name in ("dataset", "light", "backend", "network"):
        # Settings in which groups differ are in their labels.
        value = _shared(configurations, name)
        if value and name == "light":
            extras.append("light goal")
        elif value:
            extras.append(str(value))
    if extras:
        text += f" ({', '.join(extras)})"
    return text


def _program(configuration: Mapping[str, Any]) -> str:
    if configuration.get("task"):
        return f"Task {configuration['task']}"
    program = str(configuration.get("program") or configuration.get("series") or "unknown program")
    # "python -u /long/path/train.py" is shown as "train.py".
    return Path(program.rsplit(" ", 1)[-1]).name


def _goal(groups: Sequence[Group]) -> str:
    configurations = _configurations(groups)
    goal = _shared(configurations, "goal")
    if goal:
        return f"Goal: {goal_text(goal)}"
    for configuration in configurations:
        if configuration.get("goal"):
            return "Several goals"
    # A run without a result folder may have a goal that is not known.
    if all("goal" in configuration for configuration in configurations):
        return "No goal"
    return "No goal recorded"


def _machine(groups: Sequence[Group]) -> str:
    machines = [group.machine for group in groups]
    if not any(machines):
        return "Machine not recorded"
    cpu, gpu = _shared(machines, "cpu"), _shared(machines, "gpu")
    cores = _shared(machines, "cores")
    gpus, hosts = set(), set()
    for machine in machines:
        gpus.add(machine.get("gpus") or 0)
        hosts.add(machine.get("hosts") or 1)
    if not cpu and not gpu:
        return "Several machines"
    parts = [str(cpu or "several processors")]
    if cores:
        parts.append(plural(cores, "core"))
    if gpu and max(gpus):
        parts.append(f"{_range(gpus)} x {gpu}")
    if max(hosts) > 1:
        parts.append(f"{_range(hosts)} hosts")
    return f"Machine: {', '.join(parts)}"


def _range(numbers: Collection[int]) -> str:
    low, high = min(numbers), max(numbers)
    if low == high:
        return str(low)
    return f"{low} to {high}"
