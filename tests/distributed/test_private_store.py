"""The store of workers of one machine: a file that only their user can read, and no port for
others."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from mlbench_core.distributed.environment import (
    HostsEnvironment,
    MPICHEnvironment,
    OpenMPIEnvironment,
    Place,
    SlurmEnvironment,
    TorchrunEnvironment,
)
from mlbench_core.distributed.pytorch import private_store
from mlbench_core.errors import WorkerError
from tests.helpers.forked import ForkedScript, forked_python
from tests.helpers.processes import environment, free_port

LIMIT = datetime.timedelta(seconds=60)

WORKER = """
import json, os, pathlib, sys, time
import torch.distributed as dist
from mlbench_core.distributed.pytorch import initialize_backends, process_groups
out = pathlib.Path(sys.argv[1])
hosts = sys.argv[3] if len(sys.argv) > 3 else None
by_hand = int(os.environ.get("BY_HAND", -1))
settings = {"timeout_s": 60, "ckpt_run_dir": out / "checkpoints"}
with initialize_backends(sys.argv[2], hosts, by_hand, "WARNING", **settings) as (rank, size, _):
    import mlbench_core.torch_private as private
    store = process_groups.store()
    path = getattr(store, "path", "") or getattr(store.underlying_store, "path", "")
    del store  # its last user removes the file
    part = out / f"{rank}.part"
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    part.write_text(json.dumps({"pid": os.getpid(), "store": path, "interface": interface}))
    part.rename(out / f"{rank}.json")
    while not (out / "end").exists():
        time.sleep(0.01)
"""


def outside_address() -> str:
    """An address of this machine that is not a loopback one."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return entry.address
    pytest.skip("this machine has no network interface with an IPv4 address")


def listening(pid: int) -> list[tuple[str, int]]:
    """The addresses and ports on which a process listens."""
    found = psutil.Process(pid).net_connections("inet")
    return [
        (entry.laddr.ip, entry.laddr.port) for entry in found if entry.status == psutil.CONN_LISTEN
    ]


@contextlib.contextmanager
def running(
    commands: list[tuple[list[str], dict[str, str]]], out: Path
) -> Iterator[list[dict[str, str | int]]]:
    """Two workers that have joined; yields what each one says."""
    processes = [
        subprocess.Popen(argv, env=environment(**variables)) for argv, variables in commands
    ]
    try:
        deadline = time.monotonic() + 90
        files = [out / "0.json", out / "1.json"]
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline and all(one.poll() in (None, 0) for one in processes)
            time.sleep(0.05)
        yield [json.loads(file.read_text()) for file in files]
        (out / "end").touch()
        assert [one.wait(60) for one in processes] == [0] * len(processes)
    finally:
        for one in processes:
            one.kill()
            one.wait()


def _script(tmp_path: Path) -> list[str]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return [str(script), str(tmp_path)]


def _by_hand(script: list[str], host: str) -> list[tuple[list[str], dict[str, str]]]:
    port = str(free_port())
    argv = [forked_python(), *script, "gloo", f"{host},{host}"]
    return [(argv, {"BY_HAND": str(rank), "MASTER_PORT": port}) for rank in range(2)]


def _by_the_launcher(script: list[str], host: str) -> list[tuple[list[str], dict[str, str]]]:
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(free_port()),
    }
    ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return [([forked_python(), *script, "gloo"], variables) for variables in ranks]


def _by_mpi(script: list[str], host: str) -> list[tuple[list[str], dict[str, str]]]:
    pytest.importorskip("mpi4py")
    options = [
        "--oversubscribe",
        "--bind-to",
        "none",
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
    ]
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    if not Path(mpirun).exists():
        pytest.skip("needs mpirun")
    return [([mpirun, *options, "-n", "2", sys.executable, *script, "mpi"], {})]


@pytest.mark.parametrize("start", [_by_hand, _by_the_launcher, _by_mpi])
@pytest.mark.parametrize("host", ["127.0.0.1", "outside"])
def test_no_other_machine_reaches_a_worker_of_one_machine(
    start: object, host: str, tmp_path: Path
) -> None:
    assert callable(start)
    outside = outside_address()
    spool = tmp_path / "spool"
    commands = start(_script(tmp_path), outside if host == "outside" else host)
    if start is _by_mpi and host == "outside":
        pytest.skip("mpirun gives no address")
    commands = [(argv, {**variables, "MLBENCH_SPOOL": str(spool)}) for argv, variables in commands]
    with running(commands, tmp_path) as workers:
        ports = [entry for worker in workers for entry in listening(int(worker["pid"]))]
        # Open MPI's own sockets come from Open MPI.
        if start is not _by_mpi:
            # On another machine, the name of the host may lead Gloo to an address that others can
            # reach.
            addresses = psutil.net_if_addrs()
            for worker in workers:
                assert "127.0.0.1" in [
                    entry.address for entry in addresses[str(worker["interface"])]
                ]
            assert ports, "Gloo listens somewhere"
            assert {address for address, _ in ports} <= {"127.0.0.1", "::1"}
            for _, port in ports:
                with pytest.raises(OSError):
                    socket.create_connection((outside, port), 5).close()
            assert len(ports) == 2, "one of Gloo for each worker; the port of the meeting is closed"
        assert workers[0]["store"] == workers[1]["store"]
        store = Path(str(workers[0]["store"]))
        assert store.parent.stat().st_mode & 0o777 == 0o700
        assert store.parent.parent == spool
    assert list(spool.iterdir()) == []


