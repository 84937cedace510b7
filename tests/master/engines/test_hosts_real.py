"""The engine for hosts with two real sshd in network namespaces; it is skipped where they cannot
be started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlbench_master.engines import EngineError
from mlbench_master.engines.hosts import ssh as hosts_ssh
from mlbench_master.engines.hosts.engine import HostsEngine
from mlbench_master.processes import processes_with
from tests.master.engines import ssh_hosts
from tests.master.engines.test_hosts import ENDLESS, begun, end_of, job, script, texts
from tests.master.helpers import wait_for

pytestmark = pytest.mark.skipif(bool(ssh_hosts.why_not()), reason=ssh_hosts.why_not())

MEET = """\
import os, socket, time
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
network = os.readlink("/proc/self/ns/net")
if os.environ["RANK"] == "0":
    with socket.create_server(("", address[1])) as server, server.accept()[0] as other:
        print("other network", other.recv(100).decode() != network)
else:
    for attempt in range(100):
        try:
            with socket.create_connection(address) as other:
                other.sendall(network.encode())
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    print("sent")
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_hosts.SshHosts]:
    with ssh_hosts.ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture
def engine(
    hosts: ssh_hosts.SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HostsEngine]:
    monkeypatch.setenv("MLBENCH_SSH", hosts.ssh)
    # A connection that is cut is noticed after the second of two missing answers.
    monkeypatch.setattr(
        hosts_ssh, "_OPTIONS", {**hosts_ssh._OPTIONS, "ConnectTimeout": "1",
        "ServerAliveInterval": "1",
                                "ServerAliveCountMax": "2"}
    )  # fmt: skip
    made = HostsEngine(tmp_path / "runs", interval_s=0.2)
    yield made
    with contextlib.suppress(EngineError):
        made.stop("hosts-1")
    made.close()


def options(tmp_path: Path) -> tuple[str, ...]:
    return ("--host", "a,b", "--folder", str(tmp_path / "on-hosts"))


def workers(tmp_path: Path) -> list[psutil.Process]:
    folders = list((tmp_path / "on-hosts").glob("*/1"))
    return [
        process for folder in folders for process in processes_with("MLBENCH_RUN_DIR", str(folder))
    ]


def test_workers_of_two_hosts_meet_through_one_connection_per_host(
    engine: HostsEngine, hosts: ssh_hosts.SshHosts, tmp_path: Path
) -> None:
    before = [len(accepted(hosts, name)) for name in ssh_hosts.NAMES]
    job_id = engine.start(job(script(tmp_path, MEET), options=options(tmp_path)))
    assert end_of(engine, job_id).state == "finished", texts(engine, job_id)
    assert {"other network True", "sent"} <= set(texts(engine, job_id))
    assert [len(accepted(hosts, name)) for name in ssh_hosts.NAMES] == [
        count + 1 for count in before
    ]
    wait_for(
        lambda: not list((tmp_path / "on-hosts").iterdir()),
        what="the end of the folders on the hosts",
    )


def accepted(hosts: ssh_hosts.SshHosts, name: str) -> list[str]:
    return [
        line
        for line in (hosts.root / f"sshd-{name}.log").read_text().splitlines()
        if line.startswith("Accepted")
    ]


def test_a_host_that_is_cut_off_goes_on_and_is_stopped_when_it_is_back(
    engine: HostsEngine, hosts: ssh_hosts.SshHosts, tmp_path: Path
) -> None:
    job_id = engine.start(job(script(tmp_path, ENDLESS), options=options(tmp_path)))
    begun(engine, job_id, 2)
    hosts.network.cut(1)
    try:
        wait_for(
            lambda: engine.poll(job_id).reason.startswith("host b does not answer: "),
            what="the problem",
        )
        with pytest.raises(
            EngineError, match="cannot be stopped everywhere yet: host b does not answer"
        ):
            engine.stop(job_id)
        assert {process.environ().get("RANK") for process in workers(tmp_path)} == {None, "1"}
    finally:
        hosts.network.restore(1)
    engine.stop(job_id)
    assert workers(tmp_path) == []
    assert engine.poll(job_id).reason == "stopped"


def test_ssh_says_why_a_host_is_refused(
    engine: HostsEngine, hosts: ssh_hosts.SshHosts, tmp_path: Path
) -> None:
    known, keys = hosts.root / "known_hosts", hosts.root / "authorized_keys"
    for file, reason in (
        (keys, "host a refuses the login: root@10.77.0.1: Permission denied (publickey)."),
        (known, "host a does not answer: Host key verification failed."),
    ):
        content = file.read_text()
        file.write_text("")
        try:
            job_id = engine.start(job("true", num_workers=1, options=options(tmp_path)))
            assert end_of(engine, job_id).reason == reason
        finally:
            file.write_text(content)
    assert os.listdir(tmp_path / "runs") == ["1"]
