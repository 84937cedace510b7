"""Write the metrics of requests that arrive at the same time in one transaction.

A transaction costs more than a metric. While the thread writes one, further requests wait, and the
next transaction takes all of them::

    requests   a | b c d | e f ...
    thread     [ a ][ b c d ][ e f ]

A request is answered after the transaction with its metrics has been committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy.exc import OperationalError, TimeoutError

from mlbench_master.database.store import NewMetric, Store

__all__ = ["MetricWriter", "UnknownRunError"]

# The lock of the database is held for about a tenth of a second.
_MOST_METRICS = 10_000
# Errors of the database and not of a metric. Another attempt may wait half a minute for a timeout.
_NOT_OF_METRICS = (OperationalError, TimeoutError)
_Waiting = tuple[Sequence[NewMetric], "asyncio.Future[int]"]
_Answer = tuple["asyncio.Future[int]", int | Exception]


class UnknownRunError(Exception):
    """A metric belongs to a run that does not exist."""


class MetricWriter:
    """A writer of metrics for requests of any event loop.

    Args:
        store: The database.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._is_busy = False
        # One thread, because SQLite allows one writer at a time.
        self._thread = ThreadPoolExecutor(1, "metrics")

    async def add(self, metrics: Sequence[NewMetric]) -> int:
        """Store metrics: all of them or none.

        Args:
            metrics: The metrics of one request.

        Returns:
            The number of new ones, see :meth:`~mlbench_master.database.store.Store.add_metrics`.

        Raises:
            UnknownRunError: One of the runs does not exist.
            SQLAlchemyError: The database failed.
        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with self._lock:
            if not self._is_busy:
                # If the machine has no thread left, only this request fails: _is_busy stays False.
                self._thread.submit(self._write_all)
                self._is_busy = True
            self._waiting.append((metrics, future))
        return await future

    def close(self) -> None:
        """Wait for the metrics that are being written."""
        self._thread.shutdown()

    def _write_all(self) -> None:
        """Write until no request is waiting."""
        while group := self._next_group():
            batches, futures = zip(*group, strict=True)
            results = self._write(batches)
            # A future is not thread-safe, so its own event loop sets the result.
            answers: defaultdict[asyncio.AbstractEventLoop, list[_Answer]] = defaultdict(list)
            for future, result in zip(futures, results, strict=True):
                answers[future.get_loop()].append((future, result))
            for loop, pairs in answers.items():
                with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                    loop.call_soon_threadsafe(_answer, pairs)

    def _next_group(self) -> list[_Waiting]:
        with self._lock:
            # The first request is taken whatever its size.
            count, size = 0, 0
            while count < len(self._waiting) and (
                count == 0 or size + len(self._waiting[count][0]) <= _MOST_METRICS
            ):
                size += len(self._waiting[count][0])
                count += 1
            group, self._waiting = self._waiting[:count], self._waiting[count:]
            self._is_busy = bool(group)
        return group

    def _write(self, batches: Sequence[Sequence[NewMetric]]) -> list[int | Exception]:
        """Write the metrics of several requests; return the number of new ones, or the error."""
        try:
            run_ids = [*map(_run_ids, batches)]
            # Metrics that arrive after the deletion of their run would stay for good.
            with self._store.alone():
                existing = self._store.existing_runs(itertools.chain.from_iterable(run_ids))
                accepted = []
                for batch, ids in zip(batches, run_ids, strict=True):
                    if ids <= existing:
                        accepted.append(batch)
                added = iter(self._store.add_batches(accepted))
            results: list[int | Exception] = []
            for ids in run_ids:
                if ids <= existing:
                    results.append(next(added))
                else:
                    unknown = min(ids - existing)
                    results.append(UnknownRunError(f"there is no run {unknown}"))
            return results
        except Exception as error:
            if len(batches) == 1 or isinstance(error, _NOT_OF_METRICS):
                return [error] * len(batches)
            # One request must not make the others fail.
            return [self._write([batch])[0] for batch in batches]


def _run_ids(batch: Sequence[NewMetric]) -> set[int]:
    """Return the ids of the runs to which metrics of a request belong."""
    # A request has many metrics of few owners.
    owners = {metric.owner for metric in batch}
    return {int(owner[4:]) for owner in owners if owner.startswith("run:")}


def _answer(pairs: Sequence[_Answer]) -> None:
    for future, result in pairs:
        if future.done():  # the request was cancelled
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
