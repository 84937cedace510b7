"""Run workers as processes of this machine.

The command is started once for each rank, with ``{rank}`` and ``{hosts}`` filled in. The variables of torchrun (RANK,
WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are set. A Python script
(``main.py --run_id {run_id}``) runs in this Python. With the backend ``mpi``, one ``mpirun`` starts all ranks, because
MPI workers find each other through it. The command line is split as a shell would split it, but no shell runs it.

A worker of a run with GPUs sees only its own GPU. Then LOCAL_RANK is 0 and LOCAL_WORLD_SIZE is 1, so that a script that
calls ``torch.cuda.set_device(local_rank)`` finds it. If one process starts all workers (``mpirun``, or a command that
runs only in worker 0), that process assigns the local ranks. Each worker then sees all GPUs of the run in the order of
the ranks, and its local rank is the number of its GPU.

Each run has a supervisor process, which outlives the master. The files in the run's folder carry its state::

    job.json         written by the master before the start: commands, environment
    supervisor.json  written by the supervisor before it starts a worker: its process id and start mark
    load/            the load of the workers, from the supervisor; see the module ``load_sampler``
    log.jsonl        lines of the workers (from the supervisor) and notes (from the master); see the module ``logs``
    dropping         exists while the log cannot be written, so that lines are dropped
    status.json      written by the supervisor at the end; without it and without a supervisor, the run is lost
    spool/           metrics that the workers could not deliver; the master stores them at the end of the run
    work/            the folder in which the workers run
    output/          the results of the workers, for example output/task1a/7/result.json
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from mlbench_core.errors import ConfigurationError
from mlbench_master.launchers.command_line import fill, python_environment, split_command
from mlbench_master.launchers.folders import FolderLauncher
from mlbench_master.launchers.gpus import find_gpus
from mlbench_master.launchers.interface import Job, JobStatus
from mlbench_master.launchers.logs import append_log, last_file, log_limit_bytes
from mlbench_master.launchers.mpirun import is_mpirun, mpirun_command
from mlbench_master.launchers.supervised import (
    FOLDER_VARIABLE,
    end_marked,
    find_supervisor,
    hold_port,
    read_state,
    signal_to,
    start_supervisor,
)

__all__ = ["LocalLauncher", "worker_commands"]

# Supervisors that this process started. Only a parent can wait for a child, so all launcher objects share them.
_children: dict[Path, subprocess.Popen[bytes]] = {}
_DROPPING = "lines of output are dropped, because the log cannot be written: is the disk full?"
_LOAD_INTERVAL_S = 5.0
_SHORTEST_LOAD_INTERVAL_S = 0.1


class _Status(TypedDict):
    returncode: int
    reason: str
    finished_at: FiniteFloat


_status = TypeAdapter(_Status)


class LocalLauncher(FolderLauncher):
    """A launcher that starts the workers of a run on this machine.

    Args:
        folder: Folder for the folders of runs; it is created if missing.
        cores: Number of cores for workers; by default those that this process may use.
        gpus: GPUs for workers, as entries of CUDA_VISIBLE_DEVICES; by default those that this process may use.
        grace_s: Seconds between SIGTERM and SIGKILL for a worker.
    """

    name = "local"

    def __init__(
        self, folder: Path, cores: int | None = None, grace_s: float = 3.0, gpus: Sequence[str] | None = None
    ) -> None:
        super().__init__(folder)
        self.place = f"{socket.gethostname()}:{self._folder}"
        if cores is None:
            # A container or taskset may leave this process fewer cores than the machine has; macOS cannot say.
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._cores = cores
        self._gpus = None if gpus is None else tuple(gpus)
        self._grace_s = grace_s

    @property
    def capacity(self) -> float:
        """Return the number of cores for workers."""
        return float(self._cores)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Return the GPUs for workers; see :attr:`Launcher.gpus`."""
        # Only when a run asks for GPUs, because nvidia-smi can take seconds.
        if self._gpus is None:
            self._gpus = find_gpus()
        return self._gpus

    def start(self, job: Job) -> str:
        """Start a job; see :meth:`Launcher.start`."""
        job_id = f"local-{job.run_id}"
        folder = self._job_folder(job_id)
        self.stop(job_id)  # a new database reuses the ids of runs that may still be running
        self.remove(job_id)
        held: socket.socket | None = None
        limit_bytes = log_limit_bytes()
        sample_s = load_interval_s()
        try:
            (folder / "work").mkdir(parents=True)
            self.results(job_id).mkdir()
            # More threads than cores slow down all workers, so a run that shares the cores gets fewer per worker.
            threads = max(1, int(min(job.num_cpus, self._cores / min(job.num_workers, self._cores))))
            # A job may set its own number of threads, but not the folder, by which its processes are found, nor those
            # below it, which the master reads.
            own = {
                FOLDER_VARIABLE: str(folder),
                "MLBENCH_SPOOL": str(self.spool(job_id)),
                "MLBENCH_OUTPUT": str(self.results(job_id)),
            }
            env = {"OMP_NUM_THREADS": str(threads), **job.env, **python_environment(), **own}
            held = hold_port()
            commands = worker_commands(job, held.getsockname()[1])
            content = {
                "commands": commands,
                "env": env,
                "grace_s": self._grace_s,
                "log_limit_bytes": limit_bytes,
                "num_workers": job.num_workers,
                "gpus": job.gpus,
                "load_interval_s": sample_s,
            }
            (folder / "job.json").touch(mode=0o600)  # only for its owner: it may hold a token
            (folder / "job.json").write_text(json.dumps(content))
            for note in (*job.notes, f"command: {shlex.join(commands[0]['argv'])}"):
                append_log(folder / "log.jsonl", None, "system", note)
            _children[folder] = start_supervisor(folder, held)
        except OSError as error:
            raise ConfigurationError(f"cannot start run {job.run_id} in {folder}: {error}") from error
        finally:
            if held is not None:
                held.close()  # the supervisor has inherited it
        return job_id

    def poll(self, job_id: str) -> JobStatus:
        """Return the status of a job; see :meth:`Launcher.poll`."""
        folder = self._job_folder(job_id)
        # A status does not count before its supervisor has ended: its last steps may take time, and a worker that
        # writes the file must not end the run.
        if self._supervisor(folder) is not None:
            return JobStatus("running", _DROPPING if (folder / "dropping").exists() else "")
        try:
            status = _status.validate_json(read_state(folder / "status.json"))
        except FileNotFoundError:
            # A supervisor that was killed leaves its workers behind.
            end_marked(folder, self._grace_s)
            if not (folder / "supervisor.json").exists() and folder not in _children:
                return JobStatus("unstarted", "an earlier master ended before it started the run")
            return JobStatus("lost", "lost: the run is not running, and it left no status")
        except (ValidationError, IsADirectoryError, PermissionError) as error:
            end_marked(folder, self._grace_s)
            return JobStatus("failed", f"failed: {folder / 'status.json'} is damaged: {str(error).splitlines()[0]}")
        returncode = status["returncode"]
        state = "failed" if returncode else "finished"
        return JobStatus(state, status["reason"], returncode, status["finished_at"])

    def stop(self, job_id: str) -> None:
        """End a job; see :meth:`Launcher.stop`."""
        folder = self._job_folder(job_id)
        pid = self._supervisor(folder)
        if pid is not None:
            signal_to(pid, signal.SIGTERM)
            # The supervisor waits grace_s after SIGTERM, and up to 5 s after SIGKILL.
            deadline = time.monotonic() + self._grace_s + 7
            while self._supervisor(folder) == pid:
                if time.monotonic() > deadline:
                    signal_to(pid, signal.SIGKILL)
                    break
                time.sleep(0.05)
        # A supervisor that was killed leaves its workers behind.
        if folder.exists() and not (folder / "status.json").exists():
            end_marked(folder, self._grace_s)

    def note(self, job_id: str, text: str) -> None:
        """Add a line of the master to a job's log; see :meth:`Launcher.note`."""
        # A full disk must not keep the master from recording the end of the run.
        with contextlib.suppress(OSError):
            append_log(last_file(self._job_folder(job_id)), None, "system", text)

    def _supervisor(self, folder: Path) -> int | None:
        """Return the process id of the run's supervisor if it is alive."""
        child = _children.get(folder)
        if child is not None:
            return child.pid if child.poll() is None else None
        return find_supervisor(folder)


