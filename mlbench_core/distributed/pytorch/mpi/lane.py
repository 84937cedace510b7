"""The one lane on which a process talks to MPI.

Works are put into a queue and done in its order, by one thread at a time: by the communication thread, or by a thread
that waits for a work, which then does what is due itself instead of waiting for the other thread to wake up (handing a
work over costs some 30 microseconds, an all-reduce of 100 numbers 2).

A work has two parts. It is *posted* with MPI requests that do not block: those of its messages, or for a collective a
non-blocking barrier. When they have completed it is *finished*, by MPI's blocking call in the case of a
collective. Since all workers are then known to be there, that call does not wait for anyone. So a wait can have a time
limit and can be interrupted, messages go out beside a collective that others are late for, and still MPI's blocking
algorithms move the data, which are faster than its non-blocking ones. Should a worker or its link be lost in the
middle of such a call, it never returns: a watchdog then ends the process.
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

__all__ = ["Lane", "Work"]

_SPIN_S = 2e-3
"""How long to ask MPI again and again before pausing in between: longer waits should leave the core to others."""
_SHORT_PAUSE_S = 5e-5
_LONG_PAUSE_S = 1e-3


class Work(dist.Work):
    """One operation on the lane, and the handle that ``async_op=True`` gives.

    Args:
        lane: Where it is done.
        owner: The process group it belongs to.
        name: The operation and its place, for messages, as in ``"all_reduce, rank 0 of 2"``.
        post: Starts MPI's requests without blocking and returns them; they are waited for.
        finish: What follows when they have completed.
        result: The tensors that the operation fills, as its future gives them.
        timeout_s: Seconds from now after which it has failed; once its requests have completed, ``finish`` has as
            long before the process ends.
        in_order: Whether earlier works that are in order must be finished first, as for collectives.
    """

    def __init__(
        self,
        lane: Lane,
        owner: object,
        name: str,
        post: Callable[[], Sequence[Any]],
        finish: Callable[[], None] | None,
        result: Sequence[torch.Tensor],
        timeout_s: float,
        in_order: bool,
    ) -> None:
        super().__init__()
        self.name = name
        self.owner = owner
        self.in_order = in_order
        self.requests: Sequence[Any] = ()
        self.source = -1
        self.done = False
        self._lane = lane
        self._post = post
        self._finish = finish
        self._result = list(result)
        self._timeout_s = timeout_s
        self._deadline = time.perf_counter() + timeout_s
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._future_lock = threading.Lock()

    # What the lane calls

    def start(self) -> None:
        """Post the requests."""
        try:
            self.requests = self._post()
        except Exception as error:
            self.fail(_named(self.name, error))

    def arrived(self) -> bool:
        """Whether the requests have completed."""
        try:
            self.requests = [request for request in self.requests if not request.Test()]
        except Exception as error:
            self.fail(_named(self.name, error))
            return True
        return not self.requests

    def complete(self) -> None:
        """Do what follows the requests."""
        if self._finish is not None and not self.done:
            self._lane.watchdog.watch(self.name, self._timeout_s)
            try:
                self._finish()
            except Exception as error:
                self.fail(_named(self.name, error))
            finally:
                self._lane.watchdog.rest()
        self.done = True

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if not self.done:
            self._error = error
            self.done = True

    def overdue(self, now: float) -> bool:
        return now > self._deadline

    def late(self) -> dist.DistBackendError:
        """The error of a work whose time is up."""
        return dist.DistBackendError(
            f"MPI: {self.name}: timed out, the other workers did not come within {self._timeout_s:g} s: was one lost, "
            f"or does it call another operation? MPI cannot be used any more in this process"
        )

    def announce(self) -> None:
        """Tell those who wait for the future."""
        with self._future_lock:
            future = self._future
        if future is not None:
            self._tell(future)

    def _tell(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)

    # What torch and its users call

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:  # type: ignore[override]
        """Wait until the operation is done.

        Args:
            timeout: How long; zero leaves it to the process group's timeout.

        Returns:
            True.

        Raises:
            torch.distributed.DistBackendError: It failed, or was not done in time.
        """
        seconds = timeout.total_seconds()
        if not self.done and not self._lane.drive(self, seconds if seconds > 0 else None):
            raise dist.DistBackendError(f"MPI: {self.name}: timed out, it was not done within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is done, well or not. Asking also lets MPI go on."""
        if not self.done:
            self._lane.nudge()
        return self.done

    def is_success(self) -> bool:
        return self.done and self._error is None

    def exception(self) -> Exception | None:  # type: ignore[override]
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors it filled."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of :meth:`result`."""
        with self._future_lock:
            if self._future is not None:
                return self._future
            devices = sorted({str(tensor.device) for tensor in self._result if tensor.is_cuda})
            self._future = torch.futures.Future(devices=[torch.device(device) for device in devices])
            if not self.done:
                return self._future
        self._tell(self._future)
        return self._future

    def source_rank(self) -> int:
        """Rank in the group that the received message came from; -1 for what is no receive."""
        return self.source

    _source_rank = source_rank


