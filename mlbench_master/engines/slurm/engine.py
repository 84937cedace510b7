"""Run workers as tasks of a Slurm cluster.

A run is one job: ``sbatch`` submits a script that starts one task for each worker with ``srun``.
The master runs on a machine that has Slurm's commands. Its data folder is on a file system that all
nodes share. The files in the run's folder are::

    job.json   written by the master before it submits the job: a mark, also the job's comment
    slurm_job  written by the master after that: Slurm's number of the job
    job.sh     the script of the job; it writes the next two
    begun      Slurm's number of the job, when the script starts
    exit       the exit status of srun, when the script ends
    env.sh     the variables of the workers, which only their user can read
    worker.sh  the script of a worker; without it, a job ends at once
    status/    the exit status of each worker, by rank
    logs/      the output of each worker, which the master merges into log.jsonl; see ``rank_logs``
    log.jsonl  lines of the workers and of the master; see the module ``logs``
    spool/     metrics that were not delivered; the master stores them at the end of the run
    work/      the folder in which the workers run
    output/    the results of the workers

Slurm says whether the job waits, runs or has ended; the files say how. A job that Slurm has
forgotten has ended, too.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlbench_core.errors import ConfigurationError
from mlbench_master.engines.error_search import is_consequence
from mlbench_master.engines.folders import FolderEngine, read_interval, unreachable_note
from mlbench_master.engines.interface import EngineError, Job, JobStatus
from mlbench_master.engines.logs import dropping_problem, log_limit_bytes, open_at_once
from mlbench_master.engines.slurm import script
from mlbench_master.engines.slurm.job_states import (
    ENDED,
    UNKNOWN,
    QueueEntry,
    SlurmQueue,
    all_jobs,
    cancel,
    run_slurm,
)
from mlbench_master.engines.slurm.rank_logs import RankLogs
from mlbench_master.engines.supervisor.start import folder_variables, write_private
from mlbench_master.engines.supervisor.supervise import (
    describe_exit,
    from_shell_status,
    write_json,
)
from mlbench_master.engines.worker_command import variables_to_remove, worker_environment

__all__ = ["SlurmEngine"]

_PROGRAMS = ("sbatch", "squeue", "scancel")
_LOOK_S = 1.0
# Another machine may see a file of a node some seconds late on a network file system.
_FILES_S = 10.0
# Slurm waits 30 s (KillWait) between SIGTERM and SIGKILL by default.
_STOP_S = 90.0
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_STATE_BYTES = 4096
_TERMINATED = 128 + 15  # also of workers that srun ends because another one has failed
_SRUN_ERROR = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_TERMINATED_END = re.compile(rf"Terminated|Exited with exit code {_TERMINATED}$")
_FAILED_NODE = re.compile(r"DUE TO NODE ([\w.-]+) FAILURE|Node failure on ([\w.-]+)", re.IGNORECASE)


@dataclass
class _SlurmRun:
    """A run that this engine looks after."""

    folder: Path
    logs: RankLogs
    slurm_id: str | None = None
    next_look: float = 0.0
    ended_since: float | None = None
    status: JobStatus | None = None


class SlurmEngine(FolderEngine):
    """An engine that starts each run as a job of Slurm.

    Args:
        folder: Folder for the folders of runs, which all nodes can reach under the same path.
        interval_s: Seconds between two questions to Slurm's controller, each about all runs; by
            default ``MLBENCH_SLURM_INTERVAL_S``, or 5.

    Raises:
        ConfigurationError: Slurm's commands were not found.
    """

    name = "slurm"
    starts_processes = True
    sees_folders = True
    options_example = "--partition=gpu --time=1:00:00"

    def __init__(self, folder: Path, interval_s: float | None = None) -> None:
        missing = [program for program in _PROGRAMS if shutil.which(program) is None]
        if missing:
            raise ConfigurationError(
                f"the engine slurm needs {', '.join(_PROGRAMS)}, but {', '.join(missing)} "
                "cannot be found: start the master on a machine from which you submit jobs, such "
                "as a login node of the cluster"
            )
        super().__init__(folder)
        self.place = f"slurm:{self._folder}"
        self._limit_bytes = log_limit_bytes()
        if interval_s is None:
            interval_s = read_interval(self.name)
        self._queue = SlurmQueue(interval_s)
        self._jobs: dict[str, _SlurmRun] = {}

    @property
    def capacity(self) -> float:
        """Return infinity, because Slurm has its own queue."""
        return math.inf

    def check_options(self, options: Sequence[str]) -> None:
        """Refuse options of sbatch that a run cannot have; see :meth:`Engine.check_options`."""
        script.check_options(options)

    def start(self, job: Job) -> str:
        """Submit a job; see :meth:`Engine.start`."""
        job_id = f"slurm-{job.run_id}"
        self.check_options(job.options)
        folder = self._job_folder(job_id)
        if folder.exists():  # a new database reuses the ids of runs that may still be running
            self.stop(job_id)
            self.remove(job_id)
        mark = f"mlbench {uuid.uuid4()}"
        command = script.sbatch_command(job, str(folder), mark)
        try:
            # Before sbatch, because the job may begin before sbatch returns.
            self._write_files(job, folder, mark)
            run = self._run(job_id)
            for note in (*job.notes, f"command: {shlex.join(command)}"):
                run.logs.note(note)
            run.slurm_id = _submit(command, folder, mark, job.caller_env)
            # If the master dies before this, the next one finds the job by its mark.
            (folder / "slurm_job").write_text(run.slurm_id)
        except OSError as error:
            (folder / "worker.sh").unlink(missing_ok=True)
            raise ConfigurationError(
                f"cannot start run {job.run_id} in {folder}: {error}"
            ) from error
        except EngineError:
            # If Slurm has accepted the job nevertheless, it ends at once.
            (folder / "worker.sh").unlink(missing_ok=True)
            raise
        run.logs.note(f"submitted as job {run.slurm_id} of Slurm")
        self._queue.watch(run.slurm_id)
        return job_id

    def poll(self, job_id: str) -> JobStatus:
        """Return the status of a job; see :meth:`Engine.poll`."""
        run = self._run(job_id)
        if run.status is not None:
            return run.status
        if run.slurm_id is None:
            try:
                # While Slurm does not answer, the job may exist. So the run is not "unstarted".
                run.slurm_id = _find_job(run.folder)
            except EngineError as error:
                return JobStatus("running", str(error))
            if run.slurm_id is None:
                return JobStatus(
                    "unstarted", "an earlier master ended before it submitted the run to Slurm"
                )
        self._queue.watch(run.slurm_id)
        entry, problem = self._queue.entry(run.slurm_id), self._queue.problem
        # Slurm's last answer is older than the job, so it does not show that the job is lost.
        if entry is None:
            return JobStatus("running", problem)
        if entry.state in _WAITING:
            waiting = f"job {run.slurm_id} waits in Slurm's queue"
            if entry.reason not in ("", "None"):
                waiting = f"{waiting}: {entry.reason}"
            return JobStatus("waiting", problem or waiting)
        if entry.state in ENDED or entry.state == UNKNOWN:
            return self._look_at_end(run, entry)
        if time.monotonic() >= run.next_look:
            run.next_look = time.monotonic() + _LOOK_S
            run.logs.collect()
            # The script has ended, so Slurm will soon say that the job has.
            if (run.folder / "exit").exists():
                self._queue.look_soon()
        problem = self._queue.problem
        if entry.state == "SUSPENDED":
            problem = problem or f"job {run.slurm_id} is suspended by Slurm"
        elif entry.state == "COMPLETING":
            nodes = entry.nodes or "its nodes"
            problem = problem or f"job {run.slurm_id} ends when Slurm has cleaned up on {nodes}"
        return JobStatus("running", problem or dropping_problem(run.folder))

    def stop(self, job_id: str) -> None:
        """Cancel a job, and wait until Slurm has ended its processes; see :meth:`Engine.stop`.

        Raises:
            EngineError: Slurm does not answer, or has not ended the job.
        """
        run = self._run(job_id)
        if run.status is not None or not run.folder.exists():
            return
        # If sbatch is still on its way, its job finds no worker.sh and ends at once.
        slurm_id = run.slurm_id or _find_job(run.folder)
        if slurm_id is None:
            (run.folder / "worker.sh").unlink(missing_ok=True)
            return
        cancel(slurm_id, _STOP_S)
        # After the last process: it may write until it ends.
        run.logs.collect(at_end=True)
        self._queue.forget(slurm_id)

    def slurm_id(self, job_id: str) -> str:
        """Return Slurm's number of a job, empty if it was not submitted."""
        return self._run(job_id).slurm_id or ""

    def note(self, job_id: str, text: str) -> None:
        """Add a line of the master to a job's log; see :meth:`Engine.note`."""
        self._run(job_id).logs.note(text)

    def remove(self, job_id: str) -> None:
        """Delete a job's folder; see :meth:`Engine.remove`."""
        run = self._jobs.pop(job_id, None)
        if run is not None and run.slurm_id is not None:
            self._queue.forget(run.slurm_id)
        super().remove(job_id)

    def close(self) -> None:
        """End the thread that asks Slurm; the jobs continue."""
        self._queue.close()
        self._jobs.clear()
        super().close()

    def _run(self, job_id: str) -> _SlurmRun:
        run = self._jobs.get(job_id)
        if run is None:
            folder = self._job_folder(job_id)
            run = _SlurmRun(folder, RankLogs(folder, self._limit_bytes))
            # Another thread may have been faster.
            run = self._jobs.setdefault(job_id, run)
        return run

    def _write_files(self, job: Job, folder: Path, mark: str) -> None:
        for part in ("work", "output", "logs", "status"):
            (folder / part).mkdir(parents=True)
        variables, removed = _variables(job, folder_variables(folder))
        write_private(folder / "env.sh", script.environment_script(variables, removed))
        (folder / "job.sh").write_text(script.job_script(job))
        (folder / "worker.sh").write_text(script.worker_script(job))
        write_json(folder / "job.json", {"mark": mark})
        for note in unreachable_note(job):
            self._run(f"slurm-{job.run_id}").logs.note(note)

    def _look_at_end(self, run: _SlurmRun, entry: QueueEntry) -> JobStatus:
        """Return the status of a job that has ended.

        It counts as running while its files may be on their way.
        """
        now = time.monotonic()
        run.ended_since = run.ended_since or now
        begun, status = _read_number(run.folder / "begun"), _read_number(run.folder / "exit")
        # Slurm reports all other states, so they need no file.
        needs_file = entry.state in ("COMPLETED", "FAILED", UNKNOWN)
        if needs_file and status is None and now - run.ended_since < _FILES_S:
            return JobStatus("running")
        run.logs.collect(at_end=True)
        ended = _Ended(run, entry, begun is not None, status)
        run.status = ended.status()
        run.logs.note(run.status.reason or "finished")
        assert run.slurm_id is not None
        self._queue.forget(run.slurm_id)
        return run.status


