"""Launchers, which start, watch and stop the workers of a run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mlbench_core.errors import ConfigurationError
from mlbench_master.engines.interface import Job, JobStatus, Launcher, LauncherError, LogPage

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "ENTRY_POINTS",
    "LAUNCHERS",
    "Job",
    "JobStatus",
    "Launcher",
    "LauncherError",
    "LogPage",
    "launcher_names",
    "make_launcher",
]

_CLASSES = {
    "local": "local.engine:LocalLauncher",
    "hosts": "hosts.engine:HostsLauncher",
    "kubernetes": "kubernetes.engine:KubernetesLauncher",
    "slurm": "slurm.engine:SlurmLauncher",
}

LAUNCHERS = tuple(_CLASSES)
"""The names of the launchers of this package."""

ENTRY_POINTS = "mlbench.launchers"
"""The group of entry points for launchers of other packages.

The name of an entry point is the name of the launcher. It leads to a function that gets the folder
for the folders of runs and returns a :class:`Launcher`. """


def launcher_names() -> tuple[str, ...]:
    """Return the names of all launchers, those of other packages included."""
    others = {entry.name for entry in _entry_points()} - set(LAUNCHERS)
    return (*LAUNCHERS, *sorted(others))


def make_launcher(name: str, data_dir: Path) -> Launcher:
    """Make a launcher by its name.

    Args:
        name: One of :func:`launcher_names`.
        data_dir: Folder in which it keeps logs and states.

    Returns:
        The launcher.

    Raises:
        ValueError: No launcher has this name.
        ConfigurationError: The launcher cannot be used, for example because Slurm is missing.
    """
    folder = data_dir / "runs"
    if name in _CLASSES:
        # Imported only when used: each launcher needs other packages.
        module_name, _, class_name = _CLASSES[name].partition(":")
        module = import_module(f"mlbench_master.engines.{module_name}")
        launcher: Launcher = getattr(module, class_name)(folder)
        return launcher
    for entry in _entry_points():
        if entry.name == name:
            made = entry.load()(folder)
            if not isinstance(made, Launcher):
                raise ConfigurationError(
                    f"the entry point {name!r} of {ENTRY_POINTS} must return a Launcher, not "
                    f"{type(made).__name__}"
                )
            return made
    raise ValueError(f"unknown launcher {name!r}; known: {', '.join(launcher_names())}")


def _entry_points() -> list[EntryPoint]:
    # This import takes longer than the rest of `mlbench --help`.
    from importlib.metadata import entry_points

    return list(entry_points(group=ENTRY_POINTS))
