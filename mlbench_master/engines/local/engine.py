"""Run workers as processes of this machine.

The command is started once for each rank, with ``{rank}`` and ``{hosts}`` filled in. The variables
of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are set. A
Python script (``main.py --run_id {run_id}``) runs in this Python. With the backend ``mpi``, one
``mpirun`` starts all ranks, because MPI workers find each other through it. The command line is
split as a shell would split it, but no shell runs it.

A worker of a run with GPUs sees only its own GPU. Then LOCAL_RANK is 0 and LOCAL_WORLD_SIZE is 1,
so that a script that calls ``torch.cuda.set_device(local_rank)`` finds it. If one process starts
all workers (``mpirun``, or a command that runs only in worker 0), that process assigns the local
ranks. Each worker then sees all GPUs of the run in the order of the ranks, and its local rank is
the number of its GPU.

The workers of an elastic run have a number instead of a rank, and no variables of torchrun, because
they build no process group of fixed size. They meet in a store of the supervisor.

Each run has a supervisor process, which outlives the master. The files in the run's folder carry
its state::

    job.json         written by the master before the start: commands, environment
    supervisor.json  written by the supervisor before it starts a worker: process id, start mark
    load/            the load of the workers, from the supervisor; see the module ``load_sampler``
    log.jsonl        lines of the workers (from the supervisor) and of the master; see ``logs``
    dropping         exists while the log cannot be written, so that lines are dropped
    container        the program that runs containers, if there are any; see ``containers``
    status.json      written at the end; with neither this file nor a supervisor, the run is lost
    spool/           metrics that were not delivered; the master stores them at the end of the run
    network          exists if each worker has an emulated host
    work/            the folder in which the workers run, unless the run has another one
    output/          the results of the workers, for example output/task1a/7/result.json
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, PositiveInt, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from mlbench_core.calling_environment import ENGINE_VARIABLES, FORK_VARIABLE
from mlbench_core.errors import ConfigurationError
from mlbench_core.network.emulated import EmulatedNetwork
from mlbench_core.paths import user_folder
from mlbench_core.run_terms import PaidSamples
from mlbench_master.engines.containers import (
    Containers,
    check_program,
    read_options,
    remove_containers,
)
from mlbench_master.engines.folders import FolderEngine
from mlbench_master.engines.interface import WORKERS_PER_CORE, Job, JobStatus
from mlbench_master.engines.local import emulated_hosts
from mlbench_master.engines.local.gpus import find_gpus
from mlbench_master.engines.local.mpirun import is_mpirun, mpirun_command
from mlbench_master.engines.logs import append_log, dropping_problem, last_file, log_limit_bytes
from mlbench_master.engines.supervisor.fork_server import ForkServer
from mlbench_master.engines.supervisor.forked import trains_in_this_python
from mlbench_master.engines.supervisor.start import (
    end_marked,
    find_supervisor,
    folder_variables,
    hold_port,
    read_state,
    signal_to,
    start_supervisor,
    write_private,
)
from mlbench_master.engines.worker_command import (
    check_program_in,
    fill,
    split_command,
    split_container_command,
    threads_per_worker,
    usable_cores,
    variables_to_remove,
    worker_environment,
)

__all__ = ["LocalEngine", "worker_commands"]

logger = logging.getLogger(__name__)

# Supervisors that this process started. Only a parent can wait for a child, so all engine objects
# share them.
_children: dict[Path, subprocess.Popen[bytes]] = {}
_fork_server: ForkServer | None = None
_USER_FOLDERS = ("datasets", "checkpoints", "cache")
_LOAD_INTERVAL_S = 5.0
_SHORTEST_LOAD_INTERVAL_S = 0.1


class _Samples(TypedDict):
    useful: int
    paid: PositiveInt


class _Status(TypedDict):
    returncode: int
    reason: str
    finished_at: FiniteFloat
    changes: NotRequired[list[str]]
    samples: NotRequired[_Samples]


_status = TypeAdapter(_Status)


class LocalEngine(FolderEngine):
    """An engine that starts the workers of a run on this machine.

    Args:
        folder: Folder for the folders of runs; it is created if missing.
        cores: Number of cores for workers; by default those that this process may use.
        gpus: GPUs for workers, as entries of CUDA_VISIBLE_DEVICES; by default those that this
            process may use.
        grace_s: Seconds between SIGTERM and SIGKILL for a worker.
    """

    name = "local"
    emulates_networks = True
    replaces_workers = True
    starts_processes = True
    sees_folders = True
    options_example = "--container podman"
    container_advice = (
        "add --container docker, podman or apptainer to 'mlbench run' or to the engine's options"
    )

    def __init__(
        self,
        folder: Path,
        cores: int | None = None,
        grace_s: float = 3.0,
        gpus: Sequence[str] | None = None,
    ) -> None:
        super().__init__(folder)
        self.place = f"{socket.gethostname()}:{self._folder}"
        if cores is None:
            cores = usable_cores()
        self._cores = cores
        self._gpus: tuple[str, ...] | None = None
        if gpus is not None:
            self._gpus = tuple(gpus)
        self._grace_s = grace_s

    def uses_image(self, options: Sequence[str]) -> bool:
        """Return whether options ask for containers; see :meth:`Engine.uses_image`."""
        return read_options(options) is not None

    def check_options(self, options: Sequence[str]) -> None:
        """Refuse unknown options and missing programs; see :meth:`Engine.check_options`."""
        containers = read_options(options)
        if containers is not None:
            check_program(containers.program)

    @property
    def capacity(self) -> float:
        """Return the number of cores for workers."""
        return float(self._cores)

    @property
    def most_workers(self) -> int:
        """Return the largest number of workers; see :attr:`Engine.most_workers`."""
        return WORKERS_PER_CORE * self._cores

    def check_program(self, words: Sequence[str], cwd: str, path: str) -> None:
        """Refuse a command that does not exist; see :meth:`Engine.check_program`."""
        check_program_in(words, cwd, path)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Return the GPUs for workers; see :attr:`Engine.gpus`."""
        # Only when a run asks for GPUs, because nvidia-smi can take seconds.
        if self._gpus is None:
            self._gpus = find_gpus()
        return self._gpus

    def start(self, job: Job) -> str:
        """Start a job; see :meth:`Engine.start`."""
        job_id = f"local-{job.run_id}"
        folder = self._job_folder(job_id)
        containers = read_options(job.options)
        if job.cwd and not os.access(job.cwd, os.R_OK | os.X_OK):
            raise ConfigurationError(
                f"cannot start run {job.run_id}: the folder of its workers, {job.cwd}, does "
                "not exist any more"
            )
        self.stop(job_id)  # a new database reuses the ids of runs that may still be running
        self.remove(job_id)
        if containers is not None:
            # Containers of an earlier run of this id may still be there, if its folder was deleted
            # by hand.
            check_program(containers.program)
            problem = remove_containers(containers.program, folder)
            if problem:
                raise ConfigurationError(f"cannot start run {job.run_id}: {problem}")
        port_socket: socket.socket | None = None
        limit_bytes = log_limit_bytes()
        program, removed = "", variables_to_remove(job.caller_env)
        if containers is not None:
            # A container inherits nothing of the master.
            program, removed = containers.program, []
        # The containers of Docker and Podman are not below the supervisor, which measures the
        # processes below it.
        sample_s = load_interval_s() if program in ("", "apptainer") else 0.0
        try:
            (folder / "work").mkdir(parents=True)
            if program:
                # Both files tell _end_marked() what to remove if the supervisor is killed.
                (folder / "container").write_text(program)
            if job.network:
                (folder / emulated_hosts.FILE).write_text(job.network)
            self.results(job_id).mkdir()
            # The supervisor inherits the socket, so the port is not free for others before the
            # workers use it.
            port_socket = hold_port()
            commands, env = self._commands(job, folder, port_socket.getsockname()[1], containers)
            content = {
                "commands": commands,
                "env": env,
                "remove": removed,
                "cwd": job.cwd,
                "grace_s": self._grace_s,
                "log_limit_bytes": limit_bytes,
                "num_workers": job.num_workers,
                "gpus": job.gpus,
                "load_interval_s": sample_s,
                "container": program,
                "network": job.network,
            }
            content.update(_elastic_content(job, removed))
            # Only for this user: the variables of a run have its token.
            write_private(folder / "job.json", json.dumps(content))
            for note in (*job.notes, f"command: {shlex.join(commands[0]['argv'])}"):
                append_log(folder / "log.jsonl", None, "system", note)
            variables = {**os.environ, **env}
            for name in removed:
                variables.pop(name, None)
            server = None
            is_plain = containers is None and not job.network and not job.gpus
            # The supervisor of an elastic run has threads, and must not fork.
            if is_plain and job.elastic is None:
                server = fork_server_for(commands, variables, job.cwd or folder / "work")
            if server is None:
                _children[folder] = start_supervisor(folder, port_socket)
            else:
                _children.pop(folder, None)  # that of an earlier run of this id
                server.start_supervisor(folder, port_socket)
        except OSError as error:
            raise ConfigurationError(
                f"cannot start run {job.run_id} in {folder}: {error}"
            ) from error
        finally:
            if port_socket is not None:
                port_socket.close()  # the supervisor has inherited it
        return job_id

    def _commands(
        self, job: Job, folder: Path, port: int, containers: Containers | None
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return the processes to start for a job, and the environment of all of them."""
        threads = threads_per_worker(job.num_cpus, job.most_workers, self._cores)
        # A job may set its own number of threads, but not these.
        own = folder_variables(folder)
        if containers is None:
            env = worker_environment(job.env, job.caller_env, own, threads)
            return worker_commands(job, port), env
        # Not the whole folder of the user, which holds the master's database and its token.
        mounts = [folder / "work", folder / "output", folder / "spool"]
        mounts += map(user_folder, _USER_FOLDERS)
        for mount in mounts:  # Docker would make them for root
            mount.mkdir(parents=True, exist_ok=True)
        inherited = {name: os.environ[name] for name in containers.variables if name in os.environ}
        home = {"MLBENCH_HOME": str(user_folder()), "PYTHONUNBUFFERED": "1"}
        env = {"OMP_NUM_THREADS": str(threads), **inherited, **job.env, **home, **own}
        commands = worker_commands(job, port, in_container=True)
        commands = containers.wrap(job, commands, folder, mounts, list(env))
        return commands, containers.environment(env)

    def poll(self, job_id: str) -> JobStatus:
        """Return the status of a job; see :meth:`Engine.poll`."""
        folder = self._job_folder(job_id)
        # A status does not count before its supervisor has ended: its last steps may take time, and
        # a worker that writes the file must not end the run.
        if self._supervisor(folder) is not None:
            return JobStatus("running", dropping_problem(folder))
        try:
            status = _status.validate_json(read_state(folder / "status.json"))
        except FileNotFoundError:
            # A supervisor that was killed leaves its workers behind.
            self._end_marked(folder)
            if not (folder / "supervisor.json").exists() and folder not in _children:
                return JobStatus("unstarted", "an earlier master ended before it started the run")
            return JobStatus("lost", "lost: the run is not running, and it left no status")
        except (ValidationError, IsADirectoryError, PermissionError) as error:
            self._end_marked(folder)
            problem = str(error).splitlines()[0]
            return JobStatus("failed", f"failed: {folder / 'status.json'} is damaged: {problem}")
        returncode = status["returncode"]
        state = "finished"
        if returncode:
            state = "failed"
        changes = tuple(status.get("changes", ()))
        samples = None
        if status.get("samples") is not None:
            samples = PaidSamples(**status["samples"])
        return JobStatus(
            state, status["reason"], returncode, status["finished_at"], changes, samples
        )

    def stop(self, job_id: str) -> None:
        """End a job; see :meth:`Engine.stop`."""
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
            self._end_marked(folder)

    def _supervisor(self, folder: Path) -> int | None:
        """Return the process id of the run's supervisor if it is alive."""
        child = _children.get(folder)
        if child is not None:
            # poll() also removes the zombie of a child that has ended.
            if child.poll() is not None:
                return None
            return child.pid
        return find_supervisor(folder)

    def _end_marked(self, folder: Path) -> None:
        """End processes and containers that a killed supervisor left behind."""
        end_marked(folder, self._grace_s)
        # The emulated hosts of a run outlive its supervisor.
        if (folder / emulated_hosts.FILE).exists():
            EmulatedNetwork.cleanup()
        with contextlib.suppress(OSError):
            program = read_state(folder / "container").decode(errors="replace")
            problem = remove_containers(program, folder)
            if problem:
                append_log(last_file(folder), None, "system", problem)


def fork_server_for(
    commands: Sequence[Mapping[str, Any]], env: Mapping[str, str], cwd: str | Path
) -> ForkServer | None:
    """Return the fork server for the workers of a run; None if they are new programs.

    It is started for the first run that can use it.

    Args:
        commands: The processes, see :func:`worker_commands`.
        env: Variables of all of them.
        cwd: The folder in which they start.
    """
    global _fork_server
    if env.get(FORK_VARIABLE) != "1" or not sys.platform.startswith("linux"):
        return None
    for command in commands:
        if command["rank"] is None:
            return None
        if not trains_in_this_python(command["argv"], str(cwd), env.get("PATH", os.defpath)):
            return None
    if _fork_server is None or not _fork_server.fits(env):
        if _fork_server is not None:
            _fork_server.close()
            _fork_server = None
        try:
            _fork_server = ForkServer(env)
        except OSError as error:
            logger.warning("workers start as new programs: %s", error)
            return None
    return _fork_server


def load_interval_s() -> float:
    """Return the seconds between two samples of the load of workers, 0 for no samples."""
    text = os.environ.get("MLBENCH_LOAD_INTERVAL_S", "")
    try:
        interval = float(text or _LOAD_INTERVAL_S)
    except ValueError:
        interval = math.nan
    if interval != 0 and not _SHORTEST_LOAD_INTERVAL_S <= interval <= threading.TIMEOUT_MAX:
        raise ConfigurationError(
            f"MLBENCH_LOAD_INTERVAL_S must be 0 or at least {_SHORTEST_LOAD_INTERVAL_S} "
            f"seconds, not {text!r}: set it to 0 for runs without samples of their load"
        )
    return interval


def worker_commands(
    job: Job, port: int = 29500, in_container: bool = False
) -> list[dict[str, Any]]:
    """Return the processes to start for a job.

    Args:
        job: The job.
        port: Port of the rendezvous, on which rank 0 listens.
        in_container: True for processes in containers of the job's image: no path of this machine
            is filled in.

    Returns:
        One dictionary per process, with ``argv``, ``env`` and ``rank``. The rank of an ``mpirun``
        is None. It may also have ``prefix``: a regular expression for the beginning of a worker's
        line, with the rank as its group.

    Raises:
        ConfigurationError: The backend is ``mpi``, and ``mpirun`` is not installed.
    """
    argv = _shared_words(job, in_container)
    if job.elastic is not None:
        env = emulated_hosts.shared_variables(job)
        workers = range(job.num_workers)
        return [{"argv": _ranked(argv, worker), "env": env, "rank": worker} for worker in workers]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if job.gpus:
        meeting["CUDA_VISIBLE_DEVICES"] = ",".join(job.gpus)
    if not job.all_nodes:
        return [{"argv": _ranked(argv, 0), "env": meeting, "rank": 0}]
    if job.backend == "mpi":
        return [{**_mpi_command(job, argv, in_container), "env": meeting, "rank": None}]
    size = str(job.num_workers)
    world = {**meeting, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    commands: list[dict[str, Any]] = []
    for rank in range(job.num_workers):
        env = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if job.gpus:
            # The only GPU that a worker sees has the number 0.
            env.update(CUDA_VISIBLE_DEVICES=job.gpus[rank], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        emulated_hosts.place_worker(job, port, env, rank)
        commands.append({"argv": _ranked(argv, rank), "env": env, "rank": rank})
    return commands


def _mpi_command(job: Job, argv: list[str], in_container: bool) -> dict[str, Any]:
    """Return the single command that starts all workers of a job; MPI assigns the ranks."""
    if is_mpirun(argv[0]):  # the user's own mpirun, with its own options
        return {"argv": argv}
    # One command line for all workers, unless each has its own words.
    workers = [argv]
    if any("{rank}" in word for word in argv):
        workers = [_ranked(argv, rank) for rank in range(job.num_workers)]
    command, prefix = mpirun_command(job.num_workers, workers, in_container)
    return {"argv": command, "prefix": prefix}


def _elastic_content(job: Job, removed: Sequence[str]) -> dict[str, Any]:
    """Return the entries of ``job.json`` that only an elastic run has."""
    if job.elastic is None:
        return {}
    return {
        "elastic": {
            "argv": _shared_words(job),
            "env": emulated_hosts.shared_variables(job),
            "least": job.elastic.least,
            "most": job.elastic.most,
        },
        # The workers have no place in a world of fixed size.
        "remove": [*removed, *ENGINE_VARIABLES],
    }


def _shared_words(job: Job, in_container: bool = False) -> list[str]:
    """Return the words of the command of all workers, in which only the rank is not filled in."""
    hosts = ",".join(emulated_hosts.host_addresses(job))
    if in_container:
        words = split_container_command(job)
    else:
        words = split_command(job)
    return [fill(word, {"{hosts}": hosts}) for word in words]


def _ranked(argv: list[str], rank: int) -> list[str]:
    return [fill(word, {"{rank}": str(rank)}) for word in argv]
