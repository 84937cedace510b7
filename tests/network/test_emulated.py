"""Several hosts on one machine: bandwidth, cables, and what is left behind."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_core.network.emulated import EmulatedNetwork, bits_per_second
from mlbench_core.network.namespaces import Namespaces
from tests.master.helpers import wait_for

REASON = EmulatedNetwork.why_not()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"emulated network: {REASON}")

RECEIVER = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = server.accept()
received, start = 0, None
while chunk := connection.recv(1 << 16):
    if start is None:
        start = time.perf_counter()
    received += len(chunk)
print(received * 8 / (time.perf_counter() - start), flush=True)
"""
SENDER = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000))
connection.sendall(bytes(int(sys.argv[2])))
connection.close()
"""
PINGER = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000), timeout=60)
connection.settimeout(float(sys.argv[2]))
for line in sys.stdin:
    try:
        connection.sendall(b"x")
        print("answer", len(connection.recv(1)), flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = server.accept()
while chunk := connection.recv(1):
    connection.sendall(chunk)
"""
TEXT: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


def namespaces() -> set[str]:
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    return {
        line.split()[0]
        for line in listed.splitlines()
        if line.startswith(f"mlbench-{os.getpid()}-")
    }


def interfaces() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def network() -> Iterator[EmulatedNetwork]:
    with EmulatedNetwork(hosts=3, bandwidth="40mbit") as network:
        yield network


def run_python(
    network: EmulatedNetwork, host: int, code: str, *arguments: str
) -> subprocess.Popen[str]:
    return network.popen(host, [sys.executable, "-c", code, *arguments], **TEXT)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def has_rate(
    network: EmulatedNetwork,
    source: int,
    target: int,
    size_bytes: int,
    at_least: float = 0.0,
    below: float = math.inf,
) -> bool:
    """Return whether one of some measurements is in a range.

    A process that gets no core for a moment makes a measurement too low, or too high if it is the
    one that receives.
    """
    return any(at_least < measure(network, source, target, size_bytes) < below for _ in range(15))


def measure(network: EmulatedNetwork, source: int, target: int, size_bytes: int) -> float:
    """Bits per second of the content of one connection."""
    with run_python(network, target, RECEIVER, network.address(target)) as receiver:
        assert line(receiver) == "ready"
        with run_python(
            network, source, SENDER, network.address(target), str(size_bytes)
        ) as sender:
            rate = float(line(receiver))
            assert sender.wait(60) == 0
    return rate


@needs_namespaces
@pytest.mark.parametrize(("source", "target"), [(0, 1), (2, 0)])
def test_a_link_has_its_bandwidth(network: EmulatedNetwork, source: int, target: int) -> None:
    assert has_rate(network, source, target, 2_000_000, 0.7 * 40e6, 1.1 * 40e6)


@needs_namespaces
def test_the_bandwidth_of_one_link_and_of_all_can_change(network: EmulatedNetwork) -> None:
    network.set_bandwidth("8mbit", host=1)
    try:
        assert has_rate(network, 0, 1, 600_000, below=1.15 * 8e6)
        assert has_rate(network, 0, 2, 2_000_000, 2 * 8e6)
        network.set_bandwidth("80mbit")
        assert has_rate(network, 0, 1, 2_000_000, 0.6 * 80e6)
    finally:
        network.set_bandwidth("40mbit")


@needs_namespaces
def test_a_cut_link_is_silent_and_a_restored_one_goes_on(network: EmulatedNetwork) -> None:
    with (
        run_python(network, 0, ECHO, network.address(0)) as echo,
        run_python(network, 1, PINGER, network.address(0), "5" if line(echo) else "0") as pinger,
    ):

        def ping() -> str:
            assert pinger.stdin is not None
            pinger.stdin.write("\n")
            pinger.stdin.flush()
            return line(pinger)

        assert ping() == "answer 1"
        network.cut(1)
        assert ping() == "silence"
        network.restore(1)
        assert "answer 1" in (
            ping() for _ in range(10)
        )  # what was lost is sent again, within some seconds
        assert pinger.stdin is not None
        pinger.stdin.close()
        assert pinger.wait(60) == 0


