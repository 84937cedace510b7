"""Scripts in processes of their own, forked from the server of tests/helpers/ranks.py that has
torch imported.

What ``python SCRIPT ARGUMENTS`` or ``python -m MODULE ARGUMENTS`` does, without the seconds in
which a fresh interpreter imports torch. Exit status, output, signals, folder and environment are
those of a process; only what ``atexit`` was given does not run. A test whose claim is that a
command line starts from nothing takes ``subprocess``."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.processes import environment
from tests.helpers.ranks import fork_context


def _run(arguments: list[str], variables: dict[str, str], folder: str, files: list[str]) -> None:
    import torch

    for number, path in enumerate(files, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()  # it is the one in which the server was started
    os.environ.update(variables)
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


class ForkedScript:
    """A running script.

    Args:
        arguments: The script's path, or ``-m`` and a module, and its arguments.
        **variables: Changes of the environment.
    """

    def __init__(self, arguments: list[str], **variables: str) -> None:
        self.arguments = arguments
        self._files = [tempfile.NamedTemporaryFile("r", prefix="forked-") for _ in range(2)]  # noqa: SIM115
        names = [file.name for file in self._files]
        given = (arguments, environment(**variables), os.getcwd(), names)
        self._process = fork_context().Process(target=_run, args=given, daemon=True)
        self._process.start()

    def finish(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Wait for its end and return what it left.

        Raises:
            TimeoutExpired: It did not end in time; it is killed.
        """
        self._process.join(timeout_s)
        status = self._process.exitcode
        output = [file.read() for file in self._files]
        self.kill()
        if status is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout_s, *output)
        return subprocess.CompletedProcess(self.arguments, status, *output)

    def kill(self) -> None:
        """End it if it has not ended, and remove its files."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        for file in self._files:
            file.close()


def run_script(
    arguments: list[str], timeout_s: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, as ``subprocess.run`` does with captured text."""
    return ForkedScript(arguments, **variables).finish(timeout_s)


def run_scripts(
    commands: list[list[str]], timeout_s: float, **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run scripts side by side to their ends, in the order of the commands.

    Raises:
        TimeoutExpired: One did not end in time; all are killed.
    """
    running = [ForkedScript(command, **variables) for command in commands]
    try:
        return [script.finish(timeout_s) for script in running]
    finally:
        for script in running:
            script.kill()