class _Ended:
    """A job that has ended: the state that Slurm reports, and the files of the run."""

    def __init__(self, run: _SlurmRun, entry: QueueEntry, begun: bool, status: int | None) -> None:
        self._run = run
        self._entry = entry
        self._begun = begun
        self._status = status
        self._who = f"job {run.slurm_id} of Slurm"
        # (time, rank, status), by the time at which the workers ended, which the server of the
        # files has set.
        self._workers: list[tuple[float, int, int]] = []
        with contextlib.suppress(OSError):
            for path in (run.folder / "status").iterdir():
                number = _read_number(path)
                if path.name.isdecimal() and number is not None:
                    self._workers.append((path.stat().st_mtime, int(path.name), number))
        self._workers.sort()

    def status(self) -> JobStatus:
        """Return how the job ended."""
        finished_at = None
        if self._workers:
            finished_at, _, _ = self._workers[-1]
        state, status = self._entry.state, self._status
        if state == UNKNOWN and status is None:
            return JobStatus(
                "lost", f"lost: Slurm has forgotten the {self._who}, and it left no status"
            )
        # Slurm forgets a job if it has no accounting. Then the file of the script says how it
        # ended.
        if state == "COMPLETED" or (state == UNKNOWN and status == 0):
            return JobStatus("finished", returncode=0, finished_at=finished_at)
        if state in ("FAILED", UNKNOWN):
            reason, status = self._failure()
        else:
            reason = self._reason_of_slurm()
        return JobStatus("failed", reason, status, finished_at)

    def _reason_of_slurm(self) -> str:
        """Return why Slurm has ended the job."""
        entry, who = self._entry, self._who
        if entry.state == "NODE_FAIL":
            # The messages of Slurm in the job's output name the node.
            match = _FAILED_NODE.search("\n".join(self._run.logs.job_lines()))
            if match is not None:
                return f"node {match[1] or match[2]} failed, which ended {who}"
            return f"a node of {entry.nodes or 'the job'} failed, which ended {who}"
        limit = entry.time_limit or "see its partition"
        reasons = {
            "TIMEOUT": (
                f"{who} reached its time limit ({limit}): "
                "give a longer --time in the engine options"
            ),
            "CANCELLED": f"{who} was cancelled, but not by MLBench",
            "PREEMPTED": f"{who} was preempted by a job of higher priority",
            "OUT_OF_MEMORY": (
                f"{who} used more memory than it had: "
                "give a larger --mem-per-cpu in the engine options"
            ),
        }
        other = f"{who} ended with the state {entry.state}"
        if entry.reason not in ("", "None"):
            other = f"{other} ({entry.reason})"
        return reasons.get(entry.state, other)

    def _failure(self) -> tuple[str, int | None]:
        """Return which worker failed first and how, with its exit status."""
        lines = self._run.logs.job_lines()
        last_line = ""
        if lines:
            last_line = lines[-1]
        if not self._begun:
            reason = (
                f"{self._who} ended before its script began: is {self._run.folder} on a file "
                "system that all nodes share?"
            )
            if lines:
                reason = f"{reason} {last_line}"
            return reason, self._status
        failed = [(rank, status) for _, rank, status in self._workers if status]
        # After the first failure srun terminates the other workers: their ends are an effect,
        # not a cause.
        candidates = [(rank, status) for rank, status in failed if status != _TERMINATED]
        # A worker whose shell was killed has left no status, but srun names it.
        killed, terminated = self._without_status(lines)
        if not candidates:
            named = killed or terminated
            if named:
                return named, self._status
            candidates = failed[:1]
        if not candidates:
            reason = f"the script of {self._who} failed: exit status {self._status}"
            if lines:
                reason = f"{reason}: {last_line}"
            return reason, self._status
        rank, returncode, error = self._cause(candidates)
        if killed and is_consequence(error):
            return killed, self._status
        reason = describe_exit(rank, returncode)
        if error:
            reason = f"{reason}: {error}"
        return reason, returncode

    def _without_status(self, lines: Sequence[str]) -> tuple[str, str]:
        """Return how srun says that workers without a status ended.

        Returns:
            The first end that is not a termination, and the first termination, which may follow
            from the end of another worker; empty texts if there are none.
        """
        known = {rank for _, rank, _ in self._workers}
        killed = terminated = ""
        for match in filter(None, map(_SRUN_ERROR.match, lines)):
            node, ranks, end = match.groups()
            rank = _first_unknown(ranks, known)
            if rank is None:
                continue
            reason = f"worker {rank} on node {node} died: {end}"
            if _TERMINATED_END.match(end):
                terminated = terminated or reason
            else:
                killed = killed or reason
        return killed, terminated

    def _cause(self, failed: list[tuple[int, int]]) -> tuple[int, int, str]:
        """Return rank, exit status and error of the worker that is the cause of the others' end."""
        ends = []
        for rank, status in failed:
            returncode = from_shell_status(status)
            ends.append((rank, returncode, self._run.logs.said(rank, returncode)))
        if not is_consequence(ends[0][2]):
            return ends[0]
        # The first worker that did not fail because another one had gone.
        for rank, returncode, error in ends:
            if (error or returncode < 0) and not is_consequence(error):
                return rank, returncode, error
        return ends[0]