@needs_namespaces
def test_the_processes_of_a_lost_host_die_until_it_is_up() -> None:
    said: list[str] = []
    text = "unlimited; host1: kill@1s-100000s; host2: join@4s; host3: join@100000s"
    with EmulatedNetwork(4, network=text, say=said.append) as network:
        early = network.popen(3, ["sleep", "600"])
        # A process whose parent has ended is on the host, too.
        lost = network.popen(1, ["sh", "-c", "(sleep 600 & echo $!); sleep 600"], **TEXT)
        orphan = int(line(lost))
        other = network.popen(0, ["sleep", "600"])
        assert [early.wait(60), lost.wait(60)] == [-signal.SIGKILL] * 2
        wait_for(lambda: not _is_running(orphan), 60, "the end of the orphan")
        wait_for(lambda: network.is_up(2), 60, "the host that joins")
        assert network.popen(2, ["true"]).wait(60) == 0
        assert [network.is_up(host) for host in range(4)] == [True, False, True, False]
        assert other.poll() is None
        assert [network.was_lost(each.pid) for each in (lost, early, other)] == [True, True, False]
        assert not any(map(network.is_gone, range(4)))
        assert lost.stdin is not None
        assert lost.stdout is not None
        lost.stdin.close()
        lost.stdout.close()
    assert said == ["host 1 is lost", "host 2 is up"]


@needs_namespaces
def test_the_processes_of_a_stopped_host_go_on_afterwards() -> None:
    text = "unlimited; host1: pause@0s-6s; host2: pause@1s"

    def stopped(process: psutil.Process) -> bool:
        return bool(process.status() == psutil.STATUS_STOPPED)

    with EmulatedNetwork(3, network=text) as network:
        wait_for(lambda: not network.is_up(1), 60, "the first pause")
        # The host is stopped already when it starts.
        late = psutil.Process(network.popen(1, ["sleep", "600"]).pid)
        wait_for(lambda: stopped(late) or network.is_up(1), 60, "the stop of the new process")
        family = network.popen(2, ["sh", "-c", "sleep 600 & wait"])
        wait_for(lambda: network.is_gone(2), 60, "the second pause")
        wait_for(lambda: stopped(psutil.Process(family.pid)), 60, "the stop of the family")
        others = psutil.Process(network.popen(0, ["sleep", "600"]).pid)
        wait_for(lambda: network.is_up(1) and not stopped(late), 60, "the end of the pause")
        assert not stopped(others)
        assert stopped(psutil.Process(family.pid))
        assert [network.is_gone(host) for host in range(3)] == [False, False, True]
    # A process that is stopped would not have reacted to SIGTERM.
    assert family.returncode == -signal.SIGTERM


@needs_namespaces
@pytest.mark.parametrize("text", ["unlimited", "2x1:1gbit/100mbit,5ms"])
def test_all_hosts_reach_a_program_outside(text: str) -> None:
    code = (
        "import socket, sys; way = socket.create_connection((sys.argv[1], int(sys.argv[2])), 60); "
        "way.sendall(way.recv(1))"
    )
    before = namespaces()
    with EmulatedNetwork(2, network=text, has_extra_host=True) as network:
        with network.listen() as listener:
            listener.settimeout(60)
            host, port = listener.getsockname()
            assert host not in map(network.address, range(2))
            for number in range(2):
                with run_python(network, number, code, host, str(port)):
                    connection, (peer, _) = listener.accept()
                    with connection:
                        connection.settimeout(60)
                        connection.sendall(b"x")
                        assert connection.recv(1) == b"x"
                assert peer == network.address(number)
        # Two hosts, the extra one, and the switch.
        assert len(namespaces() - before) == 4
    assert namespaces() == before
    with EmulatedNetwork(1) as plain, pytest.raises(ConfigurationError, match="has_extra_host"):
        plain.listen()


@needs_namespaces
def test_a_process_gets_the_variables_of_its_worker(network: EmulatedNetwork) -> None:
    code = (
        "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], "
        "os.environ['MASTER_ADDR'], os.environ['X'])"
    )
    with network.popen(2, [sys.executable, "-c", code], env={"X": "mine"}, **TEXT) as process:
        assert line(process) == "2 3 10.77.0.1 mine"
    assert network.environment(1, port=1234)["MASTER_PORT"] == "1234"
    assert "RANK" not in os.environ


@needs_namespaces
def test_nothing_is_left_behind_after_an_error() -> None:
    before, outside = namespaces(), interfaces()
    network = EmulatedNetwork(hosts=2)
    with pytest.raises(RuntimeError, match="in the middle"), network:
        process = network.popen(1, ["sleep", "600"])
        family = network.popen(0, ["sh", "-c", "sleep 601 & wait"])
        assert len(namespaces() - before) == 3
        assert interfaces() == outside
        raise RuntimeError("in the middle")
    assert namespaces() == before
    assert interfaces() == outside
    assert process.returncode == -signal.SIGTERM
    assert family.returncode is not None
    with pytest.raises(ConfigurationError, match="inside its with block"):
        network.popen(0, ["true"])
    network.close()


