"""Delay, loss, racks, slow hosts, stragglers and cuts of an emulated network, as root and in a user
namespace."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_core.network import disturbances
from mlbench_core.network.emulated import EmulatedNetwork
from mlbench_core.network.namespaces import Namespaces
from tests.helpers.processes import wait_for
from tests.network.test_emulated import ECHO, TEXT, line, needs_namespaces, run_python

PINGER = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000), timeout=60)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
while len(times) < 5 or (min(times) >= float(sys.argv[2]) and len(times) < 500):
    start = time.perf_counter()
    connection.sendall(b"x")
    connection.recv(1)
    times.append(time.perf_counter() - start)
print(min(times))
"""
COUNTER = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 5001))
# Room for all packets, as this process may not get a core for a moment.
SO_RCVBUFFORCE = 33
server.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 22)
print("ready", flush=True)
received = 0
while server.recv(100) != b"end":
    received += 1
print(received, flush=True)
"""
SHOOTER = """
import socket, sys, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(1000):
    client.sendto(b"x", (sys.argv[1], 5001))
    time.sleep(1e-4)
for _ in range(50):
    client.sendto(b"end", (sys.argv[1], 5001))
"""
SPINNER = """
import sys, time
print("ready", flush=True)
for line in sys.stdin:
    start, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < 0.6:
        pass
    print(time.process_time() - used, flush=True)
"""


@pytest.fixture(params=["root", "user"])
def rights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the rights of root and of a user; skip what this machine cannot do."""
    if request.param == "user":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = EmulatedNetwork.why_not()
    if reason is not None:
        pytest.skip(f"emulated network: {reason}")
    return str(request.param)


def round_trip_s(
    network: EmulatedNetwork, source: int, target: int, enough_s: float = math.inf
) -> float:
    """The shortest of several round trips, which a busy machine disturbs least: of five, and of
    more until one is shorter than enough."""
    with run_python(network, target, ECHO, network.address(target)) as echo:
        assert line(echo) == "ready"
        with run_python(network, source, PINGER, network.address(target), str(enough_s)) as pinger:
            return float(line(pinger))


def test_the_round_trip_of_a_link_and_between_racks(rights: str) -> None:
    with EmulatedNetwork(4, network="2x2:1gbit,8ms/500mbit,30ms") as network:
        inside = round_trip_s(network, 0, 1, 0.025)
        across = round_trip_s(network, 0, 3, 0.060)
    assert 0.008 <= inside < 0.025
    assert 0.030 <= across < 0.060


@needs_namespaces
def test_the_jitter_of_a_link_makes_a_round_trip_shorter_and_not_too_short() -> None:
    with EmulatedNetwork(2, network="1gbit,20ms,10ms-jitter") as network:
        shortest = round_trip_s(network, 0, 1, 0.020)
    assert 0.010 <= shortest < 0.020


@needs_namespaces
def test_a_link_loses_its_share_of_packets() -> None:
    with (
        EmulatedNetwork(2, network="100mbit,10%-loss") as network,
        run_python(network, 0, COUNTER, network.address(0)) as counter,
    ):
        assert line(counter) == "ready"
        with run_python(network, 1, SHOOTER, network.address(0)) as shooter:
            assert shooter.wait(60) == 0
        # A binomial distribution has a standard deviation of 9.5 here.
        assert 840 < int(line(counter)) < 960


@needs_namespaces
def test_a_straggler_gets_its_share_of_time_and_ends_with_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disturbances, "_SEARCH_S", 0.05)
    with EmulatedNetwork(2, network="unlimited; host1: 20%-cpu") as network:
        with run_python(network, 1, SPINNER) as spinner:
            assert line(spinner) == "ready"

            def used_s() -> float:
                assert spinner.stdin is not None
                spinner.stdin.write("\n")
                spinner.stdin.flush()
                return float(line(spinner))

            # A search for processes has to find it first.
            wait_for(lambda: used_s() < 0.3, 60, "the smaller share")
            assert spinner.stdin is not None
            spinner.stdin.close()
        sleeper = network.popen(1, ["sleep", "600"])
        time.sleep(0.2)
    assert sleeper.returncode == -signal.SIGTERM


@needs_namespaces
def test_a_link_is_cut_and_repaired_at_its_times() -> None:
    """A cut begins before the first round trip, whose packets are sent again after the repair."""
    with EmulatedNetwork(2, network="1gbit; host1: cut@0s-1.2s") as network:
        start = time.monotonic()
        round_trip_s(network, 0, 1)
        assert time.monotonic() - start > 1.0


@needs_namespaces
def test_one_link_is_slower_than_the_others() -> None:
    network = EmulatedNetwork(3, network="1gbit; host1: 8mbit")
    with network:
        shown = [
            subprocess.run(
                ["tc", "-n", network.namespace(host), "qdisc", "show", "dev", "eth0"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for host in range(3)
        ]
    assert [text.partition("rate ")[2].split()[0] for text in shown] == ["1Gbit", "8Mbit", "1Gbit"]


@pytest.mark.parametrize("rights", ["user"], indirect=True)
def test_a_killed_owner_that_is_not_root_leaves_no_process(rights: str) -> None:
    code = (
        "import os\nfrom mlbench_core.network.emulated import EmulatedNetwork\nos.geteuid = "
        "lambda: 1000\nwith EmulatedNetwork(2, network='1gbit,5ms') as network:\n    "
        "network.popen(0, ['sleep', '600'])\n    print('ready', flush=True)\n    input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], **TEXT) as owner:
        assert line(owner) == "ready"
        family = psutil.Process(owner.pid).children(recursive=True)
        # The holder of the user namespace and its shell, and nsenter with the switch and with the
        # worker.
        assert len(family) >= 5
        owner.kill()
    # An orphan may stay as a zombie until process 1 takes note of it.
    alive = psutil.wait_procs(family, timeout=60)[1]
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@needs_namespaces
def test_a_switch_that_does_not_start_is_an_error_with_its_last_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlbench_core.network.emulated.SWITCH", "no_such_file.py")
    with pytest.raises(
        ConfigurationError, match=r"the switch that delays frames cannot start: .*no_such_file"
    ):
        EmulatedNetwork(2, network="1gbit,5ms").__enter__()
    assert not any(
        f"mlbench-{os.getpid()}-" in name and name.endswith("switch")
        for name in Namespaces().names()
    )


@pytest.mark.parametrize("hosts", [2, 5])
def test_racks_have_their_number_of_hosts(hosts: int) -> None:
    with pytest.raises(ValueError, match=r"hosts must be 4 \(2 racks of 2\)"):
        EmulatedNetwork(hosts, network="2x2:1gbit/100mbit")
