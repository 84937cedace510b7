"""Run workers on several machines that ssh reaches.

Nothing but the command is copied: each host has the same Python environment and the same scripts
under the same path. The master calls each host through ``ssh``, once for each interval and all
runs. There, ``agent`` starts the supervisor of local runs, so a run outlives the master and its
connections. The files in the run's folder are::

    job.json       the workers of each host, written before the first call; only for their user
    progress.json  the step of the run; see the module ``run_state``
    ended.json     written at the end: the status
    left_on_hosts  there while the run is over and hosts have their folders of it
    load/          the load of the workers
    log.jsonl      lines of the workers and of the master; see the module ``logs``
    spool/         metrics that the workers could not deliver, fetched at the end of the run
    output/        the results of the workers of the first host, fetched at the end of the run

A host has the files of a local run, below ``~/.cache/mlbench/hosts`` until the run has ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlbench_core.addresses import is_loopback
from mlbench_core.errors import ConfigurationError
from mlbench_master.engines.folders import FolderEngine, read_interval, unreachable_note
from mlbench_master.engines.hosts.host_file import HostOptions, Share, read_options, share_slots
from mlbench_master.engines.hosts.link import HostLink
from mlbench_master.engines.hosts.run_state import LEFT_ON_HOSTS, HostRun
from mlbench_master.engines.hosts.ssh import Ssh
from mlbench_master.engines.interface import EngineError, Job, JobStatus
from mlbench_master.engines.local.engine import load_interval_s
from mlbench_master.engines.logs import append_log, log_limit_bytes
from mlbench_master.engines.supervisor.start import write_private
from mlbench_master.engines.worker_command import fill, script_python, split_command

__all__ = ["HostsEngine"]

# The supervisors wait 3 s after SIGTERM and up to 5 s after SIGKILL, and then the files are
# fetched. A client of the master waits for 30 s.
_STOP_S = 25.0
_READ_S = 2.0
# For the calls of all hosts that have begun.
_CLOSE_S = 2.0


class HostsEngine(FolderEngine):
    """An engine that starts the workers of a run on hosts of a host file.

    Args:
        folder: Folder for the folders of runs; it is created if missing.
        interval_s: Seconds between two calls of a host; by default ``MLBENCH_HOSTS_INTERVAL_S``, or
            5.

    Raises:
        ConfigurationError: The program ``ssh`` was not found.
    """

    name = "hosts"
    starts_processes = True
    options_example = "--host node1:4,node2:4"

    def __init__(self, folder: Path, interval_s: float | None = None) -> None:
        if interval_s is None:
            interval_s = read_interval(self.name)
        self._interval_s = interval_s
        self._ssh = Ssh()
        super().__init__(folder)
        self.place = f"hosts:{self._folder}"
        self._limit_bytes = log_limit_bytes()
        self._load_interval_s = load_interval_s()
        self._runs: dict[str, HostRun] = {}
        self._open: list[HostRun] = []  # those of them that have slots
        self._read: dict[tuple[str, ...], tuple[float, HostOptions]] = {}
        self._links: dict[tuple[str, str], HostLink] = {}
        self._lock = threading.RLock()  # requests stop runs while the scheduler polls them
        # Hosts still have folders of these runs, which this master has to remove.
        for mark in self._folder.glob(f"*/{LEFT_ON_HOSTS}"):
            # A damaged folder must not keep the master from starting.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self._known(f"{self.name}-{mark.parent.name}")

    @property
    def capacity(self) -> float:
        """Return infinity, because each run may name its own hosts; see :meth:`has_room`."""
        return math.inf

    def check_options(self, options: Sequence[str]) -> None:
        """Refuse wrong options and host files; see :meth:`Engine.check_options`."""
        read_options(options)

    def check_workers(self, num_workers: int, backend: str, options: Sequence[str]) -> None:
        """Refuse more workers than slots; see :meth:`Engine.check_workers`."""
        if backend == "mpi":
            raise ValueError(
                "backend: must be gloo or nccl, not mpi: the engine hosts starts no mpirun; "
                "give your own mpirun as the command of a custom backend with "
                "run_all_nodes=false, and --host {hosts}"
            )
        host_options = read_options(options)
        slots = host_options.slots
        if num_workers > slots:
            raise ValueError(
                f"num_workers: must be at most {slots}, not {num_workers}: the "
                f"{len(host_options.hosts)} host(s) have {slots} slots together; start fewer "
                "workers, or give more slots in the host file"
            )
        self._check_addresses(host_options)

    def has_room(self, num_workers: int, options: Sequence[str]) -> bool:
        """Return whether enough slots are free; see :meth:`Engine.has_room`."""
        try:
            host_options = self._options(tuple(options))
        except ValueError:
            return True  # the start says why
        if num_workers > host_options.slots:
            return True
        shares = share_slots(host_options.hosts, num_workers, self._taken())
        return _count_slots(shares) == num_workers

    def start(self, job: Job) -> str:
        """Start a job; see :meth:`Engine.start`."""
        job_id = f"hosts-{job.run_id}"
        self.check_workers(job.num_workers, job.backend, job.options)
        options = read_options(job.options)
        folder = self._job_folder(job_id)
        if folder.exists():  # a new database reuses the ids of runs that may still be running
            self.stop(job_id)
            self.remove(job_id)
        shares = share_slots(options.hosts, job.num_workers, self._taken())
        if _count_slots(shares) < job.num_workers:
            raise ConfigurationError(
                f"cannot start run {job.run_id}: fewer than {job.num_workers} slots are free"
            )
        try:
            (folder / "output").mkdir(parents=True)
            write_private(folder / "job.json", json.dumps(self._content(job, options, shares)))
            for note in (*job.notes, *_notes(job, shares)):
                append_log(folder / "log.jsonl", None, "system", note)
            # From here on, the threads of the hosts read the job and start the workers.
            self._known(job_id)
        except OSError as error:
            # Without this file, no master takes the run up later.
            (folder / "job.json").unlink(missing_ok=True)
            raise ConfigurationError(
                f"cannot start run {job.run_id} in {folder}: {error}"
            ) from error
        return job_id

    def poll(self, job_id: str) -> JobStatus:
        """Return the status of a job; see :meth:`Engine.poll`."""
        run = self._known(job_id)
        if run is None:
            return JobStatus("unstarted", "an earlier master ended before it recorded the run")
        return run.status()

    def stop(self, job_id: str) -> None:
        """End a job on all hosts, and wait until its files are here; see :meth:`Engine.stop`.

        Raises:
            EngineError: A host does not answer, or its workers or its files take long. They are
                stopped and fetched when it does, and a later call finds the run ended.
        """
        run = self._known(job_id)
        if run is None:
            return
        began = time.monotonic()
        run.stop()
        # The threads of the hosts do the rest.
        while not run.is_over:
            asked_at = {name: self._link(name, run.python).asked_at for name in run.hosts}
            problem = run.problem_since(asked_at, began)
            if not problem and time.monotonic() > began + _STOP_S:
                problem = f"no end within {_STOP_S:g} s on {', '.join(run.open_hosts())}"
            # A host that the user took out of the host file will never answer again.
            if problem and not self._give_up_removed(run):
                raise EngineError(
                    f"the run cannot be stopped everywhere yet: {problem}; stop it again later"
                )
            time.sleep(0.05)

    def remove(self, job_id: str) -> None:
        """Delete a job's folder; see :meth:`Engine.remove`."""
        with self._lock:
            run = self._runs.pop(job_id, None)
            self._open = [other for other in self._open if other is not run]
        if run is not None:
            run.forget_folder()
        super().remove(job_id)

    def close(self) -> None:
        """End the threads and the connections; the jobs continue."""
        with self._lock:
            links, self._links = list(self._links.values()), {}
            self._runs.clear()
            self._open.clear()
        for link in links:
            # All first, so that their last calls end at the same time.
            link.end()
        deadline = time.monotonic() + _CLOSE_S
        for link in links:
            link.join(max(0.0, deadline - time.monotonic()))
        self._ssh.close()
        super().close()

    def _known(self, job_id: str) -> HostRun | None:
        """Return a run and watch it from now on; None if it was not recorded."""
        # Two objects for one run would write the same files.
        with self._lock:
            run = self._runs.get(job_id)
            if run is None:
                try:
                    run = HostRun(self._job_folder(job_id), self._limit_bytes, self._wake)
                except FileNotFoundError:
                    return None
                self._runs[job_id] = run
                self._open.append(run)
                for name in run.hosts:
                    self._link(name, run.python).watch(run)
            return run

    def _link(self, name: str, python: str) -> HostLink:
        with self._lock:
            link = self._links.get((name, python))
            if link is None:
                link = HostLink(name, python, self._ssh, self._interval_s)
                self._links[name, python] = link
            return link

    def _wake(self, run: HostRun) -> None:
        for name in run.hosts:
            link = self._links.get((name, run.python))
            if link is not None:
                link.look_soon()

    def _give_up_removed(self, run: HostRun) -> bool:
        """Give up hosts that were removed from the host file; return whether there was one."""
        try:
            listed = {host.name for host in read_options(run.options).hosts}
        except ValueError:
            return False
        removed = [name for name in run.open_hosts() if name not in listed]
        for name in removed:
            run.give_up(name)
        return bool(removed)

    def _taken(self) -> dict[str, set[int]]:
        """Return the slots of runs that continue, by host."""
        taken: dict[str, set[int]] = {}
        with self._lock:
            self._open = [run for run in self._open if not run.is_over]
            # Such a run is read from its files when somebody asks about it. A second object for a
            # run whose folders are still being removed from the hosts would write the same files.
            self._runs = {job_id: run for job_id, run in self._runs.items() if not run.is_cleared}
            for run in self._open:
                for name, slots in run.slots.items():
                    taken.setdefault(name, set()).update(slots)
        return taken

    def _options(self, words: tuple[str, ...]) -> HostOptions:
        """Return options of a run, which may have been read up to ``_READ_S`` seconds ago."""
        # The scheduler asks four times a second, and for each run that waits.
        read_at, options = self._read.get(words, (-math.inf, None))
        if options is None or time.monotonic() - read_at > _READ_S:
            options = read_options(words)
            self._read[words] = (time.monotonic(), options)
        return options

    def _check_addresses(self, options: HostOptions) -> None:
        """Refuse several hosts of which one is known to the others as this machine."""
        if len(options.hosts) < 2:
            return
        for host in options.hosts:
            address = host.address or self._ssh.address(host.name)
            if is_loopback(address):
                raise ValueError(
                    f"engine_options: the host {host.name!r} has the address {address}, which the "
                    "other hosts do not reach: add address=IP to its line"
                )

    def _content(self, job: Job, options: HostOptions, shares: Sequence[Share]) -> dict[str, Any]:
        """Return the content of ``job.json``."""
        # Several hosts may share one home folder.
        root = f"{options.folder.rstrip('/')}/{uuid.uuid4().hex}"
        addresses: list[str] = []  # of each worker's host
        for share in shares:
            address = share.host.address or self._ssh.address(share.host.name)
            addresses += [address] * len(share.slots)
        meeting = addresses[0]
        # Without a network between them, workers of one host meet on its loopback interface.
        if len(shares) == 1:
            meeting = "127.0.0.1"
        argv = [fill(word, {"{hosts}": ",".join(addresses)}) for word in split_command(job)]
        common = {
            "num_workers": job.num_workers,
            "num_cpus": job.num_cpus,
            "gpu_enabled": job.gpu_enabled,
            "log_limit_bytes": self._limit_bytes,
            "load_interval_s": self._load_interval_s,
            "python": script_python(job),
            "env": job.env,
            "caller_env": job.caller_env,
            "cwd": job.cwd,
            "is_task": job.is_task,
            "oversubscribe": job.oversubscribe,
        }
        hosts = {}
        started = shares
        # A command that runs only in worker 0 starts the others itself.
        if not job.all_nodes:
            started = shares[:1]
        for index, share in enumerate(started):
            commands = _commands(job, argv, share, meeting)
            # Rank 0, which listens on the port, is on the first host.
            own = {"commands": commands, "slots": share.slots, "holds_port": index == 0}
            hosts[share.host.name] = {**common, **own, "root": f"{root}-{index}"}
        slots = {share.host.name: share.slots for share in shares}
        return {
            "run_id": job.run_id,
            "python": options.python,
            "options": job.options,
            "slots": slots,
            "hosts": hosts,
        }


