"""The database: runs and metrics, in SQLite (WAL) or PostgreSQL.

Long answers are read page by page, and each page is a short query. So neither memory nor a
transaction grows with the length of a run. All writers take one lock: SQLite allows one writer at a
time anyway, and waiting for a lock is fair.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column
from sqlalchemy.pool import StaticPool

from mlbench_core.errors import ConfigurationError
from mlbench_core.results.masking import mask_variables
from mlbench_core.run_terms import WorkerRange
from mlbench_master.database.columns import PAGE, Columns
from mlbench_master.database.migrations import REVISION_TABLE, VERSION_TABLE, prepare_database
from mlbench_master.dates import format_date, now_us, us_of
from mlbench_master.engines.interface import STOPPED
from mlbench_master.runs.run_goals import GOAL_METRIC, RunGoal, read_goal

__all__ = [
    "CALLER_ENVIRONMENT",
    "GOAL_TEXT_METRIC",
    "RUN_COLUMNS",
    "RUN_SORTS",
    "LeaseRow",
    "Metric",
    "NameInUseError",
    "NewMetric",
    "Point",
    "Run",
    "Store",
    "pod_owner",
    "run_owner",
]

RUN_COLUMNS = (
    "id",
    "name",
    "state",
    "created_at",
    "started_at",
    "finished_at",
    "num_workers",
    "backend",
)
"""The columns by which a list of runs can be sorted."""

RUN_SORTS = (*RUN_COLUMNS, "image", "duration", "goal")
"""The keys by which :meth:`Store.runs` sorts.

``duration`` is the time since the start, ``goal`` the time to the goal.
"""

# The first worker of a task sends this metric when it reaches the goal.
GOAL_TEXT_METRIC = "TaskResult @ 0"
_GOAL_METRICS = (GOAL_METRIC, GOAL_TEXT_METRIC)
# Entries of the goal that are read in the search for the newest valid one.
_LATEST_GOALS = 10
# Entries that one statement reads: about 1 MB of memory if values are numbers.
_PAGE = 2000
# SQLite joins at most 500 SELECTs by UNION, and old versions of it take 999 parameters in a list.
_MANY = 500
_BUSY_MS = 30_000
_NAME_CHARACTERS = 63
# The largest INTEGER of PostgreSQL, which cannot compare such a column with a larger number.
_MAX_RUN_ID = 2**31 - 1
# The entry in the metadata of an imported run that identifies it.
_FINGERPRINT = "fingerprint"
CALLER_ENVIRONMENT = "caller_environment"
"""The metadata entry of a waiting or running run with the variables of its call, maybe secrets."""
# Packed pages that are read at once: 2 MB.
_PACKED = 16
# Metrics whose entries are counted, in about 10 MB.
_MOST_LOOSE = 50_000
# SQLite's number for auto_vacuum=INCREMENTAL.
_INCREMENTAL = 2
# One step moves 4 MB, in which other threads cannot write.
_PAGES_AT_ONCE = 1000


_Item = TypeVar("_Item")


class NameInUseError(Exception):
    """The name of a new run is already in use."""


class _Base(DeclarativeBase):
    pass


class Run(_Base):
    """One run of the benchmark."""

    __tablename__ = "runs"
    # Without AUTOINCREMENT, SQLite gives a new run the id of a deleted one, and metrics would go to
    # the wrong run.
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012 - SQLAlchemy's form

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(_NAME_CHARACTERS), unique=True)
    created_at: Mapped[int] = mapped_column(sa.BigInteger)
    started_at: Mapped[int | None] = mapped_column(sa.BigInteger)
    finished_at: Mapped[int | None] = mapped_column(sa.BigInteger)
    state: Mapped[str] = mapped_column(sa.String(16), default="initialized", index=True)
    job_id: Mapped[str | None] = mapped_column(sa.String(255))
    job_metadata: Mapped[str] = mapped_column(sa.Text, default="{}")
    num_workers: Mapped[int] = mapped_column()
    num_cpus: Mapped[float] = mapped_column()
    max_bandwidth: Mapped[float] = mapped_column()
    image: Mapped[str] = mapped_column(sa.String(512))
    backend: Mapped[str] = mapped_column(sa.String(64))
    run_all_nodes: Mapped[bool] = mapped_column(default=True)
    command: Mapped[str] = mapped_column(sa.Text)
    gpu_enabled: Mapped[bool] = mapped_column(default=False)
    light_target: Mapped[bool] = mapped_column(default=False)
    goal_result: Mapped[str | None] = mapped_column(sa.Text)
    # JSON of a RunGoal; goal_result is the text that clients of version 3.0 read.
    goal: Mapped[str | None] = mapped_column(sa.Text)

    @property
    def is_stopped(self) -> bool:
        """Return True if a user stopped the run."""
        # As in version 3.0, its state is then "failed".
        if self.state != STOPPED.state:
            return False
        return str(self.metadata_dict().get("reason")).startswith(STOPPED.reason)

    @property
    def shown_state(self) -> str:
        """Return the state for people: ``stopped`` for a run that a user stopped."""
        if self.is_stopped:
            return "stopped"
        return self.state

    @property
    def goal_record(self) -> RunGoal | None:
        """Return the result of the goal, or None if the workers have not sent it."""
        return read_goal(self.goal)

    def metadata_dict(self) -> dict[str, Any]:
        """Return the job's metadata as a dictionary, which is empty if the record is damaged."""
        try:
            metadata = json.loads(self.job_metadata)
        except (TypeError, ValueError):
            metadata = None
        if not isinstance(metadata, dict):
            return {}
        return metadata

    @property
    def tags(self) -> list[str]:
        """Return the tags of the run."""
        tags = self.metadata_dict().get("tags")
        if not isinstance(tags, list):
            return []
        return list(map(str, tags))

    @property
    def note(self) -> str:
        """Return the note of a user about the run."""
        return str(self.metadata_dict().get("note") or "")

    def public_metadata(self) -> dict[str, Any]:
        """Return the job's metadata without tags and note, and without secret variables' values."""
        metadata = self.metadata_dict()
        for name in ("tags", "note"):
            metadata.pop(name, None)
        metadata.pop(CALLER_ENVIRONMENT, None)  # it is long, and environment.json of the run has it
        if isinstance(variables := metadata.get("environment"), dict):
            metadata["environment"] = mask_variables(variables)
        return metadata

    def to_json(self) -> dict[str, Any]:
        """Return the run as the API shows it."""
        shown = {column.key: getattr(self, column.key) for column in sa.inspect(Run).columns}
        # JSON has neither of these, which a damaged record may hold.
        for name, value in shown.items():
            if isinstance(value, bytes) or (isinstance(value, float) and not math.isfinite(value)):
                shown[name] = _text(value)
        for name in ("created_at", "started_at", "finished_at"):
            if shown[name] is not None:
                shown[name] = format_date(shown[name])
        shown["job_id"] = self.job_id or ""
        shown["stopped"] = self.is_stopped
        shown["tags"], shown["note"] = self.tags, self.note
        goal = self.goal_record
        shown["goal"] = None
        if goal is not None:
            shown["goal"] = goal.model_dump()
        lists: dict[str, Any] = {"stdout": [], "stderr": [], "notes": []}
        shown["job_metadata"] = {**lists, **self.public_metadata(), "command": shown["command"]}
        return shown

    @property
    def worker_count(self) -> int:
        """Return the number of workers, 0 if the record is damaged."""
        # A damaged record must not break the list of all workers.
        if not isinstance(self.num_workers, int):
            return 0
        return self.num_workers

    @property
    def elastic(self) -> WorkerRange | None:
        """Return the numbers of workers of an elastic run, None for another one."""
        # A damaged record may hold anything.
        with contextlib.suppress(ValueError):
            return WorkerRange.parse(str(self.metadata_dict().get("elastic")))
        return None

    @property
    def most_workers(self) -> int:
        """Return the largest number of workers that live at the same time."""
        if self.elastic is None:
            return self.worker_count
        return self.elastic.most

    def lasted_s(self, now: int) -> float | None:
        """Return the seconds from the start of the run to its end; None before its start.

        Args:
            now: The present time in microseconds, which counts as the end of an open run.
        """
        # A damaged record may hold any type.
        if not isinstance(self.started_at, int):
            return None
        end = now
        if isinstance(self.finished_at, int):
            end = self.finished_at
        return max(end - self.started_at, 0) / 1e6

    def worker_name(self, rank: int) -> str:
        """Return the name of the pod of a worker."""
        return f"{self.name}-worker-{rank}"

    def worker_names(self) -> list[str]:
        """Return the names of the run's workers, by rank."""
        return list(map(self.worker_name, range(self.worker_count)))


