"""The benchmark tasks as data: what ``mlbench tasks`` lists and ``mlbench run --task`` starts.

Targets and budgets belong to a task's specification, not to its training script. This module imports no framework.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
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
