"""Run workers on several machines that ssh reaches.

Nothing but the command is copied: each host has the same Python environment and the same scripts
under the same path. The master calls each host through ``ssh``, once for each interval and all
runs. There, ``agent`` starts the supervisor of local runs, so a run outlives the master and its
connections. The files in the run's folder are::

    job.json       written by the master before it calls a host: the workers of each host, for the eyes of the user only
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
from urllib.parse import urlsplit

from mlbench_core.addresses import is_loopback
from mlbench_core.errors import ConfigurationError
from mlbench_master.launchers.command_line import fill, script_python, split_command
from mlbench_master.launchers.folders import FolderLauncher, read_interval
from mlbench_master.launchers.hosts.host_file import HostOptions, Share, read_options, share_slots
from mlbench_master.launchers.hosts.link import HostLink
from mlbench_master.launchers.hosts.run_state import LEFT_ON_HOSTS, HostRun
from mlbench_master.launchers.hosts.ssh import Ssh
from mlbench_master.launchers.interface import Job, JobStatus, LauncherError
from mlbench_master.launchers.local.launcher import load_interval_s
from mlbench_master.launchers.logs import append_log, last_file, log_limit_bytes

__all__ = ["HostsLauncher"]

# The supervisors wait 3 s after SIGTERM and up to 5 s after SIGKILL, and then the files are
# fetched. A client of the master waits for 30 s.
_STOP_S = 25.0
_READ_S = 2.0
# For the calls of all hosts that have begun.
_CLOSE_S = 2.0


class HostsLauncher(FolderLauncher):
    """A launcher that starts the workers of a run on hosts of a host file.

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
        self._interval_s = read_interval(self.name) if interval_s is None else interval_s
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
        for mark in self._folder.glob(f"*/{LEFT_ON_HOSTS}"):
            # A damaged folder must not keep the master from starting.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self._known(f"{self.name}-{mark.parent.name}")

    @property
    def capacity(self) -> float:
        """Return infinity, because each run may name its own hosts; see :meth:`has_room`."""
        return math.inf

    def check_options(self, options: Sequence[str]) -> None:
        """Refuse wrong options and host files; see :meth:`Launcher.check_options`."""
        read_options(options)

    def check_workers(self, num_workers: int, backend: str, options: Sequence[str]) -> None:
        """Refuse more workers than slots; see :meth:`Launcher.check_workers`."""
        if backend == "mpi":
            raise ValueError(
                "backend: must be gloo or nccl, not mpi: the hosts launcher starts no mpirun; "
                "give your own mpirun as "
                "the command of a custom backend with run_all_nodes=false, and --host {hosts}"
            )
        found = read_options(options)
        if num_workers > found.slots:
            raise ValueError(
                f"num_workers: must be at most {found.slots}, not {num_workers}: the "
                f"{len(found.hosts)} host(s) have "
                f"{found.slots} slots together; start fewer workers, or give more slots in the "
                "host file"
            )
        self._check_addresses(found)

    def has_room(self, num_workers: int, options: Sequence[str]) -> bool:
        """Return whether enough slots are free; see :meth:`Launcher.has_room`."""
        try:
            found = self._options(tuple(options))
        except ValueError:
            return True  # the start says why
        shares = share_slots(found.hosts, num_workers, self._taken())
        return num_workers > found.slots or sum(len(share.slots) for share in shares) == num_workers

    def start(self, job: Job) -> str:
        """Start a job; see :meth:`Launcher.start`."""
        job_id = f"hosts-{job.run_id}"
        self.check_workers(job.num_workers, job.backend, job.options)
        options = read_options(job.options)
        folder = self._job_folder(job_id)
        if folder.exists():  # a new database reuses the ids of runs that may still be running
            self.stop(job_id)
            self.remove(job_id)
        shares = share_slots(options.hosts, job.num_workers, self._taken())
        if sum(len(share.slots) for share in shares) < job.num_workers:
            raise ConfigurationError(
                f"cannot start run {job.run_id}: fewer than {job.num_workers} slots are free"
            )
        try:
            (folder / "output").mkdir(parents=True)
            (folder / "job.json").touch(mode=0o600)  # only for its owner: it may hold a token
            (folder / "job.json").write_text(json.dumps(self._content(job, options, shares)))
            for note in (*job.notes, *_notes(job, shares)):
                append_log(folder / "log.jsonl", None, "system", note)
            self._known(job_id)
        except OSError as error:
            (folder / "job.json").unlink(missing_ok=True)
            raise ConfigurationError(
                f"cannot start run {job.run_id} in {folder}: {error}"
            ) from error
        return job_id

    def poll(self, job_id: str) -> JobStatus:
        """Return the status of a job; see :meth:`Launcher.poll`."""
        run = self._known(job_id)
        if run is None:
            return JobStatus("unstarted", "an earlier master ended before it recorded the run")
        return run.status()

    def stop(self, job_id: str) -> None:
        """End a job on all hosts, and wait until its files are here; see :meth:`Launcher.stop`.

        Raises:
            LauncherError: A host does not answer, or its workers or its files take long. They are
                stopped and fetched when it does, and a later call finds the run ended.
        """
        run = self._known(job_id)
        if run is None:
            return
        began = time.monotonic()
        run.stop()
        while not run.is_over:
            asked_at = {name: self._link(name, run.python).asked_at for name in run.hosts}
            problem = run.problem_since(asked_at, began)
            if not problem and time.monotonic() > began + _STOP_S:
                problem = f"no end within {_STOP_S:g} s on {', '.join(run.open_hosts())}"
            if problem and not self._give_up_removed(run):
                raise LauncherError(
                    f"the run cannot be stopped everywhere yet: {problem}; stop it again later"
                )
            time.sleep(0.05)

    def note(self, job_id: str, text: str) -> None:
        """Add a line of the master to a job's log; see :meth:`Launcher.note`."""
        # A full disk must not keep the master from recording the end of the run.
        with contextlib.suppress(OSError):
            append_log(last_file(self._job_folder(job_id)), None, "system", text)

    def remove(self, job_id: str) -> None:
        """Delete a job's folder; see :meth:`Launcher.remove`."""
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
            link.end()
        deadline = time.monotonic() + _CLOSE_S
        for link in links:
            link.join(max(0.0, deadline - time.monotonic()))
        self._ssh.close()
        super().close()

    def _known(self, job_id: str) -> HostRun | None:
        """Return a run, which is watched from now on if it is not over; None if it was not recorded."""
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
                link = self._links[name, python] = HostLink(
                    name, python, self._ssh, self._interval_s
                )
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
        """Return options, which the scheduler asks for four times a second and for each run that waits."""
        read_at, found = self._read.get(words, (-math.inf, None))
        if found is None or time.monotonic() - read_at > _READ_S:
            found = read_options(words)
            self._read[words] = (time.monotonic(), found)
        return found

    def _check_addresses(self, options: HostOptions) -> None:
        """Refuse several hosts of which one is known to the others as this machine."""
        for host in options.hosts if len(options.hosts) > 1 else ():
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
        addresses = {
            share.host.name: share.host.address or self._ssh.address(share.host.name)
            for share in shares
        }
        # Without a network between them, workers of one host meet on its loopback interface.
        meeting = "127.0.0.1" if len(shares) == 1 else addresses[shares[0].host.name]
        listed = [addresses[share.host.name] for share in shares for _ in share.slots]
        argv = [fill(word, {"{hosts}": ",".join(listed)}) for word in split_command(job)]
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
        for place, share in enumerate(shares if job.all_nodes else shares[:1]):
            commands = _commands(job, argv, share, meeting)
            own = {"commands": commands, "slots": share.slots, "holds_port": place == 0}
            hosts[share.host.name] = {**common, **own, "root": f"{root}-{place}"}
        slots = {share.host.name: share.slots for share in shares}
        return {
            "run_id": job.run_id,
            "python": options.python,
            "options": job.options,
            "slots": slots,
            "hosts": hosts,
        }