class Metric(_Base):
    """One value of one metric; ``owner`` is ``run:ID`` or ``pod:NAME``."""

    __tablename__ = "metrics"
    # NULLs are never equal in SQL, so metrics without a client_id do not collide.
    __table_args__ = (
        sa.UniqueConstraint("owner", "client_id"),
        sa.Index("metrics_by_name", "owner", "name", "date", "id"),
        {"sqlite_autoincrement": True},
    )

    # SQLite numbers rows automatically only in a column of the type INTEGER.
    id: Mapped[int] = mapped_column(
        sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True
    )
    owner: Mapped[str] = mapped_column(sa.String(300))
    client_id: Mapped[str | None] = mapped_column(sa.String(128))
    name: Mapped[str] = mapped_column(sa.String(255))
    date: Mapped[int] = mapped_column(sa.BigInteger)
    value: Mapped[str] = mapped_column(sa.Text)
    cumulative: Mapped[bool] = mapped_column(default=False)
    # The attribute cannot be called `metadata`: SQLAlchemy has one of that name.
    extra: Mapped[str] = mapped_column("metadata", sa.Text, key="extra", default="")


# In the order of NewMetric.
_NEW_COLUMNS = "owner, name, date, value, cumulative, metadata, client_id"


class NewMetric(NamedTuple):
    """A metric that is not in the database yet; see :class:`Metric`.

    It is a row of the insert statement.
    """

    owner: str
    name: str
    date: int
    value: str
    cumulative: bool = False
    extra: str = ""
    client_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the metric as the API shows it."""
        kind, _, owner = self.owner.partition(":")
        run_id, pod_name = None, None
        if kind == "run":
            run_id = int(owner)
        elif kind == "pod":
            pod_name = owner
        return {
            "run_id": run_id,
            "pod_name": pod_name,
            "name": self.name,
            "value": self.value,
            "date": format_date(self.date),
            "metadata": self.extra,
            "cumulative": self.cumulative,
            "id": self.client_id,
        }


@dataclass(frozen=True)
class Point:
    """One entry of a metric, as read from the database."""

    id: int
    date: int
    value: str
    cumulative: bool
    extra: str


def _point(values: Iterable[Any]) -> Point:
    """Make a point of a row, in which SQLite may hold any type in any column."""
    point = Point(*values)
    if type(point.date) is int and type(point.value) is str and type(point.extra) is str:
        return point
    # One damaged row must not hide the others.
    date = us_of(point.date)
    return replace(point, date=date, value=_text(point.value), extra=_text(point.extra))


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value)


def _parts(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Yield items in parts that one statement takes as its parameters."""
    for start in range(0, len(items), _MANY):
        yield items[start : start + _MANY]


# The columns of a Point, in its order.
_POINT = (Metric.id, Metric.date, Metric.value, Metric.cumulative, Metric.extra)


class _Page(_Base):
    """A full page of entries of one metric by date; see :mod:`mlbench_master.database.columns`."""

    __tablename__ = "metric_pages"

    owner: Mapped[str] = mapped_column(sa.String(300), primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(255), primary_key=True)
    page: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    end_date: Mapped[int] = mapped_column(sa.BigInteger)
    end_id: Mapped[int] = mapped_column(sa.BigInteger)
    data: Mapped[bytes] = mapped_column(sa.LargeBinary)


class _Revision(_Base):
    """The version of the tables for Alembic; see :mod:`mlbench_master.database.migrations`."""

    __tablename__ = REVISION_TABLE

    version_num: Mapped[str] = mapped_column(sa.String(32), primary_key=True)


