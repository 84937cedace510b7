"""``mlbench tasks``: the benchmark tasks and their goals."""

from __future__ import annotations

import dataclasses

import click

from mlbench_cli._output import json_option, print_json, print_table
from mlbench_core.run_terms import GoalAim
from mlbench_core.tasks import TASKS

__all__ = ["tasks"]


@click.command()
@json_option
def tasks(as_json: bool) -> None:
    """List the benchmark tasks with their goals."""
    ordered = [TASKS[key] for key in sorted(TASKS)]
    if as_json:
        print_json(list(map(dataclasses.asdict, ordered)))
        return
    rows = []
    for task in ordered:
        # A task that only measures has no goal.
        goal = light = "-"
        if task.has_goal:
            goal = GoalAim(task.metric, task.goal, task.minimize).text
            light = f"{'<=' if task.minimize else '>='} {task.light_goal:g}"
        row = (task.key, task.title, task.model, task.data, goal, light)
        rows.append((*row, task.max_epochs or "-", ", ".join(task.backends)))
    header = ("TASK", "TITLE", "MODEL", "DATA", "GOAL", "LIGHT", "EPOCHS", "BACKENDS")
    print_table(header, rows, right=(6,))
