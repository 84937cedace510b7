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
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy.exc import OperationalError, TimeoutError

from mlbench_master.database.store import NewMetric, Store

__all__ = ["MetricWriter", "UnknownRunError"]

# The lock of the database is held for about a tenth of a second.
_MOST_METRICS = 10_000
# Errors of the database and not of a metric. Each attempt may last until a timeout of half a
# minute.
_NOT_OF_METRICS = (OperationalError, TimeoutError)
_Waiting = tuple[Sequence[NewMetric], "asyncio.Future[int]"]


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
                # If the machine has no thread left, this request fails, and the next one tries
                # again.
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
            results = self._write([metrics for metrics, _ in group])
            futures = [future for _, future in group]
            for loop in {future.get_loop() for future in futures}:
                own = [
                    pair
                    for pair in zip(futures, results, strict=True)
                    if pair[0].get_loop() is loop
                ]
                with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                    loop.call_soon_threadsafe(_answer, own)

    def _next_group(self) -> list[_Waiting]:
        with self._lock:
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
        """Write the batches of several requests; return the number of new metrics, or the error, of each."""
        try:
            owners = [{metric.owner for metric in batch} for batch in batches]
            ids = {
                int(owner[4:]) for found in owners for owner in found if owner.startswith("run:")
            }
            # Metrics that arrive after the deletion of their run would stay for good.
            with self._store.alone():
                missing = ids - self._store.existing_runs(ids)
                unknown = [
                    min((key for key in missing if f"run:{key}" in found), default=None)
                    for found in owners
                ]
                known = [batch for batch, key in zip(batches, unknown, strict=True) if key is None]
                added = iter(self._store.add_batches(known))
            return [
                next(added) if key is None else UnknownRunError(f"there is no run {key}")
                for key in unknown
            ]
        except Exception as error:
            if len(batches) == 1 or isinstance(error, _NOT_OF_METRICS):
                return [error] * len(batches)
            # One request must not make the others fail.
            return [result for batch in batches for result in self._write([batch])]


def _answer(pairs: Sequence[tuple[asyncio.Future[int], int | Exception]]) -> None:
    for future, result in pairs:
        if future.done():  # the request was cancelled
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
