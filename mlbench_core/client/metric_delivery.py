r"""Deliver metrics once, in order and in batches, even if the master does not answer for a time.

The states of a metric and its transitions::

    put ---> QUEUED, in memory ---- the master answers ----> DONE: accepted, or refused (warning)
     |         |           ^                                  ^
     |    no answer, or    | the disk fails                   | the master answers:
     |    rows wait        |                                  | the row is deleted
     |         +-----------+------------------------------> KEPT, a row of the outbox <--+
     |                                                        |                          |
     |                                                        +-------- no answer -------+
     +-----> LOST with an error: the disk fails, and the memory is full

Metrics stay in the queue only until the request before them is answered. If the master is slow,
batches become larger, not more numerous. If the master does not answer, all queued metrics become
rows, and later metrics follow them. A background thread then tries again with growing pauses. Rows
are sent before the queue, oldest first. The first process that has its turn sends them, even if
the process that inserted them has ended. With a shared outbox, a process that is killed loses only
its queued metrics.

If the outbox is not shared, as in the workers of a run, a queued metric is also a row from the
beginning. ``put`` inserts the row before anything can send the metric. The row is deleted after the
master's answer. A process that is killed at any instant after ``put`` loses nothing. If the
insertion fails because the disk is full, metrics are only in memory. ::

    put ---> QUEUED, in memory and a row ----- the master answers: the row is deleted ----> DONE
                        |                                                                    ^
                        +------ no answer: not in memory any more ------> KEPT, a row -------+

Each metric has an id from the client. If an answer is lost, the request is sent again, and the
master ignores the ids that it has. So its records have the same content and order as without the
outage.

Locks, in the order in which they are acquired: ``_sending`` while batches are sent, ``_moving``
while metrics change their state, and ``_state`` while attributes change. :meth:`MetricDelivery.put`
never acquires ``_sending``, so training does not wait for the network. It acquires ``_moving``, and
waits for the disk, only to insert rows.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import random
import sqlite3
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mlbench_core.client.post_metrics import ListRuns, NoAnswer, Post, Poster
from mlbench_core.client.undelivered_metrics import MAX_BATCH_BYTES, Outbox
from mlbench_core.errors import MasterError, MasterNotFoundError, MasterRequestError

if TYPE_CHECKING:
    import requests

__all__ = ["MAX_BATCH", "MetricDelivery", "Receipt"]

logger = logging.getLogger(__name__)

MAX_BATCH = 10_000
"""Most metrics in one request."""

# If more are queued during one request, put() itself makes them rows, so memory stays bounded.
_MAX_IN_MEMORY = 10 * MAX_BATCH
# Pause before an insertion, in which other processes that log continuously can use the database.
_GATHER_S = 0.02
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0
_DISK_ERRORS = (OSError, sqlite3.Error)


@dataclass(eq=False, slots=True)
class Receipt:
    """A metric, and the result of delivering it.

    Args:
        key: Sort key: the time at which the metric was logged, and the client.
        line: The metric as JSON text.
        is_row: True if the metric is in the outbox.

    Attributes:
        result: The master's answer to the request that contained the metric, or an error if the
            metric is kept for later, refused or lost. None before the first attempt.
    """

    key: str
    line: str
    is_row: bool = False
    result: requests.Response | MasterError | None = None


class MetricDelivery:
    """Deliver the metrics of one client; see the module's docstring.

    The background thread starts when the master fails to answer for the first time.

    Args:
        post: Sends a JSON text within a time limit in seconds and returns the answer.
        list_runs: Asks the master for its runs within a time limit in seconds.
        endpoint: The master's address, for messages.
        outbox: Keeps undelivered metrics on disk.
        timeout_s: Time limit of one request, in seconds.
        only_keep: True to send nothing: the metrics stay in the outbox, from which the master reads
            them.
    """

    def __init__(
        self,
        post: Post,
        list_runs: ListRuns,
        endpoint: str,
        outbox: Outbox,
        timeout_s: float = 10.0,
        *,
        only_keep: bool = False,
    ) -> None:
        self._endpoint = endpoint
        self._outbox = outbox
        self._only_keep = only_keep
        self._owner = uuid.uuid4().hex
        self._pid = os.getpid()
        self._sending = threading.Lock()
        # Reentrant, because put may need _keep.
        self._moving = threading.RLock()
        # Guards the attributes below.
        self._state = threading.Lock()
        self._queue: deque[Receipt] = deque()
        # The batch that was taken from the queue.
        self._in_flight: list[Receipt] = []
        self._last_ns = 0
        self._away = False
        # Rows of any client, and rows of this one.
        self._may_have_rows = os.path.exists(outbox.path)
        self._has_rows = False
        self._disk_fails = False
        self._lost = 0
        self._closed = False
        self._retrier: threading.Thread | None = None
        self._stop = threading.Event()
        # A separate generator: a draw from the global one would change the results of a seeded run.
        self._random = random.Random()
        self._poster = Poster(post, list_runs, timeout_s, self._stop)

    def put(self, lines: Sequence[str]) -> list[Receipt]:
        """Queue metrics, and insert them into the outbox if it is not shared.

        Args:
            lines: The metrics as JSON texts, each with an ``id``.

        Returns:
            Their receipts, for :meth:`settle`.

        Raises:
            RuntimeError: The client is closed.
        """
        # A forked child sends nothing, so its rows would never be deleted.
        if self._outbox.is_shared or self._pid != os.getpid():
            return list(map(self._enqueue, lines))
        # Without the lock, a metric could be sent and its row deleted before the row is inserted.
        with self._moving:
            receipts = list(map(self._enqueue, lines))
            if self._has_rows:
                # These metrics must follow the rows, so they do not stay in memory.
                self._keep()
            else:
                with self._reporting_disk():
                    self._insert([receipt for receipt in receipts if receipt.result is None])
        return receipts

    def _enqueue(self, line: str) -> Receipt:
        if self._in_memory >= _MAX_IN_MEMORY and not self._disk_fails:
            self._keep()
        with self._state:
            if self._closed:
                raise RuntimeError(f"the client for {self._endpoint} is closed: make a new one")
            # The clock may be set back, or return the same time twice, but keys must grow.
            self._last_ns = max(self._last_ns + 1, time.time_ns())
            receipt = Receipt(f"{self._last_ns:020d}-{self._owner}", line)
            if self._in_memory < _MAX_IN_MEMORY:
                self._queue.append(receipt)
                return receipt
            self._lost += 1
        receipt.result = MasterError(
            f"the metric is lost: the master at {self._endpoint} does not answer, "
            f"{self._outbox.path} cannot be written, and {_MAX_IN_MEMORY} metrics wait in memory; "
            "free disk space or set MLBENCH_HOME elsewhere"
        )
        if self._lost == 1:
            logger.error("%s", receipt.result)
        return receipt

    def settle(self, receipt: Receipt) -> requests.Response:
        """Send or keep the queued metrics, and return the master's answer to one of them.

        Args:
            receipt: The receipt of this metric.

        Raises:
            MasterNotFoundError: The master does not answer; the metric is kept and delivered later.
            MasterRequestError: The master refused the metric; it is dropped.
        """
        if receipt.result is None and (self._away or self._has_rows or not self.drain()):
            self._stop.wait(_GATHER_S)
            self._keep()
        if receipt.result is None or isinstance(receipt.result, MasterError):
            raise receipt.result or MasterError("the metric has not been sent yet")
        return receipt.result

    # ------------------------------------------------------------------ sending

    def drain(self, timeout_s: float = math.inf) -> bool:
        """Send all waiting metrics, oldest first, until none is left or the master does not answer.

        Args:
            timeout_s: Time limit in seconds, in addition to the limit of each request.

        Returns:
            True if nothing is left.
        """
        deadline = time.monotonic() + timeout_s
        if not self._sending.acquire(timeout=min(max(timeout_s, 0), threading.TIMEOUT_MAX)):
            return False
        try:
            return self._drain(deadline)
        finally:
            self._sending.release()

    def flush(self, timeout_s: float) -> bool:
        """Send all waiting metrics, and try again with growing pauses.

        Return when none is left or the time limit is reached.

        Args:
            timeout_s: Time limit, in seconds.

        Returns:
            True if nothing is left.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while not self.drain(deadline - time.monotonic()):
            left_s = deadline - time.monotonic()
            if self._only_keep or left_s <= 0:
                return self.pending == 0
            # Random pauses, because all workers of a run lose their master at the same moment.
            jittered_s = pause_s * self._random.uniform(0.75, 1.25)
            if self._stop.wait(min(jittered_s, left_s)):
                return self.pending == 0
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    @property
    def pending(self) -> int:
        """Return the number of this client's metrics that the master has not confirmed.

        If the rows cannot be counted, those that are not in memory count as one.
        """
        with self._moving:
            with contextlib.suppress(*_DISK_ERRORS):
                rows = self._outbox.count(self._owner)
                return rows + len(_without_row([*self._in_flight, *self._queue]))
            return self._in_memory + int(self._has_rows)

    def close(self, timeout_s: float = 0.0) -> bool:
        """Try to deliver the waiting metrics, keep the rest of them on disk, and end the thread.

        Args:
            timeout_s: Time limit of the delivery, in seconds.

        Returns:
            True if none is left. Those on disk can be delivered by any client of this endpoint.
        """
        # In a forked child this object is a copy. The metrics belong to the parent, which delivers
        # them.
        if self._pid != os.getpid():
            return True
        with self._state:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            if timeout_s > 0 and self.pending:
                self.flush(timeout_s)
            self._keep()
            self._stop.set()
            if self._retrier is not None and self._retrier is not threading.current_thread():
                self._retrier.join(_FIRST_PAUSE_S)
            lost = self._lost + len(_without_row(self._queue))
            if lost > 0:
                logger.error(
                    "%d metric(s) for %s are lost: they could not be kept on disk",
                    lost, self._endpoint,
                )  # fmt: skip
                self._outbox.report_lost(lost)
            if self.pending == 0 and not self._outbox.is_shared:
                self._has_rows = False
                self._outbox.remove()
        return self.pending == 0

    def _drain(self, deadline: float) -> bool:
        if self._only_keep:
            self._keep()
            return self.pending == 0
        while time.monotonic() <= deadline:
            # The turn is needed for rows only.
            turn: contextlib.AbstractContextManager[bool] = contextlib.nullcontext(True)
            if self._may_have_rows:
                # Without a deadline, keep the queue on disk now instead of waiting for another
                # client's turn to end.
                wait_s = 0.0
                if deadline < math.inf:
                    wait_s = max(deadline - time.monotonic(), 0)
                turn = self._outbox.delivering(wait_s)
            try:
                with turn as has_turn:
                    if not has_turn:
                        return False
                    batch = self._take()
                    if batch and not self._send(batch, deadline):
                        return False
            except _DISK_ERRORS as error:
                self._report_disk(error)
                if self._has_rows:
                    return False
                # Rows of other clients wait for the next client.
                self._may_have_rows = False
                continue
            if not batch:
                if self._away:
                    self._away = False
                    logger.info("the master at %s answers again", self._endpoint)
                return True
        return self.pending == 0

    def _take(self) -> list[Receipt]:
        """Take the next batch: rows first, because they are older than the queue."""
        with self._moving:
            batch: list[Receipt] = []
            if self._may_have_rows:
                batch = [Receipt(*row, is_row=True) for row in self._outbox.read(MAX_BATCH)]
            with self._state:
                if not batch:
                    self._may_have_rows = self._has_rows = False
                    size_bytes = 0
                    while self._queue and len(batch) < MAX_BATCH and size_bytes < MAX_BATCH_BYTES:
                        batch.append(self._queue.popleft())
                        size_bytes += len(batch[-1].line)
                    self._in_flight = batch
            return batch

    def _send(self, batch: list[Receipt], deadline: float) -> bool:
        """Send a batch; without an answer, insert its undelivered metrics and the queue as rows."""
        results: dict[int, requests.Response | MasterRequestError] = {}
        lines = [receipt.line for receipt in batch]
        peek_waiting = partial(self._peek_behind, batch[-1].key)
        # Only the text, because the traceback of the exception would keep the client alive.
        failure: str | None = None
        try:
            self._poster.deliver(lines, results.__setitem__, peek_waiting, deadline)
        except Exception as error:
            failure = str(error)
            if not isinstance(error, NoAnswer):
                logger.exception("metrics for %s could not be sent", self._endpoint)
        with self._moving:
            rows = []
            for index, result in results.items():
                batch[index].result = result
                if batch[index].is_row:
                    rows.append(batch[index].key)
            with self._state:
                # If the client was closed during the request, close() has already inserted the
                # batch as rows.
                if self._in_flight and not self._stop.is_set():
                    unsent = [batch[i] for i in range(len(batch)) if i not in results]
                    self._queue.extendleft(reversed(unsent))
                self._in_flight = []
            if rows:
                with self._reporting_disk():
                    self._outbox.delete(rows)
        if failure is None:
            return True
        was_away, self._away = self._away, True
        self._keep()
        if not was_away:
            logger.warning(
                "the master at %s does not answer (%s): "
                "metrics are kept in %s and delivered when it is back",
                self._endpoint, failure, self._outbox.path,
            )  # fmt: skip
        return False

    def _peek_behind(self, after: str) -> str | None:
        """Return a line that waits behind the row with this key, or None."""
        with self._moving:
            lines: list[str] = []
            # The batch in flight comes from the queue only if the outbox has no rows.
            if not self._in_flight:
                lines = [line for _, line in self._outbox.read(MAX_BATCH, after)]
            if not lines:
                queued = itertools.islice(self._queue, MAX_BATCH)
                lines = [receipt.line for receipt in queued]
            return self._random.choice(lines) if lines else None

    @property
    def _in_memory(self) -> int:
        return len(self._queue) + len(self._in_flight)

    def _keep(self) -> None:
        """Insert every metric in memory as a row, settle its receipt, and start the thread."""
        kept = MasterNotFoundError(
            f"no answer from {self._endpoint}: the metric is kept and delivered later"
        )
        with self._moving:
            with self._state:
                waiting = [*self._in_flight, *self._queue]
            with self._reporting_disk():
                if waiting:
                    self._insert(waiting)
                    with self._state:
                        for _ in range(len(waiting) - len(self._in_flight)):
                            self._queue.popleft()
                        self._has_rows, self._may_have_rows = True, True
            for receipt in waiting:
                if receipt.result is None:
                    receipt.result = kept
        with self._state:
            has_work = (self._has_rows or self._queue) and not self._only_keep
            if has_work and self._retrier is None and not self._closed:
                name = "mlbench-delivery"
                thread = threading.Thread(target=self._try_again, name=name, daemon=True)
                # The interpreter starts no threads while it exits; the metrics are on disk.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._retrier = thread

    def _try_again(self) -> None:
        """Send again until no metric is waiting."""
        while not self._stop.wait(_FIRST_PAUSE_S):
            is_done = self.flush(math.inf)
            with self._state:
                # _keep() does not start a second thread, so this thread must also send the metrics
                # that were kept since the flush.
                if is_done and not self._has_rows and not self._queue:
                    self._retrier = None
                    return

    def _insert(self, receipts: list[Receipt]) -> None:
        """Insert those metrics that are not rows yet."""
        new = _without_row(receipts)
        if new:
            self._outbox.insert([(receipt.key, receipt.line) for receipt in new])
            self._disk_fails = False
        for receipt in new:
            receipt.is_row = True

    @contextlib.contextmanager
    def _reporting_disk(self) -> Iterator[None]:
        try:
            yield
        except _DISK_ERRORS as error:
            self._report_disk(error)

    def _report_disk(self, error: Exception) -> None:
        # Log this once, not for each metric, until the disk works again.
        if not self._disk_fails:
            self._disk_fails = True
            logger.warning(
                "metrics for %s cannot be kept on disk: %s: %s",
                self._endpoint, self._outbox.path, error,
            )  # fmt: skip


def _without_row(receipts: Iterable[Receipt]) -> list[Receipt]:
    return [receipt for receipt in receipts if not receipt.is_row]
