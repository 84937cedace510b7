"""What the master needs of a launcher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from typing_extensions import TypedDict

__all__ = ["Job", "JobStatus", "Launcher", "LogLine", "LogPage"]


@dataclass(frozen=True)
class Job:
    """A run, as a launcher sees it.

    Attributes:
        run_id: The run's id.
        name: The run's name.
        command: A worker's command line; ``{run_id} {rank} {hosts} {backend}`` are to be filled in.
        num_workers: Number of workers.
        num_cpus: Cores of each worker.
        backend: Communication backend.
        gpu_enabled: Whether workers use GPUs.
        all_nodes: Whether every worker runs the command; else only the first one does, and starts the others itself.
        image: Container image, for launchers that use one.
        env: Environment of the workers, on top of the master's own.
        notes: Lines for the beginning of the run's log.
    """

    run_id: int
    name: str
    command: str
    num_workers: int
    num_cpus: float = 1.0
    backend: str = "gloo"
    gpu_enabled: bool = False
    all_nodes: bool = True
    image: str = ""
    env: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobStatus:
    """Where a job stands.

    Attributes:
        state: ``"running"``, ``"finished"``, ``"failed"``, or ``"lost"``: it is neither running nor did it say how
            it ended.
        reason: Why it failed, one line.
        returncode: The exit status, negative for a signal.
    """

    state: str
    reason: str = ""
    returncode: int | None = None


class LogLine(TypedDict):
    """One line of a log.

    Attributes:
        rank: The worker that wrote it; None for the launcher itself.
        stream: ``"stdout"``, ``"stderr"``, or ``"system"`` for a line of the master's own.
        text: The line.
        date: When it was written, as the API writes dates; empty if that is not known.
    """

    rank: int | None
    stream: str
    text: str
    date: str


@dataclass(frozen=True)
class LogPage:
    """Some lines of a log.

    Attributes:
        lines: The lines.
        next: Number of the line after the last one.
    """

    lines: list[LogLine]
    next: int


class Launcher(ABC):
    """Starts, watches and stops jobs; a job outlives the master that started it.

    Attributes:
        name: Short name for messages.
        limits_bandwidth: Whether it can limit the bandwidth of a worker.
        starts_containers: Whether a run's image is what its workers run in.
    """

    name: str
    limits_bandwidth = False
    starts_containers = False

    @property
    @abstractmethod
    def capacity(self) -> float:
        """Cores for workers, all together."""

    @abstractmethod
    def start(self, job: Job) -> str:
        """Start a job.

        Args:
            job: What to start.

        Returns:
            The job's id, which a later master can use as well.

        Raises:
            MLBenchError: It cannot be started; the message says why.
        """

    @abstractmethod
    def poll(self, job_id: str) -> JobStatus:
        """Where a job stands, without waiting."""

    @abstractmethod
    def stop(self, job_id: str) -> None:
        """End a job and every process of it; returns when they are gone. Does nothing if it has ended."""

    @abstractmethod
    def logs(self, job_id: str, since_line: int = 0, limit: int = 5000) -> LogPage:
        """Lines of a job's log.

        Args:
            job_id: The job.
            since_line: Number of the first line wanted, from 0.
            limit: At most so many lines.

        Returns:
            The lines; none for a job without a log.
        """

    @abstractmethod
    def log_tail(self, job_id: str, max_bytes: int = 65_536) -> list[LogLine]:
        """The last lines of a job's log, as many as lie in its last ``max_bytes`` bytes."""

    @abstractmethod
    def note(self, job_id: str, text: str) -> None:
        """Add a line of the master's own to a job's log."""

    @abstractmethod
    def remove(self, job_id: str) -> None:
        """Delete what is kept of a job that has ended: logs and states."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything but the jobs, which go on."""
