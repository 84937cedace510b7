"""Store the load of workers as metrics of pods, and thin it as it gets older.

A run of a week would have 120,960 samples of each figure. So the last hour is kept as it was
measured, and of each five minutes before it only the mean: about 2,700 entries of each metric after
a week, and 288 more per day.
"""

from __future__ import annotations

import json
import logging
import operator
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import TypeAdapter
from sqlalchemy.exc import SQLAlchemyError

from mlbench_master.database.store import NewMetric, Run, Store, pod_owner
from mlbench_master.dates import Date, now_us, to_us, us_of
from mlbench_master.engines.interface import Engine, LogLine
from mlbench_master.engines.supervisor.load_sampler import LOAD_METRICS
from mlbench_master.events import EventBus

__all__ = ["LOAD_MARK", "LoadKeeper"]

_log = logging.getLogger(__name__)
LOAD_MARK = "load "
"""The first characters of the id of a sample; an entry that a worker has sent begins otherwise."""

_MINUTE_US = 60 * 1_000_000
_KEPT_US = 60 * _MINUTE_US
_MEAN_US = 5 * _MINUTE_US
# The supervisor keeps about 18,000 lines. A worker can write more, but must not delay the master.
_MOST_PAGES = 20
_LARGEST = 1e18
_date = TypeAdapter(Date)


@dataclass
class _Position:
    """The progress of one run.

    Attributes:
        next: Number of the next line to read.
        stored_us: Date of the latest entry that an earlier master has stored.
        thinned_us: Entries before this date are thinned.
    """

    next: int
    stored_us: int
    thinned_us: int


class LoadKeeper:
    """Store and thin load samples.

    Args:
        store: The database.
        engine: The engine, which measures the load.
        events: The bus that notifies subscribers.
    """

    def __init__(self, store: Store, engine: Engine, events: EventBus) -> None:
        self._store = store
        self._engine = engine
        self._events = events
        # The scheduler polls a run while a request ends it.
        self._lock = threading.Lock()
        self._positions: dict[int, _Position] = {}
        self._finished: set[int] = set()

    def keep(self, run: Run) -> None:
        """Store the samples since the last call.

        An error of the database does not reach the caller, because the next call tries again.

        Args:
            run: A run that is running.
        """
        with self._lock:
            # After the run has been deleted, its metrics would stay for good.
            if run.id not in self._finished:
                self._keep_page(run)

    def finish(self, run: Run) -> None:
        """Store the last samples of a run that has ended."""
        with self._lock:
            for _ in range(_MOST_PAGES):
                if run.job_id is None or not self._keep_page(run):
                    break
            self._positions.pop(run.id, None)
            self._finished.add(run.id)

    def _keep_page(self, run: Run) -> bool:
        """Store a page of samples; return whether there may be more of them."""
        assert run.job_id is not None
        pods = list(map(pod_owner, run.worker_names()))
        try:
            if run.id not in self._positions:
                stored = min(self._store.newest_date(pods, "memory"), now_us())
                # A run of the last hour has nothing to thin.
                begin = us_of(run.started_at) // _MEAN_US * _MEAN_US
                thinned = max(_thinnable(stored) - _MEAN_US, begin)
                self._positions[run.id] = _Position(0, stored, thinned)
            position = self._positions[run.id]
            page = self._engine.load(run.job_id, position.next)
            if not page.lines:
                return False
            metrics: list[NewMetric] = []
            for line in page.lines:
                metrics.extend(_metrics(pods, line, position.stored_us))
            self._store.add_metrics(metrics)
            position.next = page.next
            latest = max(map(operator.attrgetter("date"), metrics), default=0)
            until = _thinnable(latest)
            if until > position.thinned_us:
                for pod in pods:
                    self._store.thin_metrics(
                        pod, LOAD_METRICS, LOAD_MARK, position.thinned_us, until, _MEAN_US
                    )
                position.thinned_us = until
        except SQLAlchemyError as error:
            reason = str(error).splitlines()[0]
            _log.warning("run %s: the load of its workers cannot be stored: %s", run.id, reason)
            return False
        if metrics and self._events.has_subscribers:
            self._events.publish("metric", *map(NewMetric.to_json, metrics))
        return True


def _thinnable(us: int) -> int:
    """Return the date before which entries are thinned when the latest one has this date."""
    return max(us - _KEPT_US, 0) // _MEAN_US * _MEAN_US


def _metrics(pods: list[str], line: LogLine, after_us: int) -> Iterator[NewMetric]:
    """Yield the metrics of a line that is not stored yet and that the supervisor wrote."""
    rank = line["rank"]
    try:
        load = json.loads(line["text"])
        date = to_us(_date.validate_python(line["date"]))
    except (ValueError, RecursionError):
        return
    if rank is None or not 0 <= rank < len(pods):
        return
    if not isinstance(load, dict) or not after_us < date <= now_us():
        return
    network_extra = ""
    if load.get("network") == "machine":
        # These figures are not those of a worker, which every reader of the metric must see.
        network_extra = json.dumps({"network": "machine"})
    for name in LOAD_METRICS:
        value = load.get(name)
        if isinstance(value, int | float) and 0 <= value < _LARGEST:
            extra = network_extra if name.startswith("network") else ""
            # A second delivery of the same sample, for example after a restart of the master, has
            # the same id.
            key = f"{LOAD_MARK}{name} {date}"
            text = f"{value:.15g}"
            yield NewMetric(pods[rank], name, date, text, extra=extra, client_id=key)
