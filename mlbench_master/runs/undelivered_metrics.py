"""Store the metrics that the workers of a run could not deliver themselves.

A worker keeps metrics in an outbox while the master does not answer, see
:mod:`mlbench_core.client.undelivered_metrics`. The workers of a run have their own folder for it.
The master reads it at the end of the run, so no metric depends on the address, the port or the
token that the workers knew. Workers on emulated hosts never deliver, so the master also reads
their outboxes while they run: the rows stay, and the ids of metrics make the second reading at the
end harmless.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from mlbench_core.client.metric_delivery import MAX_BATCH
from mlbench_core.client.undelivered_metrics import LOST_NAME, MAX_BATCH_BYTES
from mlbench_master.api.schemas import MetricIn
from mlbench_master.database.store import NewMetric, Run, Store, pod_owner, run_owner
from mlbench_master.dates import now_us, to_us
from mlbench_master.engines.interface import Engine
from mlbench_master.events import EventBus

__all__ = ["READ_EVERY_S", "OutboxReader", "new_metric", "store_leftovers"]

READ_EVERY_S = 2.0
"""Seconds between two readings of the outboxes of a run that goes on."""

# An outbox has at most 1 GiB, and so has its journal.
_MOST_BYTES = 2**30
# A line of the API has at most 8 MiB.
_MOST_LINE_BYTES = 16 * 2**20
# Other runs wait while the metrics of one are stored, about 100,000 of them in a second.
_LONGEST_S = 60.0
_OUTBOX_COLUMNS = [("key", "TEXT", 0), ("line", "TEXT", 0)]
# While rows are read, mostly for a millisecond, a worker that logs a metric waits.
_MOST_ROWS = 1000
# SQLite asks after this number of steps of its machine if it may go on; 1 ms or less.
_STEPS = 10_000


def store_leftovers(spool: Path, store: Store) -> str:
    """Store all metrics of a folder of outboxes, and delete the files.

    The ids of metrics keep a repetition harmless.

    Args:
        spool: The folder. It belongs to workers, so every file may have any content. Only tables of
            an outbox are read, and no longer than a minute.
        store: The database.

    Returns:
        A sentence on the metrics that are missing; empty if none is.

    Raises:
        SQLAlchemyError: The database failed; the metrics that it has not stored stay in the folder.
    """
    problems = []
    refused = 0
    deadline = time.monotonic() + _LONGEST_S
    for path in sorted(spool.glob("*.sqlite3")):
        if not path.is_file():  # opening a pipe could block
            continue
        try:
            with contextlib.closing(_open(path, deadline)) as connection:
                for lines in _batches(connection, deadline):
                    refused += _store(lines, store)
        except SQLAlchemyError:  # of the master's database: the files stay for another attempt
            raise
        except Exception as error:  # a damaged file must not keep the run from ending
            problems.append(f"an unknown number in {path}, which cannot be read ({error})")
            continue
        # Also possible on a full disk, which may have no room to delete rows.
        for suffix in (".lock", ".sqlite3-journal", ".sqlite3"):
            with contextlib.suppress(OSError):
                path.with_suffix(suffix).unlink()
    if refused:
        problems.append(f"{refused} that are not valid")
    if lost := _count_lost(spool):
        problems.append(f"{lost} that a worker could not keep on disk")
    damaged = len(list(spool.glob("*.damaged-*[0-9]")))
    if damaged:
        problems.append(f"an unknown number in {damaged} damaged file(s) in {spool}")
    if not problems:
        return ""
    return f"metrics are missing: {', '.join(problems)}"


class OutboxReader:
    """Store the metrics of runs on emulated networks while they run.

    Args:
        store: The database.
        engine: The engine, which knows the folders of outboxes.
        events: The bus that notifies subscribers.
    """

    def __init__(self, store: Store, engine: Engine, events: EventBus) -> None:
        self._store = store
        self._engine = engine
        self._events = events
        # The scheduler polls a run while a request ends it.
        self._lock = threading.Lock()
        self._finished: set[int] = set()
        self._next_s: dict[int, float] = {}
        # The key of the last row that was read, by run and file.
        self._read: dict[tuple[int, str], str] = {}

    def keep(self, run: Run) -> None:
        """Store new metrics of a run, at most every :data:`READ_EVERY_S`; the end reports errors.

        Args:
            run: A run that is running.
        """
        with self._lock:
            now = time.monotonic()
            is_early = now < self._next_s.get(run.id, 0.0)
            # After the run has been deleted, its metrics would stay for good.
            if is_early or run.id in self._finished or not run.metadata_dict().get("network"):
                return
            self._next_s[run.id] = now + READ_EVERY_S
            if run.job_id is None:
                return
            spool = self._engine.spool(run.job_id)
            if spool is None:
                return
            for path in sorted(spool.glob("*.sqlite3")):
                # Also if a worker is writing, which must not wait for long: the next call reads it.
                with contextlib.suppress(Exception):
                    self._keep_file(run.id, path)

    def finish(self, run: Run) -> None:
        """Read nothing more of a run, which has ended."""
        with self._lock:
            self._finished.add(run.id)
            self._next_s.pop(run.id, None)
            self._read = {key: last for key, last in self._read.items() if key[0] != run.id}

    def _keep_file(self, run_id: int, path: Path) -> None:
        place = run_id, path.name
        lines = []
        size = 0
        last = self._read.get(place, "")
        deadline = time.monotonic() + READ_EVERY_S
        query = "SELECT key, line FROM metrics WHERE key > ? ORDER BY key LIMIT ?"
        with contextlib.closing(_open(path, deadline, is_used=True)) as connection:
            for key, line in connection.execute(query, (last, _MOST_ROWS)):
                last = str(key)
                lines.append(str(line))
                size += len(lines[-1])
                if size >= MAX_BATCH_BYTES:
                    break
        # Without an id, a metric would be stored again at the end.
        metrics = [metric for metric in _valid(lines, self._store) if metric.client_id is not None]
        self._store.add_metrics(metrics)
        self._read[place] = last
        if metrics and self._events.has_subscribers:
            self._events.publish("metric", *map(NewMetric.to_json, metrics))


def _count_lost(spool: Path) -> int:
    """Return the number of metrics that workers could not keep, from the names of files."""
    count = 0
    for path in spool.glob("*"):
        match = re.fullmatch(LOST_NAME, path.name)
        if match is not None:
            count += int(match[1])
    return count


def _open(path: Path, deadline: float, *, is_used: bool = False) -> sqlite3.Connection:
    """Open the outbox of a worker, which may be a file of any kind and may hold any statements.

    Args:
        path: The file.
        deadline: Time of the monotonic clock at which statements end.
        is_used: True if its worker may write it: nothing is changed in it, and nothing waits.

    Raises:
        ValueError: It is not an outbox.
        sqlite3.Error: It is damaged, or cannot be opened.
    """
    for file in (path, Path(f"{path}-journal")):
        with contextlib.suppress(FileNotFoundError):
            status = file.lstat()
            is_regular = stat.S_ISREG(status.st_mode)
            # A link could lead to the database of the master.
            if not is_regular or status.st_nlink > 1 or status.st_size > _MOST_BYTES:
                raise ValueError(
                    f"{file.name} is not a regular file of at most {_MOST_BYTES >> 20} MiB"
                )
    # Not read-only at the end: SQLite undoes what a killed worker has not finished.
    mode, timeout_s = "rw", 1.0
    if is_used:
        mode, timeout_s = "ro", 0.0
    address = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, timeout=timeout_s)
    try:
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
        if hasattr(connection, "setlimit"):  # from Python 3.11 on
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_LINE_BYTES)
        # Statements of the file, for example of a view or a default value, must not call functions.
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.text_factory = lambda data: data.decode(errors="replace")
        # One row more than allowed, because a file may have any number of them.
        entries = connection.execute("SELECT type, name FROM sqlite_master LIMIT 2").fetchall()
        query = "SELECT name, type, hidden FROM pragma_table_xinfo('metrics') LIMIT 3"
        columns = connection.execute(query).fetchall()
        if entries != [("table", "metrics")] or columns != _OUTBOX_COLUMNS:
            raise ValueError("it has other tables than an outbox")
        # After the checks, which read the schema. From here on, statements read this table alone.
        connection.set_authorizer(_allow_reading)
    except BaseException:
        connection.close()
        raise
    return connection


def _allow_reading(action: int, table: str | None, column: str | None, *_: str | None) -> int:
    if action == sqlite3.SQLITE_SELECT:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_READ and table == "metrics":
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _batches(connection: sqlite3.Connection, deadline: float) -> Iterator[list[str]]:
    """Yield the lines of an outbox by their keys, in batches as large as those of a request."""
    batch: list[str] = []
    size = 0
    for _, line in connection.execute("SELECT key, line FROM metrics ORDER BY key"):
        text = ""
        # A worker may store anything in this column.
        if isinstance(line, str):
            text = line
        batch.append(text)
        size += len(text)
        if len(batch) >= MAX_BATCH or size >= MAX_BATCH_BYTES:
            yield batch
            batch, size = [], 0
            if time.monotonic() > deadline:
                raise TimeoutError(f"it takes longer than {_LONGEST_S:g} s")
    yield batch


def new_metric(metric: MetricIn, now: int) -> NewMetric:
    """Return a metric as the database takes it.

    Args:
        metric: The metric as a client sent it.
        now: The date of a metric without one, in microseconds since 1970.
    """
    if metric.run_id is not None:
        owner = run_owner(metric.run_id)
    else:
        assert metric.pod_name is not None  # MetricIn demands one of the two
        owner = pod_owner(metric.pod_name)
    date = now
    if metric.date is not None:
        date = to_us(metric.date)
    return NewMetric(
        owner=owner,
        name=metric.name,
        date=date,
        value=metric.value,
        cumulative=metric.cumulative,
        extra=metric.metadata,
        client_id=metric.id,
    )


def _store(lines: list[str], store: Store) -> int:
    """Store metrics, and return the number of those that the API would refuse."""
    metrics = _valid(lines, store)
    store.add_metrics(metrics)
    return len(lines) - len(metrics)


def _valid(lines: list[str], store: Store) -> list[NewMetric]:
    """Return the metrics that the API would not refuse."""
    metrics = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            metrics.append(MetricIn.model_validate(json.loads(line)))
    existing = store.existing_runs(metric.run_id for metric in metrics if metric.run_id is not None)
    now = now_us()
    added = []
    for metric in metrics:
        if metric.run_id is None or metric.run_id in existing:
            added.append(new_metric(metric, now))
    return added
