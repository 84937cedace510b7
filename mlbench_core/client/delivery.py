r"""Delivery of metrics: in order, in batches, once, whatever happens to the master.

Metrics wait in *chunks*, each at most one request. While the master answers, chunks live in memory for the moment
between two requests; a slow master makes them larger, not more numerous. When it does not answer, everything that
waits goes to disk at once, later metrics follow it there, and a background thread tries again with growing pauses::

    put ->  [chunk 3, open] [chunk 2] [chunk 1]  -> one POST at a time -> master
               memory, or the spool folder while the master is away

Each metric has an id made by the client. A request whose answer was lost is sent again, and the master recognises
the ids; so the order and the content of its records are the same as without the outage.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlbench_core.client.outbox import ChunkFile, SpoolFolder, adopt
from mlbench_core.client.posting import ListRuns, NoAnswer, Post, Poster
from mlbench_core.errors import MasterError, MasterNotFoundError, MasterRequestError

if TYPE_CHECKING:
    import requests

__all__ = ["MAX_BATCH", "MetricDelivery", "Receipt"]

logger = logging.getLogger(__name__)

MAX_BATCH = 10_000
"""Most metrics in one request."""

_MAX_CHUNK_BYTES = 8 * 2**20
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0


class Receipt:
    """What became of one metric.

    Attributes:
        response: The master's answer to the request that held it, once delivered.
        error: Why it was not delivered at the first attempt, or never will be.
    """

    __slots__ = ("error", "response")

    def __init__(self, error: MasterError | None = None) -> None:
        self.response: requests.Response | None = None
        self.error = error

    @property
    def settled(self) -> bool:
        """Whether there is a result."""
        return self.response is not None or self.error is not None

    def result(self) -> requests.Response:
        """The master's answer.

        Raises:
            MasterNotFoundError: The master does not answer; the metric is kept and delivered later.
            MasterRequestError: The master refused the metric; it is dropped.
        """
        if self.response is not None:
            return self.response
        raise self.error or MasterError("the metric has not been sent yet")


class _Chunk:
    """Metrics that are sent together; in memory, on disk, or both."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.count = 0
        self.size_bytes = 0
        self.lines: list[str] = []
        self.receipts: list[Receipt] = []
        self.file: ChunkFile | None = None
        self.open = True

    @property
    def has_room(self) -> bool:
        return self.open and self.count < MAX_BATCH and self.size_bytes < _MAX_CHUNK_BYTES

    def add(self, line: str) -> Receipt | None:
        """Append a line; one kept in memory has a receipt.

        Raises:
            OSError: The disk refused it.
        """
        receipt = None
        if self.file is None:
            receipt = Receipt()
            self.lines.append(line)
            self.receipts.append(receipt)
        else:
            self.file.append([line])
        self.count += 1
        self.size_bytes += len(line)
        return receipt

    def read(self) -> list[str]:
        return self.lines if self.file is None else self.file.read()

    def move_to(self, file: ChunkFile) -> None:
        """Move the lines to disk.

        Raises:
            OSError: The disk refused them; they stay in memory.
        """
        if self.file is None:
            file.append(self.lines)
            self.file = file
            self.lines = []

    def keep(self, indexes: Sequence[int]) -> None:
        """Forget all lines but these."""
        lines = self.read()
        if self.file is None:
            self.lines = [lines[index] for index in indexes]
            self.receipts = [self.receipts[index] for index in indexes]
        else:
            self.file.replace([lines[index] for index in indexes])
        self.count = len(indexes)
        self.size_bytes = sum(len(lines[index]) for index in indexes)

    def settle(self, error: MasterError) -> None:
        """Tell whoever waits for one of these metrics that it must not wait for it any longer."""
        for receipt in self.receipts:
            if not receipt.settled:
                receipt.error = error
        self.receipts = []


