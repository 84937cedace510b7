"""The command line of a worker, and the environment in which it finds this Python."""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from pathlib import Path

import mlbench_core
from mlbench_master.launchers.interface import Job

__all__ = ["fill", "python_environment", "split_command", "split_container_command"]


def split_command(job: Job) -> list[str]:
    """Return the words of a worker's command, in which ``{rank}`` and ``{hosts}`` are still to be filled in.

    A script gets this Python and an absolute path, because workers run in their own folder.

    Example:
        >>> split_command(Job(run_id=7, name="a", command="train --id {run_id} '{rank} of 2'", num_workers=2))
        ['train', '--id', '7', '{rank} of 2']
    """
    words = {"{run_id}": str(job.run_id), "{backend}": job.backend}
    argv = [_script_path(fill(word, words), position) for position, word in enumerate(shlex.split(job.command))]
    return [sys.executable, *argv] if argv[0].endswith(".py") else argv


def split_container_command(job: Job) -> list[str]:
    """Return the words of a worker's command in a container, in which ``{rank}`` and ``{hosts}`` are to be filled in.

    A script gets the ``python`` of the image. No path of this machine is filled in.

    Example:
        >>> split_container_command(Job(run_id=7, name="a", command="/app/main.py --id {run_id}", num_workers=2))
        ['python', '/app/main.py', '--id', '7']
    """
    words = {"{run_id}": str(job.run_id), "{backend}": job.backend}
    argv = [fill(word, words) for word in shlex.split(job.command)]
    return ["python", *argv] if argv[0].endswith(".py") else argv


def fill(word: str, values: dict[str, str]) -> str:
    """Return a word with its marks replaced by their values."""
    for mark, value in values.items():
        word = word.replace(mark, value)
    return word


def python_environment() -> dict[str, str]:
    """Return variables with which ``python`` is this Python, and imports find this package even if not installed."""
    env = {
        "PYTHONUNBUFFERED": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    root = str(Path(mlbench_core.__file__).resolve().parent.parent)
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env["PYTHONPATH"]]))
    return env


def _script_path(word: str, position: int) -> str:
    """Make the path of an existing script absolute, because workers run in their own folder."""
    if position < 2 and word.endswith(".py") and Path(word).is_file():
        return str(Path(word).absolute())
    return word
