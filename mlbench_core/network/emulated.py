"""Emulate several hosts on one machine: network namespaces behind a bridge, with links of a chosen bandwidth.

Slow links show how much time a compressed optimizer saves. A link that is cut shows how a run reacts to a broken cable.
Both need Linux, root, and the programs ``ip`` and ``tc`` (package iproute2). Only the namespaces created here are
changed.

The devices of a network with two hosts::

    namespace mlbench-PID-START-N-h0      namespace ...-switch      namespace ...-h1
    eth0 10.77.0.1 <------ veth pair ----> p0   br0   p1 <---- veth pair ----> eth0 10.77.0.2
    token bucket                          token buckets                       token bucket
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mlbench_core.errors import ConfigurationError
from mlbench_core.network.description import MAX_HOSTS, bits_per_second

__all__ = ["EmulatedNetwork", "bits_per_second"]

PREFIX = "mlbench"
INTERFACE = "eth0"
SUBNET = "10.77.0"
# By default, the token bucket holds the data that a link sends in this time.
BURST_S = 0.005
# A bucket that is smaller than a packet would let no packet through.
SMALLEST_BURST_BYTES = 4096

_numbers = itertools.count()


class EmulatedNetwork:
    """Hosts on this machine, each connected to one switch by a link of limited bandwidth.

    Every host is a network namespace with one interface, ``eth0``. The switch is a bridge in another namespace. Each
    link is limited in both directions by a token bucket filter. A transfer of :math:`b` bits over a link of rate
    :math:`r` takes 6 to 7 percent longer than :math:`b / r`; the headers of the packets cause 5 percent. All hosts
    share the memory, disks and processors of this machine.

    The namespaces exist inside the ``with`` block. Leaving it, also by an exception, ends the processes that still run
    in them and removes them. A process that is killed inside the block leaves its namespaces behind; :meth:`cleanup`
    removes them.

    Args:
        hosts: Number of hosts, from 1 to 250.
        bandwidth: Bandwidth of every link in each direction; see :func:`bits_per_second`.
        burst: Size of the token bucket in bytes: the amount of data that an idle link sends without delay. By default,
            the amount that the link sends in 5 ms.
        queue_ms: Longest time that a packet may wait in the queue of a link, in milliseconds. The link drops packets
            that would wait longer.

    Raises:
        ValueError: An argument is out of range.
        ConfigurationError: On entering, this machine cannot emulate a network (see :meth:`why_not`).

    Example:
        >>> network = EmulatedNetwork(hosts=2, bandwidth="100mbit")
        >>> network.address(1)
        '10.77.0.2'
        >>> network.environment(1)["GLOO_SOCKET_IFNAME"]
        'eth0'
        >>> if EmulatedNetwork.why_not() is None:
        ...     with network:
        ...         exit_code = network.popen(1, ["true"]).wait()
    """

    def __init__(
        self, hosts: int = 2, bandwidth: str | float = "100mbit", *, burst: int | None = None, queue_ms: float = 50
    ) -> None:
        if isinstance(hosts, bool) or not isinstance(hosts, int):
            raise TypeError(f"hosts must be an integer, not {hosts!r}")
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be from 1 to {MAX_HOSTS}, not {hosts}")
        if burst is not None and not burst >= SMALLEST_BURST_BYTES:
            raise ValueError(f"burst must be at least {SMALLEST_BURST_BYTES} bytes, or None, not {burst!r}")
        if not queue_ms > 0:
            raise ValueError(f"queue_ms must be positive, not {queue_ms!r}")
        self.hosts = hosts
        self._rates = [bits_per_second(bandwidth)] * hosts
        self._burst = burst
        self._queue_ms = queue_ms
        # The name holds the id and start time of this process, so that cleanup() can check if the process has ended.
        self._name = f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}"
        self._switch = f"{self._name}-switch"
        self._processes: list[subprocess.Popen[Any]] = []
        self._is_up = False

    @staticmethod
    def why_not() -> str | None:
        """Return the reason why this machine cannot emulate a network, or None if it can.

        The answer comes from a trial: two namespaces, a pair of interfaces and a filter are created and removed.
        """
        if os.name != "posix" or not hasattr(os, "geteuid"):
            return "network namespaces need Linux"
        if os.geteuid() != 0:
            return "network namespaces need root"
        missing = [program for program in ("ip", "tc") if _find(program) is None]
        if missing:
            return f"{' and '.join(missing)} not found: install the package iproute2"
        trial = EmulatedNetwork(hosts=1)
        try:
            trial._set_up()
        except ConfigurationError as error:
            return str(error)
        finally:
            trial.close()
        return None

    @staticmethod
    def cleanup() -> list[str]:
        """Remove the networks of processes that have ended, and end the processes that still run in them.

        Networks of living processes stay, even those of other users.

        Returns:
            The names of the namespaces removed.
        """
        removed = []
        for name in _namespaces():
            match = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\d+-\w+", name)
            if match and _start_time(int(match[1])) != int(match[2]):
                _remove(name)
                removed.append(name)
        return removed

    def __enter__(self) -> EmulatedNetwork:
        """Create the hosts, the switch and the links."""
        reason = self.why_not()
        if reason is not None:
            raise ConfigurationError(f"cannot emulate a network here: {reason}")
        try:
            self._set_up()
        except BaseException:
            # Also after Ctrl-C: an unfinished network must not stay.
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the processes on the hosts and remove everything."""
        self.close()

    def close(self) -> None:
        """End the processes on the hosts and remove everything; a second call does nothing."""
        self._is_up = False
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        # A process that ignores SIGTERM is killed below, together with all others in its namespace.
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
        own_names = {self._switch, *(self.namespace(host) for host in range(self.hosts))}
        for name in own_names.intersection(_namespaces()):
            _remove(name)
        # Every child was ended or killed; waiting for it removes its zombie.
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def namespace(self, host: int) -> str:
        """Return the name of a host's namespace, as ``ip netns`` lists it."""
        return f"{self._name}-h{self._check(host)}"

    def address(self, host: int) -> str:
        """Return a host's IPv4 address."""
        return f"{SUBNET}.{self._check(host) + 1}"

    def environment(self, host: int, port: int = 29500) -> dict[str, str]:
        """Return the environment variables for a run with one worker on each host.

        Args:
            host: The host; the rank of its worker is the same number.
            port: The port on which worker 0 listens. Every host has its own ports, so none is taken by a program
                outside the network.

        Returns:
            The variables that torch, Gloo and NCCL read: the master's address and port, rank, world size, and the
            interface.
        """
        return {
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "RANK": str(self._check(host)),
            "WORLD_SIZE": str(self.hosts),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
        }

    def popen(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        as_worker: bool = True,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a process on a host.

        Args:
            host: The host.
            argv: Program and arguments.
            env: Variables in addition to those of this process and of :meth:`environment`.
            as_worker: True to set the variables of :meth:`environment`. Use False for programs that get their rank in
                another way, such as torchrun and scripts with ``--hosts``.
            **options: Further arguments of :class:`subprocess.Popen`.

        Returns:
            The process. Leaving the ``with`` block ends it.

        Raises:
            ValueError: The host does not exist.
            ConfigurationError: The call is not inside the ``with`` block of the network.
        """
        command = [_program("ip"), "netns", "exec", self._up(host), *argv]
        variables = {**os.environ, **(self.environment(host) if as_worker else {}), **(env or {})}
        process = subprocess.Popen(command, env=variables, **options)
        self._processes.append(process)
        return process

    def cut(self, host: int) -> None:
        """Cut the link of a host: its packets are lost, and its connections stay open until they time out."""
        self._up(host)
        # Only the switch's end goes down. Packets are lost in both directions, but the host keeps its address, so its
        # programs see a silent network and no error.
        _run("ip", "-n", self._switch, "link", "set", f"p{host}", "down")

    def restore(self, host: int) -> None:
        """Restore the link of a host."""
        self._up(host)
        _run("ip", "-n", self._switch, "link", "set", f"p{host}", "up")

    def set_bandwidth(self, bandwidth: str | float, host: int | None = None) -> None:
        """Change the bandwidth of one host's link, or of all, while they are in use.

        Args:
            bandwidth: See :func:`bits_per_second`.
            host: The host; None for all.
        """
        rate = bits_per_second(bandwidth)
        for each in range(self.hosts) if host is None else (host,):
            self._up(each)
            self._rates[each] = rate
            self._shape(each)

    def _check(self, host: int) -> int:
        if isinstance(host, bool) or not isinstance(host, int) or not 0 <= host < self.hosts:
            raise ValueError(f"host must be from 0 to {self.hosts - 1}, not {host!r}")
        return host

    def _up(self, host: int) -> str:
        """Return the name of a host's namespace, if the network is up."""
        name = self.namespace(host)
        if not self._is_up:
            raise ConfigurationError("the emulated network is not up: use it inside its with block")
        return name

    def _set_up(self) -> None:
        # The bridge has its own namespace, so that nothing else changes and one command removes it with its ports.
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for host in range(self.hosts):
            self._add_host(host)
            self._shape(host)
        self._is_up = True

    def _add_host(self, host: int) -> None:
        name, port = self.namespace(host), f"p{host}"
        _run("ip", "netns", "add", name)
        # A veth pair is a cable: one end is the host's eth0, the other one a port of the switch. Both ends are created
        # inside their namespaces, so their names cannot collide with interfaces of this machine.
        pair = ("type", "veth", "peer", "name", port, "netns", self._switch)
        _run("ip", "link", "add", INTERFACE, "netns", name, *pair)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
        # Programs on a host also connect to 127.0.0.1, and a new namespace's loopback interface is down.
        _run("ip", "-n", name, "link", "set", "lo", "up")
        # All hosts are in one /24 network, so they reach one another through eth0 without further routes.
        _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")

    def _shape(self, host: int) -> None:
        """Limit a link at both ends, because a filter acts only on the packets that an interface sends."""
        rate = self._rates[host]
        burst = self._burst or max(SMALLEST_BURST_BYTES, int(rate / 8 * BURST_S))
        # "replace" works for a link without a filter and for one in use, whose bandwidth changes.
        bucket = ("tbf", "rate", f"{rate}bit", "burst", f"{burst}b", "latency", f"{self._queue_ms}ms")
        for namespace, device in ((self.namespace(host), INTERFACE), (self._switch, f"p{host}")):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)


