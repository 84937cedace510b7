"""Describe a run of a task for its result folder: its configuration and its environment.

This module imports no framework.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from mlbench_core.distributed.worker_messages import Workers
from mlbench_core.results.configuration import Configuration
from mlbench_core.results.environment import describe_environment
from mlbench_core.run_terms import GoalAim
from mlbench_core.tasks import TASKS
from mlbench_core.tracking.run_folder import FREE_OPTIONS, RunFolder

__all__ = ["RunFolder", "Workers", "task_configuration", "task_environment"]

# Arguments that are not settings of the training, or have their own field in the configuration.
_NOT_OPTIONS = frozenset(
    {
        "run_id", "root_dataset", "root_checkpoint", "root_output", "data", "rank", "hosts",
        "timeout", "resume", "checkpoint", "no_checkpoint", "validation_only", "gpu", "backend",
        "light_target", "seed", "dataset", "preset", "optimizer", "sink",
        # A part of the configuration's goal.
        "goal_after",
    }
)  # fmt: skip


def task_environment(args: argparse.Namespace, dataset_dir: str) -> dict[str, Any]:
    """Return the content of ``environment.json`` for a task with this command line.

    Args:
        args: The command line, as :func:`~mlbench_core.controlflow.task_arguments.task_main` read
            it.
        dataset_dir: Folder of the data, unless the command line names another one.
    """
    seed = getattr(args, "seed", None)
    folder = Path(getattr(args, "data", None) or dataset_dir)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    seeds = {}
    if seed is not None:
        seeds["seed"] = seed
    return describe_environment(seeds=seeds, data_files=files, program=Path(sys.argv[0]))


def task_configuration(
    args: argparse.Namespace, uid: str, workers: int, backend: str, goal: Any, threads: int
) -> Configuration:
    """Return the configuration of a task with this command line.

    Args:
        args: The command line, as :func:`~mlbench_core.controlflow.task_arguments.task_main` read
            it.
        uid: The task's name in paths, such as ``"task1a"``.
        workers: Number of workers.
        backend: Communication backend.
        goal: The goal of the run; None if it has none.
        threads: Threads of each worker.
    """
    task = TASKS.get(uid.removeprefix("task"))
    key: str | None = None
    dataset = getattr(args, "dataset", None)
    if task is not None:
        key, dataset = task.key, dataset or task.dataset
    options = {name: value for name, value in args.options.items() if name not in _NOT_OPTIONS}
    aim = None
    if goal is not None:
        aim = GoalAim.of(goal).to_dict()
    device = "cpu"
    if args.gpu:
        device = "cuda"
    return Configuration(
        workers=workers,
        task=key,
        program=Path(sys.argv[0]).name or None,
        dataset=dataset or None,
        preset=getattr(args, "preset", None),
        algorithm=getattr(args, "optimizer", None),
        options=options,
        backend=backend,
        threads=threads,
        device=device,
        network=os.environ.get("MLBENCH_NETWORK") or None,
        light=args.light_target,
        changed=tuple(sorted(set(options) - FREE_OPTIONS)),
        goal=aim,
        seed=getattr(args, "seed", None),
    )
