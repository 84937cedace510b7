"""Describe runs that are started together: one for each number of workers and each repeat.

``mlbench run`` and the start form of the dashboard name and seed their runs by these rules.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlbench_core.tasks import Task

__all__ = [
    "FIRST_SEED",
    "SEED",
    "RunSeries",
    "check_backend",
    "check_placeholders",
    "parse_workers",
]

SEED = "{seed}"
"""The placeholder in a command for the seed of the run."""

FIRST_SEED = 42
"""The seed of every task without ``--seed``."""

_PLACEHOLDERS = ("{run_id}", "{rank}", "{hosts}", "{backend}", SEED)
# Not the ${NAME} of a shell, and not the braces of JSON or awk.
_PLACEHOLDER = re.compile(r"(?<!\$)\{[A-Za-z_]\w*\}")

# int() of thousands of digits is slow, and it also reads "1_0" and digits of other scripts.
_WORKERS = re.compile(r"(?=0*[1-9])[0-9]{1,9}")

# The fields of a request that hold a command of the user.
_COMMANDS = ("command", "custom_image_command")


def parse_workers(text: str) -> tuple[int, ...]:
    """Return the numbers of workers in a text, each one once.

    Args:
        text: Whole numbers from 1, with blanks or commas between them.

    Raises:
        ValueError: The text is something else.

    Example:
        >>> parse_workers("1 2, 4 2")
        (1, 2, 4)
    """
    words = text.replace(",", " ").split()
    if not words or not all(map(_WORKERS.fullmatch, words)):
        raise ValueError(f"must be whole numbers from 1, not {text[:80]!r}: give for example 1 2 4")
    # A number that is given twice would start two runs of the same name.
    return tuple(dict.fromkeys(map(int, words)))


def check_backend(backend: str, task: Task | None, gpu: bool) -> None:
    """Refuse a communication backend on which the workers would fail.

    Args:
        backend: The name of the backend.
        task: The task, or None for a command of the user.
        gpu: True if each worker gets a GPU.

    Raises:
        ValueError: The task or the computer of the workers cannot use the backend.
    """
    if task is not None and backend not in task.backends:
        allowed = ", ".join(task.backends)
        raise ValueError(
            f"the backend of task {task.key} must be one of {allowed}, not {backend!r}"
        )
    if backend == "nccl" and not gpu:
        raise ValueError("nccl needs GPUs: give each worker a GPU (--gpu), or use the backend gloo")


def check_placeholders(command: str) -> None:
    """Refuse a command with a placeholder that nothing fills in.

    Args:
        command: A command line of the user.

    Raises:
        ValueError: It has an unknown ``{name}``; the message lists the known ones.

    Example:
        >>> check_placeholders("train.py --rank {rank}")
        >>> check_placeholders("train.py --workers {workers}")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: the placeholder must be one of {run_id}, {rank}, ..., not '{workers}'
    """
    for placeholder in _PLACEHOLDER.findall(command):
        if placeholder not in _PLACEHOLDERS:
            allowed = ", ".join(_PLACEHOLDERS)
            raise ValueError(f"the placeholder must be one of {allowed}, not {placeholder[:80]!r}")


@dataclass(frozen=True)
class RunSeries:
    """Runs that are started together.

    Args:
        name: The beginning of their names.
        num_workers: The numbers of workers, each one once.
        request: The body of ``POST /api/runs/`` without ``name`` and ``num_workers``.
        task: The task that the request starts, also by an image; None for a command of the user.
        repeats: Number of runs for each number of workers, with different seeds; None for one
            without a seed.
        seed: Seed of the first repeat of each number of workers; each further repeat gets the next
            one. None is 42.

    Example:
        >>> series = RunSeries("demo", (1, 2), {"command": "train.py --seed {seed}"}, repeats=2)
        >>> [(request["name"], request["command"]) for request in series.requests()][1:3]
        [('demo-2-r1', 'train.py --seed 42'), ('demo-1-r2', 'train.py --seed 43')]
    """

    name: str
    num_workers: Sequence[int]
    request: Mapping[str, Any]
    task: Task | None = None
    repeats: int | None = None
    seed: int | None = None

    @property
    def seed_option(self) -> str | None:
        """Return the field that asks for seeds, ``"repeats"`` or ``"seed"``, or None."""
        if self.repeats is not None:
            return "repeats"
        if self.seed is not None:
            return "seed"
        return None

    def names(self) -> list[tuple[str, int]]:
        """Return the name and the number of workers of each run."""
        ends = [""]
        if self.repeats is not None:
            ends = [f"-r{repeat + 1}" for repeat in range(self.repeats)]
        names = []
        # Seed by seed, so that a slow drift of the machine changes the runs of all numbers of
        # workers alike.
        for end in ends:
            for workers in self.num_workers:
                names.append((f"{self.name}-{workers}{end}", workers))
        return names

    def check_seeds(self) -> None:
        """Refuse seeds that the runs would not use.

        Raises:
            ValueError: All runs would be the same one, or the arguments hold another seed.
        """
        if self.seed_option is None:
            return
        option = f"--{self.seed_option}"
        for word in self.request.get("arguments", ()):
            if word == "--seed" or word.startswith("--seed="):
                raise ValueError(
                    f"--seed among the arguments of the script cannot be given with {option}: "
                    "each run gets its own seed"
                )
        if self.task is not None and not self.task.has_goal:
            raise ValueError(
                f"{option} cannot be given with task {self.task.key}: "
                "it only measures, and uses no seed"
            )
        if self.task is None and not self._has_seed_placeholder():
            raise ValueError(
                f"{option} needs {SEED} in the command, for example "
                f"'train.py --seed {SEED}': otherwise all repeats are the same run"
            )

    def requests(self) -> list[dict[str, Any]]:
        """Return the bodies of ``POST /api/runs/``, one for each run.

        Several runs have the name of the series as their tag, so the dashboard shows one group.
        """
        is_seeded = self.seed_option is not None or self._has_seed_placeholder()
        first = FIRST_SEED if self.seed is None else self.seed
        requests = []
        names = self.names()
        tags = {"tags": [self.name]} if len(names) > 1 else {}
        for index, (name, workers) in enumerate(names):
            seed = None
            if is_seeded:
                # The same seeds for all numbers of workers, so that their times can be compared in
                # pairs.
                seed = first + index // len(self.num_workers)
            request = {**self._request(seed), "name": name, "num_workers": workers, **tags}
            requests.append(request)
        return requests

    def _has_seed_placeholder(self) -> bool:
        return any(SEED in (self.request.get(field) or "") for field in _COMMANDS)

    def _request(self, seed: int | None) -> dict[str, Any]:
        request = dict(self.request)
        if seed is None:
            return request
        if self.task is not None:
            return {**request, "arguments": [*request.get("arguments", ()), "--seed", str(seed)]}
        for field in _COMMANDS:
            if request.get(field):
                words = shlex.split(request[field])
                request[field] = shlex.join(word.replace(SEED, str(seed)) for word in words)
        return request