def _find(program: str) -> str | None:
    """Return the path of ``ip`` or ``tc``, or None."""
    # The folders of system administration programs are not in every user's PATH.
    return shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin")))


def _program(name: str) -> str:
    path = _find(name)
    if path is None:
        raise ConfigurationError(f"{name} not found: install the package iproute2")
    return path


def _run(program: str, *arguments: str) -> str:
    """Run ``ip`` or ``tc`` and return its output."""
    done = subprocess.run([_program(program), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigurationError(f"'{program} {' '.join(arguments)}' failed: {done.stderr.strip()}")
    return done.stdout


def _namespaces() -> list[str]:
    """Return the names of all network namespaces."""
    # cleanup() may be called on any machine; without ip it has no networks.
    if _find("ip") is None:
        return []
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _remove(namespace: str) -> None:
    """Kill the processes in a namespace and remove it."""
    # "ip netns del" removes only the name. The namespace and its devices exist as long as a process is in it.
    for pid in _run("ip", "netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "del", namespace)


def _start_time(pid: int) -> int:
    """Return the start time of a process, in the kernel's ticks since boot; 0 if it does not exist.

    Process ids are reused, but id and start time together identify a process.
    """
    try:
        # The start time is field 22 of proc(5). It is counted from the last parenthesis, because field 2, the name of
        # the command in parentheses, may contain spaces and parentheses.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
