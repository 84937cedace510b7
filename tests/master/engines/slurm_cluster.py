"""A real Slurm on this machine for tests: one controller and several nodes, with ports and folders
of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SchedulerParameters=sched_min_interval=10000
KillWait=1
InactiveLimit=0
SrunPortRange={ports}
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10
"""
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")


def why_not() -> str:
    """Why no Slurm can be started here; empty if one can."""
    missing = [
        name
        for name in PROGRAMS
        if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    if missing:
        return f"needs Slurm's programs, and {', '.join(missing)} cannot be found"
    return "" if os.geteuid() == 0 else "needs root to start Slurm's daemons"


class Cluster:
    """A Slurm that runs."""

    def __init__(self, root: Path, num_nodes: int) -> None:
        self.root = root
        self.nodes = [f"n{number + 1}" for number in range(num_nodes)]
        self.conf = root / "slurm.conf"

    def start(self) -> None:
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(len(self.nodes) + 1)
        nodes = "\n".join(
            (
                f"NodeName={name} NodeHostname={host} "
                f"NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000"
            )
            for name, port in zip(self.nodes, ports[1:], strict=True)
        )
        (self.root / "state").mkdir()
        for name in self.nodes:
            (self.root / "spool" / name).mkdir(parents=True)
        values = {
            "host": host,
            "port": ports[0],
            "root": self.root,
            "nodes": nodes,
            "ports": "61001-64000",
        }
        self.conf.write_text(CONFIGURATION.format(**values))
        self.run("slurmctld", "-c")
        for name in self.nodes:
            self.run("slurmd", "-N", name)
        deadline = time.monotonic() + 60
        while self.run(
            "sinfo", "--noheader", "--states=idle", "--format=%D", "--partition=all"
        ).strip() != str(len(self.nodes)):
            assert time.monotonic() < deadline, (self.root / "slurmctld.log").read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.run("scancel", "--user=root")
        alive = self.processes()
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, alive = psutil.wait_procs(alive, timeout=5)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=5)

    def run(self, *command: str) -> str:
        """Run one of Slurm's commands; its output."""
        program = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin")
        assert program is not None
        return subprocess.run(
            [program, *command[1:]],
            env={**os.environ, "SLURM_CONF": str(self.conf)},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout

    def processes(self) -> list[psutil.Process]:
        """Everything that runs with this configuration: daemons, steps, and the tasks of jobs."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if (
                    process.environ().get("SLURM_CONF") == str(self.conf)
                    and process.pid != os.getpid()
                ):
                    found.append(process)
        return found


@contextlib.contextmanager
def cluster(root: Path, num_nodes: int = 4) -> Iterator[Cluster]:
    """A Slurm with its files below ``root``, whose processes are gone afterwards."""
    made = Cluster(root, num_nodes)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in held]
