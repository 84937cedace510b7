"""The state of a run on several hosts, from the answers of its hosts.

Its steps are::

    checking  every host checks the script, the GPUs and the version; a host that fails ends the run
    -> the port of the first host is recorded in progress.json: from here on, workers may exist
    running   every host starts its supervisor once, and is looked at;
              if one fails, the others are stopped
    -> all hosts have ended, their lines are here, and their files were fetched
    over      ended.json has the status; the hosts delete their folders of the run,
              and then the file left_on_hosts is deleted

On a full disk, a run continues in memory, with two exceptions: no worker starts before the port is
recorded, and no host deletes its folder before the end is recorded, which is tried again.

A master that was killed leaves ``job.json`` and ``progress.json``, with which the next one
continues at the same step. It looks for ``left_on_hosts``, because nobody asks about the status of
a run that is known to be over.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from mlbench_master.engines.error_search import is_consequence
from mlbench_master.engines.interface import JobStatus
from mlbench_master.engines.logs import DROPPING, LogWriter, dropping_problem
from mlbench_master.engines.supervisor.supervise import write_json

__all__ = ["LEFT_ON_HOSTS", "Answer", "HostRun"]

LEFT_ON_HOSTS = "left_on_hosts"
"""Name of the file in the folder of a run that is over, while hosts have their folders of it."""

_LOAD_BYTES = 4 * 2**20


class _Line(TypedDict):
    rank: Annotated[int, Field(ge=0)] | None
    stream: Annotated[str, Field(pattern="^[a-z]{1,10}$")]
    text: str
    date: Annotated[str, Field(pattern="^[0-9T:.Z-]{0,40}$")]


class Answer(TypedDict):
    """The answer of a host about its part of a run; see the module ``agent``."""

    state: Annotated[
        str, Field(pattern="^(?:prepared|running|ended|lost|missing|refused|troubled)$")
    ]
    reason: NotRequired[str]
    port: NotRequired[Annotated[int, Field(ge=1, le=65535)]]
    status: NotRequired[str]
    dropping: NotRequired[bool]
    lines: NotRequired[list[_Line]]
    next: NotRequired[Annotated[int, Field(ge=0)]]
    load: NotRequired[list[_Line]]
    load_next: NotRequired[Annotated[int, Field(ge=0)]]
    more: NotRequired[bool]


class _Status(TypedDict):
    returncode: int
    reason: str
    finished_at: FiniteFloat
    failed_at: NotRequired[FiniteFloat | None]


_status = TypeAdapter(_Status)


@dataclass
class _Kept:
    """The part of ``progress.json`` about a host.

    ``log`` and ``load`` are the numbers of the next lines to ask for.
    """

    log: int = 0
    load: int = 0
    is_started: bool = False
    is_fetched: bool = False
    is_removed: bool = False


@dataclass
class _Part:
    """The workers of a run on one host."""

    name: str
    root: str
    kept: _Kept = field(default_factory=_Kept)
    state: str = ""
    port: int = 0
    problem: str = ""
    failure: str = ""
    is_consequence: bool = False
    returncode: int | None = None
    ended_at: float | None = None
    failed_at: float | None = None
    is_complete: bool = False  # all lines are here

    @property
    def is_over(self) -> bool:
        return self.state == "ended" and self.is_complete

    @property
    def is_done(self) -> bool:
        return self.is_over and self.kept.is_fetched

    @property
    def is_left(self) -> bool:
        """Return whether its folder is to be removed when the run is over."""
        return self.kept.is_started and self.kept.is_fetched and not self.kept.is_removed


class HostRun:
    """A run on several hosts.

    Args:
        folder: Its folder on this machine, with ``job.json``.
        limit_bytes: Largest size of its log.
        wake: Called when its hosts may have something new to do.
    """

    def __init__(self, folder: Path, limit_bytes: int, wake: Callable[[HostRun], None]) -> None:
        self.folder = folder
        self.log = LogWriter(folder, limit_bytes)
        self._load = LogWriter(folder / "load", _LOAD_BYTES)
        self._wake = wake
        self._lock = threading.RLock()
        job: dict[str, Any] = json.loads((folder / "job.json").read_text())
        self.run_id = int(job["run_id"])
        self.python = str(job["python"])
        self.options: tuple[str, ...] = tuple(job["options"])
        self.slots: dict[str, set[int]] = {}
        for name, slots in job["slots"].items():
            self.slots[name] = set(slots)
        self._jobs: dict[str, dict[str, Any]] = job["hosts"]
        self._parts = {name: _Part(name, part["root"]) for name, part in self._jobs.items()}
        self._port: int | None = None
        self._is_stopping = False
        self._is_deleted = False
        self._ended: JobStatus | None = None
        # The status with which the run is about to end, while ended.json cannot be written.
        self._ending: JobStatus | None = None
        self._end_problem = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            progress = json.loads((folder / "progress.json").read_text())
            self._port, self._is_stopping = progress["port"], bool(progress["is_stopping"])
            for name, kept in progress["hosts"].items():
                self._parts[name].kept = _Kept(**kept)
        with contextlib.suppress(OSError, ValueError, TypeError):
            ended = json.loads((folder / "ended.json").read_text())
            # A master of an earlier version wrote no changes.
            self._ended = JobStatus(**{**ended, "changes": tuple(ended.get("changes", ()))})

    @property
    def hosts(self) -> list[str]:
        """Return the names of the hosts with workers."""
        return list(self._parts)

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended and its results are here."""
        return self._ended is not None

    @property
    def is_cleared(self) -> bool:
        """Return whether the run has ended and no host has a folder of it that is to be removed."""
        return self.is_over and not self._is_left()

    def forget_folder(self) -> None:
        """Write nothing more into the folder on this machine, which is being deleted."""
        # The next run may get its path.
        with self._lock:
            self._is_deleted = True

    def status(self) -> JobStatus:
        """Return the status of the run."""
        with self._lock:
            if self._ended is not None:
                return self._ended
            problems = "; ".join(part.problem for part in self._parts.values() if part.problem)
            problems = self._end_problem or problems
            if self._port is None:
                return JobStatus("waiting", problems or f"asks the hosts: {', '.join(self._parts)}")
            return JobStatus("running", problems or dropping_problem(self.folder))

    def stop(self) -> None:
        """Ask all hosts to end their workers."""
        with self._lock:
            # A run whose end cannot be recorded keeps the status with which it ended.
            if self._ending is None and self._ended is None and not self._is_stopping:
                # Saved before the hosts are asked, so that the next master continues to stop the
                # run.
                self._is_stopping = True
                self._try_to_save()
                self._look_at_all()
        self._wake(self)

    def give_up(self, name: str) -> None:
        """Go on without a host that will never answer again."""
        with self._lock:
            part = self._parts[name]
            text = (
                f"host {name} is no longer among the hosts: the run ends without it, and "
                "its workers may continue"
            )
            self.log.write(None, "system", text)
            part.state, part.problem = "ended", ""
            # Nothing more is expected from it.
            part.is_complete = part.kept.is_removed = part.kept.is_fetched = True
            self._try_to_save()
            self._look_at_all()

    def open_hosts(self) -> list[str]:
        """Return the hosts whose workers have not ended, or whose files are not here."""
        with self._lock:
            return [part.name for part in self._open_parts()]

    def _open_parts(self) -> list[_Part]:
        return [part for part in self._parts.values() if not part.is_done]

    def problem_since(self, asked_at: dict[str, float], since: float) -> str:
        """Return why hosts that have to answer did not, in calls since a time.

        The text is empty if another one still may.
        """
        problems = []
        with self._lock:
            if self._end_problem:
                return self._end_problem
            for part in self._open_parts():
                if not part.problem or asked_at.get(part.name, 0) < since:
                    return ""
                problems.append(part.problem)
        return "; ".join(problems)

    def step(self, name: str) -> dict[str, Any] | None:
        """Return the next step of a host, or None if there is none."""
        with self._lock:
            part = self._parts[name]
            step: dict[str, Any] = {"id": self.run_id, "log": part.kept.log, "load": part.kept.load}
            if self._ending is not None:
                self._end(self._ending)
            if self._ending is not None:
                return None
            if self._ended is not None:
                if part.is_left:
                    return {**step, "want": "remove"}
                return None
            if self._port is None:
                if part.state == "prepared":
                    return None
                # The token is not needed yet.
                return {**step, "want": "prepare", "job": {**self._jobs[name], "env": {}}}
            if part.is_over:
                return None
            # Also for a host that has not confirmed its start, because the answer may have been
            # lost.
            if self._is_stopping or any(other.failure for other in self._parts.values()):
                return {**step, "want": "stop"}
            if part.kept.is_started:
                return {**step, "want": "look"}
            return {**step, "want": "run", "job": {**self._jobs[name], "port": self._port}}

    def root(self, name: str) -> str:
        """Return the folder of the run on a host."""
        return self._parts[name].root

    def to_fetch(self, name: str) -> list[str]:
        """Return the folders of a host that are to be fetched now."""
        with self._lock:
            part = self._parts[name]
            if not part.is_over or part.kept.is_fetched or self._ended is not None:
                return []
            if name == self.hosts[0]:  # of rank 0, which writes the results
                return ["spool", "output"]
            return ["spool"]

    def fetched(self, name: str, problem: str = "") -> None:
        """Record that the files of a host are here, or that they never will be."""
        with self._lock:
            part = self._parts[name]
            part.kept.is_fetched = True
            part.problem = ""
            if problem:
                self.log.write(None, "system", problem)
                # The host keeps its folder.
                part.kept.is_removed = True
            self._try_to_save()
            self._look_at_all()
        self._wake(self)

    def failed(self, name: str, problem: str) -> None:
        """Record that a host did not answer."""
        with self._lock:
            self._parts[name].problem = problem
            # Without a port, no host has workers, so the run fails at once. Later, a host that does
            # not answer may still compute.
            is_end = self._port is None and self._ending is None and self._ended is None
            if is_end:
                self._end(JobStatus("failed", problem))
        # Otherwise the interval passes, because a host that refuses a call does so at once.
        if is_end:
            self._wake(self)

    def answered(self, name: str, answer: Answer, clock_offset_s: float) -> bool:
        """Take the answer of a host.

        Args:
            name: The host.
            answer: Its answer.
            clock_offset_s: The time of its clock less the time of this machine.

        Returns:
            True if it has more to say at once.
        """
        with self._lock:
            part = self._parts[name]
            part.problem = ""
            if self._ended is not None:
                part.kept.is_removed = True
                # After the end, hosts are only asked to delete their folders.
                if not self._is_deleted:
                    with contextlib.suppress(OSError):  # a full disk
                        self._save()
                        self._mark_left()
                return False
            if self._ending is not None:
                return False
            before = part.state, self._port
            if self._port is None:
                self._checked(part, answer)
            else:
                self._keep_lines(part, answer)
                self._take_state(part, answer, clock_offset_s)
            self._look_at_all()
            is_changed = before != (part.state, self._port)
        if is_changed:
            self._wake(self)
        return bool(answer.get("more"))

    def _checked(self, part: _Part, answer: Answer) -> None:
        if answer["state"] == "prepared":
            part.state, part.port = "prepared", answer.get("port", 0)
            if all(other.state == "prepared" for other in self._parts.values()):
                # Saved before any host may start workers: the next master must not check the hosts
                # again and choose another port, as workers of this one may exist.
                self._port = self._parts[self.hosts[0]].port
                try:
                    self._save()
                except OSError:
                    self._port = None
                    raise
        else:
            reason = _one_line(answer.get("reason", answer["state"]))
            self._end(JobStatus("failed", f"host {part.name}: {reason}"))

    def _keep_lines(self, part: _Part, answer: Answer) -> None:
        for line in answer.get("lines", ()):
            text = line["text"]
            # Each supervisor says how its workers ended.
            if line["rank"] is None:
                text = f"host {part.name}: {text}"
            self.log.write(line["rank"], line["stream"], text, line["date"])
        self.log.close()
        # Dates of this form have the order of their texts, if all of them have microseconds.
        time_here = datetime.now(timezone.utc).replace(tzinfo=None)
        now = f"{time_here.isoformat(timespec='microseconds')}Z"
        if answer.get("load"):
            (self.folder / "load").mkdir(exist_ok=True)
        for line in answer.get("load", ()):
            date = None
            # A sample of the future, by a clock that differs, would be thrown away.
            if line["date"] < now:
                date = line["date"]
            self._load.write(line["rank"], "load", line["text"], date)
        self._load.close()
        # The position is saved after the lines: if the master is killed in between, they are asked
        # for again, and appear twice instead of never.
        kept = (answer.get("next", part.kept.log), answer.get("load_next", part.kept.load))
        if kept != (part.kept.log, part.kept.load):
            part.kept.log, part.kept.load = kept
            self._save()

    def _take_state(self, part: _Part, answer: Answer, clock_offset_s: float) -> None:
        state = answer["state"]
        if state == "troubled":
            part.problem = f"host {part.name}: {_one_line(answer.get('reason', ''))}"
            return
        if state == "missing" and not part.kept.is_started:
            # It was stopped before it started anything.
            part.state, part.is_complete, part.kept.is_fetched = "ended", True, True
            return
        if state in ("running", "ended", "lost") and not part.kept.is_started:
            part.kept.is_started = True
            self._save()
        if state == "running":
            part.state = "running"
            part.problem = ""
            if answer.get("dropping"):
                part.problem = f"host {part.name}: {DROPPING}"
            return
        part.state, part.is_complete = "ended", not answer.get("more")
        if state == "ended":
            self._take_status(part, answer.get("status", ""), clock_offset_s)
            return
        # Only a host that has lost its workers has files to fetch.
        part.kept.is_fetched = part.kept.is_fetched or state != "lost"
        if not self._is_stopping:
            reason = answer.get("reason", "its folder of the run is gone")
            who = f"host {part.name}"
            if state != "refused":
                who = f"the workers on {who} were lost"
            part.failure = _one_line(f"{who}: {reason}")

    def _take_status(self, part: _Part, content: str, clock_offset_s: float) -> None:
        try:
            status = _status.validate_json(content)
        except ValidationError as error:
            problem = str(error).splitlines()[0]
            part.failure = f"status.json of host {part.name} is damaged: {problem}"
            return
        part.returncode = status["returncode"]
        # By the clock of this machine, so that the failures of several hosts can be compared.
        part.ended_at = part.failed_at = status["finished_at"] - clock_offset_s
        failed_at = status.get("failed_at")
        if failed_at is not None:
            part.failed_at = failed_at - clock_offset_s
        reason = _one_line(status["reason"])
        if status["returncode"] and reason != "stopped":
            # After a failure, the workers of the other hosts are stopped with SIGTERM.
            part.is_consequence = "signal 15 " in reason or is_consequence(reason)
            part.failure = re.sub(r"^(worker \d+) ", rf"\1 on host {part.name} ", reason)
            if part.failure == reason:
                part.failure = f"host {part.name}: {reason}"

    def _look_at_all(self) -> None:
        """End the run if all of its hosts have ended."""
        if self._ending is not None or self._ended is not None:
            return
        if self._port is None:
            if self._is_stopping:
                self._end(JobStatus("failed", "stopped"))
            return
        if self._open_parts():
            return
        parts = self._parts.values()
        end_times = [part.ended_at for part in parts if part.ended_at is not None]
        finished_at = max(end_times, default=None)
        failed = [part for part in parts if part.failure]
        if failed and not self._is_stopping:
            # A cause comes first. A host without a status ended for its own reason, at a time that
            # nobody knows.
            first = min(failed, key=lambda part: (part.is_consequence, part.failed_at or 0.0))
            self._end(JobStatus("failed", first.failure, first.returncode, finished_at))
        elif self._is_stopping or any(part.returncode for part in parts):
            self._end(JobStatus("failed", "stopped", finished_at=finished_at))
        else:
            self._end(JobStatus("finished", returncode=0, finished_at=finished_at))

    def _end(self, status: JobStatus) -> None:
        """Record the end of the run; if the disk does not accept it, :meth:`step` tries again."""
        # The next run may already have the folder of a run that is being deleted.
        if not self._is_deleted:
            # Before the hosts delete their folders: the next master must not start the run again.
            with contextlib.suppress(OSError):
                self._mark_left()
            try:
                write_json(self.folder / "ended.json", asdict(status))
            except OSError as error:
                why = error.strerror or error
                self._ending = status
                self._end_problem = f"the end of the run cannot be recorded: {why}"
                return
            self.log.write(None, "system", status.reason or "finished")
            self.log.close()
        self._ended, self._ending, self._end_problem = status, None, ""

    def _is_left(self) -> bool:
        return any(part.is_left for part in self._parts.values())

    def _mark_left(self) -> None:
        mark = self.folder / LEFT_ON_HOSTS
        if self._is_left():
            mark.touch()
        else:
            mark.unlink(missing_ok=True)

    def _try_to_save(self) -> None:
        """Save a step that the next master may repeat, or continue on a full disk."""
        with contextlib.suppress(OSError):
            self._save()

    def _save(self) -> None:
        hosts = {name: asdict(part.kept) for name, part in self._parts.items()}
        content = {"port": self._port, "is_stopping": self._is_stopping, "hosts": hosts}
        write_json(self.folder / "progress.json", content)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
