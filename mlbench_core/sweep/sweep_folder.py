"""The folder of a sweep, which is its whole state.

Its content::

    sweep.toml           a copy of the file that started the sweep last
    sweep-files/         copies of the files of networks and prices that it names
    runs/NAME/           a run that ended: its result folder, and run.json with request and outcome
    tuning/NAME/         the same for a trial of the tuning
    failed/NAME.json     a run that failed: the reason, and how often it was tried
    current.json         the run that was requested last; missing if no run goes on
    unfinished/          result folders that are put together before they are moved to runs/

A folder in ``runs`` is moved there whole, so it is complete. A run that exceeded the limit has the
outcome ``limit``. Its folder has the raw lines that the workers had written until then, if there
are any, but no ``result.json``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from mlbench_core.client.series import FIRST_SEED
from mlbench_core.comparison.load_results import load
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError
from mlbench_core.files import lock, move_into_place, replacing
from mlbench_core.sweep.toml_file import FILES, Point, Sweep, copied_name
from mlbench_core.sweep.tuning_search import Score, Search, score, search_all, tuned_arguments

__all__ = ["COPY", "RECORD", "RUNS", "TUNING", "Done", "Failure", "SweepFolder", "stopped_at_limit"]

RUNS = "runs"
TUNING = "tuning"
RECORD = "run.json"
"""The file in the folder of a run with its request and its outcome."""

COPY = "sweep.toml"
"""The copy of the file of the sweep."""

_CURRENT = "current.json"
_SCHEMA_VERSION = 1
# A failed run is tried once more at the next start.
_MOST_TRIES = 2


@dataclass(frozen=True)
class Done:
    """A run whose folder is complete.

    Attributes:
        outcome: ``"finished"``, or ``"limit"`` for a run that ended at the limit without its goal.
        seconds: Time from the start of its workers to their end.
        not_measured: What was not measured, each with the reason; only of a run that just ended.
    """

    outcome: Literal["finished", "limit"]
    seconds: float
    not_measured: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A run that failed.

    Attributes:
        reason: The reason, as the master gives it.
        tries: Number of starts of the sweep at which it failed.
        log: Last lines of its workers.
    """

    reason: str
    tries: int = 1
    log: str = ""


def stopped_at_limit(folder: Path) -> bool:
    """Return True if a sweep stopped the run of this folder at its limit.

    Such a run has no result.

    Args:
        folder: A folder below ``runs``, or any other folder.
    """
    try:
        return bool(_read(folder / RECORD).get("outcome") == "limit")
    # Result folders that no sweep made have no record.
    except ConfigurationError:
        return False


