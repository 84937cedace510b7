"""The interface between the master and an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Not from typing_extensions, which an installation without extras lacks.
from typing import NamedTuple, TypedDict

from mlbench_core.errors import MLBenchError
from mlbench_core.run_terms import PaidSamples, WorkerRange

__all__ = [
    "EVERY_LINE",
    "FROM_THE_START",
    "STOPPED",
    "WORKERS_PER_CORE",
    "Engine",
    "EngineError",
    "Job",
    "JobStatus",
    "LogFilter",
    "LogLine",
    "LogPage",
    "LogRange",
    "NumberedLine",
]


WORKERS_PER_CORE = 4
"""Largest number of workers per core; more would wait for each other most of the time."""


class EngineError(MLBenchError):
    """The system behind an engine, for example Slurm, does not answer or refuses a request."""


@dataclass(frozen=True)
class Job:
    """The data of a run that an engine needs.

    Attributes:
        run_id: The run's id.
        name: The run's name.
        command: A worker's command line; the engine fills in ``{run_id} {rank} {hosts}
            {backend}``. In a container, its paths are paths of the image.
        num_workers: Number of workers.
        num_cpus: Cores of each worker.
        backend: Communication backend.
        gpu_enabled: True if workers use GPUs.
        gpus: Entries of CUDA_VISIBLE_DEVICES, one per worker in the order of the ranks; empty if
            the engine assigns no GPUs.
        all_nodes: True if every worker runs the command. Otherwise only the first worker runs it,
            and the command starts the others.
        image: Full name of the container image, for an engine that uses it (see
            :meth:`Engine.uses_image`).
        env: Environment variables of the workers, in addition to those of the master.
        notes: Lines for the beginning of the run's log.
        options: Options of the engine's own command, for engines that have one.
        network: The emulated network, as text, with one host for each worker; empty if none.
        is_task: True if the command is the script of a task, which needs no file of the user's
            folder.
        cwd: Absolute path of the folder in which the workers start; empty for the folder ``work``
            of the run.
        caller_env: Variables of the call that started the run, which the run uses instead of those
            of the master; see :func:`mlbench_core.calling_environment.is_carried`. None to use
            the variables of the master.
        oversubscribe: True if a host may get more workers than its cores can serve.
        elastic: The numbers of workers with which the run goes on; None for a run that the first
            death ends.
    """

    run_id: int
    name: str
    command: str
    num_workers: int
    num_cpus: float = 1.0
    backend: str = "gloo"
    gpu_enabled: bool = False
    gpus: tuple[str, ...] = ()
    all_nodes: bool = True
    image: str = ""
    env: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    network: str = ""
    is_task: bool = False
    cwd: str = ""
    caller_env: dict[str, str] | None = None
    oversubscribe: bool = False
    elastic: WorkerRange | None = None

    @property
    def most_workers(self) -> int:
        """The largest number of workers that live at the same time."""
        if self.elastic is None:
            return self.num_workers
        return self.elastic.most


@dataclass(frozen=True)
class JobStatus:
    """The status of a job.

    Attributes:
        state: ``"waiting"`` (in the queue of an engine that has one), ``"running"``,
            ``"finished"``, ``"failed"``, ``"lost"`` (it is not running and left no status), or
            ``"unstarted"``: an earlier master ended before it started a worker, so the job can be
            started again.
        reason: One line: the reason why the job failed or waits, or a problem of a job that runs or
            has finished.
        returncode: The exit status, negative for a signal.
        finished_at: The time at which the last worker ended, in seconds since 1970, if it is known.
        changes: Lines about the workers of an elastic run that died or joined.
        samples: The samples of an elastic run; None if they were not counted.
    """

    state: str
    reason: str = ""
    returncode: int | None = None
    finished_at: float | None = None
    changes: tuple[str, ...] = ()
    samples: PaidSamples | None = None


STOPPED = JobStatus("failed", "stopped by a user")
"""The status of a job that a user stopped. The API has no separate state for it."""


class LogLine(TypedDict):
    """One line of a log.

    Attributes:
        rank: Rank of the worker that wrote it; None for the engine itself.
        stream: ``"stdout"``, ``"stderr"``, or ``"system"`` for a line of the master.
        text: The line, without escape sequences of terminals and without control characters except
            tabs.
        date: The date of the line in the format of the API; empty if unknown.
    """

    rank: int | None
    stream: str
    text: str
    date: str


class NumberedLine(LogLine):
    """One line of a log with its number.

    Attributes:
        line: Number of the line in the whole log, from 0.
    """

    line: int


@dataclass(frozen=True)
class LogFilter:
    """Select lines of a log; by default all lines.

    Attributes:
        rank: Rank of the worker; ``"master"`` for lines that no worker wrote; None for all lines.
        stream: The stream, or None for all streams.
        search: Text that a line must contain, ignoring case.

    Example:
        >>> errors = LogFilter(stream="stderr", search="error")
        >>> errors.matches({"rank": 0, "stream": "stderr", "text": "ValueError", "date": ""})
        True
    """

    rank: int | str | None = None
    stream: str | None = None
    search: str = ""

    def matches(self, line: LogLine) -> bool:
        """Return whether a line is selected."""
        rank: int | str | None = line["rank"]
        # A filter names the lines of the master by this word, because None means all lines.
        if rank is None:
            rank = "master"
        return (
            self.rank in (None, rank)
            and self.stream in (None, line["stream"])
            and self.search.lower() in line["text"].lower()
        )


EVERY_LINE = LogFilter()


class LogRange(NamedTuple):
    """A range of a log to read, forward from ``since_line`` or backward from ``before_line``.

    Attributes:
        since_line: Number of the first line wanted, from 0.
        limit: Maximum number of lines. With 0, wanted lines are only counted.
        before_line: Read the last wanted lines before the line with this number. A number after
            the end of the log means the end. None to read forward.
        wanted: Filter for the lines of the range.
    """

    since_line: int = 0
    limit: int = 5000
    before_line: int | None = None
    wanted: LogFilter = EVERY_LINE


FROM_THE_START = LogRange()


@dataclass(frozen=True)
class LogPage:
    """A range of lines of a log.

    Attributes:
        lines: The wanted lines of the range.
        next: Number of the line after the range.
        previous: Number of the first line of the range.
        matches: Number of wanted lines in the range.
    """

    lines: list[NumberedLine]
    next: int
    previous: int = 0
    matches: int = 0


class Engine(ABC):
    """An engine starts, watches and stops jobs; a job outlives the master that started it.

    Attributes:
        name: Short name for messages.
        place: The location of the state of its jobs, as text. Engines with the same location see
            the same jobs.
        limits_bandwidth: True if it can limit the bandwidth of a worker.
        emulates_networks: True if it can give each worker an emulated host.
        replaces_workers: True if it can replace the workers of an elastic run that die.
        starts_first_worker_alone: True if the command of a run may start in worker 0 only, and
            start the others itself.
        starts_containers: True if workers always run in a container of the run's image.
        container_advice: Advice on how to get containers, if workers do not always run in them.
        options_example: Example of the engine's options, for messages.
        starts_processes: True if workers are processes that start in ``Job.cwd`` with
            ``Job.caller_env``, unless the options of a run ask for containers.
        sees_folders: True if these processes can access the folders of the master's machine.
    """

    name: str
    place = ""
    limits_bandwidth = False
    emulates_networks = False
    replaces_workers = False
    starts_first_worker_alone = True
    starts_containers = False
    container_advice = "choose an engine that starts containers"
    options_example = ""
    starts_processes = False
    sees_folders = False

    @property
    def has_options(self) -> bool:
        """Return whether a run can have options of the engine."""
        return type(self).check_options is not Engine.check_options

    @property
    @abstractmethod
    def capacity(self) -> float:
        """Return the number of cores for all workers together."""

    @property
    def most_workers(self) -> int | None:
        """Return the largest number of workers that the cores can serve; None if unknown."""
        return None

    @property
    def gpus(self) -> tuple[str, ...] | None:
        """Return the GPUs of the engine; a run gets one of them for each worker.

        Returns:
            Entries of CUDA_VISIBLE_DEVICES; None if the engine does not assign GPUs, for
            example because a cluster does.
        """
        return None

    def uses_image(self, options: Sequence[str]) -> bool:
        """Return whether the workers of a run with these options run in a container of its image.

        Args:
            options: Options of the engine's own command.
        """
        return self.starts_containers

    def check_options(self, options: Sequence[str]) -> None:
        """Refuse options that the engine's own command does not accept.

        Raises:
            ValueError: An option is not allowed; the message names it.
        """
        if options:
            words = " ".join(options)[:80]
            raise ValueError(
                f"engine_options: must be left out, not {words!r}: the engine {self.name} has none"
            )

    def check_workers(self, num_workers: int, backend: str, options: Sequence[str]) -> None:
        """Refuse a run that could never start with its number of workers or its backend.

        Args:
            num_workers: Number of workers.
            backend: Communication backend.
            options: Options of the engine's own command.

        Raises:
            ValueError: The run could never start; the message names the field.
        """
        return

    def check_program(self, words: Sequence[str], cwd: str, path: str) -> None:
        """Refuse a command that cannot start, if the engine can find this out.

        Args:
            words: The words of the command.
            cwd: The folder in which it would start.
            path: The ``PATH`` of the workers.

        Raises:
            ValueError: The program does not exist; the message says what to do.
        """
        return

    def has_room(self, num_workers: int, options: Sequence[str]) -> bool:
        """Return whether a run could start now, apart from the limit :attr:`capacity`."""
        return True

    @abstractmethod
    def start(self, job: Job) -> str:
        """Start a job.

        Args:
            job: The job to start.

        Returns:
            The job's id, which a later master can use as well.

        Raises:
            MLBenchError: The job cannot be started; the message has the reason.
        """

    @abstractmethod
    def poll(self, job_id: str) -> JobStatus:
        """Return the status of a job without waiting."""

    @abstractmethod
    def stop(self, job_id: str) -> None:
        """End a job with all its processes and wait until they are gone.

        Do nothing if it has ended.
        """

    @abstractmethod
    def logs(self, job_id: str, lines: LogRange = FROM_THE_START) -> LogPage:
        """Return lines of a job's log.

        The log is read until enough lines are found, or until a limit on bytes or time is reached.
        To read on, pass the page's ``next`` until it no longer grows. To read backward, pass
        ``previous`` until it is the number of the first line.

        Args:
            job_id: The job.
            lines: The lines to read; by default the first ones.

        Returns:
            The lines in the order of the log; none for a job without a log.
        """

    def log_end(self, job_id: str) -> int:
        """Return the number of the line after the last one of a job's log."""
        page = LogPage([], 0)
        while True:
            page = self.logs(job_id, LogRange(page.next))
            if not page.lines:
                return page.next

    @abstractmethod
    def log_tail(self, job_id: str, max_bytes: int = 65_536) -> list[LogLine]:
        """Return the lines in the last ``max_bytes`` bytes of a job's log."""

    def load(self, job_id: str, since_line: int = 0, limit: int = 1000) -> LogPage:
        """Return samples of the load of a job's workers as lines.

        An engine that does not measure the load returns none.

        Args:
            job_id: The job.
            since_line: Number of the first line wanted, from 0.
            limit: Maximum number of lines.

        Returns:
            One line per worker and sample. Its text is JSON with some of
            :data:`~mlbench_master.engines.supervisor.load_sampler.LOAD_METRICS`.
        """
        return LogPage([], since_line)

    @abstractmethod
    def note(self, job_id: str, text: str) -> None:
        """Add a line of the master to a job's log."""

    def spool(self, job_id: str) -> Path | None:
        """Return the folder with metrics that a job's workers could not deliver.

        Return None if the master cannot read the folder.
        """
        return None

    def results(self, job_id: str) -> Path | None:
        """Return the folder for the results of a job's workers, if the master can read it.

        Workers find it in the environment variable ``MLBENCH_OUTPUT``. A task writes into
        ``<folder>/<task>/<run>``.
        """
        return None

    @abstractmethod
    def remove(self, job_id: str) -> None:
        """Delete the logs, states and results of a job that has ended."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources except the jobs, which continue."""
