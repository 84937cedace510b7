"""A process that has imported torch, and forks the supervisors of runs, which fork the workers.

It has a single thread, no process group and no CUDA. It ends with the process that has started it;
the runs go on.

    LocalEngine -- socket --> fork server -- fork --> supervisor of a run -- fork --> workers
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path

from mlbench_core.calling_environment import safe_environment
from mlbench_master.engines.supervisor.forked import (
    BecomeWorker,
    rename_process,
    replace_variables,
    startup_variables,
)
from mlbench_master.engines.supervisor.start import FOLDER_VARIABLE, supervisor_command

__all__ = ["ForkServer"]

# The first entry of the path is the current folder, whose modules must not hide those of packages.
_PROGRAM = (
    "import sys; sys.path.pop(0); "
    "from mlbench_master.engines.supervisor.fork_server import main; main()"
)
# Room for the words and variables of a fork, see rename_process().
_ROOM = "x" * 2048
_ROOM_VARIABLE = "FORK_ROOM"
_MODULES = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim"),
    *("torch.distributed.tensor", "torch.profiler._cupti_monitor", "torch.utils.data"),
    *("mlbench_core.controlflow.pytorch.run", "mlbench_core.optim.pytorch"),
    *("mlbench_core.observe.command", "mlbench_core.observe.observer"),
    "mlbench_core.observe.store_messages",
)
_SIZE_BYTES = 8  # of the number of bytes of a request, which comes first
_LONGEST_ERROR = 500
_IMPORTS_S = 120.0
_START_S = 30.0


class ForkServer:
    """The fork server of this process for one set of start-up variables.

    Args:
        env: Variables of the workers.

    Raises:
        OSError: The process cannot be started, or does not answer.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.variables = startup_variables(env)
        own, other = socket.socketpair()
        own.settimeout(_IMPORTS_S)
        kept = {**safe_environment(), _ROOM_VARIABLE: _ROOM}
        for name in startup_variables(kept):
            del kept[name]
        with other, contextlib.ExitStack() as opened:
            opened.push(own)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(other.fileno()), _ROOM],
                env={**kept, **self.variables},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[other.fileno()],
            )
            opened.pop_all()
        self._socket = own
        self._lock = threading.Lock()
        self._receive()  # it is ready

    def fits(self, env: Mapping[str, str]) -> bool:
        """Return True if workers with these variables can be forked, and the server is alive."""
        return self._process.poll() is None and startup_variables(env) == self.variables

    def start_supervisor(self, folder: Path, held: socket.socket) -> int:
        """Start the supervisor of a run.

        It does the same as :func:`~mlbench_master.engines.supervisor.start.start_supervisor`.

        Args:
            folder: The run's folder.
            held: The socket that keeps its port.

        Returns:
            The id of the process, which is a child of the fork server.

        Raises:
            OSError: The fork server does not answer, or the supervisor cannot write its files.
        """
        request = {"folder": str(folder), "env": safe_environment()}
        message = json.dumps(request).encode()
        size = len(message).to_bytes(_SIZE_BYTES, "big")
        with self._lock:
            self._socket.settimeout(_START_S)
            try:
                socket.send_fds(self._socket, [size], [held.fileno()])
                self._socket.sendall(message)
            except OSError:
                self.close()  # it may have a part of the request
                raise
            answer = json.loads(self._receive())
        if "error" in answer:
            raise OSError(answer["error"])
        return int(answer["pid"])

    def close(self) -> None:
        """End the process; runs go on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _receive(self) -> bytes:
        """Return an answer; without one, end the process, which may answer too late."""
        try:
            answer = self._socket.recv(4096)
            if not answer:
                raise OSError("the fork server has ended: see the log of the master")
        except OSError:
            self.close()
            raise
        return answer


def main() -> None:
    """Serve until the other end of the socket is closed; the forks leave as what they became."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    _import_all()
    # The collector would write to the pages that forks share.
    gc.collect()
    gc.freeze()
    # Linux removes forks that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    connection.sendall(b"ready")
    work: BecomeWorker | None = None
    try:
        _serve(connection)
    except BecomeWorker as worker:
        work = worker
    # Outside of the handler, so that the errors of a script have no context.
    if work is not None:
        work.run()


def _serve(connection: socket.socket) -> None:
    while True:
        size, descriptors, _, _ = socket.recv_fds(connection, _SIZE_BYTES, 1)
        if not size:
            return
        message = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        request = json.loads(message)
        if os.fork() == 0:
            _supervise(connection, Path(request["folder"]), request["env"])
            return
        # The supervisor has its own copy of the socket, which keeps the port.
        for descriptor in descriptors:
            os.close(descriptor)


def _supervise(connection: socket.socket, folder: Path, env: dict[str, str]) -> None:
    """Become the supervisor of a run, and stay it to the end."""
    from mlbench_master.engines.supervisor.forked import ForkedWorker
    from mlbench_master.engines.supervisor.supervise import Supervisor

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        log = os.open(folder / "supervisor.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        os.chdir(folder)
        env = {FOLDER_VARIABLE: str(folder), **env}
        replace_variables(env)
        rename_process(supervisor_command(folder), env)
        supervisor = Supervisor(folder, ForkedWorker)
        supervisor.prepare()
        answer: dict[str, int | str] = {"pid": os.getpid()}
    # For example on a full disk. Otherwise the master would wait for the answer.
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {str(error)[:_LONGEST_ERROR]}"}
    connection.sendall(json.dumps(answer).encode())
    # The master notices the end of the fork server only if no copy of its socket is open.
    connection.close()
    if "pid" in answer:
        supervisor.run()


def _import_all() -> None:
    """Import what workers need, also what torch imports at first use."""
    variables = dict(os.environ)
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Some modules of torch set variables.
    replace_variables(variables)
