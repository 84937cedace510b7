"""Ask Slurm about the jobs of a master: one call for all of them.

The text formats of Slurm's commands are used, not ``--json``: they are the same in all versions,
and the JSON is not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbench_core.calling_environment import VARIABLES
from mlbench_master.engines.interface import EngineError

__all__ = ["ENDED", "UNKNOWN", "QueueEntry", "SlurmQueue", "all_jobs", "cancel", "run_slurm"]

_log = logging.getLogger(__name__)

ENDED = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    )
)
"""States of a job that do not change any more."""

UNKNOWN = "UNKNOWN"
"""State of a job that Slurm has forgotten."""

# Job, state, reason, time limit, nodes, comment. The comment is last, because it may have any
# characters.
_FORMAT = "%i|%T|%r|%l|%N|%k"
_FIELDS = 6
_TIMEOUT_S = 60.0
# Slurm's controller serves a whole cluster, so changes that are expected soon do not lead to more
# calls than this.
_SHORTEST_PAUSE_S = 1.0
# Slurm's commands read these variables. The others would carry settings of a job in which the
# master runs over to the jobs that it starts.
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_MPI_TYPE")
# Its commands read options from their variables, too. Only those for the place and the limits of a
# job are the user's: others would change the job that is submitted, or the answers of squeue.
_OF_SLURM = re.compile("(?:SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SCANCEL|SACCT|SCONTROL|SINFO)_")
# Workers read these from a file that only their user can read; Slurm keeps the environment of a job
# in its database.
_SECRET = re.compile("MLBENCH_(?:TOKEN|MASTER_.*|DATABASE_URL)")
_NO_JOB = "Invalid job id"
_NO_ACCOUNTING = "accounting storage is disabled"


@dataclass(frozen=True)
class QueueEntry:
    """A job as Slurm describes it.

    Attributes:
        state: Slurm's name of its state, or :data:`UNKNOWN`.
        reason: Slurm's name of the reason why it waits or has failed; ``"None"`` or empty without
            one.
        time_limit: Its time limit.
        nodes: Its nodes in Slurm's short form.
        mark: The comment that the job was given.
    """

    state: str
    reason: str = ""
    time_limit: str = ""
    nodes: str = ""
    mark: str = ""


class SlurmQueue:
    """The latest answer of Slurm about the jobs of this user, which a thread renews.

    Args:
        interval_s: Seconds between two calls. There are none while no job is watched.

    Attributes:
        problem: One line on why Slurm does not answer; empty while it does.
    """

    def __init__(self, interval_s: float) -> None:
        self.problem = ""
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._watched: dict[str, float] = {}  # the times at which watching began
        self._entries: dict[str, QueueEntry] = {}
        self._asked_at = -1.0  # the begin of the latest call that succeeded
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, slurm_id: str) -> None:
        """Include a job in the next calls."""
        with self._lock:
            if slurm_id in self._watched:
                return
            self._watched[slurm_id] = time.monotonic()
            if self._thread is None:
                self._closed.clear()
                self._thread = threading.Thread(
                    target=self._loop, name="mlbench-slurm", daemon=True
                )
                self._thread.start()
        self._wake.set()

    def forget(self, slurm_id: str) -> None:
        """Leave a job out of the next calls."""
        with self._lock:
            self._watched.pop(slurm_id, None)

    def entry(self, slurm_id: str) -> QueueEntry | None:
        """Return the entry of a watched job; None if Slurm was not asked since watching began."""
        with self._lock:
            # A call that began before the job was submitted lacks it.
            if self._asked_at < self._watched.get(slurm_id, time.monotonic()):
                return None
            return self._entries.get(slurm_id, QueueEntry(UNKNOWN))

    def look_soon(self) -> None:
        """Ask again without waiting for the interval to pass."""
        self._wake.set()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            if self._watched:
                self._ask()
            interval_s = None
            if self._watched:
                interval_s = self._interval_s
            self._wake.wait(interval_s)
            # Before the next call, so that a change during that call leads to another one.
            self._wake.clear()
            pause_s = min(_SHORTEST_PAUSE_S, self._interval_s)
            self._closed.wait(max(0.0, began + pause_s - time.monotonic()))

    def _ask(self) -> None:
        asked_at = time.monotonic()
        with self._lock:
            watched = set(self._watched)
        try:
            entries = all_jobs()
            forgotten = []
            for slurm_id in sorted(watched - entries.keys()):
                entry = self._entries.get(slurm_id)
                if entry is not None and entry.state in ENDED:
                    # The state does not change any more, so the accounting need not be asked.
                    entries[slurm_id] = entry
                else:
                    forgotten.append(slurm_id)
            # The controller forgets a job some minutes after its end; the accounting keeps it.
            if forgotten:
                entries.update(accounted_jobs(forgotten))
        except EngineError as error:
            if self.problem != str(error):
                _log.warning("%s", error)
            self.problem = str(error)
            return
        self.problem = ""
        with self._lock:
            self._entries = {job: entry for job, entry in entries.items() if job in watched}
            self._asked_at = asked_at


def all_jobs() -> dict[str, QueueEntry]:
    """Return all jobs of this user that Slurm's controller knows, by their ids.

    Raises:
        EngineError: Slurm does not answer.
    """
    answer = run_slurm(
        "squeue", f"--user={os.getuid()}", "--states=all", "--noheader", f"--format={_FORMAT}"
    )
    jobs = {}
    for line in answer.splitlines():
        words = line.strip().split("|", _FIELDS - 1)
        if len(words) == _FIELDS:
            jobs[words[0]] = QueueEntry(*words[1:])
    return jobs


def one_job(slurm_id: str) -> QueueEntry:
    """Return what Slurm's controller says about one job at this moment.

    Raises:
        EngineError: Slurm does not answer.
    """
    try:
        answer = run_slurm(
            "squeue", f"--jobs={slurm_id}", "--states=all", "--noheader", f"--format={_FORMAT}"
        )
    except EngineError as error:
        if _NO_JOB in str(error):
            return QueueEntry(UNKNOWN)
        raise
    words = answer.strip().split("|", _FIELDS - 1)
    if len(words) != _FIELDS:
        return QueueEntry(UNKNOWN)
    return QueueEntry(*words[1:])


def accounted_jobs(slurm_ids: Iterable[str]) -> dict[str, QueueEntry]:
    """Return jobs that the controller has forgotten, from Slurm's accounting.

    A cluster without accounting returns none.
    """
    fields = "--format=JobIDRaw,State,Timelimit,NodeList"
    options = ["--noheader", "--allocations", "--parsable2", fields]
    try:
        answer = run_slurm("sacct", *options, f"--jobs={','.join(slurm_ids)}")
    except EngineError as error:
        if _NO_ACCOUNTING in str(error) or isinstance(error.__cause__, FileNotFoundError):
            return {}
        raise
    jobs = {}
    for line in answer.splitlines():
        words = line.split("|")
        if len(words) == 4:
            slurm_id, state, time_limit, nodes = words
            # "CANCELLED by 1000"
            state = state.split(" ")[0]
            jobs[slurm_id] = QueueEntry(state, time_limit=time_limit, nodes=nodes)
    return jobs


def run_slurm(
    *command: str,
    folder: Path | None = None,
    timeout_s: float = _TIMEOUT_S,
    caller_env: Mapping[str, str] | None = None,
) -> str:
    """Run one of Slurm's commands.

    Args:
        *command: The command line.
        folder: Folder in which to run it.
        timeout_s: Seconds after which it has failed.
        caller_env: Variables of the call that started a run, whose account and partition replace
            those of the master.

    Returns:
        Its standard output.

    Raises:
        EngineError: It failed; the message has the last line of its standard error.
    """
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=_environment(caller_env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
        if isinstance(error, subprocess.TimeoutExpired):
            why = f"no answer within {timeout_s:g} s"
        raise EngineError(f"Slurm cannot be used: {command[0]}: {why}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise EngineError(f"Slurm refused or does not answer: {_one_line(command[0], lines)}")
    return done.stdout


def _one_line(program: str, lines: Sequence[str]) -> str:
    """Return the lines of a failed command as one."""
    # The name of the program is before each of them.
    prefix = re.compile(rf"^{re.escape(program)}: (?:error: |fatal: )?")
    messages = dict.fromkeys(prefix.sub("", line.strip()) for line in lines)
    return f"{program}: {'; '.join(messages)}"[:500]


def _environment(caller_env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables for Slurm's commands, which become those of the job."""
    variables: dict[str, str] = {}
    for name, value in os.environ.items():
        is_allowed = not _OF_SLURM.match(name) or name in _KEPT or name in VARIABLES
        # With a call, the account and the partition are those of its user.
        is_replaced = caller_env is not None and name.startswith("SBATCH_")
        if is_allowed and not is_replaced and not _SECRET.fullmatch(name):
            variables[name] = value
    for name, value in (caller_env or {}).items():
        if name.startswith("SBATCH_"):
            variables[name] = value
    return variables


def cancel(slurm_id: str, timeout_s: float) -> None:
    """End a job, and wait until all its processes are gone; do nothing if it has ended.

    Raises:
        EngineError: Slurm does not answer, or has not ended the job in time.
    """
    deadline = time.monotonic() + timeout_s
    pause = 0.1
    while True:
        state = one_job(slurm_id).state
        if state in ENDED or state == UNKNOWN:
            return
        if pause == 0.1:
            # The job may end at this moment, which is an error for scancel.
            with contextlib.suppress(EngineError):
                run_slurm("scancel", slurm_id)
        if time.monotonic() > deadline:
            raise EngineError(
                f"Slurm has not ended job {slurm_id} within {timeout_s:g} s: "
                f"it is {state}; try again"
            )
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