def _variables(job: Job, own: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables of the workers, and the names of those that they must not inherit."""
    caller_env = job.caller_env
    if caller_env is not None:
        # Slurm sets which devices belong to a job.
        caller_env = dict(caller_env)
        for name in job.caller_env or ():
            if name.endswith("VISIBLE_DEVICES"):
                del caller_env[name]
    variables = worker_environment(job.env, caller_env, own, threads=1)
    # The job's script knows the cores of a worker.
    if "OMP_NUM_THREADS" not in {**(caller_env or {}), **job.env}:
        del variables["OMP_NUM_THREADS"]
    inherited = variables_to_remove(caller_env)
    return variables, [name for name in inherited if not name.endswith("VISIBLE_DEVICES")]


def _first_unknown(ranks: str, known: set[int]) -> int | None:
    """Return the first of the ranks in a message of srun that is not in a set.

    Example:
        >>> _first_unknown("0-2,5", {0, 1})
        2
    """
    for first, last in _RANKS.findall(ranks):
        for rank in range(int(first), int(last or first) + 1):
            if rank not in known:
                return rank
    return None


def _submit(
    command: list[str], folder: Path, mark: str, caller_env: Mapping[str, str] | None
) -> str:
    """Submit a job and return Slurm's number for it."""
    try:
        answer = run_slurm(*command, folder=folder, caller_env=caller_env)
        # "123", or "123;cluster"
        slurm_id = answer.strip().splitlines()[-1].partition(";")[0]
    except (EngineError, IndexError):
        # The answer may be lost, and the job be submitted.
        submitted: str | None = None
        with contextlib.suppress(EngineError):
            submitted = _find_mark(mark)
        if submitted is None:
            raise
        return submitted
    if not slurm_id.isdecimal():
        raise EngineError(
            f"sbatch answered {slurm_id[:80]!r}, which is not the number of a job: look at squeue"
        )
    return slurm_id


def _find_job(folder: Path) -> str | None:
    """Return Slurm's number of the job of a run, or None if the run was not submitted.

    Raises:
        EngineError: Slurm has to be asked, and does not answer.
    """
    # The master may have died between sbatch and the first file.
    number = _read_number(folder / "slurm_job") or _read_number(folder / "begun")
    if number is not None:
        return str(number)
    try:
        mark = json.loads((folder / "job.json").read_text())["mark"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return _find_mark(mark)


def _find_mark(mark: str) -> str | None:
    for slurm_id, entry in all_jobs().items():
        if entry.mark == mark:
            return slurm_id
    return None


def _read_number(path: Path) -> int | None:
    """Return the number in a file, or None if there is none."""
    with contextlib.suppress(OSError, ValueError), open_at_once(path) as file:
        return int(file.read(_STATE_BYTES))
    return None
