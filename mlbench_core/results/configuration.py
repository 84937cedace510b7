"""Describe the program of a run and its settings; repeats differ only in their seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Configuration"]


@dataclass(frozen=True)
class Configuration:
    """The program of a run and its settings. None means unknown or not given.

    Attributes:
        workers: Number of workers.
        task: Key of the benchmark task, such as ``"1a"``; None for a script of the user.
        program: File name of the script.
        dataset: The data set.
        preset: The preset of the task's model, if it has several.
        algorithm: The optimizer, or the way in which workers agree.
        options: The options of the command line that differ from their defaults, by name.
        backend: Communication backend.
        threads: Threads of each worker.
        device: ``"cpu"`` or ``"cuda"``.
        network: The emulated network, as text.
        light: True if the light goal ends the run.
        changed: Names of the hyper-parameters that differ from the task's own.
        goal: ``metric``, ``threshold`` and ``minimize`` of the goal, see
            :meth:`~mlbench_core.run_terms.GoalAim.to_dict`.
        seed: The seed of the run.
        unit: One of :data:`~mlbench_core.run_terms.UNITS`: ``"steps"`` if epochs mean nothing.

    Example:
        >>> Configuration(workers=2, task="1a", changed=("batch_size",)).to_dict()["division"]
        'open'
    """

    workers: int
    task: str | None = None
    program: str | None = None
    dataset: str | None = None
    preset: str | None = None
    algorithm: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    backend: str | None = None
    threads: int | None = None
    device: str = "cpu"
    network: str | None = None
    light: bool = False
    changed: tuple[str, ...] = ()
    goal: Mapping[str, Any] | None = None
    seed: int | None = None
    unit: str = "epochs"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the ``division`` as plain containers that can be written as JSON.

        The division is ``"closed"`` for a task with its own hyper-parameters, and ``"open"``
        otherwise. A script of the user is always in the open division.
        """
        division = "open"
        if self.task is not None and not self.changed:
            division = "closed"
        fields = {
            **asdict(self),
            "options": dict(self.options),
            "changed": sorted(self.changed),
            "division": division,
        }
        # Results of earlier versions lack it, and it must not distinguish them from others.
        if self.unit == "epochs":
            del fields["unit"]
        return fields
