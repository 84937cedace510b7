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
    known = [TASKS[key] for key in sorted(TASKS)]
    if as_json:
        print_json([dataclasses.asdict(task) for task in known])
        return
    sign = {True: "<=", False: ">="}
    rows = [
        (
            task.key,
            task.title,
            task.model,
            task.data,
            GoalAim(task.metric, task.goal, task.minimize).text if task.has_goal else "-",
            f"{sign[task.minimize]} {task.light_goal:g}" if task.has_goal else "-",
            task.max_epochs or "-",
            ", ".join(task.backends),
        )
        for task in known
    ]
    print_table(
        ("TASK", "TITLE", "MODEL", "DATA", "GOAL", "LIGHT", "EPOCHS", "BACKENDS"), rows, right=(6,)
    )
