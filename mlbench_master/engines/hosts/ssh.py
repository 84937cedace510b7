"""Call a host through the system's ``ssh``, with its configuration and its agent."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from mlbench_core.errors import ConfigurationError
from mlbench_core.files import lock
from mlbench_master.engines.interface import EngineError
from mlbench_master.engines.logs import readable

__all__ = ["MARK", "HostError", "Ssh"]

MARK = b"\n==mlbench answers==\n"
"""The line before an answer, because a shell on the host may write a greeting first."""

_VARIABLE = "MLBENCH_SSH"
_OPTIONS = {
    "BatchMode": "yes",  # it must not ask
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    # One connection serves all calls, and ends some time after a master was killed.
    "ControlMaster": "auto",
    "ControlPersist": "60",
    # The user's configuration may have these for people.
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "RemoteCommand": "none",
    "LogLevel": "ERROR",
}
_NO_CONNECTION = 255
_GREETING_BYTES = 65_536
_LONGEST_ERROR = 300
_LOOK_S = 0.25
_FOLDER_PREFIX = "mlbench-ssh-"
_LOCK = "lock"
# The path of a socket has at most 104 bytes on macOS, 108 on Linux. Of these, ssh adds 1 + 40 for
# %C, and 17 for a temporary name; the name of the folder has 1 + 12 + 8, and a 0 ends the path.
_LONGEST_FOLDER = 104 - (1 + 40) - 17 - (1 + 12 + 8) - 1
_NEW_S = 60


class HostError(EngineError):
    """A call of a host failed.

    Attributes:
        is_too_large: True if its answer was larger than the limit, as the next one would be.
    """

    def __init__(self, message: str, *, is_too_large: bool = False) -> None:
        super().__init__(message)
        self.is_too_large = is_too_large


class Ssh:
    """The ``ssh`` program, or the words of ``MLBENCH_SSH``, such as ``ssh -F file``.

    Raises:
        ConfigurationError: The program was not found.
    """

    def __init__(self) -> None:
        self._program = shlex.split(os.environ.get(_VARIABLE, "")) or ["ssh"]
        if shutil.which(self._program[0]) is None:
            raise ConfigurationError(
                f"the engine hosts needs ssh, but {self._program[0]!r} cannot be found: "
                f"install it (apt-get install openssh-client), or set {_VARIABLE}"
            )
        _remove_old_folders()
        self._sockets = _make_folder()
        # Kept until close(): by it, other masters know that this folder is in use.
        self._folder_lock = contextlib.ExitStack()
        self._folder_lock.enter_context(lock(self._sockets / _LOCK))
        self._used: set[str] = set()
        self._addresses: dict[str, str] = {}
        self._lock = threading.Lock()

    def call(
        self, host: str, command: Sequence[str], request: bytes, timeout_s: float, limit_bytes: int
    ) -> IO[bytes]:
        """Run a command on a host.

        Args:
            host: Name of the host.
            command: Its words.
            request: Its standard input.
            timeout_s: Seconds after which the host does not answer.
            limit_bytes: Largest size of the answer.

        Returns:
            A temporary file, which stands at the beginning of the answer.

        Raises:
            HostError: The host was not reached, or it gave no answer.
        """
        with self._lock:
            self._used.add(host)
        # A folder of the user's home on the host could hide modules of Python.
        line = f"cd / && exec {shlex.join(command)}"
        # Not pipes: the process that keeps the connection open would hold them.
        out = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        try:
            with tempfile.TemporaryFile() as errors:
                ssh = [*self._options(), "-T", "--", host, line]
                status = self._run(ssh, (request, out, errors), timeout_s, limit_bytes)
                out.seek(0)
                mark_at = out.read(_GREETING_BYTES).find(MARK)
                if status is None:
                    # The connection may be dead, and the next call needs a new one.
                    self._control("exit", host)
                if os.fstat(out.fileno()).st_size > limit_bytes:
                    raise HostError(
                        f"host {host} sends more than {limit_bytes >> 20} MiB", is_too_large=True
                    )
                if status != 0 or mark_at < 0:
                    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _GREETING_BYTES))
                    raise _error(host, command, status, timeout_s, readable(errors.read()))
            out.seek(mark_at + len(MARK))
        except BaseException:
            out.close()
            raise
        return out

    def address(self, host: str) -> str:
        """Return the name or address by which ssh reaches a host.

        It is that of the configuration of ssh; no host is asked.
        """
        if host not in self._addresses:
            address = host.rpartition("@")[2]
            command = [*self._program, "-G", "--", host]
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=10, check=True
                )
                for line in done.stdout.splitlines():
                    if line.startswith("hostname "):
                        address = line.removeprefix("hostname ")
                        break
            self._addresses[host] = address
        return self._addresses[host]

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            hosts, self._used = self._used, set()
        for host in hosts:
            self._control("exit", host)
        shutil.rmtree(self._sockets, ignore_errors=True)
        self._folder_lock.close()

    def _control(self, command: str, host: str) -> None:
        """Send a command to the process that keeps the connection to a host open."""
        with tempfile.TemporaryFile() as out, contextlib.suppress(HostError):
            self._run([*self._options(), "-O", command, "--", host], (b"", out, out), 5, 2**20)

    def _options(self) -> list[str]:
        words = list(self._program)
        for name, value in _OPTIONS.items():
            words += ["-o", f"{name}={value}"]
        return [*words, "-o", f"ControlPath={self._sockets / '%C'}"]

    def _run(
        self,
        command: list[str],
        files: tuple[bytes, IO[bytes], IO[bytes]],
        timeout_s: float,
        limit_bytes: int,
    ) -> int | None:
        """Run a program and return its exit status; None if it took too long or wrote too much."""
        request, out, errors = files
        deadline = time.monotonic() + timeout_s
        try:
            # In a new session, so that Ctrl-C in the terminal of the master does not end a call.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=errors, start_new_session=True
            )
        except OSError as error:
            raise HostError(f"ssh cannot be started: {error}") from error
        sent: bytes | None = request
        while True:
            try:
                process.communicate(sent, timeout=_LOOK_S)
                return process.returncode
            except subprocess.TimeoutExpired:
                sent = None
            # The answer goes into a file, whose size shows a host that sends without an end.
            if time.monotonic() > deadline or os.fstat(out.fileno()).st_size > limit_bytes:
                process.kill()
                process.communicate()
                return None


def _temporary_folders() -> list[str]:
    """Return the folders for temporary files whose paths are short enough for a socket in them."""
    candidates = (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp")
    folders = []
    for folder in dict.fromkeys(candidates):
        if folder and len(os.fsencode(folder)) <= _LONGEST_FOLDER:
            folders.append(folder)
    return folders


def _make_folder() -> Path:
    """Make the private folder for the sockets of the connections."""
    problem = "all of their paths are too long"
    for parent in _temporary_folders():
        try:
            return Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent))
        except OSError as error:
            problem = f"{parent}: {error.strerror}"
    raise ConfigurationError(
        f"TMPDIR must be a folder that can be written, with a path of at most {_LONGEST_FOLDER} "
        f"characters, for the sockets of ssh: {problem}"
    )


def _remove_old_folders() -> None:
    """Remove the folders of masters that were killed, which hold no lock any more."""
    for parent in map(Path, _temporary_folders()):
        for folder in parent.glob(f"{_FOLDER_PREFIX}*"):
            with contextlib.suppress(OSError):  # TimeoutError, if its master continues, is one
                status = folder.lstat()
                is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
                # A new one may have no lock yet.
                if is_own and time.time() - status.st_mtime > _NEW_S:
                    with lock(folder / _LOCK, wait=False):
                        shutil.rmtree(folder, ignore_errors=True)


def _error(
    host: str, command: Sequence[str], status: int | None, timeout_s: float, output: str
) -> HostError:
    """Return why a call failed."""
    if status is None:
        return HostError(f"host {host} does not answer: no complete answer within {timeout_s:g} s")
    lines = output.strip().splitlines()
    last = ""
    if lines:
        last = lines[-1].strip()[:_LONGEST_ERROR]
    if status == _NO_CONNECTION:
        how = "does not answer"
        if "Permission denied" in output:
            how = "refuses the login"
        # A connection that is shared by several calls ends without a message.
        return HostError(f"host {host} {how}: {last or 'the connection broke'}")
    last = last or "it gave no reason"
    if "No module named" in last:
        # The Python is the word before -m.
        python = command[command.index("-m") - 1]
        why = f"{last}: install the same MLBench there, or name another Python with --python"
        return HostError(f"host {host} has no MLBench in {python}: {why}")
    if status in (126, 127):
        why = f"{last}: use the same path on all hosts, or name another one with --python"
        return HostError(f"host {host} cannot start Python: {why}")
    return HostError(f"host {host} cannot run MLBench: exit status {status}: {last}")
