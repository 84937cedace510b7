"""Run a sweep through a master, one run after the other.

The steps of one run, each of which can be the last one of a killed process::

    1. write current.json: the point, and a new name for the run at the master
    2. request the run from the master
    3. wait for its end; at the limit of its training time, the run stops
    4. put its folder together in unfinished/, and move it to runs/
    5. remove current.json

The next start continues: a run with that name is the run of step 2. The name ends with random
digits, so that no run of another sweep has it. A master that does not answer any more is looked for
again, and started again if it is the embedded one.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from mlbench_core.comparison.load_results import save
from mlbench_core.errors import ConfigurationError, MasterError, MasterRequestError
from mlbench_core.results.folder import RESULT, read_result
from mlbench_core.sweep.sweep_folder import Done, Failure, SweepFolder
from mlbench_core.sweep.toml_file import LONGEST_NAME, Point, Sweep
from mlbench_core.tasks import TRAIN_LIMIT

__all__ = ["Observer", "Runner"]

POLL_S = 0.5
GUARD_TIMES, GUARD_S = 10, 300.0
"""A run is stopped after ``GUARD_TIMES`` times its limit plus ``GUARD_S`` seconds.

It hangs, or its script ignores the limit.
"""

LOST_MASTER_S = 120.0
"""Seconds for which the master may not answer."""

# The states of a run that has not ended.
_OPEN = ("initialized", "started")
# Enough for a traceback.
_LOG_LINES = 20
T = TypeVar("T")


class Master(Protocol):
    """The part of a master's interface that a sweep uses."""

    def runs(self) -> list[dict[str, Any]]:
        """Return all runs."""

    def run(self, run_id: int | str) -> dict[str, Any]:
        """Return the run with an id."""

    def create(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start a run and return it."""

    def stop(self, run_id: int | str) -> None:
        """Stop a run and keep its metrics."""

    def delete(self, run_id: int | str) -> None:
        """Stop a run and delete it."""

    def metrics(self, run_id: int | str) -> dict[str, list[dict[str, Any]]]:
        """Return metrics of a run."""

    def fetch_result(self, run_id: int | str, target: Path, *, unfinished: bool = False) -> bool:
        """Write the result folder of a run to a folder; return False if there is none."""


class Observer:
    """A display of the progress, which by default shows nothing."""

    def begin(self, pending: Sequence[Point]) -> None:
        """Show the start of the first of the pending runs."""

    def watch(self, point: Point, state: str, seconds: float, reason: str) -> None:
        """Show the state of a run, the seconds since its workers started, and why it waits."""

    def end(self, point: Point, ended: Done | Failure) -> None:
        """Show the end of a run."""

    def note(self, text: str) -> None:
        """Show something that happened."""


class Runner:
    """A sweep that runs.

    Args:
        sweep: The sweep.
        folder: Its folder, which must be open.
        connect: Function that finds the master, or starts it.
        observer: The display of the progress.
        call: Fields of each request that come from the call of the command. They are not part of a
            point, which may be continued by a call from another folder.
    """

    def __init__(
        self,
        sweep: Sweep,
        folder: SweepFolder,
        connect: Callable[[], Master],
        observer: Observer,
        call: Mapping[str, Any] | None = None,
    ) -> None:
        self._call_fields = dict(call or {})
        self._sweep = sweep
        self._folder = folder
        self._connect = connect
        self._observer = observer
        self._master: Master | None = None

    def run(self, pending: Sequence[Point]) -> bool:
        """Run the pending points.

        Args:
            pending: The points in the order in which they start.

        Returns:
            False if the budget ended before the last run started.

        Raises:
            MasterRequestError: The master did not answer for too long, or refused a request.
        """
        # Each start of the command has the whole budget.
        started = time.monotonic()
        self._drop_other_run(pending)
        while pending:
            budget_s = self._sweep.budget_s
            if budget_s is not None and time.monotonic() - started >= budget_s:
                return False
            self._observer.begin(pending)
            self._observer.end(pending[0], self._run_point(pending[0]))
            pending = self._left(pending[1:])
        return True

    def _left(self, pending: Sequence[Point]) -> list[Point]:
        """Return the runs that are left, which depend on the run that ended."""
        waiting = {point.name for point in pending}
        planned = self._folder.planned(self._sweep)
        trials = [point for point in planned if point.trial is not None]
        failures = self._folder.failures(trials)
        left = []
        # With repeat_stopped = false, the run that ended may leave out those of other seeds. After
        # a trial, the grid can grow, and the requests of the runs that depend on it are known.
        for point in planned:
            if point.trial is None:
                is_left = point.name in waiting
            elif self._folder.run_folder(point).exists():
                is_left = False
            else:
                # Unlike a run, a trial is tried again at once, because runs depend on its end.
                is_left = self._folder.may_try(failures.get(point.name))
            if is_left:
                left.append(point)
        return left

    def _drop_other_run(self, pending: Sequence[Point]) -> None:
        """End the run of an earlier start if the sweep does not wait for it any more."""
        current = self._folder.current()
        if current is None or any(_is_same(current, point) for point in pending):
            return
        # The file has changed since, or the result is saved already.
        item = self._find(current["run"])
        if item is not None and item.get("state") in _OPEN:
            self._delete(item)
        self._folder.set_current(None)

    def _run_point(self, point: Point) -> Done | Failure:
        try:
            item = self._watch(point)
            # Killed together with the machine or with all of its processes: the run itself did
            # nothing wrong.
            if _reason(item).startswith("lost"):
                item = self._watch(point)
        except KeyboardInterrupt:
            self._stop_current()
            raise
        ended = self._save(point, item)
        # Only now: the next start of a killed process must find the run until its result is saved.
        self._folder.set_current(None)
        return ended

    def _watch(self, point: Point) -> dict[str, Any]:
        """Start a run, or take over that of an earlier start, and return it at its end."""
        item = self._take_over(point)
        if item is not None:
            return self._wait(point, item, is_new=False)
        try:
            item = self._request(point)
        except MasterRequestError as error:
            if error.status not in (400, 422):
                raise
            # Of a wrong request, the others may still be right.
            return {"state": "failed", "job_metadata": {"reason": str(error)}}
        return self._wait(point, item, is_new=True)

    def _take_over(self, point: Point) -> dict[str, Any] | None:
        """Return the run that an earlier start requested, if it goes on or has a result."""
        current = self._folder.current()
        if current is None or not _is_same(current, point):
            return None
        item = self._find(current["run"])
        if item is None:
            return None
        # A run that failed is started again.
        if item.get("state") not in _OPEN and isinstance(self._judge(item), Failure):
            return None
        self._observer.note(f"{point.name} was started before: going on with it")
        return item

    def _request(self, point: Point) -> dict[str, Any]:
        """Start a run under a name that no other run has."""
        # Sweeps share a master, and a new try must not replace an older run.
        run = f"{point.name[: LONGEST_NAME - 9].rstrip('-')}-{secrets.token_hex(4)}"
        # Before the request: if this process is killed after it, the next start finds the run.
        self._folder.set_current(point, run)
        fields = {**point.request, **self._call_fields, "name": run}
        if self._sweep.limit_s is not None:
            # The script ends itself at the limit, which counts its training time only.
            limit = {TRAIN_LIMIT: repr(self._sweep.limit_s)}
            fields["environment"] = {**fields.get("environment", {}), **limit}

        def create(master: Master) -> dict[str, Any]:
            # A request can arrive although its answer does not.
            return self._find_at(master, run) or master.create(fields)

        return self._call(create)

    def _delete(self, item: Mapping[str, Any]) -> None:
        try:
            self._call(lambda master: master.delete(item["id"]))
        except MasterRequestError as error:
            # The first request may have arrived although its answer did not.
            if error.status != 404:
                raise

    def _wait(self, point: Point, item: dict[str, Any], *, is_new: bool) -> dict[str, Any]:
        """Watch a run until it ends, stop it if it hangs, and return it as it ended."""
        run_id = item["id"]
        guard_s = _guard_s(self._sweep)
        started: float | None = None
        is_stopped = False
        while item.get("state") in _OPEN:
            now = time.monotonic()
            if item["state"] == "started" and started is None:
                started = now
                # The workers of a run that was taken over started before this process.
                if not is_new:
                    started -= _seconds_since(item)
            elapsed = 0.0
            if started is not None:
                elapsed = now - started
            reason = ""
            if item["state"] != "started":
                # For example, that it waits for free workers.
                reason = _reason(item)
            self._observer.watch(point, item["state"], elapsed, reason)
            if guard_s is not None and elapsed > guard_s and not is_stopped:
                self._call(lambda master: master.stop(run_id))
                is_stopped = True
            else:
                time.sleep(POLL_S)
            item = self._call(lambda master: master.run(run_id))
        return item

    def _judge(self, item: Mapping[str, Any]) -> Done | Failure:
        """Return how a run ended, as far as the master knows."""
        seconds = _duration(item)
        if item.get("state") == "finished":
            return Done("finished", seconds)
        reason, guard_s = _reason(item), _guard_s(self._sweep)
        if reason.startswith("stopped") and guard_s is not None and seconds > guard_s:
            reason = (
                f"stopped after {guard_s:g} s: "
                f"its training did not end at the limit of {self._sweep.limit_s:g} s"
            )
        details = item.get("job_metadata") or {}
        # The cause of a failure is mostly at the end of standard error.
        lines = details.get("stderr") or details.get("stdout") or []
        return Failure(reason, log="\n".join(lines[-_LOG_LINES:]))

    def _save(self, point: Point, item: Mapping[str, Any]) -> Done | Failure:
        """Save the result of a run."""
        ended = self._judge(item)
        # A run that finished for the master may still have left no usable result.
        if isinstance(ended, Done):
            try:
                ended = self._fetch(point, item, ended)
            except ConfigurationError as error:
                ended = Failure(f"its result cannot be used: {error}")
        if isinstance(ended, Done):
            self._folder.add(point, self._sweep, ended)
            return ended
        before = self._folder.failures([point]).get(point.name)
        if before is not None:
            ended = dataclasses.replace(ended, tries=before.tries + 1)
        self._folder.add_failure(point, ended)
        return ended

    def _fetch(self, point: Point, item: Mapping[str, Any], ended: Done) -> Done | Failure:
        """Put the result folder of a run together, and return how the run ended.

        The outcome depends on the files that its workers wrote.

        Raises:
            ConfigurationError: The result is damaged.
        """
        folder = self._folder.prepare(point)
        run_id = item["id"]
        has_result = self._call(lambda master: master.fetch_result(run_id, folder, unfinished=True))
        if not has_result:
            # A script of the user need not leave a result folder, and a stopped run may not have
            # begun.
            save(folder / "metrics.json", item, self._call(lambda master: master.metrics(run_id)))
            return ended
        if (folder / RESULT).exists():
            result = read_result(folder)
            if result["run"]["state"] == "finished":
                outcome: Literal["finished", "limit"] = "finished"
                if _missed_at(folder, self._sweep.limit_s):
                    outcome = "limit"
                reasons = tuple(map(str, result.get("not_measured") or ()))
                return Done(outcome, ended.seconds, reasons)
        if ended.outcome == "finished":
            return Failure(f"its workers left no {RESULT}, or one of a run that did not finish")
        return ended

    def _stop_current(self) -> None:
        """Stop the run that goes on, because the user ends the sweep."""
        current = self._folder.current()
        if current is None:
            return
        item = self._find(current["run"])
        if item is not None and item.get("state") in _OPEN:
            self._observer.note(f"stopping {current['name']}")
            self._call(lambda master: master.stop(item["id"]))
        self._folder.set_current(None)

    def _find(self, run: str) -> dict[str, Any] | None:
        return self._call(lambda master: self._find_at(master, run))

    @staticmethod
    def _find_at(master: Master, run: str) -> dict[str, Any] | None:
        for item in master.runs():
            if item.get("name") == run:
                return item
        return None

    def _call(self, request: Callable[[Master], T]) -> T:
        """Send a request, again and to a new master if the master does not answer."""
        failing_since: float | None = None
        while True:
            try:
                if self._master is None:
                    self._master = self._connect()
                return request(self._master)
            except MasterError as error:
                status: int | None = None
                if isinstance(error, MasterRequestError):
                    status = error.status
                # A refusal stays. A master without an answer, or with an error of its own, may
                # recover.
                if status is not None and status < 500:
                    raise
                # A master that cannot be started was not there before.
                if self._master is None and failing_since is None:
                    raise
                now = time.monotonic()
                if failing_since is None:
                    failing_since = now
                    self._observer.note(f"{error}; trying again for {LOST_MASTER_S:g} s")
                if now - failing_since >= LOST_MASTER_S:
                    raise
                # The next try looks for the master again, and starts it if it is the embedded one.
                self._master = None
                time.sleep(POLL_S)


def _guard_s(sweep: Sweep) -> float | None:
    """Return the seconds after which a run is stopped in any case; None without a limit."""
    if sweep.limit_s is None:
        return None
    return GUARD_TIMES * sweep.limit_s + GUARD_S


def _missed_at(folder: Path, limit_s: float | None) -> bool:
    """Return True if a run had not reached its goal at the limit of its training time."""
    result = read_result(folder)
    goal = result["goal"]
    if goal is None or limit_s is None:
        return False
    # The goal may be reached in the epoch in which the limit lies.
    if goal["reached"]:
        seconds = goal["time_to_goal_s"]["slowest"]
    else:
        seconds = result["times"]["slowest"]["train_s"]
    return bool(seconds > limit_s)


def _reason(item: Mapping[str, Any]) -> str:
    """Return why a run did not finish, as the master says."""
    return str((item.get("job_metadata") or {}).get("reason") or item.get("state"))


def _is_same(current: Mapping[str, Any], point: Point) -> bool:
    return current["name"] == point.name and current["request"] == dict(point.request)


def _date(text: Any) -> datetime | None:
    try:
        # Before version 3.11, Python did not know the letter for UTC.
        return datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None


def _duration(item: Mapping[str, Any]) -> float:
    started, finished = _date(item.get("started_at")), _date(item.get("finished_at"))
    if started is None or finished is None:
        return 0.0
    return max(0.0, (finished - started).total_seconds())


def _seconds_since(item: Mapping[str, Any]) -> float:
    """Return the seconds since the workers of a run started."""
    started = _date(item.get("started_at"))
    if started is None:
        return 0.0
    # The clocks of the master and of this machine may differ.
    return max(0.0, time.time() - started.timestamp())
