"""Make all MPI calls of a process through one queue.

One thread at a time works on the queue, in its order: the communication thread, or a thread that
waits for a work. The waiting thread does the due works itself, because waking the other thread
costs some 30 microseconds (an all-reduce of 100 numbers costs 2).

A work goes through these states::

    queued --start()--> posted --has_arrived()--> due --complete()--> done
                          |                                           ^
                          +------------ overdue, or an error ---------+

* *Posted*: non-blocking MPI requests are under way. For a message they are its sends or receives.
  For a collective it is a non-blocking barrier, which completes when all workers have called the
  collective.
* *Due*: the requests have completed. A collective now makes MPI's blocking call, which no longer
  waits for a worker.

So a wait can have a time limit and can be interrupted, and messages go out while a collective waits
for late workers. The data itself moves through MPI's blocking algorithms, which are faster than its
non-blocking ones. If a worker or its link is lost in the middle of such a call, the call never
returns. A watchdog then ends the process.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mlbench_core.distributed.pytorch.mpi.watchdog import Watchdog
from mlbench_core.processor_time import polling

__all__ = ["Work", "WorkQueue"]

# Time to poll MPI without a pause. A longer wait pauses in between and leaves the core to others.
_SPIN_S = 2e-3
_SHORT_PAUSE_S = 5e-5
_LONG_PAUSE_S = 1e-3

Test = Callable[[], bool]
"""The ``Test`` of a request of mpi4py: return True if it has completed."""


class Work(dist.Work):
    """One operation in the queue, and the handle that ``async_op=True`` returns.

    Args:
        queue: The queue.
        owner: The process group it belongs to.
        name: The operation and its worker, for messages, as in ``"all_reduce, rank 0 of 2"``.
        post: Start MPI's requests without blocking and return their ``Test`` methods.
        finish: Called when the requests have completed; None for nothing.
        result: The tensors that the operation fills, as its future gives them.
        timeout_s: Seconds from now after which it has failed. Once its requests have completed,
            ``finish`` has the same time before the process ends.
        in_order: True if earlier works that are in order must be finished first, as for
            collectives.
    """

    def __init__(
        self,
        queue: WorkQueue,
        owner: object,
        name: str,
        post: Callable[[], Sequence[Test]],
        finish: Callable[[], None] | None,
        result: Sequence[torch.Tensor],
        timeout_s: float,
        in_order: bool,
    ) -> None:
        super().__init__()
        self.name = name
        self.owner = owner
        self.in_order = in_order
        self.source = -1
        self.done = False
        self._queue = queue
        self._post = post
        self._finish = finish
        self._result = list(result)
        self._timeout_s = timeout_s
        self._deadline = time.perf_counter() + timeout_s
        self._requests: Sequence[Test] = ()
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._is_future_set = False
        self._future_lock = threading.Lock()

    # Called by the queue

    def start(self) -> None:
        """Post the requests."""
        try:
            self._requests = self._post()
        except Exception as error:
            self._fail(error)

    def has_arrived(self) -> bool:
        """Return True if the requests have completed or failed."""
        try:
            self._requests = [test for test in self._requests if not test()]
        except Exception as error:
            self._fail(error)
        return self.done or not self._requests

    def complete(self) -> None:
        """Finish the work after its requests."""
        if self._finish is not None and not self.done:
            # This call may block in MPI, out of reach of any exception.
            self._queue.watchdog.start(self.name, self._timeout_s)
            try:
                self._finish()
            except Exception as error:
                self._fail(error)
            finally:
                self._queue.watchdog.stop()
        self.done = True

    def _fail(self, error: Exception) -> None:
        self._error = dist.DistBackendError(f"MPI: {self.name}: {error}")
        self._error.__cause__ = error
        self.done = True

    def expire(self, now: float) -> Exception | None:
        """Fail if the time is up, and return the error."""
        if now <= self._deadline:
            return None
        self._error = dist.DistBackendError(
            f"MPI: {self.name}: timed out, the other workers did not come within "
            f"{self._timeout_s:g} s: was one lost, or does it call another operation? MPI "
            "cannot be used any more in this process"
        )
        self.done = True
        return self._error

    def set_future(self) -> None:
        """Complete the future, if there is one; a second call does nothing."""
        with self._future_lock:
            future = self._future
            if future is None or self._is_future_set:
                return
            self._is_future_set = True
        # Without the lock, because the callbacks of the future run here.
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)

    # Called by torch and its users

    def wait(  # type: ignore[override]
        self, timeout: datetime.timedelta = datetime.timedelta(0)
    ) -> bool:
        """Wait until the operation is done.

        Args:
            timeout: Time limit; zero leaves it to the process group's timeout.

        Returns:
            True.

        Raises:
            torch.distributed.DistBackendError: It failed, or was not done in time.
        """
        seconds = timeout.total_seconds()
        limit_s = None
        if seconds > 0:
            limit_s = seconds
        if not self.done and not self._queue.run_until(self, limit_s):
            raise dist.DistBackendError(
                f"MPI: {self.name}: timed out, it was not done within {seconds:g} s"
            )
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return True if it is done, successfully or not. The call also lets MPI make progress."""
        if not self.done:
            # A loop that only polls must not depend on the communication thread.
            self._queue.poll()
        return self.done

    def is_success(self) -> bool:
        return self.done and self._error is None

    def exception(self) -> Exception | None:  # type: ignore[override]
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors it filled."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of :meth:`result`."""
        with self._future_lock:
            if self._future is not None:
                return self._future
            devices = sorted({str(tensor.device) for tensor in self._result if tensor.is_cuda})
            self._future = torch.futures.Future(
                devices=[torch.device(device) for device in devices]
            )
        if self.done:
            self.set_future()
        return self._future

    def source_rank(self) -> int:
        """Return the group rank that the message came from; -1 if the work is not a receive."""
        return self.source

    _source_rank = source_rank