class MetricDelivery:
    """The queue of one client.

    Nothing here blocks :meth:`put`, and nothing starts a thread before the master first fails to answer.

    Args:
        post: Sends a JSON text within a time limit in seconds and returns the answer.
        list_runs: Asks the master for its runs within a time limit in seconds.
        endpoint: The master's address, for messages.
        spool: Folder of all clients' chunks for this endpoint; made when it is first needed.
        timeout_s: Time limit of one request, in seconds.
        max_in_memory: Metrics kept in memory; more than that wait on disk, and their receipts say so.
    """

    def __init__(
        self,
        post: Post,
        list_runs: ListRuns,
        endpoint: str,
        spool: Path,
        timeout_s: float = 10.0,
        max_in_memory: int = 10 * MAX_BATCH,
    ) -> None:
        self._endpoint = endpoint
        self._spool = spool
        self._max_in_memory = max_in_memory
        self._pid = os.getpid()
        self._state = threading.Lock()  # guards what follows; held only for moments
        self._chunks: deque[_Chunk] = deque()
        self._in_flight: _Chunk | None = None
        self._next_index = 0
        self._folder: SpoolFolder | None = None
        self._adopted: list[SpoolFolder] | None = None
        self._away = False
        self._closed = False
        self._disk_failed = False
        self._retrier: threading.Thread | None = None
        self._sending = threading.Lock()  # held while chunks are sent: one request at a time, in order
        self._stop = threading.Event()
        self._poster = Poster(post, list_runs, timeout_s, self._stop)

    # ------------------------------------------------------------------ what training calls

    def put(self, line: str) -> Receipt:
        """Queue one metric.

        Args:
            line: Its JSON text, with an ``id``.

        Returns:
            Its receipt; settled already where the master is known to be away.

        Raises:
            RuntimeError: The client is closed.
        """
        with self._state:
            if self._closed:
                raise RuntimeError(f"the client for {self._endpoint} is closed: make a new one")
            last = self._chunks[-1] if self._chunks else None
            on_disk = last is not None and last.file is not None and last.has_room
            if self._away or on_disk or self._in_memory() >= self._max_in_memory:
                return self._put_on_disk(line)
            if last is None or not last.has_room:
                last = self._new_chunk()
            return last.add(line) or Receipt(self._kept())

    def settle(self, receipt: Receipt) -> requests.Response:
        """Send what is queued, up to the metric of ``receipt``, and return the master's answer to it.

        Raises:
            MasterNotFoundError: The master does not answer; the metric is kept and delivered later.
            MasterRequestError: The master refused the metric; it is dropped.
        """
        if not receipt.settled:
            self.drain()
        return receipt.result()

    # ------------------------------------------------------------------ sending

    def drain(self, timeout_s: float | None = None) -> bool:
        """Send everything that waits, oldest first, until nothing is left or the master does not answer.

        Args:
            timeout_s: Longest time to spend, in seconds; None leaves only the limit of each request.

        Returns:
            Whether nothing is left.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        wait_s = -1 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
        if not self._sending.acquire(timeout=wait_s):
            return False
        try:
            self._adopt()
            while True:
                if deadline is not None and time.monotonic() > deadline:
                    return self.pending == 0
                chunk = self._take()
                if chunk is None:
                    return True
                if not self._send(chunk, deadline):
                    return False
        finally:
            self._sending.release()

    def flush(self, timeout_s: float) -> bool:
        """Send everything that waits, trying again until it is through or the time is up.

        Args:
            timeout_s: Longest time to spend, in seconds.

        Returns:
            Whether nothing is left.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            if self.drain(deadline - time.monotonic()):
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._stop.wait(min(pause_s, left_s)):
                return self.pending == 0
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @property
    def pending(self) -> int:
        """Number of metrics that the master has not confirmed."""
        with self._state:
            return sum(chunk.count for chunk in self._chunks) + (self._in_flight.count if self._in_flight else 0)

    def close(self, timeout_s: float = 0.0) -> bool:
        """Deliver what can be delivered, keep the rest on disk, and end the thread.

        Args:
            timeout_s: Longest time to try, in seconds.

        Returns:
            Whether nothing is left. What is left is on disk, for the next client of this endpoint.
        """
        if self._pid != os.getpid():  # a forked child's copy: the metrics are the parent's
            return True
        with self._state:
            if self._closed:
                return not self._chunks
            self._closed = True
        if timeout_s > 0 and self.pending:
            self.flush(timeout_s)
        self._stop.set()
        if self._retrier is not None and self._retrier is not threading.current_thread():
            self._retrier.join(_FIRST_PAUSE_S)
        with self._state:
            self._keep_all()
            delivered = not self._chunks and self._in_flight is None
            for folder in filter(None, [*(self._adopted or []), self._folder]):
                folder.close()
        return delivered

    def _send(self, chunk: _Chunk, deadline: float | None) -> bool:
        """Send one chunk; put back what is left of it if the master does not answer."""
        lines, receipts = chunk.read(), list(chunk.receipts)
        left = dict.fromkeys(range(len(lines)))

        def settle(index: int, result: requests.Response | MasterRequestError) -> None:
            left.pop(index, None)
            if receipts and isinstance(result, MasterRequestError):
                receipts[index].error = result
            elif receipts:
                receipts[index].response = result  # type: ignore[assignment]

        try:
            self._poster.deliver(lines, settle, self._borrow, deadline)
        except Exception as error:
            self._failed(chunk, list(left) if len(left) < len(lines) else None, error)
            return False
        with self._state:
            self._in_flight = None
            if chunk.file is not None:
                chunk.file.delete()
            if self._away:
                self._away = False
                logger.info("the master at %s answers again", self._endpoint)
        return True

    def _borrow(self) -> str | None:
        """A line that waits behind the chunk that is being sent."""
        with self._state:
            lines = self._chunks[0].read() if self._chunks else []
            return random.choice(lines) if lines else None

    # ------------------------------------------------------------------ the queue; callers hold self._state

    def _in_memory(self) -> int:
        waiting = [*self._chunks, self._in_flight] if self._in_flight else self._chunks
        return sum(chunk.count for chunk in waiting if chunk.file is None)

    def _new_chunk(self, file: ChunkFile | None = None) -> _Chunk:
        chunk = _Chunk(self._next_index)
        chunk.file = file
        self._next_index += 1
        self._chunks.append(chunk)
        return chunk

    def _put_on_disk(self, line: str) -> Receipt:
        last = self._chunks[-1] if self._chunks else None
        try:
            if last is None or last.file is None or not last.has_room:
                self._own_folder().chunk(self._next_index).append([line])
                last = self._new_chunk(self._own_folder().chunk(self._next_index))
                last.count, last.size_bytes = 1, len(line)
            else:
                last.add(line)
            return Receipt(self._kept())
        except OSError as error:
            self._report_disk(error)
            return self._put_in_spare_memory(line)

    def _put_in_spare_memory(self, line: str) -> Receipt:
        """The master is away and the disk is full: memory is what is left, up to a limit."""
        if self._in_memory() >= self._max_in_memory:
            error = MasterError(
                f"the metric is lost: the master at {self._endpoint} does not answer, {self._spool} cannot be written, "
                f"and {self._max_in_memory} metrics wait in memory; free disk space or set MLBENCH_HOME elsewhere"
            )
            return Receipt(error)
        last = self._chunks[-1] if self._chunks else None
        if last is None or last.file is not None or not last.has_room:
            last = self._new_chunk()
        return last.add(line) or Receipt(self._kept())

    def _own_folder(self) -> SpoolFolder:
        if self._folder is None:
            self._folder = SpoolFolder.create(self._spool)
        return self._folder

    def _keep_all(self) -> None:
        """Move every chunk to disk, and tell those who wait that it will take longer."""
        waiting = [*([self._in_flight] if self._in_flight else []), *self._chunks]
        for chunk in waiting:
            if chunk.file is None:
                try:
                    chunk.move_to(self._own_folder().chunk(chunk.index))
                except OSError as error:
                    self._report_disk(error)
            if chunk is not self._in_flight:
                chunk.settle(self._kept())

    def _report_disk(self, error: OSError) -> None:
        if not self._disk_failed:
            self._disk_failed = True
            logger.warning("metrics for %s cannot be kept on disk: %s", self._endpoint, error)

    def _kept(self) -> MasterNotFoundError:
        return MasterNotFoundError(
            f"the master at {self._endpoint} has not answered; the metric is kept and delivered when it does"
        )

    # ------------------------------------------------------------------ outages

    def _take(self) -> _Chunk | None:
        with self._state:
            if not self._chunks:
                return None
            chunk = self._chunks.popleft()
            chunk.open = False
            self._in_flight = chunk
            return chunk

    def _failed(self, chunk: _Chunk, left: list[int] | None, error: Exception) -> None:
        if not isinstance(error, NoAnswer):
            logger.error("metrics for %s could not be sent", self._endpoint, exc_info=error)
        with self._state:
            self._in_flight = None
            if left is not None:
                with contextlib.suppress(OSError):  # they are sent again; their ids make that harmless
                    chunk.keep(left)
            chunk.open = True
            self._chunks.appendleft(chunk)
            first_time, self._away = not self._away, True
            self._keep_all()
            self._start_retrier()
        if first_time:
            logger.warning(
                "the master at %s does not answer (%s): metrics are kept in %s and delivered when it is back",
                self._endpoint,
                str(error),  # not the exception: its traceback would keep the client alive in a log
                self._spool,
            )

    def _start_retrier(self) -> None:
        if self._retrier is None and not self._closed:
            thread = threading.Thread(target=self._try_again, name="mlbench-delivery", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is going down: the disk has everything
                thread.start()
                self._retrier = thread

    def _try_again(self) -> None:
        """Send again with growing pauses until nothing waits any more."""
        jitter = random.Random(os.urandom(8))
        pause_s = _FIRST_PAUSE_S
        while not self._stop.wait(pause_s * jitter.uniform(0.75, 1.25)):
            self.drain()
            with self._state:
                if not self._away:
                    self._retrier = None
                    return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _adopt(self) -> None:
        """Once, before the first request: queue what clients that are gone left behind, ahead of our own."""
        if self._adopted is not None:
            return
        try:
            self._adopted = adopt(self._spool)
        except OSError as error:
            logger.warning("metrics of earlier processes in %s cannot be read: %s", self._spool, error)
            self._adopted = []
        left: list[_Chunk] = []
        for file in (file for folder in self._adopted for file in folder.chunks()):
            chunk = _Chunk(-1)
            chunk.file, chunk.open = file, False
            chunk.count = len(file.read())
            left.append(chunk)
        with self._state:
            self._chunks.extendleft(reversed(left))
