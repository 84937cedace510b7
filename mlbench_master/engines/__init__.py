"""Engines, which start, watch and stop the workers of a run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mlbench_core.errors import ConfigurationError
from mlbench_master.engines.interface import Engine, EngineError, Job, JobStatus, LogPage

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "ENGINES",
    "ENTRY_POINTS",
    "Engine",
    "EngineError",
    "Job",
    "JobStatus",
    "LogPage",
    "engine_names",
    "make_engine",
]

_CLASSES = {
    "local": "local.engine:LocalEngine",
    "hosts": "hosts.engine:HostsEngine",
    "kubernetes": "kubernetes.engine:KubernetesEngine",
    "slurm": "slurm.engine:SlurmEngine",
}

ENGINES = tuple(_CLASSES)
"""The names of the engines of this package."""

ENTRY_POINTS = "mlbench.engines"
"""The group of entry points for engines of other packages.

The name of an entry point is the name of the engine. It leads to a function that gets the folder
for the folders of runs and returns an :class:`Engine`. """


def engine_names() -> tuple[str, ...]:
    """Return the names of all engines, those of other packages included."""
    others = {entry.name for entry in _entry_points()} - set(ENGINES)
    return (*ENGINES, *sorted(others))


def make_engine(name: str, data_dir: Path) -> Engine:
    """Make an engine by its name.

    Args:
        name: One of :func:`engine_names`.
        data_dir: Folder in which it keeps logs and states.

    Returns:
        The engine.

    Raises:
        ValueError: No engine has this name.
        ConfigurationError: The engine cannot be used, for example because Slurm is missing.
    """
    folder = data_dir / "runs"
    if name in _CLASSES:
        # Imported only when used: each engine needs other packages.
        module_name, _, class_name = _CLASSES[name].partition(":")
        module = import_module(f"mlbench_master.engines.{module_name}")
        engine: Engine = getattr(module, class_name)(folder)
        return engine
    for entry in _entry_points():
        if entry.name == name:
            made = entry.load()(folder)
            if not isinstance(made, Engine):
                raise ConfigurationError(
                    f"the entry point {name!r} of {ENTRY_POINTS} must return an Engine, not "
                    f"{type(made).__name__}"
                )
            return made
    raise ValueError(f"unknown engine {name!r}; known: {', '.join(engine_names())}")


def _entry_points() -> list[EntryPoint]:
    # This import takes longer than the rest of `mlbench --help`.
    from importlib.metadata import entry_points

    return list(entry_points(group=ENTRY_POINTS))
