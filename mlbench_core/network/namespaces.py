"""Create network namespaces, run programs in them and remove them.

Root creates namespaces that every user sees in ``ip netns list``. Another user gets a user
namespace with its own table of namespaces and process ids, which ends with its holder::

    this process -- pipe --> unshare -- forks --> sh, process 1 of the user namespace:
                                                   reads the pipe
                                                   ip netns exec ... (workers and the switch,
                                                   through nsenter)

When this process ends, the pipe ends, and then ``sh``. The kernel kills the other processes in the
user namespace, and removes it with its network namespaces. So nothing of it is left even after
SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mlbench_core.errors import ConfigurationError

__all__ = ["Namespaces", "find_program", "start_time"]

# The folder /run of the machine belongs to root; "ip netns" keeps its names there.
_HOLD = "mount -t tmpfs tmpfs /run && echo ready && read -r _"

# The options of nsenter, and the files of the holder's namespaces in /proc.
_SPACES = {"user": "user", "mount": "mnt", "net": "net", "pid": "pid_for_children"}


class Namespaces:
    """The place in which network namespaces are created: this machine, or a user namespace.

    Attributes:
        is_open: True between :meth:`open` and :meth:`close`.

    Example:
        >>> Namespaces().command("h0", ["true"])[-4:]
        ['netns', 'exec', 'h0', 'true']
    """

    def __init__(self) -> None:
        self.is_open = False
        self._holder: subprocess.Popen[str] | None = None
        self._prefix: list[str] = []

    def open(self) -> None:
        """Create a user namespace, unless this process is root's.

        Raises:
            ConfigurationError: This machine has no network namespaces for this user; the message
                says what is missing.
        """
        if os.name != "posix" or not hasattr(os, "geteuid"):
            raise ConfigurationError("network namespaces need Linux")
        missing = _missing("ip", "tc")
        if missing:
            raise ConfigurationError(f"{missing} not found: install the package iproute2")
        if os.geteuid() != 0:
            self._hold()
        self.is_open = True

    def _hold(self) -> None:
        """Create a user namespace and the process that holds it."""
        missing = _missing("unshare", "nsenter")
        if missing:
            raise ConfigurationError(
                "network namespaces need root or a user namespace, and "
                f"{missing} not found: install the package util-linux"
            )
        new = ("--user", "--map-root-user", "--mount", "--net", "--pid")
        # If the holder ends, also by a signal, the kernel ends its child. That is the first process
        # of the namespace of process ids, so all others end with it.
        options = (*new, "--fork", "--kill-child", "--mount-proc")
        self._holder = subprocess.Popen(
            [_program("unshare"), *options, "sh", "-c", _HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Ctrl-C must not end it before the owner has cleaned up.
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, problem = self._holder.communicate()
            self._holder = None
            raise ConfigurationError(
                "network namespaces need root, or a kernel that lets users create user "
                f"namespaces: {problem.strip()}"
            )
        folder = f"/proc/{self._holder.pid}/ns"
        # The holder itself stays outside of the namespace of process ids that it creates for its
        # children.
        spaces = [f"--{name}={folder}/{file}" for name, file in _SPACES.items()]
        # Otherwise nsenter would drop the user's groups, which this kind of namespace forbids.
        self._prefix = [_program("nsenter"), "--preserve-credentials", *spaces]

    def close(self) -> None:
        """End the user namespace with everything in it; a second call does nothing."""
        self.is_open = False
        if self._holder is None:
            return
        # Its end closes the pipe as well.
        self._holder.communicate()
        self._holder, self._prefix = None, []

    def run(self, program: str, *arguments: str) -> str:
        """Run ``ip`` or ``tc`` and return its output.

        Raises:
            ConfigurationError: The program failed.
        """
        command = [*self._prefix, _program(program), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ConfigurationError(
                f"'{program} {' '.join(arguments)}' failed: {result.stderr.strip()}"
            )
        return result.stdout

    def command(self, namespace: str, argv: Sequence[str], folder: Path | None = None) -> list[str]:
        """Return the command line that runs a program in a namespace.

        The program runs in a folder, by default in that of this process.
        """
        prefix = list(self._prefix)
        if prefix:
            # To enter another table of mounted disks changes the folder to its root.
            prefix.append(f"--wd={(folder or Path()).absolute()}")
        return [*prefix, find_program("ip") or "ip", "netns", "exec", namespace, *argv]

    def names(self) -> list[str]:
        """Return the names of all network namespaces."""
        # A machine without ip has none.
        if find_program("ip") is None:
            return []
        lines = self.run("ip", "netns", "list").splitlines()
        return [line.split()[0] for line in lines if line.strip()]

    def kill(self, name: str) -> None:
        """Kill the processes in a namespace.

        Raises:
            ConfigurationError: It does not exist.
        """
        pids = self.run("ip", "netns", "pids", name).split()
        if self._prefix:
            # The ids are those inside of the user namespace.
            command = [*self._prefix, "kill", "-KILL", *pids]
            subprocess.run(command, capture_output=True, check=False)
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def remove(self, name: str) -> None:
        """Kill the processes in a namespace and remove it; do nothing if it does not exist."""
        # "ip netns del" removes only the name. The namespace and its devices exist as long as a
        # process is in it.
        try:
            self.kill(name)
            self.run("ip", "netns", "del", name)
        except ConfigurationError:
            # Another process may clean up at the same time.
            if name in self.names():
                raise


def find_program(name: str) -> str | None:
    """Return the path of a program of system administration, or None."""
    # The folders of such programs are not in every user's PATH.
    folders = (os.environ.get("PATH", ""), "/usr/sbin", "/sbin")
    return shutil.which(name, path=os.pathsep.join(folders))


def _missing(*names: str) -> str:
    """Return the names of the programs that this machine lacks as a text, or an empty one."""
    return " and ".join(name for name in names if find_program(name) is None)


def start_time(pid: int) -> int:
    """Return the start time of a process, in the kernel's ticks since boot; 0 if it does not exist.

    Process ids are reused, but id and start time together identify a process.
    """
    try:
        # The start time is field 22 of proc(5). It is counted from the last parenthesis, because
        # field 2, the name of the command in parentheses, may contain spaces and parentheses.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def _program(name: str) -> str:
    path = find_program(name)
    if path is None:
        raise ConfigurationError(f"{name} not found: install the package iproute2")
    return path