def _commands(job: Job, argv: Sequence[str], share: Share, meeting: str) -> list[dict[str, Any]]:
    """Return the processes of a run on one host, with the variables of torchrun; the host adds the port."""
    commands: list[dict[str, Any]] = []
    for local, rank in enumerate(range(share.first_rank, share.first_rank + len(share.slots))):
        env = {"MASTER_ADDR": meeting}
        if job.all_nodes:
            size = {"WORLD_SIZE": str(job.num_workers), "LOCAL_WORLD_SIZE": str(len(share.slots))}
            env.update(RANK=str(rank), LOCAL_RANK=str(local), **size)
        commands.append(
            {"argv": [fill(word, {"{rank}": str(rank)}) for word in argv], "env": env, "rank": rank}
        )
    # A command that runs only in worker 0 starts the others itself.
    return commands if job.all_nodes else commands[:1]


def _notes(job: Job, shares: Sequence[Share]) -> list[str]:
    """Return lines for the beginning of the log."""
    notes = [
        f"command: {shlex.join(split_command(job))}",
        f"hosts: {', '.join(f'{share.host.name} ({len(share.slots)} workers)' for share in shares)}",
    ]
    url = job.env.get("MLBENCH_MASTER_URL", "")
    if is_loopback(urlsplit(url).hostname or ""):
        notes.append(
            f"note: workers on other machines cannot reach the master at {url}, so their "
            "metrics arrive when the run "
            "ends; to see them earlier, start the master with --host and an address of this machine"
        )
    return notes
