"""The command line of a worker, and the environment in which it finds this Python."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlbench_core
from mlbench_core.calling_environment import is_carried
from mlbench_master.engines.interface import Job

__all__ = [
    "check_program_in",
    "fill",
    "python_environment",
    "script_python",
    "split_command",
    "split_container_command",
    "threads_per_worker",
    "usable_cores",
    "variables_to_remove",
    "worker_environment",
]


def split_command(job: Job) -> list[str]:
    """Return the words of a worker's command; ``{rank}`` and ``{hosts}`` are not filled in yet.

    A script gets a Python: that of the call, and the script of a task that of the master. In a run
    without a folder of its call it also gets an absolute path, because workers run in their own
    folder.

    Example:
        >>> command = "train --id {run_id} '{rank} of 2'"
        >>> split_command(Job(run_id=7, name="a", command=command, num_workers=2))
        ['train', '--id', '7', '{rank} of 2']
    """
    argv = _words(job)
    if not job.cwd:
        # The script is the first word, or the second one after its interpreter.
        for position, word in enumerate(argv[:2]):
            if word.endswith(".py") and Path(word).is_file():
                argv[position] = str(Path(word).absolute())
    if _is_script(argv[0], job.cwd):
        return [script_python(job), *argv]
    return argv


def script_python(job: Job) -> str:
    """Return the Python that runs a job's script: that of the call, or that of this process."""
    path = (job.caller_env or {}).get("PATH")
    if job.is_task or path is None:
        return sys.executable
    return shutil.which("python", path=path) or sys.executable


def split_container_command(job: Job) -> list[str]:
    """Return the words of a worker's command in a container.

    ``{rank}`` and ``{hosts}`` are not filled in yet. A script gets the ``python`` of the image. No
    path of this machine is filled in.

    Example:
        >>> command = "/app/main.py --id {run_id}"
        >>> split_container_command(Job(run_id=7, name="a", command=command, num_workers=2))
        ['python', '/app/main.py', '--id', '7']
    """
    argv = _words(job)
    if argv[0].endswith(".py"):
        return ["python", *argv]
    return argv


def _words(job: Job) -> list[str]:
    values = {"{run_id}": str(job.run_id), "{backend}": job.backend}
    return [fill(word, values) for word in shlex.split(job.command)]


def fill(word: str, values: dict[str, str]) -> str:
    """Return a word with its marks replaced by their values."""
    for mark, value in values.items():
        word = word.replace(mark, value)
    return word


def check_program_in(words: Sequence[str], cwd: str, path: str) -> None:
    """Refuse a command whose program or script this machine does not have.

    The arguments and errors are those of
    :meth:`~mlbench_master.engines.interface.Engine.check_program`.
    """
    first = words[0]
    if "{" in first:  # it is filled in later
        return
    file = Path(cwd, first)
    if first.endswith(".py") and file.is_file():
        return
    if "/" in first:
        if not file.is_file():
            raise ValueError(
                f"must begin with a program or script that exists, not {first[:80]!r}, which "
                f"{cwd} lacks"
            )
        if not os.access(file, os.X_OK):
            raise ValueError(
                f"must begin with a program that can be executed, not {first[:80]!r}: use "
                "chmod +x, or begin with its interpreter, for example bash"
            )
        return
    # An entry of the PATH may be relative, too.
    absolute = os.pathsep.join(os.path.join(cwd, entry) for entry in path.split(os.pathsep))
    if shutil.which(first, path=absolute) is None:
        advice = "bash -c '...' for a command of a shell"
        if file.is_file():
            advice = f"./{first}"
        raise ValueError(
            f"must begin with a program on the PATH, not {first[:80]!r}: write {advice}"
        )


def worker_environment(
    job_env: Mapping[str, str],
    caller_env: Mapping[str, str] | None,
    own: Mapping[str, str],
    threads: int,
) -> dict[str, str]:
    """Return the variables of the workers of a run, in addition to those of their parent process.

    Args:
        job_env: Variables of the run.
        caller_env: Variables of the call that started it, None if the run takes those of this
            process.
        own: Variables that the user cannot choose.
        threads: Threads of a worker, if the user did not choose them.
    """
    chosen = {**(caller_env or {}), **job_env}
    inherited = ""
    # A call without PYTHONPATH must not get that of the master.
    if caller_env is None:
        inherited = os.environ.get("PYTHONPATH", "")
    import_path = [_package_root(), chosen.get("PYTHONPATH", inherited)]
    return {
        "OMP_NUM_THREADS": str(threads),
        **python_environment(),
        # The output goes to a log, whose lines are UTF-8, and not to the terminal of the call.
        "PYTHONIOENCODING": "utf-8",
        **chosen,
        "PYTHONPATH": os.pathsep.join(filter(None, import_path)),
        **own,
    }


def threads_per_worker(num_cpus: float, num_workers: int, cores: int) -> int:
    """Return the number of threads of each worker of a run on a machine with these cores."""
    # More threads than cores slow down all workers, so a run that shares the cores gets fewer per
    # worker.
    return max(1, int(min(num_cpus, cores / min(num_workers, cores))))


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    # A container or taskset may leave this process fewer cores than the machine has; macOS cannot
    # say.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def variables_to_remove(caller_env: Mapping[str, str] | None) -> list[str]:
    """Return the variables of this process that the workers of a run must not inherit."""
    if caller_env is None:
        return []
    return [name for name in os.environ if is_carried(name) and name not in caller_env]


def python_environment() -> dict[str, str]:
    """Return variables with which ``python`` is this Python.

    Imports find this package even if it is not installed.
    """
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    import_path = [_package_root(), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONUNBUFFERED": "1",
        "PATH": os.pathsep.join(programs),
        "PYTHONPATH": os.pathsep.join(filter(None, import_path)),
    }


def _package_root() -> str:
    """Return the folder of this package for ``PYTHONPATH``; empty if it is installed."""
    root = str(Path(mlbench_core.__file__).resolve().parent.parent)
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return ""
    return root


def _is_script(word: str, cwd: str) -> bool:
    """Return whether a word is a script that needs a Python, and not a program on the PATH."""
    if not word.endswith(".py"):
        return False
    return not cwd or "/" in word or Path(cwd, word).is_file() or shutil.which(word) is None