class WorkQueue:
    """The queue of works and its communication thread.

    The thread starts with the first work in the background.

    Example:
        >>> works, done = WorkQueue(), []
        >>> work = Work(works, None, "nothing", lambda: [], lambda: done.append(1), [],
        ...             timeout_s=1.0, in_order=True)
        >>> works.submit(work, background=False)
        >>> work.wait(), done
        (True, [1])
        >>> works.close(drain=True)
    """

    def __init__(self) -> None:
        self.broken: Exception | None = None
        self.watchdog = Watchdog()
        self._queued: collections.deque[Work] = collections.deque()
        self._posted: list[Work] = []
        # Only the thread that holds this lock may call MPI, which is
        # started for one caller at a time.
        self._mpi_lock = threading.Lock()
        # For the attributes below; never held while MPI works.
        self._lock = threading.Lock()
        self._waiting_threads = 0
        self._groups = 0
        self._thread: threading.Thread | None = None
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def add_group(self) -> None:
        """Count one more process group that uses the queue."""
        with self._lock:
            self._groups += 1

    def remove_group(self, owner: object, drain: bool) -> None:
        """Remove a process group that no longer uses the queue; with the last one the thread ends.

        Args:
            owner: The process group.
            drain: True to finish its works before. Otherwise, if it has any, MPI cannot be used any
                more.
        """
        works = [work for work in self._works() if work.owner is owner]
        self._end_works(works, drain)
        with self._lock:
            self._groups -= 1
            is_last = self._groups <= 0
        if is_last:
            self.close(drain)

    def submit(self, work: Work, background: bool) -> None:
        """Put a work into the queue.

        Args:
            work: The work.
            background: True to let the communication thread do it; otherwise some thread must wait
                for it.

        Raises:
            torch.distributed.DistBackendError: An earlier operation timed out, and MPI's state is
                unknown since then.
        """
        if self.broken is not None:
            raise dist.DistBackendError(
                f"MPI: {work.name}: impossible after an earlier failure: {self.broken}"
            )
        # Without a lock: a deque takes items from several threads, and only the thread that has MPI
        # takes them out.
        self._queued.append(work)
        if not background:
            return
        # Post it from here: others can go on with it before the thread has woken up.
        self.poll()
        if not work.done:
            self._wake_thread()

    def poll(self) -> None:
        """Post queued works and check which messages have arrived, unless another thread does."""
        self._progress(wait_s=0, finish_collectives=False)

    # The time of MPI's calls is that of the network, as with Gloo, which has threads for them.
    @polling()
    def run_until(self, work: Work, timeout_s: float | None) -> bool:
        """Do due works until a given work is done.

        Args:
            work: The work.
            timeout_s: Seconds to try; None for no limit but the work's own.

        Returns:
            True if it is done, False if the time was up before.
        """
        start = time.perf_counter()
        # While a thread waits here, the communication thread leaves MPI to it.
        with self._lock:
            self._waiting_threads += 1
        try:
            while not work.done:
                self._progress(_LONG_PAUSE_S, finish_collectives=True)
                if work.done:
                    break
                waited = time.perf_counter() - start
                if timeout_s is not None and waited > timeout_s:
                    return False
                if waited <= _SPIN_S:
                    # Another worker may need this core to come to the operation.
                    os.sched_yield()
                elif waited < 1:
                    time.sleep(_SHORT_PAUSE_S)
                else:
                    time.sleep(_LONG_PAUSE_S)
        finally:
            with self._lock:
                self._waiting_threads -= 1
        return True

    def close(self, drain: bool) -> None:
        """End all works and the threads, which start again when they are needed."""
        self._end_works(self._works(), drain)
        with self._lock:
            thread, self._thread = self._thread, None
            wake = self._wake
        if thread is not None:
            wake.put(False)
            if thread is not threading.current_thread():
                limit_s = None
                if self.broken is not None:
                    # After a failure the thread may be stuck in MPI for good.
                    limit_s = 1.0
                thread.join(limit_s)
        self.watchdog.close()

    def _works(self) -> list[Work]:
        return [*self._posted, *self._queued]

    def _end_works(self, works: Sequence[Work], drain: bool) -> None:
        for work in works:
            if drain and self.broken is None:
                self.run_until(work, None)
            elif not work.done:
                self.broken = self.broken or dist.DistBackendError(f"MPI: {work.name}: given up")

    def _progress(self, wait_s: float, finish_collectives: bool) -> bool:
        """Do new and due works if no other thread does; return True if works ended."""
        if not self._mpi_lock.acquire(timeout=wait_s):
            return False
        try:
            ended = self._advance(finish_collectives)
        finally:
            self._mpi_lock.release()
        # Callbacks of futures run here, without the lock: a callback may start an
        # operation, which takes the lock.
        for work in ended:
            work.set_future()
        return bool(ended)

    def _advance(self, finish_collectives: bool) -> list[Work]:
        """Do new and due works, and return those that ended. The caller holds the lock."""
        while self._queued:
            work = self._queued.popleft()
            work.start()
            self._posted.append(work)
        ended = []
        # The first collective that has not ended blocks the later ones: all workers make MPI's
        # blocking calls in the same order, or they would wait for each other. Messages pass.
        blocked = not finish_collectives
        now = time.perf_counter()
        for work in list(self._posted):
            if work.in_order and blocked and not work.done:
                continue
            if work.done or work.has_arrived():
                work.complete()
            else:
                error = work.expire(now)
                self.broken = self.broken or error
            if work.done:
                self._posted.remove(work)
                ended.append(work)
            elif work.in_order:
                blocked = True
        return ended

    def _wake_thread(self) -> None:
        with self._lock:
            if self._thread is None:
                # Each thread has its own queue of wake-ups: a thread that
                # is ending reads the old one.
                self._wake = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=self._run, args=(self._wake,), name="mpi-communication", daemon=True
                )
                self._thread.start()
            self._wake.put(True)

    def _run(self, wake: queue.SimpleQueue[bool]) -> None:
        """Run the communication thread: do works, unless a waiting thread already does."""
        is_running = wake.get()
        since = time.perf_counter()
        while is_running:
            if not self._waiting_threads and self._progress(_LONG_PAUSE_S, finish_collectives=True):
                since = time.perf_counter()
            if not self._posted and not self._queued:
                is_running = wake.get()
                since = time.perf_counter()
            elif self._waiting_threads or time.perf_counter() - since > _SPIN_S:
                # Not get(timeout=...): Python's SimpleQueue waits without end if a short time
                # limit has passed when it finds that an earlier put() has been answered
                # already (CPython up to 3.12).
                pause_s = _SHORT_PAUSE_S
                if self._waiting_threads:
                    # A thread that waits does the works itself.
                    pause_s = _LONG_PAUSE_S
                time.sleep(pause_s)
                with contextlib.suppress(queue.Empty):
                    is_running = wake.get_nowait()
