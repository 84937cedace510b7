"""Emulate several hosts on one machine: network namespaces behind a switch.

The links have chosen properties. Slow links show how much time a compressed optimizer saves. A link
that is cut shows how a run reacts to a broken cable. Emulation needs Linux and the programs ``ip``
and ``tc`` (package iproute2). It also needs root, or a kernel that lets users create user
namespaces. Only the namespaces created here are changed.

The devices of a network with two hosts::

    namespace mlbench-PID-START-N-h0      namespace ...-switch           namespace ...-h1
    eth0 10.77.0.1 <------ veth pair ----> p0  junction  p1 <---- veth pair ----> eth0 10.77.0.2
    token bucket                          token buckets                            token bucket

In a network of racks, every rack has a junction. A veth pair connects it to the junction of the
core::

    p0, p1 -- junction of rack 0 -- u0 <-- veth pair --> c0 -- core
                                    token bucket         token bucket
    p2, p3 -- junction of rack 1 -- u1 <-- veth pair --> c1 -- core
                                    token bucket         token bucket

A junction without delay and loss is a bridge of the kernel. Another one is a part of the process
``switch.py``, which holds the frames. It does not use the kernel's ``netem``, which many kernels
lack, so that a network is the same on all machines.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mlbench_core.errors import ConfigurationError
from mlbench_core.network.description import MAX_HOSTS, Link, Network, bits_per_second
from mlbench_core.network.disturbances import Disturbances
from mlbench_core.network.namespaces import Namespaces, start_time
from mlbench_core.network.parsing import parse_network

__all__ = ["EmulatedNetwork", "bits_per_second"]

PREFIX = "mlbench"
INTERFACE = "eth0"
SWITCH = "switch.py"
SUBNET = "10.77.0"
# Above those of all hosts.
EXTRA_ADDRESS = f"{SUBNET}.254"
EXTRA_BACKLOG = 4096
# By default, the token bucket holds the data that a link sends in this time.
BURST_S = 0.005
# A bucket that is smaller than a packet would let no packet through.
SMALLEST_BURST_BYTES = 4096
# A connection over a long link has a window of bandwidth times round trip, for which Linux's
# defaults are too small.
WINDOW_BYTES = 256 * 2**20

_numbers = itertools.count()


class EmulatedNetwork:
    """Hosts on this machine, each connected to a switch by a link of limited bandwidth.

    Every host is a network namespace with one interface, ``eth0``. The switches are in another
    namespace. Each link is limited in both directions by a token bucket filter. A transfer of
    :math:`b` bits over a link of rate :math:`r` takes 6 to 7 percent longer than :math:`b / r`; the
    headers of the packets cause 5 percent. All hosts share the memory, disks and processors of this
    machine.

    The namespaces exist inside the ``with`` block. Leaving it, also by an exception, ends the
    processes that still run in them and removes them. If root's process is killed inside the block,
    its namespaces are left behind; :meth:`cleanup` removes them. The namespaces of other users end
    with their process.

    Args:
        hosts: Number of hosts, from 1 to 250.
        bandwidth: Bandwidth of every link in each direction; see
            :func:`~mlbench_core.network.description.bits_per_second`.
        burst: Size of the token bucket in bytes: the amount of data that an idle link sends without
            delay. By default, the amount that the link sends in 5 ms.
        queue_ms: Longest time that a packet may wait in the queue of a link, in milliseconds. The
            link drops packets that would wait longer. In a network with a longer round trip, it is
            the round trip.
        network: Description of the network, in place of ``bandwidth``: delay, jitter, loss, racks,
            slow hosts, outages.
        has_extra_host: True for one more host at the first switch, without a limit of bandwidth. No
            outage reaches it, and :meth:`listen` makes this process its program.
        say: Called with a line about each beginning and end of an outage, from another thread.

    Raises:
        ValueError: An argument is out of range.
        ConfigurationError: On entering, this machine cannot emulate a network (see
            :meth:`why_not`).

    Example:
        >>> network = EmulatedNetwork(hosts=2, network="100mbit,20ms")
        >>> network.address(1)
        '10.77.0.2'
        >>> network.environment(1)["GLOO_SOCKET_IFNAME"]
        'eth0'
        >>> if EmulatedNetwork.why_not() is None:
        ...     with network:
        ...         exit_code = network.popen(1, ["true"]).wait()
    """

    def __init__(
        self,
        hosts: int = 2,
        bandwidth: str | float = "100mbit",
        *,
        burst: int | None = None,
        queue_ms: float = 50,
        network: Network | str | None = None,
        has_extra_host: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if isinstance(hosts, bool) or not isinstance(hosts, int):
            raise TypeError(f"hosts must be an integer, not {hosts!r}")
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be from 1 to {MAX_HOSTS}, not {hosts}")
        if burst is not None and not burst >= SMALLEST_BURST_BYTES:
            raise ValueError(
                f"burst must be at least {SMALLEST_BURST_BYTES} bytes, or None, not {burst!r}"
            )
        if not queue_ms > 0:
            raise ValueError(f"queue_ms must be positive, not {queue_ms!r}")
        if network is None:
            network = Network(Link(bits_per_second(bandwidth)))
        elif isinstance(network, str):
            network = parse_network(network)
        self.network = network
        self.network.check_hosts(hosts)
        self.hosts = hosts
        self._rates = [self.network.link.bandwidth] * hosts
        for host, settings in self.network.hosts.items():
            if settings.bandwidth:
                self._rates[host] = settings.bandwidth
        self._burst = burst
        self._links = [self.network.link]
        if self.network.between is not None:
            self._links.append(self.network.between)
        longest_s = max(link.round_trip_s for link in self._links)
        self._queue_ms = max(queue_ms, longest_s * 1e3)
        # The name holds the id and start time of this process, so that cleanup() can check if the
        # process has ended.
        self._name = f"{PREFIX}-{os.getpid()}-{start_time(os.getpid())}-{next(_numbers)}"
        self._switch = f"{self._name}-switch"
        self._extra_host: str | None = None
        if has_extra_host:
            self._extra_host = f"{self._name}-extra"
        self._namespaces = Namespaces()
        self._processes: dict[int, list[subprocess.Popen[Any]]] = defaultdict(list)
        self._switch_process: subprocess.Popen[bytes] | None = None
        self._disturbances: Disturbances | None = None
        self._lost: set[int] = set()
        self._say = say
        self._is_up = False

    @staticmethod
    def why_not() -> str | None:
        """Return the reason why this machine cannot emulate a network, or None if it can.

        The answer comes from a trial: two namespaces, a pair of interfaces and a filter are created
        and removed.
        """
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
        """Remove the networks of processes that have ended.

        The processes that still run in them are killed. Networks of living processes stay, even
        those of other users. Networks that users other than root created end with their processes.

        Returns:
            The names of the namespaces removed.
        """
        namespaces = Namespaces()
        removed = []
        for name in namespaces.names():
            match = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\d+-\w+", name)
            if match and start_time(int(match[1])) != int(match[2]):
                namespaces.remove(name)
                removed.append(name)
        return removed

    def __enter__(self) -> EmulatedNetwork:
        """Create the hosts, the switches and the links."""
        reason = self.why_not()
        if reason is not None:
            raise ConfigurationError(f"cannot emulate a network here: {reason}")
        try:
            self._set_up()
            self._disturbances = Disturbances(
                self.network,
                self.hosts,
                self.cut,
                self.restore,
                self._processes.__getitem__,
                self._lose,
                self._say or (lambda line: None),
            )
            self._disturbances.start()
        except BaseException:
            # Also after Ctrl-C: an unfinished network must not stay.
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the processes on the hosts and remove everything."""
        self.close()

    def close(self) -> None:
        """End the processes on the hosts and remove everything; a second call does nothing."""
        # First, because a stopped process would not react to SIGTERM.
        self.end_disturbances()
        self._is_up = False
        processes = list(itertools.chain.from_iterable(self._processes.values()))
        for process in processes:
            if process.poll() is None:
                process.terminate()
        # A process that ignores SIGTERM is killed below, together with all others in its namespace.
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
        if self._namespaces.is_open:
            own_names = {self._switch, *map(self.namespace, range(self.hosts))}
            if self._extra_host is not None:
                own_names.add(self._extra_host)
            for name in own_names.intersection(self._namespaces.names()):
                self._namespaces.remove(name)
            self._namespaces.close()
        # Waiting for a child removes its zombie. The helper of a user namespace may still be there.
        for process in processes:
            process.kill()
            process.wait()
        self._processes.clear()
        if self._switch_process is not None:
            # communicate() closes its standard input, and the switch then ends.
            self._switch_process.communicate()
            self._switch_process = None

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
            port: The port on which worker 0 listens. Every host has its own ports, so none is taken
                by a program outside the network.

        Returns:
            The variables that torch, Gloo and NCCL read: the master's address and port, rank, world
            size, local rank and local world size, and the interface.
        """
        return {
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "RANK": str(self._check(host)),
            "WORLD_SIZE": str(self.hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
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
            as_worker: True to set the variables of :meth:`environment`. Use False for programs that
                get their rank in another way, such as torchrun and scripts with ``--hosts``.
            **options: Further arguments of :class:`subprocess.Popen`.

        Returns:
            The process. Leaving the ``with`` block ends it.

        Raises:
            ValueError: The host does not exist.
            ConfigurationError: The call is not inside the ``with`` block of the network.
        """
        folder = options.get("cwd")
        command = self._namespaces.command(self._up(host), argv, folder and Path(folder))
        variables = dict(os.environ)
        if as_worker:
            variables.update(self.environment(host))
        variables.update(env or {})
        process = subprocess.Popen(command, env=variables, **options)
        self._processes[host].append(process)
        if self._disturbances is not None:
            # A process that starts during an outage of its host must not run.
            self._disturbances.apply(host)
        return process

    def listen(self) -> socket.socket:
        """Return a listening socket of the extra host, which all hosts reach.

        It belongs to this process, which is outside of the network.

        Raises:
            ConfigurationError: The network has no extra host, or is not up.
        """
        if self._extra_host is None:
            raise ConfigurationError("the network must have an extra host: set has_extra_host=True")
        self._up(0)
        # A socket stays in the network namespace of the process that creates it.
        script = (
            "import socket, sys; "
            f"listener = socket.create_server(('{EXTRA_ADDRESS}', 0), backlog={EXTRA_BACKLOG}); "
            "way = socket.socket(fileno=int(sys.argv[1])); "
            "socket.send_fds(way, [b'.'], [listener.fileno()])"
        )
        here, there = socket.socketpair()
        with here, there:
            argv = [sys.executable, "-I", "-S", "-c", script, str(there.fileno())]
            done = subprocess.run(
                self._namespaces.command(self._extra_host, argv),
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                last = done.stderr.strip().rpartition("\n")[2]
                raise ConfigurationError(f"the extra host cannot listen: {last}")
            _, (number,), _, _ = socket.recv_fds(here, 1, 1)
        listener = socket.socket(fileno=number)
        listener.set_inheritable(False)
        return listener

    def is_up(self, host: int) -> bool:
        """Return True if the description of the network has no outage of a host at this time."""
        self._up(host)
        return self._disturbances is None or self._disturbances.is_up(host)

    def is_gone(self, host: int) -> bool:
        """Return True if an outage of a host has begun that has no end."""
        return self._disturbances is not None and self._disturbances.is_gone(host)

    def was_lost(self, pid: int) -> bool:
        """Return True if a process that has ended was killed together with its host."""
        return pid in self._lost

    def end_disturbances(self) -> None:
        """Let no outage begin or end any more, and let all processes run."""
        if self._disturbances is not None:
            self._disturbances.stop()
            self._disturbances = None

    def _lose(self, host: int) -> None:
        """Kill all processes of a host, also those whose parent has ended."""
        # Noted before the kill, so that was_lost() knows a process as soon as it has ended.
        self._lost.update(each.pid for each in self._processes[host] if each.returncode is None)
        with contextlib.suppress(ConfigurationError):
            self._namespaces.kill(self.namespace(host))

    def cut(self, host: int) -> None:
        """Cut the link of a host: its packets are lost, and its connections stay for a while."""
        self._up(host)
        # Only the switch's end goes down. Packets are lost in both directions, but the host keeps
        # its address, so its programs see a silent network and no error.
        self._ip(self._switch, "link", "set", f"p{host}", "down")

    def restore(self, host: int) -> None:
        """Restore the link of a host."""
        self._up(host)
        self._ip(self._switch, "link", "set", f"p{host}", "up")

    def set_bandwidth(self, bandwidth: str | float, host: int | None = None) -> None:
        """Change the bandwidth of one host's link, or of all, while they are in use.

        Args:
            bandwidth: See :func:`bits_per_second`.
            host: The host; None for all.
        """
        rate = bits_per_second(bandwidth)
        hosts: Sequence[int] = range(self.hosts)
        if host is not None:
            hosts = (host,)
        for each in hosts:
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
        self._namespaces.open()
        # The switches have their own namespace, so that nothing else changes and one command
        # removes them with their ports.
        self._namespaces.run("ip", "netns", "add", self._switch)
        junctions: list[dict[str, Any]] = []
        across = self.network.between
        for rack in range(self.network.racks):
            hosts = [host for host in range(self.hosts) if self.network.rack_of(host) == rack]
            for host in hosts:
                self._add_namespace(self.namespace(host), f"p{host}", self.address(host))
                self._shape(host)
            uplink = ""
            if across is not None:
                uplink = f"u{rack}"
                self._pair((self._switch, uplink), (self._switch, f"c{rack}"), across.bandwidth)
            ports = [f"p{host}" for host in hosts]
            if self._extra_host is not None and rack == 0:
                self._add_namespace(self._extra_host, "extra", EXTRA_ADDRESS)
                ports.append("extra")
            junctions += self._connect(f"rack{rack}", ports, uplink, self.network.link)
        if across is not None:
            ports = [f"c{rack}" for rack in range(self.network.racks)]
            junctions += self._connect("core", ports, "", across)
        if junctions:
            self._start_switch(junctions)
        self._is_up = True

    def _add_namespace(self, name: str, port: str, address: str) -> None:
        """Create a host, and connect it to a port of the switch."""
        self._namespaces.run("ip", "netns", "add", name)
        self._pair((name, INTERFACE), (self._switch, port), None)
        # Programs on a host also connect to 127.0.0.1, and a new namespace's loopback interface is
        # down.
        self._ip(name, "link", "set", "lo", "up")
        # All hosts are in one /24 network, so they reach one another through eth0 without further
        # routes.
        self._ip(name, "addr", "add", f"{address}/24", "dev", INTERFACE)
        if any(link.loss for link in self._links):
            # The switch loses whole frames, so a frame must not be larger than a packet.
            self._ip(name, "link", "set", INTERFACE, "gso_max_segs", "1")
        if any(link.round_trip_s for link in self._links):
            script = (
                "cd /proc/sys/net/ipv4; "
                f"echo 4096 131072 {WINDOW_BYTES} >tcp_rmem; "
                f"echo 4096 16384 {WINDOW_BYTES} >tcp_wmem"
            )
            self._namespaces.run("ip", "netns", "exec", name, "sh", "-ec", script)

    def _pair(self, first: tuple[str, str], second: tuple[str, str], rate: int | None) -> None:
        """Create a cable, a veth pair, between two devices in namespaces, with a bandwidth."""
        # Both ends are created inside their namespaces, so their names cannot collide with
        # interfaces of this machine.
        pair = ("type", "veth", "peer", "name", second[1], "netns", second[0])
        self._namespaces.run("ip", "link", "add", first[1], "netns", first[0], *pair)
        for namespace, device in (first, second):
            self._ip(namespace, "link", "set", device, "up")
            self._limit(namespace, device, rate)

    def _connect(
        self, name: str, ports: list[str], uplink: str, link: Link
    ) -> list[dict[str, Any]]:
        """Connect ports by a bridge, or return their junction for ``switch.py``.

        A link with delay or loss needs the switch.
        """
        if link.round_trip_s or link.loss:
            # The delay and the jitter of a link are those of both ways.
            delay_s, jitter_s = link.round_trip_s / 2, link.jitter_s / 2
            one_way = {"delay_s": delay_s, "jitter_s": jitter_s, "loss": link.loss}
            return [{"ports": ports, "uplink": uplink, **one_way}]
        self._ip(self._switch, "link", "add", name, "type", "bridge")
        self._ip(self._switch, "link", "set", name, "up")
        for port in filter(None, (*ports, uplink)):
            self._ip(self._switch, "link", "set", port, "master", name)
        return []

    def _start_switch(self, junctions: list[dict[str, Any]]) -> None:
        script = Path(__file__).with_name(SWITCH)
        # Isolated (-I), so that it starts quickly and the user's Python settings do not change it.
        argv = [sys.executable, "-I", "-S", str(script), json.dumps(junctions)]
        self._switch_process = subprocess.Popen(
            self._namespaces.command(self._switch, argv),
            # The switch ends with this pipe, even if this process is killed.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C must not end it before this process has ended the workers.
            start_new_session=True,
        )
        assert self._switch_process.stdout is not None
        if self._switch_process.stdout.readline() != b"ready\n":
            _, problem = self._switch_process.communicate()
            last = problem.decode(errors="replace").strip().rpartition("\n")[2]
            raise ConfigurationError(f"the switch that delays frames cannot start: {last}")

    def _shape(self, host: int) -> None:
        """Limit a link at both ends."""
        # A filter acts only on the packets that an interface sends.
        for namespace, device in ((self.namespace(host), INTERFACE), (self._switch, f"p{host}")):
            self._limit(namespace, device, self._rates[host])

    def _limit(self, namespace: str, device: str, rate: int | None) -> None:
        if rate is None:
            return
        # A rate is in bits per second, and a burst in bytes.
        burst = self._burst or max(SMALLEST_BURST_BYTES, int(rate / 8 * BURST_S))
        # "replace" works for a link without a filter and for one in use, whose bandwidth changes.
        command = ("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf")
        limits = ("rate", f"{rate}bit", "burst", f"{burst}b", "latency", f"{self._queue_ms}ms")
        self._namespaces.run(*command, *limits)

    def _ip(self, namespace: str, *arguments: str) -> None:
        self._namespaces.run("ip", "-n", namespace, *arguments)