class _Version(_Base):
    """The version of the tables for masters before Alembic."""

    __tablename__ = VERSION_TABLE

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class _Lease(_Base):
    """The only row says which master looks after the runs; see :mod:`mlbench_master.runs.lease`."""

    __tablename__ = "master_lease"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    holder: Mapped[str] = mapped_column(sa.String(32))
    beat: Mapped[int] = mapped_column(sa.BigInteger)
    host: Mapped[str] = mapped_column(sa.String(255))
    place: Mapped[str] = mapped_column(sa.String(255))
    pid: Mapped[int] = mapped_column(sa.BigInteger)
    started: Mapped[str] = mapped_column(sa.String(255))


@dataclass(frozen=True)
class LeaseRow:
    """The lease of the database.

    Attributes:
        holder: A random text of the master that holds it.
        beat: Grows with each renewal.
        host: Name of the master's machine, for messages.
        place: From :func:`~mlbench_master.processes.place`.
        pid: The master's process id.
        started: The master's start mark.
    """

    holder: str
    beat: int
    host: str
    place: str
    pid: int
    started: str


def run_owner(run_id: int) -> str:
    """Return the owner text of a run's metrics."""
    return f"run:{run_id}"


def pod_owner(name: str) -> str:
    """Return the owner text of a pod's metrics."""
    return f"pod:{name}"


