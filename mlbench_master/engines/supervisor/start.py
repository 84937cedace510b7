"""Start, find and end the supervisor of a run on this machine.

Its imports are light, as those of the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import psutil

from mlbench_core.calling_environment import module_command, safe_environment
from mlbench_master.engines.logs import open_at_once
from mlbench_master.processes import end_processes, processes_with, start_mark

__all__ = [
    "FOLDER_VARIABLE",
    "end_marked",
    "find_supervisor",
    "folder_variables",
    "hold_port",
    "read_state",
    "signal_to",
    "start_supervisor",
    "supervisor_command",
    "write_private",
]

FOLDER_VARIABLE = "MLBENCH_RUN_DIR"
"""The variable with the run's folder, by which its processes are found."""

_SUPERVISOR = "mlbench_master.engines.supervisor.supervise"
_STATE_BYTES = 65_536


def folder_variables(folder: Path) -> dict[str, str]:
    """Return the variables of the workers of a run that a job cannot set itself.

    The processes of the run are found by the first one. The master reads the folders of the others.
    """
    return {
        FOLDER_VARIABLE: str(folder),
        "MLBENCH_SPOOL": str(folder / "spool"),
        "MLBENCH_OUTPUT": str(folder / "output"),
    }


def supervisor_command(folder: Path) -> list[str]:
    """Return the command of the supervisor of a run."""
    return module_command(_SUPERVISOR, str(folder))


def start_supervisor(folder: Path, held: socket.socket) -> subprocess.Popen[bytes]:
    """Start the supervisor of a run, whose folder has ``job.json``.

    Args:
        folder: The run's folder.
        held: A socket of :func:`hold_port`, which the supervisor keeps until it ends.
    """
    with (folder / "supervisor.log").open("ab") as log:
        return subprocess.Popen(
            supervisor_command(folder),
            cwd=folder,
            env={**safe_environment(), FOLDER_VARIABLE: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # signals to the master's group must not end the run
            pass_fds=[held.fileno()],
        )


def find_supervisor(folder: Path) -> int | None:
    """Return the process id of a run's supervisor if it is alive and not a child that has ended.

    A worker can write the file that names it. So the process itself must be the supervisor of this
    folder.
    """
    with contextlib.suppress(
        OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError, psutil.Error
    ):
        state = json.loads(read_state(folder / "supervisor.json"))
        pid = int(state["pid"])
        # Another process may have got the id since.
        if start_mark(pid) == state["started"] and _supervises(psutil.Process(pid), folder):
            return pid
    # A supervisor that has just started has not written the file yet, and a worker may have
    # replaced it.
    if folder.exists():
        for process in processes_with(FOLDER_VARIABLE, str(folder)):
            with contextlib.suppress(psutil.Error):
                if _supervises(process, folder):
                    return int(process.pid)
    return None


def _supervises(process: psutil.Process, folder: Path) -> bool:
    """Return True if a process is the supervisor of a run and has not ended."""
    # The command line ends with the module and the folder, and that of a fork with empty words.
    module, supervised = ["", "", *filter(None, process.cmdline())][-2:]
    if module != _SUPERVISOR or os.path.realpath(supervised) != os.path.realpath(folder):
        return False
    return bool(process.status() != psutil.STATUS_ZOMBIE)


def end_marked(folder: Path, grace_s: float) -> None:
    """End processes that a killed supervisor left behind."""
    # By the run's folder in their environment: their parent is gone.
    end_processes(processes_with(FOLDER_VARIABLE, str(folder)), grace_s)


def read_state(path: Path) -> bytes:
    """Return the content of a small file."""
    # A worker may have replaced it by a pipe or a large file.
    with open_at_once(path) as file:
        return file.read(_STATE_BYTES)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, because it may hold a token.

    A reader sees either all of it or nothing, also if the writer is killed.
    """
    # Not files.replacing, which waits for the disk, at the start of each run.
    part = path.with_name(f"{path.name}.part")
    try:
        part.touch(mode=0o600)
        part.write_text(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def signal_to(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may have ended in the meantime."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def hold_port(address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Reserve a free port, which no other program gets until the socket is closed in all processes.

    The socket does not listen, and it has SO_REUSEADDR, as torch's store has. So rank 0 can listen
    on the port, and the system does not assign it to a program that asks for a free port.

    Args:
        address: The address; empty for all of this machine.
        port: The port; 0 for one that the system chooses.
    """
    reserved = socket.socket()
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((address, port))
    except OSError:
        reserved.close()
        raise
    return reserved