def _commands(job: Job, argv: Sequence[str], share: Share, meeting: str) -> list[dict[str, Any]]:
    """Return the processes of a run on one host, with the variables of torchrun."""
    # The host adds the port.
    common = {"MASTER_ADDR": meeting}
    num_local = 1
    if job.all_nodes:
        num_local = len(share.slots)
        common.update(WORLD_SIZE=str(job.num_workers), LOCAL_WORLD_SIZE=str(num_local))
    commands: list[dict[str, Any]] = []
    for local_rank in range(num_local):
        rank = share.first_rank + local_rank
        env = dict(common)
        if job.all_nodes:
            env.update(RANK=str(rank), LOCAL_RANK=str(local_rank))
        ranked = [fill(word, {"{rank}": str(rank)}) for word in argv]
        commands.append({"argv": ranked, "env": env, "rank": rank})
    return commands


def _count_slots(shares: Sequence[Share]) -> int:
    return sum(len(share.slots) for share in shares)


def _notes(job: Job, shares: Sequence[Share]) -> list[str]:
    """Return lines for the beginning of the log."""
    hosts = ", ".join(f"{share.host.name} ({len(share.slots)} workers)" for share in shares)
    command = shlex.join(split_command(job))
    return [f"command: {command}", f"hosts: {hosts}", *unreachable_note(job)]