class SweepFolder:
    """The folder of a sweep.

    Args:
        path: The folder, which is created when the sweep starts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # By trial. The planned runs are read again after each run, and a trial does not change.
        self._scores: dict[str, Score] = {}

    @contextmanager
    def open(self, source: Path, files: Mapping[str, Path]) -> Iterator[None]:
        """Create the folder, copy the file of the sweep into it, and lock it for other processes.

        Args:
            source: The file of the sweep.
            files: The files that it names; see :class:`~mlbench_core.sweep.toml_file.Sweep`.

        Raises:
            ConfigurationError: Another process runs this sweep.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            # Two processes would start the same runs.
            with lock(self.path / ".lock", wait=False):
                # A sweep can be continued from its copy.
                if source.resolve() != (self.path / COPY).resolve():
                    for name, path in files.items():
                        _copy(path, self.path / FILES / copied_name(name))
                    _copy(source, self.path / COPY)
                yield
        except TimeoutError:
            raise ConfigurationError(
                f"another sweep uses {self.path}: wait for it, or end it with Ctrl-C"
            ) from None

    def run_folder(self, point: Point) -> Path:
        """Return the result folder of a run, which may not exist yet."""
        # Apart, so that a trial is never counted among the results.
        if point.trial is not None:
            return self.path / TUNING / point.name
        return self.path / RUNS / point.name

    def record(self, point: Point) -> RunRecord | None:
        """Return the result of a run; None if it has not ended.

        Raises:
            ConfigurationError: The result folder is damaged.
        """
        folder = self.run_folder(point)
        if not folder.is_dir():
            return None
        loaded = load([folder], empty_is_error=False)
        if loaded:
            # Its name at the master has random digits.
            return replace(loaded[0], name=point.name)
        # A run that was stopped before its workers wrote a line.
        workers = {"workers": point.workers}
        return RunRecord(point.name, state="unfinished", configuration=workers, reached=False)

    def results(self, sweep: Sweep) -> tuple[list[Point], dict[str, RunRecord], set[str]]:
        """Return the planned runs without trials, and their outcomes.

        Returns:
            The planned runs, the results of those that ended, by name, and the names of those that
            ended with an error.

        Raises:
            ConfigurationError: A result folder is damaged.
        """
        points = [point for point in self.planned(sweep) if point.trial is None]
        records = {}
        for point in points:
            record = self.record(point)
            if record is not None:
                records[point.name] = record
        # A run that succeeded at its second try may still have the file of its failure.
        return points, records, set(self.failures(points)).difference(records)

    def searches(self, sweep: Sweep) -> list[Search]:
        """Return the tuning of a sweep as far as its trials have ended, see :func:`search_all`.

        Args:
            sweep: The sweep.

        Raises:
            ConfigurationError: A trial is damaged or has no goal.
        """
        return search_all(sweep, self._score)

    def _score(self, point: Point) -> Score | None:
        """Return the outcome of a trial; None if it has not ended."""
        if point.name not in self._scores:
            record = self.record(point)
            if record is None:
                # A failure counts when it is not tried again, so that the choice stays.
                failure = self.failures([point]).get(point.name)
                if self.may_try(failure):
                    return None
                return Score()
            self._scores[point.name] = score(record)
        return self._scores[point.name]

    def planned(self, sweep: Sweep) -> list[Point]:
        """Return the runs of a sweep, after the trials of its tuning that are known so far.

        Runs that are left out because ``repeat_stopped`` is false are not among them.

        A run is left out if the run of the same algorithm, workers and network with the first seed
        was stopped at the limit. Runs that have a folder stay.

        Args:
            sweep: The sweep.

        Raises:
            ConfigurationError: Two runs would have the same name, or the seeds cannot be used.
        """
        searches = self.searches(sweep)
        trials = [point for search in searches for point in search.points]
        points = sweep.points(tuned_arguments(searches))
        if sweep.repeat_stopped:
            return [*trials, *points]
        stopped = set()
        for point in points:
            if point.seed == FIRST_SEED and stopped_at_limit(self.run_folder(point)):
                stopped.add(point.cell)

        def stays(point: Point) -> bool:
            is_first = point.seed == FIRST_SEED
            return is_first or point.cell not in stopped or self.run_folder(point).is_dir()

        return [*trials, *filter(stays, points)]

    def done(self, sweep: Sweep, points: Iterable[Point]) -> dict[str, Done]:
        """Return the runs that have a folder, by name.

        Raises:
            ConfigurationError: The request of a run was another one than that of the file now, or
                its folder is damaged.
        """
        done = {}
        for point in points:
            folder = self.run_folder(point)
            if not folder.is_dir():
                continue
            record = _read(folder / RECORD)
            if not point.request:
                # Before hours of trials, after which the tuned arguments could be others.
                raise ConfigurationError(
                    f"tuning must stay as it was before the run {folder}, which has values of "
                    "other trials: undo the change, or give another --output folder"
                )
            _check_unchanged(folder, record, point, sweep)
            try:
                done[point.name] = Done(record["outcome"], float(record["seconds"]))
            except (KeyError, TypeError, ValueError):
                raise ConfigurationError(
                    f"{folder / RECORD} is damaged: delete the folder to repeat the run"
                ) from None
        return done

    def failures(self, points: Iterable[Point]) -> dict[str, Failure]:
        """Return the runs that failed, by name."""
        failures = {}
        for point in points:
            path = self._failure(point)
            if path.exists():
                content = _read(path)
                # With another request it is another run, which was not tried yet.
                if content.pop("request", None) == dict(point.request):
                    failures[point.name] = Failure(**content)
        return failures

    def may_try(self, failure: Failure | None) -> bool:
        """Return True if a run that failed at earlier starts, or never, is started."""
        return failure is None or failure.tries < _MOST_TRIES

    def prepare(self, point: Point) -> Path:
        """Return the path, which is free, at which the result folder of a run is put together."""
        path = self.path / "unfinished" / point.name
        # A process that was killed may have left a part of it.
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def add(self, point: Point, sweep: Sweep, done: Done) -> None:
        """Move the prepared folder of a run to its place.

        Args:
            point: The run.
            sweep: The sweep, for its limit.
            done: The outcome.
        """
        temporary = self.path / "unfinished" / point.name
        fields = asdict(point)
        del fields["request"]
        if point.trial is None:
            del fields["trial"]
        record = {
            "schema_version": _SCHEMA_VERSION,
            **fields,
            "outcome": done.outcome,
            "seconds": done.seconds,
            "limit_s": sweep.limit_s,
            "request": dict(point.request),
        }
        (temporary / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        # The record is in the folder before it is moved, so each folder in runs/ is complete.
        self.run_folder(point).parent.mkdir(exist_ok=True)
        move_into_place(temporary, self.run_folder(point))
        self._failure(point).unlink(missing_ok=True)

    def add_failure(self, point: Point, failure: Failure) -> None:
        """Note that a run failed."""
        _write(self._failure(point), {**asdict(failure), "request": dict(point.request)})

    def current(self) -> dict[str, Any] | None:
        """Return ``name``, ``request`` and ``run``, its name at the master, of the last request."""
        path = self.path / _CURRENT
        if not path.exists():
            return None
        content = _read(path)
        # Earlier versions gave a run the same name at the master.
        return {"run": content["name"], **content}

    def set_current(self, point: Point | None, run: str = "") -> None:
        """Note which run is requested next and its name at the master, or that no run goes on."""
        if point is None:
            (self.path / _CURRENT).unlink(missing_ok=True)
            return
        # If the command is killed, the run continues at the master, and the next start takes it
        # over.
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        _write(
            self.path / _CURRENT,
            {"name": point.name, "run": run, "request": dict(point.request), "at": now},
        )

    def _failure(self, point: Point) -> Path:
        return self.path / "failed" / f"{point.name}.json"


def _copy(source: Path, target: Path) -> None:
    with replacing(target) as temporary:
        temporary.write_bytes(source.read_bytes())


def _check_unchanged(folder: Path, record: Mapping[str, Any], point: Point, sweep: Sweep) -> None:
    """Raise a ConfigurationError if the request of an ended run was another one than now."""
    # A change of these would make the runs incomparable.
    before = {"limit": record.get("limit_s"), **(record.get("request") or {})}
    for name, new in {"limit": sweep.limit_s, **point.request}.items():
        old = before.get(name)
        if old != new:
            # The key of the file is "light", and that of the request "light_target".
            raise ConfigurationError(
                f"{name.removesuffix('_target')} changed from {old!r} to {new!r} after the run "
                f"{folder}: undo the change, or give another --output folder"
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not a file of a sweep: {error}; delete it to repeat the run"
        ) from error
    return content


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