class Lane:
    """The queue of works and its communication thread, which starts when there is something to do behind the scenes.

    Example:
        >>> lane, done = Lane(), []
        >>> work = Work(lane, None, "nothing", lambda: [], lambda: done.append(1), [], timeout_s=1.0, in_order=True)
        >>> lane.submit(work, background=False)
        >>> work.wait(), done
        (True, [1])
        >>> lane.close(drain=True)
    """

    def __init__(self) -> None:
        self.broken: Exception | None = None
        self.watchdog = Watchdog()
        self._inbox: collections.deque[Work] = collections.deque()
        self._posted: list[Work] = []
        self._turn = threading.Lock()  # who holds it may call MPI
        self._guard = threading.Lock()  # for what follows
        self._drivers = 0
        self._groups = 0
        self._thread: threading.Thread | None = None
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def join(self) -> None:
        """One more process group uses the lane."""
        with self._guard:
            self._groups += 1

    def leave(self, owner: object, drain: bool) -> None:
        """A process group uses the lane no longer; with the last one the thread ends.

        Args:
            owner: The process group.
            drain: Whether to finish its works before. Otherwise MPI cannot be used any more if there are any.
        """
        self._end_works([work for work in self._works() if work.owner is owner], drain)
        with self._guard:
            self._groups -= 1
            last = self._groups <= 0
        if last:
            self.close(drain)

    def submit(self, work: Work, background: bool) -> None:
        """Put a work into the queue.

        Args:
            work: The work.
            background: Whether the communication thread shall do it; otherwise somebody must wait for it.

        Raises:
            torch.distributed.DistBackendError: An earlier operation timed out; MPI's state is unknown since.
        """
        if self.broken is not None:
            raise dist.DistBackendError(f"MPI: {work.name}: impossible after an earlier failure: {self.broken}")
        self._inbox.append(work)
        if not background:
            return
        self.nudge()
        if not work.done:
            self._wake_thread()

    def nudge(self) -> None:
        """Post what waits and see which messages have arrived, unless another thread is at it."""
        if self._turn.acquire(blocking=False):
            try:
                finished = self._progress(finish_collectives=False)
            finally:
                self._turn.release()
            _announce(finished)

    def drive(self, work: Work, timeout_s: float | None) -> bool:
        """Do what is due until a work is done.

        Args:
            work: The work.
            timeout_s: Seconds to try; None for no limit but the work's own.

        Returns:
            Whether it is done.
        """
        start = time.perf_counter()
        with self._guard:
            self._drivers += 1
        try:
            while not work.done:
                if self._turn.acquire(timeout=_LONG_PAUSE_S):
                    try:
                        finished = self._progress(finish_collectives=True)
                    finally:
                        self._turn.release()
                    _announce(finished)
                if work.done:
                    break
                waited = time.perf_counter() - start
                if timeout_s is not None and waited > timeout_s:
                    return False
                if waited > _SPIN_S:
                    time.sleep(_SHORT_PAUSE_S if waited < 1 else _LONG_PAUSE_S)
                else:
                    os.sched_yield()  # maybe to the worker that this one waits for
        finally:
            with self._guard:
                self._drivers -= 1
        return True

    def close(self, drain: bool) -> None:
        """End all works and the threads, which start again where they are needed."""
        self._end_works(self._works(), drain)
        with self._guard:
            thread, self._thread = self._thread, None
            wake = self._wake
        if thread is not None:
            wake.put(False)
            if thread is not threading.current_thread():
                thread.join(1.0 if self.broken else None)
        self.watchdog.close()

    def _works(self) -> list[Work]:
        return [*self._posted, *self._inbox]

    def _end_works(self, works: Sequence[Work], drain: bool) -> None:
        for work in works:
            if drain and self.broken is None:
                self.drive(work, None)
            elif not work.done:
                self.broken = self.broken or dist.DistBackendError(f"MPI: {work.name}: given up")

    def _progress(self, finish_collectives: bool) -> list[Work]:
        """Post new works and finish those that are due; returns those that ended. Needs the turn."""
        while self._inbox:
            work = self._inbox.popleft()
            work.start()
            self._posted.append(work)
        ended = []
        blocked = not finish_collectives
        now = time.perf_counter()
        for work in list(self._posted):
            if work.in_order and blocked and not work.done:
                continue
            if work.done or work.arrived():
                work.complete()
            elif work.overdue(now):
                work.fail(work.late())
                self.broken = self.broken or work.late()
            if work.done:
                self._posted.remove(work)
                ended.append(work)
            elif work.in_order:
                blocked = True
        return ended

    def _wake_thread(self) -> None:
        with self._guard:
            if self._thread is None:
                self._wake = queue.SimpleQueue()  # its own: a thread that is ending reads the old one
                self._thread = threading.Thread(
                    target=self._run, args=(self._wake,), name="mpi-communication", daemon=True
                )
                self._thread.start()
            self._wake.put(True)

    def _run(self, wake: queue.SimpleQueue[bool]) -> None:
        """What the communication thread does: wait for works, then do them unless somebody who waits does."""
        go_on = wake.get()
        since = time.perf_counter()
        while go_on:
            if not self._drivers and self._turn.acquire(timeout=_LONG_PAUSE_S):
                try:
                    finished = self._progress(finish_collectives=True)
                finally:
                    self._turn.release()
                _announce(finished)
                if finished:
                    since = time.perf_counter()
            if not self._posted and not self._inbox:
                go_on = wake.get()
                since = time.perf_counter()
            elif self._drivers or time.perf_counter() - since > _SPIN_S:
                with contextlib.suppress(queue.Empty):
                    go_on = wake.get(timeout=_LONG_PAUSE_S if self._drivers else _SHORT_PAUSE_S)


def _announce(works: Sequence[Work]) -> None:
    """Complete futures; callbacks run here, so without the turn."""
    for work in works:
        work.announce()


def _named(name: str, error: Exception) -> dist.DistBackendError:
    named = dist.DistBackendError(f"MPI: {name}: {error}")
    named.__cause__ = error
    return named