@needs_namespaces
def test_a_link_that_cannot_be_made_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before, run = namespaces(), Namespaces.run

    def refuse(self: Namespaces, program: str, *arguments: str) -> str:
        if "p1" in arguments:
            raise ConfigurationError("no more links")
        return run(self, program, *arguments)

    monkeypatch.setattr(Namespaces, "run", refuse)
    with pytest.raises(ConfigurationError, match="no more links"), EmulatedNetwork(hosts=2):
        pytest.fail("entered")
    assert namespaces() == before


@needs_namespaces
def test_cleanup_removes_what_a_killed_process_left(network: EmulatedNetwork) -> None:
    code = (
        "from mlbench_core.network.emulated import EmulatedNetwork\nwith "
        "EmulatedNetwork(network='1gbit,5ms') as network:\n    child = network.popen(0, ['sleep', "
        "'600'])\n    print(network.namespace(0), child.pid, flush=True)\n    input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], **TEXT) as owner:
        name, pid = line(owner).split()
        assert name not in EmulatedNetwork.cleanup()  # its owner lives
        owner.kill()
    ours = namespaces()
    # A master of another test, which cleans up as well, may have removed it.
    was_there = name in Namespaces().names()
    removed = EmulatedNetwork.cleanup()
    assert name in removed or not was_there
    assert name not in Namespaces().names()
    assert name not in EmulatedNetwork.cleanup()
    assert not ours.intersection(removed)
    assert namespaces() == ours >= {network.namespace(0)}
    deadline = time.monotonic() + 60
    while _is_running(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_running(int(pid))


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hosts": 0}, ValueError, "from 1 to 250, not 0"),
        ({"hosts": 251}, ValueError, "from 1 to 250, not 251"),
        ({"hosts": 2.0}, TypeError, r"integer, not 2\.0"),
        (
            {"bandwidth": "fast"},
            ValueError,
            "like '100mbit' or a number of bits per second, not 'fast'",
        ),
        ({"bandwidth": "1bit"}, ValueError, "from 8 kbit/s to 1000 Gbit/s, not '1bit'"),
        ({"bandwidth": float("nan")}, ValueError, "not nan"),
        ({"burst": 10}, ValueError, "at least 4096 bytes, or None, not 10"),
        ({"queue_ms": 0}, ValueError, "queue_ms must be positive, not 0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EmulatedNetwork(**arguments)


@pytest.mark.parametrize("host", [-1, 2, "0", True])
def test_a_host_that_is_not_there(host: Any) -> None:
    network = EmulatedNetwork(hosts=2)
    for function in (
        network.address,
        network.namespace,
        network.environment,
        network.cut,
        network.restore,
    ):
        with pytest.raises(ValueError, match="host must be from 0 to 1, not"):
            function(host)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100mbit", 10**8),
        ("1.5 Gbit", 1_500_000_000),
        ("64kbit", 64_000),
        ("9000bit", 9000),
        (1e6, 10**6),
    ],
)
def test_bandwidths(text: str | float, rate: int) -> None:
    assert bits_per_second(text) == rate


def test_the_former_path_hands_on_the_same_names() -> None:
    from mlbench_core.utils import emulated_network

    assert emulated_network.EmulatedNetwork is EmulatedNetwork
    assert emulated_network.bits_per_second is bits_per_second


def test_why_not_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    which = "mlbench_core.network.namespaces.shutil.which"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(which, lambda name, **_: None)
    assert EmulatedNetwork.why_not() == "ip and tc not found: install the package iproute2"
    with pytest.raises(
        ConfigurationError, match="cannot emulate a network here: ip and tc not found"
    ):
        EmulatedNetwork().__enter__()
    monkeypatch.setattr(which, lambda name, **_: name if name in ("ip", "tc", "unshare") else None)
    assert EmulatedNetwork.why_not() == (
        "network namespaces need root or a user namespace, and nsenter "
        "not found: install the package util-linux"
    )


def test_why_not_has_the_words_of_a_kernel_without_user_namespaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuses = tmp_path / "unshare"
    refuses.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    refuses.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(
        "mlbench_core.network.namespaces.shutil.which", lambda name, **_: str(tmp_path / "unshare")
    )
    assert EmulatedNetwork.why_not() == (
        "network namespaces need root, or a kernel that lets users create user namespaces: "
        "unshare failed: Operation not permitted"
    )
