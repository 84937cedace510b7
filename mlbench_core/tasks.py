"""The benchmark tasks as data: what ``mlbench tasks`` lists and ``mlbench run --task`` starts.

Targets and budgets belong to a task's specification, not to its training script. This module imports no framework.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlbench_core.errors import ConfigurationError

__all__ = ["TASKS", "Task", "get_task"]


@dataclass(frozen=True)
class Task:
    """One benchmark task.

    Attributes:
        key: Short name, for example ``"1a"``.
        folder: Folder below ``benchmarks/`` that holds its ``main.py``.
        title: One line for people.
        model: The model.
        data: The data set.
        metric: Name of the validation metric that the goal watches.
        goal: Threshold of the goal.
        light_goal: Threshold of the light goal, for a quick comparison.
        minimize: Whether smaller values of the metric are better.
        max_epochs: Budget in epochs.
        backends: Communication backends it runs on, the default first.
        stand_ins: Goals of small data sets that stand in for the task's own: name to (goal, light goal). Reaching one
            is no result of the task.
    """

    key: str
    folder: str
    title: str
    model: str
    data: str
    metric: str
    goal: float
    light_goal: float
    minimize: bool
    max_epochs: int
    backends: tuple[str, ...] = ("gloo", "nccl", "mpi")
    stand_ins: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def dataset(self) -> str:
        """The task's own data set as an option takes it, for example ``"cifar10"``."""
        return self.data.lower().replace("-", "")

    def goal_on(self, dataset: str | None, light: bool = False) -> float:
        """The threshold of the goal on a data set.

        Args:
            dataset: Name of the task's own data set or of a stand-in; None is the task's own.
            light: The light goal.

        Raises:
            ValueError: The task has no goal on that data set; the message lists the known ones.

        Example:
            >>> get_task("1a").goal_on("digits")
            95.0
        """
        goals = {self.dataset: (self.goal, self.light_goal), **self.stand_ins}
        if dataset is not None and dataset not in goals:
            raise ValueError(f"task {self.key} has no goal on {dataset!r}; known: {', '.join(sorted(goals))}")
        return goals[dataset or self.dataset][1 if light else 0]

    @property
    def script(self) -> Path:
        """Absolute path of the task's ``main.py``.

        Raises:
            ConfigurationError: The reference implementations are not installed.
        """
        found = importlib.util.find_spec("mlbench_benchmarks")
        roots = [Path(p) for p in (found.submodule_search_locations or ())] if found else []
        roots.append(Path(__file__).resolve().parent.parent / "benchmarks")
        for root in roots:
            script = root / self.folder / "main.py"
            if script.is_file():
                return script.resolve()
        raise ConfigurationError(
            f"task {self.key}: no {self.folder}/main.py below {', '.join(map(str, roots))}; "
            "reinstall mlbench-core or run from a checkout"
        )

    def command(self, *arguments: str) -> str:
        """The shell command of one worker, as the master's launchers take it.

        Args:
            arguments: Further arguments of the script, already quoted.

        Returns:
            A command with the placeholders ``{run_id}`` and ``{backend}``; rank and hosts come from torchrun.
        """
        import shlex

        return " ".join([shlex.quote(str(self.script)), "--run_id", "{run_id}", "--backend", "{backend}", *arguments])


TASKS: dict[str, Task] = {
    task.key: task
    for task in (
        Task(
            key="1a",
            folder="task1a_resnet20_cifar10",
            title="Image classification",
            model="ResNet-20 (v1)",
            data="CIFAR-10",
            metric="Prec@1",
            goal=80.0,
            light_goal=70.0,
            minimize=False,
            max_epochs=164,
            stand_ins={"digits": (95.0, 90.0), "mnist": (98.0, 95.0)},
        ),
    )
}


def get_task(key: str) -> Task:
    """Look a task up by its key or its folder, with or without the word "task".

    Args:
        key: For example ``"1a"``, ``"task1a"`` or ``"task1a_resnet20_cifar10"``.

    Returns:
        The task.

    Raises:
        ValueError: There is no such task; the message lists the known ones.

    Example:
        >>> get_task("task1a").model
        'ResNet-20 (v1)'
    """
    wanted = key.lower()
    for task in TASKS.values():
        if wanted in (task.key, f"task{task.key}", task.folder):
            return task
    raise ValueError(f"unknown task {key!r}; known: {', '.join(sorted(TASKS))}")
