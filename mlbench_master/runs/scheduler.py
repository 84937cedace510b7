"""Decide which run may start, and record how runs end."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from mlbench_core.errors import MLBenchError
from mlbench_master.database.store import CALLER_ENVIRONMENT, Run, Store
from mlbench_master.dates import now_us
from mlbench_master.engines.interface import STOPPED, Engine, JobStatus, LogRange
from mlbench_master.events import EventBus
from mlbench_master.runs.commands import check_gpus
from mlbench_master.runs.lease import Lease
from mlbench_master.runs.load_samples import LoadKeeper
from mlbench_master.runs.new_runs import make_job
from mlbench_master.runs.undelivered_metrics import OutboxReader, store_leftovers

__all__ = ["Scheduler"]

_log = logging.getLogger(__name__)
# Characters of each stream that the record of a run keeps of its output.
_TAIL_CHARACTERS = 16_384
# A poll starts runs for this long at most, because a request that stops a run waits for its end.
_LONGEST_START_S = 2.0
_OPEN = ("initialized", "started")


class Scheduler:
    """A thread that starts waiting runs when cores and GPUs are free, and records how they end.

    The run with the fewest cores starts first. A run with GPUs takes one for each worker until it
    ends. A run for which too few are free lets others pass.

    No run waits indefinitely if every run ends. After ``patience_s`` seconds, a run comes before
    all younger ones, and none of them starts before it. So only runs that are already running, and
    older ones, can delay it. Their number is finite. When they have ended, nothing else runs. Then
    the next run always starts, also one that is exclusive.

    A run that needs more cores than the machine has starts when nothing else runs, with a warning
    in its log. Otherwise it would wait indefinitely. After a restart of the master, runs that
    continue are watched again. Runs that disappeared without a status are marked as lost.

    An exception in the handling of a run ends only that run, with the exception as its reason.
    Errors of the operating system and of the database (a full disk, too many open files) concern
    the machine and may pass, so the next poll tries again.

    The states of a run and their transitions::

        initialized -- enough cores are free --> started
        initialized -- stopped by a user ------> failed
        started ------ the master died before it started a worker --> initialized
        started ------ exit status 0 ----------> finished
        started ------ failed, lost, stopped --> failed

    The lock is held while runs start and while states change, which takes milliseconds. Stopping a
    run takes seconds if its workers ignore SIGTERM, and other runs start and stop meanwhile.

    Args:
        store: The database of runs.
        engine: The engine that starts them.
        events: The bus that notifies subscribers.
        worker_env: Environment variables for all workers, for example the URL of the master.
        poll_s: Seconds between two polls.
        lease: The right to look after the runs of the database, which must be acquired; None if no
            other master can use the database.
        patience_s: Seconds after which a waiting run comes before all younger ones.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        events: EventBus,
        worker_env: dict[str, str],
        poll_s: float = 0.25,
        lease: Lease | None = None,
        patience_s: float = 3600.0,
    ) -> None:
        self._store = store
        self._engine = engine
        self._events = events
        self._worker_env = worker_env
        self._poll_s = poll_s
        self._lease = lease
        self._patience_s = patience_s
        # Reentrant, because an exception while a run starts ends it.
        self._lock = threading.RLock()
        # Runs that wait or run at the last poll; True while it is unknown.
        self.has_runs = True
        # Runs that stop_run is ending, so that no poll records another reason.
        self._stopping: set[int] = set()
        # Runs that a user stopped while the database could not be written.
        self._unrecorded: set[int] = set()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._log_lines: dict[int, int] = {}
        self._load = LoadKeeper(store, engine, events)
        self._outboxes = OutboxReader(store, engine, events)
        self._noted: set[tuple[int, str]] = set()
        self._problems: dict[int, str] = {}  # of runs that continue
        self._waits: dict[int, str] = {}  # why runs did not start at the last poll

    def start(self) -> None:
        """Start the thread, which also watches the runs of an earlier master."""
        self._closed = False
        if self._lease is not None:
            self._lease.start()
        self._thread = threading.Thread(target=self._loop, name="mlbench-scheduler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; the runs continue."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._lease is not None:
            # Not earlier: another master may take the runs over at once.
            self._lease.release()

    @property
    def is_in_charge(self) -> bool:
        """Return whether this master may look after the runs, and no other one."""
        return self._lease is None or self._lease.is_held

    def wake(self) -> None:
        """Poll now, because something has changed."""
        self._wake.set()

    def stop_run(self, run_id: int) -> Run | None:
        """End a run that waits or runs; its state becomes ``failed``, and it keeps its metrics.

        Args:
            run_id: The run.

        Returns:
            The run as it is now, or None if it does not exist.
        """
        with self._lock:
            run = self._store.run(run_id)
            if run is None or run.state not in _OPEN:
                return run
            if run.job_id is None:
                return self._finish(run, STOPPED)
            self._stopping.add(run_id)
        try:
            # Without the lock, because an engine may need a minute to end a run.
            self._engine.stop(run.job_id)
            try:
                return self._finish(run, STOPPED) or self._store.run(run_id)
            except SQLAlchemyError as error:
                # The run has ended, which the answer must say. The next polls try to record it.
                self._unrecorded.add(run_id)
                text = "run %s is stopped, but the database cannot record it yet: %s"
                _log.warning(text, run_id, error)
                run.state = STOPPED.state
                run.job_metadata = json.dumps({**run.metadata_dict(), "reason": STOPPED.reason})
                return run
        finally:
            self._stopping.discard(run_id)
            self.wake()

    def delete_run(self, run_id: int) -> None:
        """End a run if it runs, and delete it with its metrics and logs."""
        run = self.stop_run(run_id)
        self._store.delete_run(run_id)
        if run is not None and run.job_id is not None:
            self._engine.remove(run.job_id)
        self._events.publish("deleted", {"id": run_id})

    def tick(self) -> None:
        """Record which runs have ended, and start those that fit."""
        running = []
        for run in self._store.runs("started"):
            if self._goes_on(self._watch, run):
                running.append(run)
        with self._lock:
            until = time.monotonic() + _LONGEST_START_S
            used = sum(map(_cores, running))
            lent = set[str]().union(*map(_lent_gpus, running))
            waiting = self._store.runs("initialized")
            self.has_runs = bool(running or waiting)
            waits: dict[int, str] = {}
            ahead: Run | None = None  # the first run that no later one may pass
            for run in sorted(waiting, key=self._turn):
                if ahead is not None:
                    waits[run.id] = f"waits for run {ahead.name}, which comes first"
                    continue
                shortage = self._shortage(run, running, used)
                if shortage:
                    waits[run.id] = shortage
                    # The runs are sorted by their cores, so none of the others fits either.
                    ahead = run
                    continue
                free = self._free_gpus(run, lent)
                if running and (free is None or not self._has_room(run)):
                    scarce = "GPUs" if free is None else "slots"
                    waits[run.id] = f"waits for {scarce}: {run.num_workers} needed"
                    # Larger runs may need fewer GPUs, or other hosts.
                    if self._has_waited_long(run):
                        ahead = run
                    continue
                if self._goes_on(partial(self._launch, gpus=free or ()), run):
                    running.append(run)
                    used += _cores(run)
                    lent.update(free or ())
                if time.monotonic() >= until:
                    # An engine may need a moment for each start. Requests that stop runs do not
                    # wait for all of them.
                    self.wake()
                    break
            self._waits = waits

    def _shortage(self, run: Run, running: Sequence[Run], used: float) -> str:
        """Return why a run cannot start beside the running ones, or an empty text if it can."""
        if not running:
            return ""
        # Runs on one machine share its memory bandwidth and its network, so a run that is to be
        # measured runs alone. While it waits its turn, the runs after it wait, too.
        for other in running:
            if _is_exclusive(other):
                return f"waits for run {other.name}, which is exclusive"
        if _is_exclusive(run):
            return f"waits for run {running[0].name}, because this run is exclusive"
        if used + _cores(run) > self._engine.capacity:
            free = max(self._engine.capacity - used, 0.0)
            return f"waits for cores: {_cores(run):g} needed, {free:g} free"
        return ""

    def _turn(self, run: Run) -> tuple[bool, float, int]:
        """Return the sort key of a waiting run in the queue."""
        # Those that have waited long come before all younger runs, so that none waits indefinitely.
        if self._has_waited_long(run):
            return False, 0, run.id
        return True, _cores(run), run.id

    def _has_waited_long(self, run: Run) -> bool:
        return now_us() - run.created_at >= self._patience_s * 1e6

    def _free_gpus(self, run: Run, lent: Collection[str]) -> tuple[str, ...] | None:
        """Return the GPUs that a run would get, or None if it has to wait for some."""
        if not run.gpu_enabled:
            return ()
        gpus = self._engine.gpus
        if gpus is None:  # the cluster assigns them
            return ()
        free = tuple(gpu for gpu in gpus if gpu not in lent)
        if len(free) < run.num_workers:
            return None
        return free[: run.num_workers]

    def _has_room(self, run: Run) -> bool:
        options = run.metadata_dict().get("engine_options", ())
        return self._engine.has_room(run.num_workers, tuple(options))

    def _loop(self) -> None:
        last_error = ""
        while not self._closed:
            # Before the poll, so that a change during it leads to another one.
            self._wake.clear()
            try:
                # A master that was stopped for a while must not touch the runs of its successor.
                if self.is_in_charge:
                    self.tick()
                else:
                    self.has_runs = False
                last_error = ""
            except Exception as error:  # the thread must outlive an unreachable database
                self.has_runs = True
                # Once and not four times a second, which would fill the disk.
                if last_error != repr(error):
                    last_error = repr(error)
                    _log.exception("looking after the runs failed; trying again")
            self._wake.wait(self._poll_s)

    def _goes_on(self, step: Callable[[Run], bool], run: Run) -> bool:
        """Run a step and return whether the run continues.

        An exception of the step ends the run.
        """
        try:
            return step(run)
        except SQLAlchemyError:
            raise  # nothing can be recorded now, and the next poll tries again
        except OSError as error:
            _log.warning("run %s: %s; trying again", run.id, error)
            return True
        except Exception as error:
            _log.exception("looking after run %s failed; it is ended", run.id)
            # The run is recorded as failed even if its processes cannot be stopped.
            with contextlib.suppress(Exception):
                self._engine.stop(f"{self._engine.name}-{run.id}")
            reason = f"the master cannot look after the run: {type(error).__name__}: {error}"
            self._record_end(run, JobStatus("failed", reason), {})
            return False

    def _watch(self, run: Run) -> bool:
        """Record the status of a started run; return whether it continues."""
        if run.id in self._stopping:  # stop_run records the end
            return True
        assert run.job_id is not None
        if run.id in self._unrecorded:
            self._finish(run, STOPPED)
            return False
        status = self._engine.poll(run.job_id)
        self._publish_logs(run)
        if status.state in ("waiting", "running"):
            if status.state == "running":
                self._load.keep(run)
                self._outboxes.keep(run)
            self._show_problem(run, status)
            return True
        if status.state == "unstarted":
            # A master with another folder sees no run of the earlier one, and a second start would
            # mix their metrics.
            started_in = run.metadata_dict().get("started_at_place")
            if started_in != self._engine.place:
                reason = f"lost: another master started it in {started_in}"
                self._finish(run, JobStatus("lost", reason))
                return False
            changes: dict[str, Any] = {"state": "initialized", "job_id": None, "started_at": None}
            self._store.update_run(run.id, only_in=("started",), **changes)
            return False
        if status.state == "lost":
            self._note(run, status.reason)
        # stop_run may have begun to end the run after the poll.
        if run.id not in self._stopping:
            self._finish(run, status)
        return False

    def _note(self, run: Run, text: str) -> None:
        """Add a line to a run's log once."""
        # If the database fails, the end of the run is recorded later, with the same line.
        if run.job_id is not None and (run.id, text) not in self._noted:
            self._noted.add((run.id, text))
            self._engine.note(run.job_id, text)

    def _show_problem(self, run: Run, status: JobStatus) -> None:
        """Record the problem of a run that continues, or the reason why its job waits.

        An empty reason means that the problem has passed.
        """
        reason = status.reason
        if self._problems.get(run.id, "") != reason:
            self._problems[run.id] = reason
            if status.state == "waiting":
                # An engine may have hundreds of jobs in its queue.
                level = logging.DEBUG
            elif reason:
                level = logging.WARNING
            else:
                level = logging.INFO
            _log.log(level, "run %s: %s", run.id, reason or "it runs without a problem")
            event = {"id": run.id, "name": run.name, "state": run.state, "reason": reason}
            self._events.publish("state", event)
        if run.metadata_dict().get("reason", "") != reason:
            # A disk that is full for the log is often full for the database. The next poll
            # tries again.
            with contextlib.suppress(SQLAlchemyError):
                self._store.update_run(run.id, {"reason": reason}, only_in=("started",))

    def _launch(self, run: Run, gpus: tuple[str, ...]) -> bool:
        """Start a run with the GPUs lent to it; return whether it continues."""
        job = make_job(run, self._engine, self._worker_env, gpus)
        if run.id in self._stopping:
            return False
        # Before the start: if the master dies in between, the next master looks for the job.
        job_id = f"{self._engine.name}-{run.id}"
        changes: dict[str, Any] = {"state": "started", "job_id": job_id, "started_at": now_us()}
        facts: dict[str, Any] = {"started_at_place": self._engine.place}
        if gpus:
            # So that the next master does not lend them to another run.
            facts["gpus"] = list(gpus)
        started = self._store.update_run(run.id, facts, only_in=("initialized",), **changes)
        if started is None:
            return False
        try:
            # A restarted master may have fewer GPUs than the one that accepted the run.
            if run.gpu_enabled:
                check_gpus(run.num_workers, self._engine)
            self._engine.start(job)
        except (MLBenchError, ValueError) as error:
            self._finish(started, JobStatus("failed", str(error)))
            return False
        if self._events.has_subscribers:
            self._log_lines[run.id] = 0  # so that they get the first lines, too
        self._events.publish("state", {"id": run.id, "name": run.name, "state": "started"})
        return True

    def _finish(self, run: Run, status: JobStatus) -> Run | None:
        """Record the end of a run with the last lines of its output and its last metrics."""
        # Metrics and load come before the state: a run that is finished has all of them.
        missing = ""
        self._outboxes.finish(run)
        if run.job_id is not None:
            spool = self._engine.spool(run.job_id)
            if spool is not None:
                missing = store_leftovers(spool, self._store)
        if missing:
            self._note(run, missing)
        self._load.finish(run)
        output: dict[str, Any] = {**self.tails(run), "missing_metrics": missing}
        self._publish_logs(run)
        reason = "; ".join(filter(None, [status.reason, missing]))
        return self._record_end(run, replace(status, reason=reason), output)

    def _record_end(self, run: Run, status: JobStatus, output: dict[str, Any]) -> Run | None:
        state = "failed"
        # The API has no state for a run that is lost.
        if status.state == "finished":
            state = "finished"
        details = {**output, "reason": status.reason, "returncode": status.returncode}
        if status.changes:
            details["changes"] = list(status.changes)
        if status.samples is not None:
            details["samples"] = asdict(status.samples)
        details.update(_without_secrets(run))
        self._log_lines.pop(run.id, None)
        self._problems.pop(run.id, None)
        finished_at = now_us()
        if status.finished_at is not None:
            # The workers may have ended long before, while no master ran, and the clock may have
            # been set since.
            finished_at = min(max(int(status.finished_at * 1e6), run.started_at or 0), finished_at)
        changed = self._store.update_run(
            run.id, details, only_in=_OPEN, state=state, finished_at=finished_at
        )
        self._unrecorded.discard(run.id)
        self._noted = {note for note in self._noted if note[0] != run.id}
        if changed is None:  # deleted, or ended by another thread
            return None
        event = {"id": run.id, "name": run.name, "state": state, "reason": status.reason}
        self._events.publish("state", event)
        return changed

    def waits_for(self, run: Run) -> str:
        """Return why a run did not start at the last poll; an empty text if it is not waiting."""
        if run.state != "initialized":
            return ""
        return self._waits.get(run.id, "")

    def tails(self, run: Run) -> dict[str, Any]:
        """Return the last lines that a run's workers wrote.

        Args:
            run: The run.

        Returns:
            ``stdout`` and ``stderr``, which includes the lines of the master itself. If the run
            continues with a problem, also ``reason``.
        """
        out: list[str] = []
        err: list[str] = []
        if run.job_id is not None:
            for line in self._engine.log_tail(run.job_id):
                if line["stream"] == "stdout":
                    out.append(line["text"])
                else:
                    err.append(line["text"])
        tails: dict[str, Any] = {"stdout": _last_lines(out), "stderr": _last_lines(err)}
        if problem := self._problems.get(run.id):
            tails["reason"] = problem
        return tails

    def _publish_logs(self, run: Run) -> None:
        """Publish the lines since the last call."""
        if run.job_id is None:
            return
        if not self._events.has_subscribers:
            self._log_lines.pop(run.id, None)
            return
        if run.id not in self._log_lines:
            # A page reads the earlier lines itself.
            self._log_lines[run.id] = self._engine.log_end(run.job_id)
        page = self._engine.logs(run.job_id, LogRange(self._log_lines[run.id]))
        self._log_lines[run.id] = page.next
        # A page knows by their numbers which lines it shows already.
        self._events.publish("log", *({"run_id": run.id, **line} for line in page.lines))


def _last_lines(lines: list[str]) -> list[str]:
    """Return as many last lines as a run's record may hold, or the end of a single longer line."""
    size, first = 0, len(lines)
    while first > 0 and size + len(lines[first - 1]) < _TAIL_CHARACTERS:
        first -= 1
        size += len(lines[first]) + 1
    if lines and first == len(lines):
        return [lines[-1][-_TAIL_CHARACTERS:]]
    return lines[first:]


def _is_exclusive(run: Run) -> bool:
    return run.metadata_dict().get("exclusive") is True


def _lent_gpus(run: Run) -> list[str]:
    gpus = run.metadata_dict().get("gpus")
    # A damaged record may hold anything.
    if not isinstance(gpus, list):
        return []
    return [gpu for gpu in gpus if isinstance(gpu, str)]


def _without_secrets(run: Run) -> dict[str, Any]:
    """Return the entries of a run's metadata that had secrets for its workers, without them."""
    entries: dict[str, Any] = {}
    if CALLER_ENVIRONMENT in run.metadata_dict():
        entries[CALLER_ENVIRONMENT] = {}
    public = run.public_metadata()
    if "environment" in public:
        entries["environment"] = public["environment"]
    return entries


def _cores(run: Run) -> float:
    return run.most_workers * run.num_cpus
