"""Measure an emulated network: bandwidth, round trip and loss of its paths, and all-reduces."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import select
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlbench_core.errors import ConfigurationError
from mlbench_core.network.description import HostSettings, Link, Network
from mlbench_core.network.emulated import EmulatedNetwork

__all__ = ["AllReduceTime", "NetworkReport", "PathReport", "measure_network"]

_PROBE = Path(__file__).with_name("probe.py")
_ALL_REDUCE = Path(__file__).with_name("all_reduce_timing.py")
_PINGS = 40
_DATAGRAMS = 2000
_INTERVAL_S = 0.0005
# TCP finds the bandwidth in some round trips. Its windows on long links grow until then.
_SKIPPED_ROUND_TRIPS = 20
_LEAST_SKIP_S = 0.5
# The large all-reduce would move this number of bytes, or for a slow link those of half a second.
_LARGE_BYTES = 16 * 2**20
_SMALLEST_LARGE_BYTES = 2**16
_PATIENCE_S = 180.0


@dataclasses.dataclass(frozen=True)
class PathReport:
    """The measured properties of the path between two hosts.

    Attributes:
        source: The host that sends.
        target: The host that receives.
        asked: The described properties.
        bandwidth: Payload of one TCP connection in bits per second; at most about 96 percent of a
            link's bandwidth.
        round_trip_s: Median of the round trips of one byte, in seconds.
        round_trips_s: The shortest and the longest of these round trips.
        loss: Share of the lost packets; None if no loss is described.
    """

    source: int
    target: int
    asked: Link
    bandwidth: float
    round_trip_s: float
    round_trips_s: tuple[float, float]
    loss: float | None


@dataclasses.dataclass(frozen=True)
class AllReduceTime:
    """The median time of an all-reduce over Gloo with one worker on each host.

    Attributes:
        num_bytes: Size of the tensor of each worker.
        seconds: Time of the slowest worker.
        bus_bandwidth: Bits per second over the link of each host: :math:`2 (n - 1) / n` times the
            size, per time.
    """

    num_bytes: int
    seconds: float
    bus_bandwidth: float


@dataclasses.dataclass(frozen=True)
class NetworkReport:
    """The measured properties of an emulated network.

    Attributes:
        network: The text of the network.
        hosts: Number of hosts.
        paths: One report for each kind of path from host 0.
        all_reduce: A small and a large all-reduce; empty if torch is not installed or there is one
            host.
        machine: Further conditions of the measurement: number of cores, load at the start, TCP's
            congestion control, rights.
    """

    network: str
    hosts: int
    paths: tuple[PathReport, ...]
    all_reduce: tuple[AllReduceTime, ...]
    machine: dict[str, Any]


def measure_network(
    network: Network, hosts: int | None = None, duration_s: float = 2.0
) -> NetworkReport:
    """Emulate a network and measure it.

    Stragglers and outages are left out, because they are not properties of the links.

    Args:
        network: The network.
        hosts: Number of hosts; by default that of the network, or else the smallest number with all
            described hosts.
        duration_s: Seconds of each measurement of a bandwidth.

    Returns:
        The report.

    Raises:
        ValueError: The network cannot have this number of hosts, or it is less than 2.
        ConfigurationError: This machine cannot emulate the network, or a measurement failed.
    """
    hosts = hosts or network.num_hosts or max(2, max(network.hosts, default=0) + 1)
    if hosts < 2:
        raise ValueError(f"hosts must be at least 2, not {hosts}: a link needs two ends")
    network.check_hosts(hosts)
    # The links are measured, so the hosts have no outages and whole processors.
    links = {host: HostSettings(settings.bandwidth) for host, settings in network.hosts.items()}
    quiet = dataclasses.replace(network, hosts=links, kills=None, pauses=None)
    # One host of each kind of way is measured: the ways to the others are alike.
    targets: dict[Link, int] = {}
    for host in range(1, hosts):
        targets.setdefault(network.path(0, host), host)
    machine = _machine()
    with EmulatedNetwork(hosts, network=quiet) as emulated:
        paths = [_path(emulated, host, asked, duration_s) for asked, host in targets.items()]
        slowest = min(path.bandwidth for path in paths)
        all_reduce = _all_reduce(emulated, slowest, duration_s)
    return NetworkReport(str(network), hosts, tuple(paths), all_reduce, machine)


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = {"cores": os.cpu_count(), "load": None, "congestion_control": None}
    if hasattr(os, "getloadavg"):
        machine["load"] = round(os.getloadavg()[0], 1)
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    if control.exists():
        machine["congestion_control"] = control.read_text().strip()
    machine["root"] = hasattr(os, "geteuid") and os.geteuid() == 0
    return machine


def _path(network: EmulatedNetwork, target: int, asked: Link, duration_s: float) -> PathReport:
    times = _pair(network, target, ("echo",), ("ping", str(_PINGS)), answers_last=True)
    skip_s = max(_LEAST_SKIP_S, _SKIPPED_ROUND_TRIPS * asked.round_trip_s)
    bandwidth = _pair(network, target, ("receive", str(skip_s), str(duration_s)), ("send",))
    loss = None
    if asked.loss:
        received = _pair(network, target, ("count",), ("shoot", str(_DATAGRAMS), str(_INTERVAL_S)))
        loss = 1 - received / _DATAGRAMS
    median_s, range_s = statistics.median(times), (min(times), max(times))
    return PathReport(0, target, asked, bandwidth, median_s, range_s, loss)


def _pair(
    network: EmulatedNetwork,
    target: int,
    first: tuple[str, ...],
    second: tuple[str, ...],
    *,
    answers_last: bool = False,
) -> Any:
    """Run a pair of probes, the first on ``target`` and the second on host 0, for their answer."""
    address = network.address(target)
    server = _start(network, target, [str(_PROBE), first[0], address, *first[1:]])
    with server:
        try:
            # The first line says that the server listens. A client before that would be refused.
            _read(server)
            with _start(network, 0, [str(_PROBE), second[0], address, *second[1:]]) as client:
                try:
                    answering = server
                    if answers_last:
                        answering = client
                    return _read(answering)
                finally:
                    client.kill()
        finally:
            server.kill()


def _all_reduce(
    network: EmulatedNetwork, bandwidth: float, limit_s: float
) -> tuple[AllReduceTime, ...]:
    if importlib.util.find_spec("torch") is None:
        return ()
    # Bytes that the slowest link carries in half a second, in whole numbers of float32.
    large = min(_LARGE_BYTES, max(_SMALLEST_LARGE_BYTES, int(bandwidth / 8 / 2) // 4 * 4))
    argv = [str(_ALL_REDUCE), str(large), str(limit_s)]
    # Without -I and -S, which would hide torch.
    workers = [_start(network, host, argv, isolated=False) for host in range(network.hosts)]
    try:
        answer = _read(workers[0])
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    # A worker sends 2 (k - 1) / k of the bytes of the tensor, each with 8 bits.
    factor = 2 * (network.hosts - 1) / network.hosts * 8
    pairs = ((4, answer["small_s"]), (large, answer["large_s"]))
    return tuple(AllReduceTime(size, seconds, factor * size / seconds) for size, seconds in pairs)


def _start(
    network: EmulatedNetwork, host: int, arguments: list[str], *, isolated: bool = True
) -> subprocess.Popen[bytes]:
    argv = [sys.executable]
    if isolated:
        # A probe needs the standard library only, and starts sooner without packages.
        argv += ["-I", "-S"]
    argv += arguments
    return network.popen(host, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _read(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], _PATIENCE_S)[0]:
        raise ConfigurationError(
            f"a measurement of the network did not end within {_PATIENCE_S:.0f} s"
        )
    line = process.stdout.readline()
    if not line:
        _, problem = process.communicate()
        last = problem.decode(errors="replace").strip().rpartition("\n")[2]
        reason = last or f"exit status {process.returncode}"
        raise ConfigurationError(f"a measurement of the network failed: {reason}")
    return json.loads(line)
