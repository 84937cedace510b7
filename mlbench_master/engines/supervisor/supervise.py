"""The process between the master and the workers of a local run.

Its command is ``python -m mlbench_master.engines.supervisor.supervise DIR``.

It outlives the master, so a run continues while the master restarts. Its only import outside the
standard library is psutil, so it starts quickly. Its steps are::

    write DIR/supervisor.json: its process id and start mark
    -> start the commands of DIR/job.json; if one cannot start, go on with the clean-up
    -> wait until all processes have ended, one has failed, or SIGTERM arrives
       (after a failure the others have grace_s seconds to end)
    -> clean up: end every descendant, orphans included, and remove containers of the run
    -> write DIR/status.json: exit status and reason

All along, every line of the workers is written to the log, and every few seconds their load to
DIR/load. A full disk stops neither a worker nor the supervisor: lines are dropped until there is
room, and the status says how many.

In an elastic run, a worker that dies is replaced; see the module ``elastic``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from mlbench_core.errors import ConfigurationError
from mlbench_master.engines.containers import remove_containers
from mlbench_master.engines.error_search import CONTAINER_STATUSES, ErrorSearch, is_consequence
from mlbench_master.engines.logs import LogWriter, readable_line
from mlbench_master.engines.supervisor.elastic import ElasticWorkers
from mlbench_master.engines.supervisor.load_sampler import LoadSampler
from mlbench_master.processes import end_processes, start_mark

if TYPE_CHECKING:
    from mlbench_core.network.emulated import EmulatedNetwork
    from mlbench_master.engines.supervisor.forked import ForkedWorker

__all__ = ["Supervisor", "describe_exit", "from_shell_status", "write_json"]

# Longer lines are divided. A line of the log is at most six times as long, and its end still shows
# on a page.
_MAX_LINE_BYTES = 16_384
# Room that the status gets at the start of a run, so that a full disk cannot keep the end of the
# run secret.
_STATUS_BYTES = 4096
_LONGEST_REASON = 500
_DISK_PAUSE_S = 0.25
_LOOK_S = 0.5  # at the rounds of an elastic run
_LAST_LINES_S = 1.0
# More than one hour of samples of 16 workers every 5 s: a master that was away for longer does not
# get the older ones.
_LOAD_BYTES = 4 * 2**20
_PR_SET_CHILD_SUBREAPER = 36
_MPIRUN_FAILURE = re.compile(r"process rank (\d+) with PID|^\s*Process name: \[.*,(\d+)\]\s*$")
# Shells, mpirun and programs that run containers report a signal as 128 plus its number.
_SHELL_SIGNAL = 128


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file so that a reader sees either all of it or nothing."""
    # Not files.replacing, which waits for the disk: after a power cut, the processes of the run are
    # lost anyway.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content))
    part.replace(path)


def from_shell_status(status: int) -> int:
    """Return the exit status of a process from the one that a shell, mpirun or container reports.

    Example:
        >>> from_shell_status(137), from_shell_status(3)
        (-9, 3)
    """
    if _SHELL_SIGNAL < status < 2 * _SHELL_SIGNAL:
        return _SHELL_SIGNAL - status
    return status


def describe_exit(rank: int | None, returncode: int) -> str:
    """Describe how a process ended.

    Args:
        rank: The worker's rank, or None for mpirun itself.
        returncode: Its exit status, negative for a signal.

    Returns:
        One line.

    Example:
        >>> describe_exit(1, -9)
        'worker 1 died: signal 9 (SIGKILL)'
        >>> describe_exit(0, 3)
        'worker 0 failed: exit status 3'
    """
    who = f"worker {rank}"
    if rank is None:
        who = "the launcher"
    if returncode >= 0:
        return f"{who} failed: exit status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown"
    return f"{who} died: signal {-returncode} ({name})"


