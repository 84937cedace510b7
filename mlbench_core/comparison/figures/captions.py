"""Write the captions of figures: task, goal, machine, number of runs, and the runs that missed their goal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlbench_core.comparison.pool import Group, plural
from mlbench_core.run_terms import goal_text

__all__ = ["INTERVAL", "caption", "name_of", "not_drawn", "shared_goal", "subtitle"]

INTERVAL = "Error bars: 95 % confidence interval of the geometric mean (Student's t)"
"""Description of the error bars of a mean time."""


def caption(groups: Sequence[Group]) -> str:
    """Describe a measurement: task, goal, machine, number of runs, and the runs that missed their goal.

    Args:
        groups: The groups in the figure or table.

    Returns:
        Sentences in one line.

    Example:
        >>> from mlbench_core.comparison.pool import pool
        >>> from mlbench_core.comparison.record import RunRecord
        >>> runs = [RunRecord(f"a-{seed}", configuration={"task": "1a", "workers": 2, "seed": seed}) for seed in (1, 2)]
        >>> caption(pool(runs))
        'Task 1a. No goal recorded. Machine not recorded. n = 2 runs.'
    """
    counts = {len(group.records) for group in groups}
    runs = f"n = {_range(counts)} {'run' if counts == {1} else 'runs'}"
    if len(groups) > 1:
        runs += " of each configuration"
    sentences = [_workload(groups), _goal(groups), _machine(groups), runs]
    lost = [
        f"{name_of(group)} ({missed} of {len(group.records)})"
        for group in groups
        if (missed := group.missed)
    ]
    if lost:
        sentences.append(f"Missed the goal: {', '.join(lost)}")
    return " ".join(f"{sentence}." for sentence in sentences)


def subtitle(groups: Sequence[Group], short: bool = False) -> str:
    """Return task and goal in one line, for the place below a title.

    Args:
        groups: The groups in the figure.
        short: True to leave out the data set, the backend and other settings that all groups share.
    """
    workload, goal = _workload(groups), shared_goal(groups)
    workload = workload.partition(" (")[0] if short else workload
    return f"{workload}, goal: {goal_text(goal)}" if goal else workload


def shared_goal(groups: Sequence[Group]) -> Mapping[str, Any] | None:
    """Return the goal that all groups share; None if they have no goal, several, or one without a metric."""
    goal = _shared(group.configuration.get("goal") for group in groups)
    return goal if goal and goal.get("metric") is not None else None


def name_of(group: Group) -> str:
    """Return a group's label and its number of workers, for a list in a sentence."""
    return f"{group.label} with {plural(group.workers, 'worker')}"


def not_drawn(groups: Sequence[Group], shown: Iterable[Group]) -> str:
    """Return a sentence with the groups that a figure of means leaves out, after a space; empty if there are none.

    Args:
        groups: All groups.
        shown: Those in the figure.
    """
    kept = list(map(id, shown))
    names = [
        name_of(group) + (f" ({group.missed} of {len(group.records)})" if group.missed else "")
        for group in groups
        if id(group) not in kept
    ]
    return (
        f" Not drawn, because a run missed the goal or no time is known: {', '.join(names)}."
        if names
        else ""
    )


def _shared(values: Iterable[Any]) -> Any:
    """Return the value that all have in common; None if they differ."""
    found = list(values)
    return found[0] if found and all(value == found[0] for value in found) else None


def _workload(groups: Sequence[Group]) -> str:
    def shared(name: str) -> Any:
        return _shared(group.configuration.get(name) for group in groups)

    programs = sorted({_program(group.configuration) for group in groups})
    text = programs[0] if len(programs) == 1 else f"{len(programs)} programs"
    if all(group.configuration.get("task") for group in groups):
        tasks = sorted({str(group.configuration["task"]) for group in groups})
        text = f"Task{'s' * (len(tasks) > 1)} {', '.join(tasks)}"
    extras = [
        shared("dataset"),
        "light goal" if shared("light") else None,
        shared("backend"),
        shared("network"),
    ]
    extras = [str(extra) for extra in extras if extra]
    return f"{text} ({', '.join(extras)})" if extras else text


def _program(configuration: Mapping[str, Any]) -> str:
    if configuration.get("task"):
        return f"Task {configuration['task']}"
    program = str(configuration.get("program") or configuration.get("series") or "unknown program")
    # "python -u /long/path/train.py" is shown as "train.py".
    return Path(program.rsplit(" ", 1)[-1]).name


def _goal(groups: Sequence[Group]) -> str:
    goal = shared_goal(groups)
    if goal:
        return f"Goal: {goal_text(goal)}"
    goals = [goal for group in groups if (goal := group.configuration.get("goal"))]
    if goals:
        return (
            f"Goal: {goal_text(goals[0])}"
            if _shared(goals) and len(goals) == len(groups)
            else "Several goals"
        )
    known = all("goal" in group.configuration for group in groups)
    return "No goal" if known else "No goal recorded"


def _machine(groups: Sequence[Group]) -> str:
    machines = [group.records[0].machine for group in groups]
    if not any(machines):
        return "Machine not recorded"
    cpu, gpu = (_shared(machine.get(name) for machine in machines) for name in ("cpu", "gpu"))
    cores = _shared(machine.get("cores") for machine in machines)
    gpus = {machine.get("gpus") or 0 for machine in machines}
    hosts = {machine.get("hosts") or 1 for machine in machines}
    if not cpu and not gpu:
        return "Several machines"
    processor = f"{cpu or 'several processors'}" + (f", {plural(cores, 'core')}" if cores else "")
    parts = [processor]
    if gpu and max(gpus):
        parts.append(f"{_range(gpus)} x {gpu}")
    if max(hosts) > 1:
        parts.append(f"{_range(hosts)} hosts")
    return f"Machine: {', '.join(parts)}"


def _range(numbers: Iterable[int]) -> str:
    low, high = min(numbers := list(numbers)), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