class Store:
    """The database of runs and metrics.

    Args:
        database_url: SQLAlchemy URL, for example ``sqlite:////home/me/master.db``, ``sqlite://``
            (in memory) or ``postgresql+psycopg://user@host/db``.

    Raises:
        ConfigurationError: The database cannot be opened, is damaged, or is not one of this version
            of the master.
    """

    def __init__(self, database_url: str) -> None:
        self._write_lock = threading.RLock()
        self._reclaiming = threading.Lock()
        # Entries of each metric since its last packed page, as far as this process has seen them.
        self._loose: Counter[tuple[str, str]] = Counter()
        try:
            self._database_engine = _make_database_engine(database_url)
            self._in_memory = isinstance(self._database_engine.pool, StaticPool)
            prepare_database(self._database_engine, _Base.metadata)
        except (SQLAlchemyError, ImportError, OSError, ConfigurationError) as error:
            reason = str(error).splitlines()[0]
            if isinstance(error, ModuleNotFoundError) and error.name == "psycopg":
                reason += " (pip install 'mlbench-core[postgres]')"
            shown = repr(database_url)
            # An URL may hold a password, which must not reach a log.
            with contextlib.suppress(SQLAlchemyError):
                shown = sa.make_url(database_url).render_as_string(hide_password=True)
            raise ConfigurationError(
                f"cannot open the database {shown}: {reason}; "
                "give one with --database-url, for example sqlite:////path/to/master.db"
            ) from error

    def close(self) -> None:
        """Close every connection."""
        self._database_engine.dispose()

    def check(self) -> None:
        """Raise an SQLAlchemyError if the database does not answer."""
        with self._reading() as session:
            session.execute(sa.select(_Revision.version_num)).all()

    # The lease

    def lease(self) -> LeaseRow | None:
        """Return the lease, or None if no master holds it."""
        with self._reading() as session:
            row = session.get(_Lease, 1)
            if row is None:
                return None
            return LeaseRow(**{field.name: getattr(row, field.name) for field in fields(LeaseRow)})

    def replace_lease(self, expected: LeaseRow | None, row: LeaseRow) -> bool:
        """Write the lease unless another master has changed it.

        Args:
            expected: The lease as it was read; None if there was none.
            row: The new lease.

        Returns:
            True if it was written.
        """
        try:
            with self._writing() as session:
                if expected is None:
                    session.add(_Lease(id=1, **vars(row)))
                    return True
                unchanged = (_Lease.holder == expected.holder) & (_Lease.beat == expected.beat)
                update = sa.update(_Lease).where(unchanged).values(**vars(row))
                result: Any = session.execute(update)
                return bool(result.rowcount)
        except IntegrityError:  # another master has added the lease in the meantime
            return False

    def delete_lease(self, holder: str) -> None:
        """Delete the lease if this master holds it."""
        with self._writing() as session:
            session.execute(sa.delete(_Lease).where(_Lease.holder == holder))

    # Runs

    def add_run(self, run: Run) -> Run:
        """Add a new run; see :meth:`add_runs`."""
        return self.add_runs([run])[0]

    def add_runs(self, runs: Sequence[Run]) -> list[Run]:
        """Add new runs in one transaction: all of them or none.

        Args:
            runs: The runs, without ids.

        Returns:
            The runs with their ids, in the same order.

        Raises:
            NameInUseError: A run of one of the names exists; the error's text is that name.
        """
        names = [run.name for run in runs]
        try:
            with self._writing() as session:
                for part in _parts(names):
                    same_name = sa.select(Run.name).where(Run.name.in_(part))
                    if (taken := session.scalar(same_name.order_by(Run.id).limit(1))) is not None:
                        raise NameInUseError(taken)
                session.add_all(runs)
        except IntegrityError as error:
            # Another program has added one in the meantime, or two names are the same.
            raise NameInUseError(", ".join(names)) from error
        return list(runs)

    def import_run(self, run: Run, fingerprint: str) -> Run:
        """Add a run that ended without this master, unless it was added before.

        Args:
            run: The run, without an id. If its name is in use, it gets a number at its end.
            fingerprint: A text that identifies the run.

        Returns:
            The run with its id, or the one that was added with this fingerprint before.
        """
        with self._writing() as session:
            # The output of a worker may hold the same text, so the metadata is parsed, too.
            with_text = sa.select(Run).where(Run.job_metadata.contains(fingerprint))
            for earlier in session.scalars(with_text):
                if earlier.metadata_dict().get(_FINGERPRINT) == fingerprint:
                    return earlier
            name = run.name
            for number in itertools.count(2):
                if session.scalar(sa.select(Run.id).where(Run.name == run.name)) is None:
                    break
                run.name = f"{name[: _NAME_CHARACTERS - len(str(number)) - 1].rstrip('-')}-{number}"
            run.job_metadata = json.dumps({**run.metadata_dict(), _FINGERPRINT: fingerprint})
            session.add(run)
        return run

    def run(self, run_id: int) -> Run | None:
        """Return the run with this id, or None."""
        if run_id > _MAX_RUN_ID:
            return None
        with self._reading() as session:
            return session.get(Run, run_id)

    def run_named(self, name: str) -> Run | None:
        """Return the run with this name, or None."""
        with self._reading() as session:
            return session.scalar(sa.select(Run).where(Run.name == name))

    def run_of_worker(self, name: str) -> Run | None:
        """Return the run that has a worker of this name, or None."""
        # PostgreSQL refuses NUL in a parameter.
        if "\x00" in name:
            return None
        # The last separator: the name of a run may contain it, too.
        run = self.run_named(name.rpartition("-worker-")[0])
        if run is None or name not in run.worker_names():
            return None
        return run

    def runs(
        self,
        *states: str,
        after: int = 0,
        limit: int | None = None,
        name: str = "",
        text: str = "",
        sort: str = "id",
        offset: int = 0,
    ) -> list[Run]:
        """Return runs without the last lines of their output, which :meth:`run` returns.

        Args:
            *states: Only runs in one of these states; by default all. ``"failed"`` includes runs
                that a user stopped; ``"stopped"`` has only these, ``"failed itself"`` all others.
            after: Only runs with a larger id.
            limit: Maximum number of runs.
            name: Only runs with this text in their name; upper and lower case are the same.
            text: Only runs with each word of this text in their name, image, command or backend.
            sort: One of :data:`RUN_SORTS`, with a ``-`` before it for the largest value first. Runs
                without a value come last, and those with equal values are ordered by id.
            offset: Number of first runs to leave out.

        Returns:
            The runs, which no session knows: changes of them are not saved.
        """
        columns = {column.key: getattr(Run, column.key) for column in sa.inspect(Run).columns}
        is_sqlite = self._database_engine.dialect.name == "sqlite"
        if is_sqlite:
            # The output is up to 32 KiB of each run, so a list of runs must not read it. A damaged
            # record is left out.
            slim = sa.func.json_remove(Run.job_metadata, "$.stdout", "$.stderr")
            columns["job_metadata"] = sa.case(
                (sa.func.json_valid(Run.job_metadata) == 1, slim), else_="{}"
            )
        chosen = _chosen(sa.select(Run.id), states, text).where(Run.id > min(after, _MAX_RUN_ID))
        if name:
            chosen = chosen.where(Run.name.icontains(name, autoescape=True))
        # The two databases disagree about the order of NULLs.
        key = self._sort_key(sort.removeprefix("-"))
        order: list[Any] = [key.nulls_last(), Run.id]
        if sort.startswith("-"):
            order = [key.desc().nulls_last(), Run.id.desc()]
        if limit is not None or offset:
            # SQLite would read the whole record of each run that the offset leaves out.
            chosen = chosen.order_by(*order).limit(limit).offset(offset)
        query = sa.select(*(value.label(key) for key, value in columns.items()))
        query = query.where(Run.id.in_(chosen)).order_by(*order)
        with self._reading() as session:
            runs = [Run(**row) for row in session.execute(query).mappings()]
        if not is_sqlite:
            # PostgreSQL parses no JSON with an escaped NUL, which the output of a worker may hold.
            for run in runs:
                metadata = run.metadata_dict()
                metadata.pop("stdout", None)
                metadata.pop("stderr", None)
                run.job_metadata = json.dumps(metadata)
        return runs

    def count_runs(self, *states: str, text: str = "") -> int:
        """Return the number of runs that :meth:`runs` finds with these states and this text."""
        with self._reading() as session:
            return session.scalar(_chosen(sa.select(sa.func.count(Run.id)), states, text)) or 0

    def _sort_key(self, name: str) -> sa.ColumnElement[Any]:
        if name == "duration":
            return sa.func.coalesce(Run.finished_at, now_us()) - Run.started_at
        if name != "goal":
            column: sa.ColumnElement[Any] = getattr(Run, name)
            return column
        if self._database_engine.dialect.name == "sqlite":
            time_to_goal = sa.func.json_extract(Run.goal, "$.time_to_goal_s")
            # json_extract fails on a damaged record.
            return sa.case((sa.func.json_valid(Run.goal) == 1, time_to_goal))
        # A record that is damaged has no number here, where a cast to JSON would fail.
        number = sa.func.substring(Run.goal, r'"time_to_goal_s":\s*(\d+(?:\.\d+)?(?:e[+-]?\d\d?)?)')
        return sa.cast(number, sa.Float)

    def update_run(
        self,
        run_id: int,
        job_metadata: dict[str, Any] | None = None,
        *,
        only_in: Collection[str] = (),
        **values: Any,
    ) -> Run | None:
        """Change columns of a run.

        Args:
            run_id: Id of the run.
            job_metadata: Entries to add to its metadata.
            only_in: Change nothing unless the run is in one of these states; by default it may be
                in any.
            values: New values by column.

        Returns:
            The changed run, or None if it does not exist or is in another state.
        """
        with self._writing() as session:
            run = session.get(Run, run_id)
            if run is None or (only_in and run.state not in only_in):
                return None
            for column, value in values.items():
                setattr(run, column, value)
            if job_metadata:
                run.job_metadata = json.dumps({**run.metadata_dict(), **job_metadata})
        return run

    def delete_run(self, run_id: int) -> None:
        """Delete a run, its metrics and those of its workers."""
        with self._writing() as session:
            run = session.get(Run, run_id)
            if run is None:
                return
            owners = [run_owner(run_id), *map(pod_owner, run.worker_names())]
            for part in _parts(owners):
                session.execute(sa.delete(Metric).where(Metric.owner.in_(part)))
                session.execute(sa.delete(_Page).where(_Page.owner.in_(part)))
            session.delete(run)
        for key in list(self._loose):  # other threads change it
            if key[0] in owners:
                self._loose.pop(key, None)

    def reclaim(self) -> None:
        """Give the space of deleted rows back to the disk; other threads write between its steps.

        PostgreSQL reuses the space. A database of an earlier version of the master is rewritten
        once, when more than half of it is free.
        """
        if self._database_engine.dialect.name != "sqlite" or self._in_memory:
            return
        if not self._reclaiming.acquire(blocking=False):
            return
        connection = self._database_engine.raw_connection()
        try:
            cursor = connection.cursor()

            def pragma(text: str) -> int:
                # A pragma does its work while its rows are read.
                rows = cursor.execute(f"PRAGMA {text}").fetchall()
                # A pragma that only acts returns no row.
                if not rows:
                    return 0
                return int(rows[0][0])

            if pragma("auto_vacuum") != _INCREMENTAL:
                with self._write_lock:
                    if 2 * pragma("freelist_count") > pragma("page_count"):
                        cursor.execute("VACUUM")
            while pragma("auto_vacuum") == _INCREMENTAL:
                with self._write_lock:
                    before = pragma("freelist_count")
                    pragma(f"incremental_vacuum({_PAGES_AT_ONCE})")
                    if pragma("freelist_count") in (0, before):
                        break
            # Readers of the log delay this; the next call tries again.
            pragma("busy_timeout=100")
            pragma("wal_checkpoint(TRUNCATE)")
            pragma(f"busy_timeout={_BUSY_MS}")
        finally:
            connection.close()
            self._reclaiming.release()

    # Metrics

    def add_metrics(self, metrics: Sequence[NewMetric]) -> int:
        """Add metrics in one transaction: all of them or none.

        Args:
            metrics: The metrics in the order in which they were measured. A metric is skipped if
                its owner has delivered its ``client_id`` before.

        Returns:
            The number of new metrics.
        """
        return self.add_batches([metrics])[0]

    def add_batches(self, batches: Sequence[Sequence[NewMetric]]) -> list[int]:
        """Add the metrics of several requests in one transaction: all of them or none.

        Args:
            batches: The metrics of each request, see :meth:`add_metrics`.

        Returns:
            The number of new metrics of each request.
        """
        # Earliest date and number of entries of each metric.
        firsts: dict[tuple[str, str], int] = {}
        counts: Counter[tuple[str, str]] = Counter()
        goals = []
        for metric in itertools.chain.from_iterable(batches):
            key = metric[:2]
            counts[key] += 1
            if key not in firsts or metric.date < firsts[key]:
                firsts[key] = metric.date
            if metric.name in _GOAL_METRICS and metric.owner.startswith("run:"):
                goals.append(metric)
        # A statement of SQLAlchemy takes three times as long for one row. Both databases
        # understand this one.
        mark = _mark(self._database_engine)
        marks = ", ".join([mark] * 7)
        insert = f"INSERT INTO metrics ({_NEW_COLUMNS}) VALUES ({marks}) ON CONFLICT DO NOTHING"
        # An entry of the same date sorts behind the end of the page, because its id is larger.
        drop = (
            f"DELETE FROM metric_pages WHERE owner = {mark} AND name = {mark} AND end_date > {mark}"
        )
        with self._write_lock, self._database_engine.begin() as opened:
            # By default, SQLAlchemy does not keep the row count of an insert of many rows.
            connection = opened.execution_options(preserve_rowcount=True)
            added = []
            with _cache_for(connection, sum(counts.values())):
                for batch in batches:
                    count = 0
                    # SQLAlchemy would run the statement of an empty batch once, without values.
                    if batch:
                        count = connection.exec_driver_sql(insert, list(batch)).rowcount
                    added.append(count)
            if firsts:
                connection.exec_driver_sql(drop, [(*key, date) for key, date in firsts.items()])
            if goals:
                with Session(connection) as session:
                    for metric in goals:
                        _record_goal(session, metric)
                    session.commit()
        if len(self._loose) > _MOST_LOOSE:
            # Also metrics of runs that ended long ago. The others are counted again from now on.
            self._loose.clear()
        self._loose.update(counts)
        for owner, name in counts:
            self.pack_loose(owner, [name])
        return added

    def pack_loose(self, owner: str, names: Iterable[str] | None = None) -> None:
        """Pack the full pages of metrics that have some outside of the packed ones.

        Args:
            owner: From :func:`run_owner` or :func:`pod_owner`.
            names: The metrics; by default all that this process has written or read.
        """
        if names is None:
            names = [name for loose_owner, name in list(self._loose) if loose_owner == owner]
        for name in names:
            if self._loose[owner, name] >= PAGE:
                # Without the pages, reading the metrics only takes longer.
                with contextlib.suppress(SQLAlchemyError):
                    self.pack_pages(owner, name)

    def pack_pages(self, owner: str, name: str) -> None:
        """Store the full pages of a metric that are not packed yet.

        Other threads write between two pages.

        Args:
            owner: From :func:`run_owner` or :func:`pod_owner`.
            name: The metric.
        """
        while True:
            with self._writing() as session:
                page, end = _end_of_pages(session, owner, name)
                rows = _rows_after(session, owner, name, end, PAGE)
                # A damaged row may change its place when it is mended.
                is_sound = all(type(row[1]) is int for row in rows)
                loose = 0
                if is_sound:
                    loose = len(rows)
                # Written once, because other threads read it without the lock.
                self._loose[owner, name] = loose
                if len(rows) < PAGE or not is_sound:
                    return
                data = Columns.of_rows(rows).pack()
                end_id, end_date, *_ = rows[-1]
                ends = {"end_date": end_date, "end_id": end_id}
                session.add(_Page(owner=owner, name=name, page=page, data=data, **ends))

    def size(self, owner: str, name: str) -> int:
        """Return the number of entries of a metric."""
        with self._reading() as session:
            pages, end = _end_of_pages(session, owner, name)
            rest = sa.select(sa.func.count()).where(Metric.owner == owner, Metric.name == name)
            if end is not None:
                rest = rest.where(sa.tuple_(Metric.date, Metric.id) > sa.tuple_(*end))
            return PAGE * pages + (session.scalar(rest) or 0)

    def columns(self, owner: str, name: str) -> Iterator[Columns]:
        """Yield all entries of a metric by date, in successive parts.

        Args:
            owner: From :func:`run_owner` or :func:`pod_owner`.
            name: The metric.

        Yields:
            Parts of up to 65,536 entries, none of them empty. Memory holds one of them.
        """
        end = None
        for start in itertools.count(0, _PACKED):
            # The data of the page before, which was read last, is not wanted.
            data = sa.case((_Page.page >= start, _Page.data)).label("data")
            query = sa.select(_Page.page, _Page.end_date, _Page.end_id, data)
            query = query.where(_Page.owner == owner, _Page.name == name)
            query = query.where(_Page.page >= start - 1, _Page.page < start + _PACKED)
            with self._reading() as session:
                pages = session.execute(query.order_by(_Page.page)).all()
            # Pages that a late entry has deleted in the meantime are read from the rows. They may
            # also have been packed again since then, and begin at another entry.
            if end is not None and (not pages or end != (pages[0].end_date, pages[0].end_id)):
                break
            if start:
                pages = pages[1:]
            pages = [row for index, row in enumerate(pages, start) if row.page == index]
            if pages:
                yield Columns.join([Columns.unpack(row.data) for row in pages])
                end = pages[-1].end_date, pages[-1].end_id
            if len(pages) < _PACKED:
                break
        size = PAGE * _PACKED
        loose = 0
        while True:
            with self._reading() as session:
                rows = _rows_after(session, owner, name, end, size)
            loose += len(rows)
            if rows:
                yield Columns.of_rows(rows)
                end = rows[-1][1], rows[-1][0]
            if len(rows) < size:
                if loose:  # a request may ask for any name
                    self._loose[owner, name] = loose
                return

    def points_with(self, ids: Sequence[int]) -> dict[int, Point]:
        """Return the entries with these ids, by id; at most 500 of them."""
        query = sa.select(*_POINT).where(Metric.id.in_(ids))
        with self._reading() as session:
            return {row[0]: _point(row) for row in session.execute(query)}

    def thin_metrics(
        self,
        owner: str,
        names: Collection[str],
        mark: str,
        since: int,
        until: int,
        interval_us: int,
    ) -> None:
        """Replace the entries of each interval of time by one with their mean value and date.

        Args:
            owner: From :func:`run_owner` or :func:`pod_owner`.
            names: The metrics.
            mark: Only entries whose ``client_id`` begins with this text.
            since: Only entries from this date on (microseconds since 1970), a multiple of
                ``interval_us``.
            until: Only entries before this date.
            interval_us: Length of an interval in microseconds.
        """
        query = sa.select(Metric.id, Metric.name, Metric.date, Metric.value)
        query = query.where(Metric.owner == owner, Metric.name.in_(names))
        query = query.where(Metric.client_id.startswith(mark))
        query = query.where(Metric.date >= since, Metric.date < until)
        with self._writing() as session:
            rows = session.execute(query.order_by(Metric.name, Metric.date)).all()
            changed = (_Page.owner == owner) & _Page.name.in_(names) & (_Page.end_date >= since)
            session.execute(sa.delete(_Page).where(changed))
            intervals = itertools.groupby(rows, key=lambda row: (row.name, row.date // interval_us))
            for _, group in intervals:
                ids, _names, dates, values = zip(*group, strict=True)
                if len(ids) < 2:
                    continue
                try:
                    mean = sum(map(float, values)) / len(values)
                except ValueError:  # of a damaged record
                    continue
                first, *others = ids
                mean_entry = {"date": sum(dates) // len(dates), "value": f"{mean:.15g}"}
                session.execute(sa.update(Metric).where(Metric.id == first).values(**mean_entry))
                for part in _parts(others):
                    session.execute(sa.delete(Metric).where(Metric.id.in_(part)))

    def newest_date(self, owners: Sequence[str], name: str) -> int:
        """Return the latest date of a metric of any of the owners.

        Returns:
            Microseconds since 1970, 0 without entries.
        """
        latest = 0
        query = sa.select(sa.func.max(Metric.date)).where(Metric.name == name)
        with self._reading() as session:
            for part in _parts(owners):
                date = session.scalar(query.where(Metric.owner.in_(part)))
                if date is not None:
                    latest = max(latest, date)
        return latest

    def newest_value(self, owner: str, name: str) -> str | None:
        """Return the latest value of a metric, or None without one.

        Args:
            owner: From :func:`run_owner` or :func:`pod_owner`.
            name: The metric.
        """
        with self._reading() as session:
            value = session.scalar(_newest(owner, name))
        if value is None:
            return None
        return _text(value)

    def existing_runs(self, ids: Iterable[int]) -> set[int]:
        """Return those of the ids that belong to runs."""
        wanted = [number for number in set(ids) if number <= _MAX_RUN_ID]
        existing: set[int] = set()
        with self._reading() as session:
            for part in _parts(wanted):
                existing.update(session.scalars(sa.select(Run.id).where(Run.id.in_(part))))
        return existing

    def pods_with_metrics(self) -> list[str]:
        """Return the names of all pods that have metrics, sorted."""
        query = sa.select(Metric.owner).where(Metric.owner.startswith("pod:")).distinct()
        query = query.order_by(Metric.owner)
        with self._reading() as session:
            return [owner[4:] for owner in session.scalars(query)]

    def metric_counts(
        self, owners: Sequence[str], name: str | None = None, since: int | None = None
    ) -> dict[tuple[str, str], int]:
        """Count the entries of each metric of some owners.

        Args:
            owners: From :func:`run_owner` or :func:`pod_owner`.
            name: Only this metric.
            since: Count only entries from this date on (microseconds since 1970).

        Returns:
            Number of entries by owner and name, in the order of the owners and then of the names.
        """
        query = sa.select(Metric.owner, Metric.name, sa.func.count())
        query = query.group_by(Metric.owner, Metric.name).order_by(Metric.name)
        if name is not None:
            query = query.where(Metric.name == name)
        if since is not None:
            query = query.where(Metric.date >= since)
        counts: dict[tuple[str, str], int] = {}
        with self._reading() as session:
            for part in _parts(owners):
                for owner, metric, count in session.execute(query.where(Metric.owner.in_(part))):
                    if isinstance(metric, str):
                        counts[owner, metric] = count
        # A database sorts owners by its own rules, so their order is restored here.
        positions = dict(zip(owners, itertools.count(), strict=False))
        return dict(sorted(counts.items(), key=lambda item: positions[item[0][0]]))

    def entries(
        self,
        counts: Mapping[tuple[str, str], int],
        since: int | None = None,
        last_n: int | None = None,
    ) -> Iterator[tuple[str, str, Iterable[Point]]]:
        """Yield the entries of metrics.

        One statement reads many small metrics; a large one is read page by page.

        The number of statements grows with the number of entries, but not with the number of
        metrics (up to 500), of which a run has one for each value and rank.

        Args:
            counts: From :meth:`metric_counts`.
            since: Only entries from this date on (microseconds since 1970).
            last_n: Only this number of latest entries of each metric.

        Yields:
            Owner, name and entries of each metric, in the order of ``counts``; entries as
            :meth:`points` has them.
        """
        small: list[tuple[str, str]] = []
        size = 0
        for (owner, name), count in counts.items():
            wanted = count
            if last_n is not None:
                wanted = min(count, last_n)
            if small and (size + wanted > _PAGE or len(small) == _MANY):
                yield from self._read_together(small, since, last_n)
                small, size = [], 0
            if wanted > _PAGE:
                yield owner, name, self.points(owner, name, since, skip=count - wanted)
            else:
                small.append((owner, name))
                size += wanted
        if small:
            yield from self._read_together(small, since, last_n)

    def latest_entries(self, metrics: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Point]:
        """Return the latest entry of each of some metrics that has any.

        Args:
            metrics: Owner and name of each metric.
        """
        latest = {}
        for owner, name, points in self.entries(dict.fromkeys(metrics, 1), last_n=1):
            for point in points:
                latest[owner, name] = point
        return latest

    def _read_together(
        self, metrics: Sequence[tuple[str, str]], since: int | None, last_n: int | None
    ) -> Iterator[tuple[str, str, list[Point]]]:
        # One SELECT per metric, because each then reads only its own end of the index
        # metrics_by_name. SQLite allows ORDER BY and LIMIT in a part of a UNION only inside a
        # subquery. SQLAlchemy's own objects would take longer to compile than the database needs
        # for the answer.
        parts = []
        values: dict[str, Any] = {"since": -sys.maxsize, "most": sys.maxsize}
        if since is not None:
            values["since"] = since
        if last_n is not None:
            values["most"] = last_n
        for index, (owner, name) in enumerate(metrics):
            parts.append(
                f"SELECT * FROM (SELECT {index} AS part, id, date, value, cumulative, "
                "metadata AS extra FROM metrics "
                f"WHERE owner = :owner{index} AND name = :name{index} AND date >= :since "
                f"ORDER BY date DESC, id DESC LIMIT :most) AS part{index}"
            )
            values |= {f"owner{index}": owner, f"name{index}": name}
        text = f"{' UNION ALL '.join(parts)} ORDER BY part, date, id"
        with self._reading() as session:
            rows = session.execute(sa.text(text).columns(sa.column("part"), *_POINT), values).all()
        for index, group in itertools.groupby(rows, key=lambda row: row[0]):
            yield *metrics[index], [_point(row[1:]) for row in group]

    def points(
        self, owner: str, name: str, since: int | None = None, skip: int = 0
    ) -> Iterator[Point]:
        """Yield the entries of one metric by date.

        Entries of the same date come in the order of their arrival.

        Args:
            owner: From :func:`run_owner` or :func:`pod_owner`.
            name: The metric.
            since: Only entries from this date on (microseconds since 1970).
            skip: Number of first entries to leave out.

        Yields:
            The entries. Memory holds one page of them.
        """
        base = sa.select(*_POINT).where(Metric.owner == owner, Metric.name == name)
        if since is not None:
            base = base.where(Metric.date >= since)
        page = base.order_by(Metric.date, Metric.id).limit(_PAGE)
        query = page.offset(skip)
        while True:
            with self._reading() as session:
                rows = list(map(_point, session.execute(query)))
            yield from rows
            if len(rows) < _PAGE:
                return
            # Continue after the last row: an offset would shift when entries arrive in between.
            last = sa.tuple_(rows[-1].date, rows[-1].id)
            query = page.where(sa.tuple_(Metric.date, Metric.id) > last)

    def latest(self, owner: str) -> list[tuple[str, Point]]:
        """Return name and latest entry of each metric of an owner, by name, with one statement."""
        entry = aliased(Metric)
        # DISTINCT would read all entries. Each step of this recursion finds the next name in
        # the index metrics_by_name.
        names = (
            sa.select(sa.func.min(Metric.name).label("name"))
            .where(Metric.owner == owner)
            .cte(recursive=True)
        )
        following = sa.select(sa.func.min(entry.name)).where(
            entry.owner == owner, entry.name > names.c.name
        )
        names = names.union_all(
            sa.select(following.scalar_subquery()).where(names.c.name.is_not(None))
        )
        # metrics_by_name ends with date and id, so the database reads one entry of each metric.
        newest = sa.select(entry.id).where(entry.owner == owner, entry.name == names.c.name)
        newest = newest.order_by(entry.date.desc(), entry.id.desc()).limit(1)
        query = sa.select(Metric.name, *_POINT).join_from(
            names, Metric, Metric.id == newest.scalar_subquery()
        )
        with self._reading() as session:
            rows = session.execute(query.order_by(Metric.name)).all()
        return [(row[0], _point(row[1:])) for row in rows if isinstance(row[0], str)]

    def last_id(self) -> int:
        """Return the id of the entry that arrived last, 0 without one."""
        with self._reading() as session:
            return session.scalar(sa.select(sa.func.max(Metric.id))) or 0

    def first_date(self, owner: str) -> int:
        """Return the earliest date of the metrics of an owner, 0 without one."""
        with self._reading() as session:
            date = session.scalar(sa.select(sa.func.min(Metric.date)).where(Metric.owner == owner))
        return us_of(date)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads from writing during several calls."""
        with self._write_lock:
            yield

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Session]:
        if self._in_memory:  # all threads share one connection
            with (
                self._write_lock,
                Session(self._database_engine, expire_on_commit=False) as session,
            ):
                yield session
            return
        with Session(self._database_engine, expire_on_commit=False) as session:
            yield session

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Session]:
        # expire_on_commit=False: callers read the attributes of a Run after its session has ended.
        with (
            self._write_lock,
            Session(self._database_engine, expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session


def _end_of_pages(session: Session, owner: str, name: str) -> tuple[int, tuple[int, int] | None]:
    """Return the number of packed pages of a metric, and date and id of the last entry in them."""
    query = sa.select(_Page.page, _Page.end_date, _Page.end_id).where(
        _Page.owner == owner, _Page.name == name
    )
    last = session.execute(query.order_by(_Page.page.desc()).limit(1)).first()
    if last is None:
        return 0, None
    return last.page + 1, (last.end_date, last.end_id)


def _rows_after(
    session: Session, owner: str, name: str, end: tuple[int, int] | None, most: int
) -> list[Any]:
    """Return id, date, value and metadata of the first entries of a metric after one, by date."""
    # As plain tuples of the driver, in half the time of SQLAlchemy's rows.
    connection = session.connection()
    mark = _mark(connection)
    after = ""
    if end is not None:
        after = f" AND (date, id) > ({mark}, {mark})"
    query = (
        "SELECT id, date, value, metadata FROM metrics "
        f"WHERE owner = {mark} AND name = {mark}{after} ORDER BY date, id LIMIT {mark}"
    )
    result = connection.exec_driver_sql(query, (owner, name, *(end or ()), most))
    assert result.cursor is not None
    rows = list(result.cursor.fetchall())
    result.close()
    return rows


@contextlib.contextmanager
def _cache_for(connection: sa.Connection, inserts: int) -> Iterator[None]:
    """Give SQLite 16 MB if there are many inserts."""
    # The ids of clients are random, so each insert changes another page of their index.
    is_larger = connection.dialect.name == "sqlite" and inserts > _PAGE
    if is_larger:
        connection.exec_driver_sql("PRAGMA cache_size=-16000")
    try:
        yield
    finally:
        # Back to the default: the caches of all connections would need too much memory.
        if is_larger:
            connection.exec_driver_sql("PRAGMA cache_size=-2000")


def _mark(connection: sa.Connection | sa.Engine) -> str:
    """Return the placeholder of a parameter in a statement of the database's driver."""
    if connection.dialect.paramstyle == "qmark":
        return "?"
    return "%s"


def _chosen(query: sa.Select[Any], states: Collection[str], text: str) -> sa.Select[Any]:
    """Limit a query to runs in some states (by default all) with each word of a text."""
    if states:
        # The text of the JSON, because PostgreSQL cannot parse an escaped NUL, which the output
        # of a worker may hold.
        by_user = Run.job_metadata.contains(f'"reason": "{STOPPED.reason}', autoescape=True)
        failed = Run.state == STOPPED.state
        special = {
            "stopped": sa.and_(failed, by_user),
            "failed itself": sa.and_(failed, sa.not_(by_user)),
        }
        query = query.where(sa.or_(*(special.get(state, Run.state == state) for state in states)))
    for word in text.split():
        columns = (Run.name, Run.image, Run.backend, Run.command)
        query = query.where(
            sa.or_(*(column.icontains(word, autoescape=True) for column in columns))
        )
    return query


def _newest(owner: str, name: str, count: int = 1) -> sa.Select[Any]:
    """Select the latest values of a metric, the latest one first."""
    query = sa.select(Metric.value).where(Metric.owner == owner, Metric.name == name)
    return query.order_by(Metric.date.desc(), Metric.id.desc()).limit(count)


def _record_goal(session: Session, metric: NewMetric) -> None:
    """Add the result of the goal to the record of the run, which pages and lists show."""
    run = session.get(Run, int(metric.owner[4:]))
    if run is None:
        return
    if metric.name == GOAL_TEXT_METRIC:
        run.goal_result = metric.value
        return
    # The goal is sent when it is reached and at the end, and the first one may arrive last.
    goals = map(read_goal, session.scalars(_newest(metric.owner, metric.name, _LATEST_GOALS)))
    newest = next(filter(None, goals), None)
    if newest is not None:
        run.goal = newest.model_dump_json()


def new_run(**values: Any) -> Run:
    """Make a run that waits for its start.

    Args:
        values: Columns of :class:`Run`.
    """
    return Run(created_at=now_us(), state="initialized", **{"job_metadata": "{}", **values})


def _make_database_engine(database_url: str) -> sa.Engine:
    url = sa.make_url(database_url)
    # Without the name of a driver, SQLAlchemy 2.0 looks for psycopg2, and it refuses the usual
    # "postgres://".
    if url.drivername in ("postgres", "postgresql"):
        url = url.set(drivername="postgresql+psycopg")
    # FastAPI answers requests in up to 40 threads.
    pool = {"pool_size": 10, "max_overflow": 40}
    if url.get_backend_name() != "sqlite":
        # The server may have closed a connection since its last use.
        return sa.create_engine(url, pool_pre_ping=True, **pool)
    # The pool lends a connection to one thread after another.
    arguments = {"check_same_thread": False, "timeout": 30}
    # A database in memory exists as long as its one connection.
    if url.database in (None, "", ":memory:"):
        engine = sa.create_engine(url, poolclass=StaticPool, connect_args=arguments)
    else:
        # SQLite's own form of an address, "file:PATH?mode=ro", is for an existing file.
        if not url.database.startswith("file:"):
            Path(url.database).expanduser().absolute().parent.mkdir(parents=True, exist_ok=True)
        # The last connection returned is lent first. Each has a cache of 2 MB, and those of the
        # others stay empty.
        engine = sa.create_engine(url, connect_args=arguments, pool_use_lifo=True, **pool)
    event.listen(engine, "connect", _prepare_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # By default, one text that is not UTF-8 makes a whole statement fail.
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    cursor = connection.cursor()
    # SQLite does not wait if two connections change the mode of a file at the same time.
    deadline_s = time.monotonic() + _BUSY_MS / 1000

    def pragma(text: str) -> list[Any]:
        while True:
            try:
                return cursor.execute(f"PRAGMA {text}").fetchall()
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.01)

    # This must precede everything that writes into a new file; see Store.reclaim. Setting the mode
    # that a file already has writes too, and then a reader would fail on a full disk.
    if pragma("auto_vacuum") != [(_INCREMENTAL,)]:
        pragma("auto_vacuum=INCREMENTAL")
    # In WAL mode, readers continue while one connection writes.
    pragma("journal_mode=WAL")
    pragma("synchronous=NORMAL")
    pragma("foreign_keys=ON")
    pragma(f"busy_timeout={_BUSY_MS}")
    cursor.close()