class Supervisor:
    """Run the processes of one job to their end.

    Args:
        folder: The run's folder.
        fork: Starts a worker as a fork of this process, see
            :class:`~mlbench_master.engines.supervisor.forked.ForkedWorker`; None if every worker
            is a new program.
    """

    def __init__(self, folder: Path, fork: type[ForkedWorker] | None = None) -> None:
        self._folder = folder
        self._fork = fork
        job: dict[str, Any] = json.loads((folder / "job.json").read_text())
        self._commands: list[dict[str, Any]] = job["commands"]
        self._env: dict[str, str] = job["env"]
        self._cwd = job.get("cwd") or folder / "work"
        # Variables of the call that started the master, which the run must not inherit.
        for name in job.get("remove", ()):
            os.environ.pop(name, None)
        self._grace_s = float(job["grace_s"])
        self._num_workers = int(job["num_workers"])
        self._gpus: list[str] = job["gpus"]
        self._load_interval_s = float(job["load_interval_s"])
        self._container: str = job.get("container", "")
        self._network_text: str = job.get("network", "")
        self._network: EmulatedNetwork | None = None
        self._elastic: ElasticWorkers | None = None
        if "elastic" in job:
            self._elastic = ElasticWorkers(job["elastic"], self._num_workers)
        self._roots: dict[int, int | None] = {}  # ranks of the started processes by their ids
        self._lost_with_host: set[int | None] = set()  # ranks
        self._places: dict[int, int] = {}  # emulated hosts of the workers by their ranks
        self._all_ended = threading.Event()
        self._log = LogWriter(folder, int(job["log_limit_bytes"]))
        # Rank and exit status of each process in the order of their ends; None is a request to
        # stop.
        self._ended: queue.SimpleQueue[tuple[int | None, int] | None] = queue.SimpleQueue()
        self._stopping = False
        self._failed_rank: int | None = None
        self._failed_at: float | None = None
        self._failed_to_start = ""
        # Rank and exit status of the workers that failed, in the order in which they ended.
        self._failures: list[tuple[int, int]] = []
        self._errors: dict[int | None, ErrorSearch] = defaultdict(ErrorSearch)  # by rank
        self._readers: dict[int | None, list[threading.Thread]] = defaultdict(list)  # by rank

    def prepare(self) -> None:
        """Take signals, and write the process id into the run's folder; the first call."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        # The run outlives the master and its terminal.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Before any worker starts: without this file, a master knows that none has started, and may
        # start the run.
        pid = os.getpid()
        write_json(self._folder / "supervisor.json", {"pid": pid, "started": start_mark(pid)})

    def run(self) -> None:
        """Start the processes, wait for their end, clean up, and write the status."""
        with contextlib.suppress(OSError):
            self._status_part.write_bytes(b" " * _STATUS_BYTES)
        if sys.platform.startswith("linux"):
            # Adopt grandchildren whose parent dies, so that they are ended, too.
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # The status of a command that cannot start, as in a shell.
        returncode = 127
        started = []
        for command in self._commands:
            try:
                if self._network_text and self._network is None:
                    self._open_network()
                started.append((self._start(**command), command))
            except OSError as error:
                self._failed_to_start = (
                    f"cannot start {command['argv'][0]!r}: {error.strerror or error}"
                )
                break
        # Threads begin after the last start, because a process with threads must not fork.
        for process, command in started:
            self._watch(process, command["rank"], command.get("prefix"))
        if len(started) == len(self._commands):
            if self._load_interval_s:
                threading.Thread(target=self._sample_load, daemon=True).start()
            returncode = self._wait()
        finished_at = time.time()
        self._all_ended.set()
        self._close_network()
        for _ in range(3):  # a process that is ended may start another one first
            end_processes(psutil.Process().children(recursive=True), self._grace_s)
        problem = remove_containers(self._container, self._folder)
        if problem:
            self._log.write(None, "system", problem)
        for rank in list(self._readers):
            # A reader does not end while a process outside this tree keeps the pipe open.
            self._read_to_end(rank, 5.0)
        if self._stopping:
            # Workers may handle SIGTERM and end with status 0, but the run has not finished.
            returncode = returncode or -signal.SIGTERM
        elif returncode:
            returncode = self._cause(returncode)
        reason = self._reason(returncode)
        self._log.write(None, "system", reason or "finished")
        if self._log.dropped:
            lost = f"{self._log.dropped} lines of output could not be written: {self._log.problem}"
            reason = f"{reason}; {lost}" if reason else lost
        status = {
            "returncode": returncode,
            "reason": reason[:_LONGEST_REASON],
            "finished_at": finished_at,
        }
        # Of several hosts, the one on which a worker failed first has the reason.
        self._write_status({**status, "failed_at": self._failed_at})

    def _open_network(self) -> None:
        """Create the hosts of the run.

        Raises:
            OSError: This machine cannot emulate the network.
        """
        # Imported here, because most runs have no emulated network.
        from mlbench_master.engines.local.emulated_hosts import open_network

        def say(line: str) -> None:
            self._log.write(None, "system", f"network: {line}")

        if self._elastic is None:
            self._network = open_network(
                self._network_text, self._num_workers, say, has_extra_host=False
            )
            return
        most = self._elastic.most
        self._network = open_network(self._network_text, most, say, has_extra_host=True)
        try:
            self._elastic.meet_at(self._network.listen())
        except ConfigurationError as error:
            raise OSError(str(error)) from error

    def _reason(self, returncode: int) -> str:
        """Return how the run failed, in one line; call it when all output has been read."""
        if self._stopping:
            return "stopped"
        if self._failed_to_start or not returncode:
            return self._failed_to_start
        if self._elastic is not None and self._failed_rank is None:
            return self._elastic.failure
        by_mpirun = self._failed_rank is not None and self._commands[0]["rank"] is None
        # Without these two, a status above 128 is the worker's own.
        if by_mpirun or self._container:
            returncode = from_shell_status(returncode)
        errors = self._errors[self._failed_rank]
        error = errors.said(returncode)
        if self._container and returncode in CONTAINER_STATUSES:
            error = errors.container_error
        reason = self._describe_end(self._failed_rank, returncode)
        if self._elastic is not None:
            reason = f"{self._elastic.failure}: {reason}"
        if error:
            return f"{reason}: {error}"
        return reason

    def _cause(self, returncode: int) -> int:
        """Set the rank that failed to the one that made the others fail; return its exit status.

        A worker that raises an exception closes its connections before it ends, so another one may
        end before it.
        """
        if not self._failures:
            return returncode
        rank, status = self._failures[0]
        if self._failed_rank != rank or not is_consequence(self._errors[rank].said(status)):
            return returncode
        for rank, status in self._failures[1:]:
            error = self._errors[rank].said(status)
            # A worker that a signal has ended may have written nothing.
            if (error or status < 0) and not is_consequence(error):
                self._failed_rank = rank
                return status
        return returncode

    def _write_status(self, status: dict[str, Any]) -> None:
        if self._elastic is not None:
            status["changes"] = list(self._elastic.changes)
            samples = self._elastic.samples()
            # The work of a run that failed is in no result.
            if samples is not None and not status["returncode"]:
                status["samples"] = {"useful": samples.useful, "paid": samples.paid}
        # Blanks may follow a value in JSON.
        content = json.dumps(status).encode().ljust(_STATUS_BYTES)
        while True:
            try:
                mode = "wb"
                # This mode keeps the room that the file has taken at the start.
                if self._status_part.exists():
                    mode = "r+b"
                with self._status_part.open(mode, buffering=0) as file:
                    if file.write(content) == len(content):
                        self._status_part.replace(self._folder / "status.json")
                        return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
                    raise
            # Until there is room, the run counts as running for the master.
            time.sleep(_DISK_PAUSE_S)

    @property
    def _status_part(self) -> Path:
        return self._folder / "status.json.part"

    def _stop(self) -> None:
        self._stopping = True
        # In a handler of a signal. A SimpleQueue allows this, also in the middle of another put().
        self._ended.put(None)

    def _start(
        self, argv: list[str], env: dict[str, str], rank: int | None, prefix: str | None = None
    ) -> subprocess.Popen[bytes] | ForkedWorker:
        # Later variables win: those of the supervisor, of all workers, of this worker.
        variables = {**os.environ, **self._env, **env}
        if self._elastic is not None and rank is not None:
            variables.update(self._elastic.variables(rank))
        if self._fork is not None:
            # Imported already by a process that has a fork.
            from mlbench_master.engines.supervisor.forked import finds_other_modules

            if not finds_other_modules(argv, str(self._cwd), variables):
                return self._fork(argv, variables, str(self._cwd))
        options: dict[str, Any] = {
            "cwd": self._cwd,
            "env": variables,
            # A worker that asks for input must fail, not wait indefinitely.
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "start_new_session": True,
        }
        if self._network is not None and rank is not None:
            place = rank
            # A worker that replaces another has a new rank, and gets a host that is free.
            if self._elastic is not None:
                place = self._free_places()[0]
            self._places[rank] = place
            return self._network.popen(place, argv, as_worker=False, **options)
        return subprocess.Popen(argv, **options)

    def _watch(
        self, process: subprocess.Popen[bytes] | ForkedWorker, rank: int | None, prefix: str | None
    ) -> None:
        """Read the output of a process, and note its end."""
        self._roots[process.pid] = rank
        for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert pipe is not None
            arguments = (pipe, rank, stream, prefix)
            reader = threading.Thread(target=self._read, args=arguments, daemon=True)
            reader.start()
            self._readers[rank].append(reader)

        def wait_for_end() -> None:
            returncode = process.wait()
            was_killed = returncode == -signal.SIGKILL
            if was_killed and self._network is not None and self._network.was_lost(process.pid):
                self._lost_with_host.add(rank)
            self._ended.put((rank, returncode))

        # One thread per process: polling would not show which of two processes ended first.
        threading.Thread(target=wait_for_end, daemon=True).start()

    def _close_network(self) -> None:
        """End the workers on emulated hosts, and remove the hosts."""
        if self._network is None:
            return
        # A process that is stopped does not react to SIGTERM.
        self._network.end_disturbances()
        workers: list[psutil.Process] = []
        for pid in self._roots:
            with contextlib.suppress(psutil.Error):
                worker = psutil.Process(pid)
                workers += [worker, *worker.children(recursive=True)]
        end_processes(workers, self._grace_s)
        self._network.close()

    def _sample_load(self) -> None:
        """Write the load of the workers until they end; the run does not depend on it."""
        folder = self._folder / "load"
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
        log = LogWriter(folder, _LOAD_BYTES)
        sampler = LoadSampler(self._num_workers, self._roots, self._gpus)
        while not self._all_ended.wait(self._load_interval_s):
            for rank, load in sampler.sample().items():
                log.write(rank, "load", json.dumps(load))

    def _wait(self) -> int:
        """Wait until all have ended, or until one has failed and the others had time to notice.

        Returns:
            The exit status of the first process that failed, or 0.
        """
        if self._elastic is not None:
            return self._wait_elastic(self._elastic)
        status = 0
        deadline: float | None = None
        for _ in self._commands:
            timeout = None
            if deadline is not None:
                timeout = max(0.0, deadline - time.monotonic())
            try:
                ended = self._ended.get(timeout=timeout)
            except queue.Empty:
                break
            if ended is None:  # a request to stop
                break
            rank, returncode = ended
            if returncode and rank is not None:
                self._failures.append((rank, returncode))
            # The first failure starts the time for the others: their failures are mostly its
            # effect.
            if returncode and not status:
                status, deadline = returncode, time.monotonic() + self._grace_s
                self._failed_at = time.time()
                if rank is not None:
                    self._failed_rank = rank
        return status

    def _wait_elastic(self, workers: ElasticWorkers) -> int:
        """Replace workers that die, until all have ended or the run cannot go on.

        Returns:
            The exit status of the worker that made it fail, or 0.
        """
        try:
            workers.hold_store()
        except Exception as error:  # of any type: torch may be missing or damaged
            self._failed_to_start = f"cannot hold the store of the workers: {error}"
            return 127
        while True:
            for command in workers.missing(self._count_places()):
                try:
                    self._watch(self._start(**command), command["rank"], None)
                except OSError as error:
                    self._failed_to_start = f"cannot start a worker: {error.strerror or error}"
                    return 127
                self._log.write(None, "system", f"worker {command['rank']} starts")
            workers.failure = workers.failure or self._lack_of_hosts(workers)
            if workers.failure or not self._goes_on(workers):
                break
            try:
                ended = self._ended.get(timeout=_LOOK_S)
            except queue.Empty:
                lines = workers.look()
            else:
                if ended is None:  # a request to stop
                    return 0
                worker, returncode = ended
                assert worker is not None
                lines = self._end_of(workers, worker, returncode)
            for line in lines:
                self._log.write(None, "system", line)
        if not workers.result():
            return 0
        self._failed_at = time.time()
        if workers.last_death is None:
            return 1
        self._failed_rank, returncode = workers.last_death
        return returncode

    def _end_of(self, workers: ElasticWorkers, worker: int, returncode: int) -> list[str]:
        """Note the end of a worker of an elastic run, and return lines for the log."""
        pid = next(pid for pid, rank in self._roots.items() if rank == worker)
        reason = self._describe_end(worker, returncode)
        del self._roots[pid]
        self._places.pop(worker, None)
        if returncode:
            # Its own processes, for example loaders of data: it has a session of its own.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self._read_to_end(worker, _LAST_LINES_S)
            if error := self._errors[worker].said(returncode):
                reason = f"{reason}: {error}"
        return workers.end(worker, returncode, reason, by_network=worker in self._lost_with_host)

    def _count_places(self) -> int | None:
        """Return the number of emulated hosts that can get a worker now; None without a network."""
        if self._network is None:
            return None
        return sum(map(self._network.is_up, self._free_places()))

    def _lack_of_hosts(self, workers: ElasticWorkers) -> str:
        """Return why the emulated hosts end a run; empty if they do not."""
        if self._network is None or workers.is_finished:
            return ""
        left = len(self._hosts_left())
        if left >= workers.least:
            return ""
        return (
            f"too few hosts are left: {left} of {self._network.hosts}, and the least number of "
            f"workers is {workers.least}"
        )

    def _hosts_left(self) -> set[int]:
        """Return the emulated hosts that have, or can have, a worker again."""
        assert self._network is not None
        return {host for host in range(self._network.hosts) if not self._network.is_gone(host)}

    def _goes_on(self, workers: ElasticWorkers) -> bool:
        """Return True if a worker lives, or can start later."""
        if self._network is None:
            return bool(workers.living)
        if not workers.is_finished:
            return True
        # A worker whose host is stopped or cut off for good does not notice the end of the run.
        hosts = self._hosts_left()
        return any(self._places[worker] in hosts for worker in workers.living)

    def _free_places(self) -> list[int]:
        """Return the emulated hosts without a worker, first those that are up."""
        assert self._network is not None
        taken = set(self._places.values())
        free = [host for host in range(self._network.hosts) if host not in taken]
        return sorted(free, key=self._network.is_up, reverse=True)

    def _describe_end(self, worker: int | None, returncode: int) -> str:
        """Describe how a worker ended, and which host ended with it."""
        reason = describe_exit(worker, returncode)
        if worker in self._lost_with_host:
            return f"{reason}, because its host was lost"
        return reason

    def _read_to_end(self, rank: int | None, timeout_s: float) -> None:
        """Wait for the last lines of a process that has ended."""
        for reader in self._readers[rank]:
            reader.join(timeout_s)

    def _read(self, pipe: IO[bytes], rank: int | None, stream: str, prefix: str | None) -> None:
        """Log the lines of a process.

        The lines of an mpirun come from its workers, or name the worker that failed.
        """
        with pipe:
            # The limit keeps a line that never ends from filling the memory.
            while raw := pipe.readline(_MAX_LINE_BYTES):
                text = readable_line(raw)
                marked = None
                if prefix:
                    marked = re.match(prefix, text)
                if marked is not None:
                    self._write_line(int(marked[1]), stream, text[marked.end() :])
                    continue
                self._write_line(rank, stream, text)
                # Open MPI and MPICH report the failed rank nowhere but in their output.
                if rank is None and self._failed_rank is None:
                    failure = _MPIRUN_FAILURE.search(text)
                    if failure is not None:
                        self._failed_rank = int(failure[1] or failure[2])

    def _write_line(self, rank: int | None, stream: str, text: str) -> None:
        """Log a line of a worker."""
        self._log.write(rank, stream, text)
        if stream == "stderr":
            self._errors[rank].add(text)


if __name__ == "__main__":
    supervisor = Supervisor(Path(sys.argv[1]))
    supervisor.prepare()
    supervisor.run()