def load_interval_s() -> float:
    """Return the seconds between two samples of the load of workers, 0 for no samples."""
    text = os.environ.get("MLBENCH_LOAD_INTERVAL_S", "")
    try:
        interval = float(text or _LOAD_INTERVAL_S)
    except ValueError:
        interval = math.nan
    if interval != 0 and not _SHORTEST_LOAD_INTERVAL_S <= interval <= threading.TIMEOUT_MAX:
        raise ConfigurationError(
            f"MLBENCH_LOAD_INTERVAL_S must be 0 or at least {_SHORTEST_LOAD_INTERVAL_S} seconds, not {text!r}: "
            "set it to 0 for runs without samples of their load"
        )
    return interval


def worker_commands(job: Job, port: int = 29500) -> list[dict[str, Any]]:
    """Return the processes to start for a job.

    Args:
        job: The job.
        port: Port of the rendezvous, on which rank 0 listens.

    Returns:
        One dictionary per process, with ``argv``, ``env`` and ``rank``. The rank of an ``mpirun`` is None. It may also
        have ``prefix``: a regular expression for the beginning of a worker's line, with the rank as its group.

    Raises:
        ConfigurationError: The backend is ``mpi``, and ``mpirun`` is not installed.
    """
    hosts = ",".join(["127.0.0.1"] * job.num_workers)
    argv = [fill(word, {"{hosts}": hosts}) for word in split_command(job)]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if job.gpus:
        meeting["CUDA_VISIBLE_DEVICES"] = ",".join(job.gpus)
    if not job.all_nodes:
        return [{"argv": _ranked(argv, 0), "env": meeting, "rank": 0}]
    if job.backend == "mpi":
        return [{**_mpi_command(job, argv), "env": meeting, "rank": None}]
    size = str(job.num_workers)
    world = {**meeting, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    commands: list[dict[str, Any]] = []
    for rank in range(job.num_workers):
        env = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if job.gpus:
            env.update(CUDA_VISIBLE_DEVICES=job.gpus[rank], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        commands.append({"argv": _ranked(argv, rank), "env": env, "rank": rank})
    return commands


def _mpi_command(job: Job, argv: list[str]) -> dict[str, Any]:
    """Return the single command that starts all workers of a job with the backend ``mpi``; MPI assigns ranks."""
    if is_mpirun(argv[0]):  # the user's own mpirun, with its own options
        return {"argv": argv}
    has_rank = any("{rank}" in word for word in argv)
    workers = [_ranked(argv, rank) for rank in range(job.num_workers)] if has_rank else [argv]
    command, prefix = mpirun_command(job.num_workers, workers)
    return {"argv": command, "prefix": prefix}


def _ranked(argv: list[str], rank: int) -> list[str]:
    return [fill(word, {"{rank}": str(rank)}) for word in argv]
