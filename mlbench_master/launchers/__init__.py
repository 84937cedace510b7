"""Launchers, which start, watch and stop the workers of a run."""

from __future__ import annotations

from pathlib import Path

from mlbench_core.errors import ConfigurationError
from mlbench_master.launchers.interface import Job, JobStatus, Launcher, LogPage

__all__ = ["LAUNCHERS", "Job", "JobStatus", "Launcher", "LogPage", "make_launcher"]

LAUNCHERS = ("local", "kubernetes", "slurm")


def make_launcher(name: str, data_dir: Path) -> Launcher:
    """Make a launcher by its name.

    Args:
        name: One of :data:`LAUNCHERS`.
        data_dir: Folder in which it keeps logs and states.

    Returns:
        The launcher.

    Raises:
        ValueError: No launcher has this name.
        ConfigurationError: The launcher cannot be used yet.
    """
    if name == "local":
        from mlbench_master.launchers.local import LocalLauncher

        return LocalLauncher(data_dir / "runs")
    if name in LAUNCHERS:
        raise ConfigurationError(f"the launcher {name!r} is not available yet in this version; use 'local'")
    raise ValueError(f"unknown launcher {name!r}; known: {', '.join(LAUNCHERS)}")
