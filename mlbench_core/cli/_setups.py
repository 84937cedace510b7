"""The setup of a run: everything that must be equal before the results of two runs are compared."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbench_core.tasks import TASKS

__all__ = ["Setup", "labels"]

_NOT_LIMITED = 1000.0  # the default of 3.0, which no launcher enforces
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
            workers: Its number of workers, which gives the series if the command is unknown.
        """
        job = run.get("job_metadata")
        command = run.get("command") or (job.get("command") if isinstance(job, Mapping) else None)
        backend = _text(run.get("backend"))
        if not isinstance(command, str) or not command.strip():
            # 'mlbench run NAME 1 2 4' names its runs NAME-1, NAME-2 and NAME-4: one series.
            return cls(series=str(run.get("name") or "run").removesuffix(f"-{workers}"), backend=backend)
        program, items = _split(command)
        image = _text(run.get("image"))
        return cls(
            program=program,
            arguments=tuple(item for item in items if item not in ("--gpu", "--light")),
            image=None if program.startswith("task ") or image == "custom_image" else image,
            backend=backend,
            gpu=_flag(run.get("gpu_enabled"), "--gpu" in items),
            light=_flag(run.get("light_target"), "--light" in items),
            num_cpus=_number(run.get("num_cpus")),
            max_bandwidth=_number(run.get("max_bandwidth")),
        )

    def parts(self) -> tuple[str, ...]:
        """Describe the setup with one text for each property in which two setups can differ."""
        program = self.program or ""
        known = (
            self.series,
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
        Labels, all different. A setup without a part of its own, or the only setup, is called ``"default"``.

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
        # The quotes are not balanced.
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
    return _program(words, start), items


def _program(words: Sequence[str], script: int) -> str:
    # A task is recognized by its folder, because the rest of the path depends on the installation.
    path = Path(words[script])
    task = next((task for task in TASKS.values() if (task.folder, "main.py") == (path.parent.name, path.name)), None)
    return f"task {task.key}" if task else " ".join(words[: script + 1])


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _flag(value: object, in_command: bool) -> bool | None:
    return True if in_command else (value if isinstance(value, bool) else None)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