@pytest.mark.parametrize("start", [_by_hand, _by_the_launcher])
def test_rank_0_waits_for_the_others_where_no_other_machine_reaches_it(
    start: object, tmp_path: Path
) -> None:
    assert callable(start)
    argv, variables = start(_script(tmp_path), outside_address())[0]
    waiting = ForkedScript(argv[1:], **variables)
    try:
        deadline = time.monotonic() + 60
        while not (found := listening(waiting.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert found == [("127.0.0.1", int(variables["MASTER_PORT"]))]
    finally:
        waiting.kill()


def test_two_workers_by_torchrun_use_a_private_file(tmp_path: Path) -> None:
    torchrun = [
        forked_python(),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    with running(
        [
            (
                [*torchrun, *_script(tmp_path), "gloo"],
                {"TMPDIR": str(tmp_path), "PYTHON_EXEC": forked_python()},
            )
        ],
        tmp_path,
    ) as workers:
        assert Path(str(workers[0]["store"])).is_relative_to(tmp_path)
        ports = [entry for worker in workers for entry in listening(int(worker["pid"]))]
        assert {address for address, _ in ports} <= {"127.0.0.1", "::1"}
    assert not list(tmp_path.glob("mlbench-store-*"))


def _port_store(path: Path) -> dist.Store:
    store = dist.HashStore()
    store.set("mlbench/meeting", str(path))
    return store


def test_a_path_of_another_program_is_refused(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, {"MLBENCH_SPOOL": str(tmp_path)}):
        mine, path = private_store.create(1, LIMIT)
    mine.set("key", "1")
    assert private_store.open_existing(path, 1, LIMIT).get("key") == b"1"
    path.parent.chmod(0o750)
    with pytest.raises(WorkerError, match=r"cannot meet in .*, which is not private to their user"):
        private_store.meet(_port_store(path), 1, 2, LIMIT)
    path.parent.chmod(0o700)
    with (
        mock.patch("os.geteuid", return_value=os.geteuid() + 1),
        pytest.raises(WorkerError, match="private to their user"),
    ):
        private_store.meet(_port_store(path), 1, 2, LIMIT)
    with pytest.raises(WorkerError, match=r"cannot open .*set TMPDIR of rank 0"):
        private_store.meet(_port_store(tmp_path / "none"), 1, 2, LIMIT)
    with pytest.raises(WorkerError, match="private to their user"):
        private_store.meet(_port_store(path.parent), 1, 2, LIMIT)


SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_NODELIST": "n1"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}


def test_which_launchers_say_that_all_workers_are_here() -> None:
    here, elsewhere = Place(0, 2, 0, "n1"), Place(0, 2, 0, "127.0.0.1")
    cases = [
        (HostsEnvironment("n1,n1", 0, {}), True),
        (HostsEnvironment("n1,n2", 0, {}), False),
        (TorchrunEnvironment({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}), True),
        (TorchrunEnvironment({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}), False),
        (TorchrunEnvironment(TORCHRUN), False),
        (OpenMPIEnvironment({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}), True),
        (OpenMPIEnvironment({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}), False),
        (MPICHEnvironment({"MPI_LOCALNRANKS": "2"}), True),
        (SlurmEnvironment({**SLURM, "SLURM_NNODES": "1"}), True),
        (SlurmEnvironment({**SLURM, "SLURM_NNODES": "2"}), False),
        (SlurmEnvironment({**SLURM, "SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "1"}), True),
        (SlurmEnvironment(SLURM), False),
    ]
    assert [found.is_on_one_machine(here) for found, _ in cases] == [
        expected for _, expected in cases
    ]
    assert all(found.is_on_one_machine(elsewhere) for found, _ in cases)


def test_the_last_worker_removes_the_folder_also_if_torch_has_left_the_file(tmp_path: Path) -> None:
    """Two workers that let go of torch's store at the same moment each take the other one for the
    last."""
    path = tmp_path / "store" / "file"
    path.parent.mkdir()
    path.write_text("")
    private_store.leave(path, 2)
    assert path.exists(), "the other worker may still use it"
    private_store.leave(path, 2)
    assert not path.parent.exists()
    private_store.leave(path, 2)
