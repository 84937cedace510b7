"""Scripts in processes of their own, forked from the server of tests/helpers/ranks.py that has
torch imported.

What ``python SCRIPT ARGUMENTS`` or ``python -m MODULE ARGUMENTS`` does, without the seconds in
which a fresh interpreter imports torch. Exit status, output, signals, folder and environment are
those of a process; only what ``atexit`` was given does not run. A test whose claim is that a
command line starts from nothing takes ``subprocess``.

Where another program starts Python, such as torchrun, it is given :func:`forked_python` instead,
an executable that forks, too."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path
from typing import NoReturn

from tests.helpers import fork_client
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
    _be_python(arguments)


def _be_python(arguments: list[str]) -> None:
    """Do what Python does for its arguments."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
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
        if arguments[:2] == ["-m", "torch.distributed.run"]:
            variables = {"PYTHON_EXEC": forked_python(), **variables}
        given = (arguments, environment(**variables), os.getcwd(), names)
        self._process = fork_context().Process(target=_run, args=given, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """The id of its process."""
        assert self._process.pid is not None
        return self._process.pid

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


# ---- an executable that other programs take for Python


@functools.cache
def forked_python() -> str:
    """The path of an executable that does what Python does, in a fork of the server.

    It takes the arguments ``[-u] SCRIPT ...``, ``[-u] -m MODULE ...`` and ``[-u] -c CODE ...``. The
    process that the other program sees only stands for the fork: they end alike, the fork gets the
    signals, and it is killed if the other one is.
    """
    folder = Path(tempfile.mkdtemp(prefix="fork-"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        fork_context().Process(target=_serve, args=(listener,), daemon=True).start()
    program = folder / "python"
    words = [sys.executable, "-IS", fork_client.__file__, str(folder / "socket")]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    atexit.register(shutil.rmtree, folder)
    return str(program)


def _serve(listener: socket.socket) -> None:
    """Fork two processes for each client, one that runs the script and one that watches it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    while parent.sentinel not in multiprocessing.connection.wait([listener, parent.sentinel]):
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch(connection)
        connection.close()


def _watch(connection: socket.socket) -> NoReturn:
    """Fork a process for a client's request, pass on the client's signals, and report its end."""
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    content = b""
    # No more than the request: signals may follow it.
    while missing := int.from_bytes(length, "big") - len(content):
        content += connection.recv(min(missing, 1 << 16))
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(*json.loads(content), files)
    for file in files:
        os.close(file)

    guard, has_ended = threading.Lock(), False

    def send(number: int) -> None:
        with guard:
            # Afterwards, another process may get its number.
            if not has_ended:
                os.kill(pid, number)

    def pass_on() -> None:
        while numbers := connection.recv(1):
            send(numbers[0])
        send(signal.SIGKILL)  # the client is gone

    threading.Thread(target=pass_on, daemon=True).start()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with guard:
        has_ended = True
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(status.to_bytes(4, "big", signed=True))
    os._exit(0)


def _become(
    arguments: list[str], variables: dict[str, str], folder: str, files: list[int]
) -> NoReturn:
    """Run a script as a process of its own."""
    import torch

    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    atexit._clear()
    tempfile.tempdir = None  # the variables may name another one
    # Line by line, whether it is asked for or not: a test may wait for a line.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (until the process ends)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    torch.set_num_threads(int(variables.get("OMP_NUM_THREADS", "1")))
    status = 1
    try:
        _be_python(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
