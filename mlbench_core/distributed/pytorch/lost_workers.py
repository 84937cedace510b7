"""Find out which worker was lost if a collective operation fails.

The error of a backend says that a connection was closed or that time is up, but does not name the
worker. So the workers do three things:

1. At the start each writes a record of itself into the process group's store (:func:`introduce`).
2. Once the first collective of a group has gone through, each of its workers reads the records of
   the group (:func:`read_records`).
3. If a later collective fails, each writes a notice and looks for the workers that did not.

On its own machine, a worker can see that another one's process has ended. A worker on another
machine, or one that hangs, is recognized only because it does not answer.
"""

from __future__ import annotations

import contextlib
import dis
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch.distributed as dist

from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.errors import WorkerError

__all__ = [
    "explained",
    "forget",
    "introduce",
    "is_failed_communication",
    "name_lost_workers",
    "naming_lost_workers",
    "read_records",
]

SILENCE_S = 5.0
"""Seconds to wait for the notices of workers whose processes are not known to have ended."""

# Modules whose errors may be those of a collective operation, raised by a
# statement or by compiled code.
_LIBRARIES = ("mlbench_core.aggregation.", "mlbench_core.distributed.", "torch.distributed.")

# Words of failed collective operations; only errors that come out of one of these libraries are
# compared with them.
_COMMUNICATION = re.compile(
    r"\b(gloo|nccl|mpi|connection|socket|timed out|timeout|peer|broken pipe)\b", re.IGNORECASE
)

# Gloo's texts for callers that wait for their work themselves, as autograd and a user's
# ``work.wait()`` do.
_GLOO = re.compile(r"\bgloo/|^Application timeout caused pair closure")

# Bytecodes of raise statements: an error that left another instruction comes out of compiled code.
_RAISE = frozenset([dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]])


@dataclass(frozen=True)
class _Record:
    """A worker's host and process; ``machine`` is equal if processes see each other's ids."""

    host: str
    pid: int
    machine: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class _KnownWorkers:
    """The records of the workers of one process group.

    ``processes`` has the processes of this machine. They are looked up when the records are read,
    because a process id may be reused later. An entry is None if the process has ended by then.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.records: dict[int, _Record] = {}
        self.processes: dict[int, psutil.Process | None] = {}

    def of_this_group(self) -> bool:
        return self.group is not None and self.group is dist.group.WORLD

    def has_ended(self, rank: int) -> bool:
        """Return True if the worker's process has certainly ended.

        The answer is False if it runs, or if it is on another machine.
        """
        if rank not in self.processes:
            return False
        process = self.processes[rank]
        try:
            if process is None or not process.is_running():
                return True
            # A zombie has ended, but its parent has not collected its status yet.
            return bool(process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True


_known = _KnownWorkers()


def introduce() -> None:
    """Write this worker's record into the process group's store, once; without a collective.

    A worker alone writes nothing. A process group without a store (that of an MPI built into torch)
    has no records, and lost workers are then not named.
    """
    global _known
    if process_groups.world_size() == 1 or _known.of_this_group():
        return
    _known = _KnownWorkers(dist.group.WORLD)
    record = _Record(socket.gethostname(), os.getpid(), _machine())
    with contextlib.suppress(RuntimeError, ValueError):
        key = _key("record", process_groups.rank())
        process_groups.store().set(key, json.dumps(asdict(record)))


def forget() -> None:
    """Release the process group before it is destroyed: its store keeps the rendezvous' port."""
    global _known
    _known = _KnownWorkers()


@contextlib.contextmanager
def naming_lost_workers() -> Iterator[None]:
    """Turn a failed collective operation in the block into an error that names lost workers.

    Any other error passes as it is, whatever its text: a data loader of the user's may time out as
    well.

    Raises:
        WorkerError: Communication failed. The message names the workers that are gone or do not
            answer; the backend's own error is its cause.
    """
    try:
        yield
    except RuntimeError as error:  # the type that torch and its backends raise
        name_lost_workers(error)
        raise
    read_records()


def name_lost_workers(error: RuntimeError) -> None:
    """Raise an error that names lost workers, if a failed collective operation raised ``error``.

    For an ``except`` clause. Unlike :func:`naming_lost_workers`, it takes no part in a step without
    an error.

    Args:
        error: The error, as it was caught. If this returns, it has another reason, or names the
            workers already, and the caller raises it again.

    Raises:
        WorkerError: See :func:`naming_lost_workers`.
    """
    if isinstance(error, WorkerError) or process_groups.world_size() == 1:
        return
    if is_failed_communication(error):
        raise explained(error) from error


def is_failed_communication(error: RuntimeError) -> bool:
    """Return True if a collective operation, or the process group's store for one, raised it.

    torch has types for some of these errors. Gloo's are plain RuntimeErrors, which come out of
    compiled code. So the place that raised an error decides first, and then its text. A ``raise``
    statement outside of torch.distributed and of this library does not belong to a collective.

    Args:
        error: The error, as it was caught.
    """
    module, by_statement = _origin(error)
    is_library = module.startswith(_LIBRARIES)
    if isinstance(error, dist.DistError):
        return is_library or (isinstance(error, dist.DistBackendError) and not by_statement)
    if is_library:
        return bool(_COMMUNICATION.search(str(error)))
    return not by_statement and bool(_GLOO.search(str(error)))


def _origin(error: BaseException) -> tuple[str, bool]:
    """Return the module that raised an error, and whether by ``raise``, not in compiled code."""
    innermost = error.__traceback__
    if innermost is None:
        return "", True
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    frame = innermost.tb_frame
    module = str(frame.f_globals.get("__name__", ""))
    # The traceback has the position of the instruction that the error left.
    return module, frame.f_code.co_code[innermost.tb_lasti] in _RAISE


def explained(error: Exception) -> WorkerError:
    """Return a failed communication's error that names the lost workers, in at most ten seconds.

    Args:
        error: The backend's error.
    """
    # A request to the store over a cut cable never returns. So a thread makes the
    # request, and may be left behind.
    answer: list[str] = []
    asking = threading.Thread(
        target=lambda: answer.append(_who_is_lost()), name="who-is-lost", daemon=True
    )
    asking.start()
    asking.join(2 * SILENCE_S)
    if not answer:
        answer.append(
            f"communication failed: {_name(0)}, which holds "
            "the process group's store, does not answer"
        )
    reason = str(error).strip().split("\n", 1)[0]
    return WorkerError(f"{answer[0]}; the backend says: {reason}")


def _who_is_lost() -> str:
    """Return one clause that names the workers that are gone, else those that do not answer.

    A worker that notices the loss writes a notice before it ends. It may have ended when another
    one looks, but it is not the cause.
    """
    # Workers of other groups may have written theirs since, and if no collective has gone through,
    # none is known yet. One by one, because some may never write one.
    for rank in range(process_groups.world_size()):
        _read_records([rank])
    try:
        store = process_groups.store()
    except RuntimeError:
        if process_groups.world_size() == 2:
            return f"communication with worker {1 - process_groups.rank()} failed"
        return "communication failed"
    silent = set(range(process_groups.world_size())) - {process_groups.rank()}
    deadline = time.monotonic() + SILENCE_S
    while True:
        try:
            store.set(_key("noticed", process_groups.rank()), "1")
            # Before the look at the notices: a worker that writes one and ends in
            # between must not count as lost.
            ended = [rank for rank in sorted(silent) if _known.has_ended(rank)]
            for rank in sorted(silent):
                if store.check([_key("noticed", rank)]):
                    silent.remove(rank)
        except RuntimeError:
            return f"lost {_name(0)}: the process group's store, which it holds, does not answer"
        # A process of this machine that has ended without a notice is the cause for certain; the
        # rest need not be waited for.
        gone = [rank for rank in ended if rank in silent]
        if gone:
            return "lost " + ", ".join(map(_name, gone))
        if not silent or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if not silent:
        return "communication failed, although all workers answer: was the network interrupted?"
    names = ", ".join(map(_name, sorted(silent)))
    return f"communication failed, and these workers do not answer: {names}"


def read_records(group: Any = None) -> None:
    """Read the records of a group's workers, each once; call it after a collective of the group.

    Every worker that took part in it has written its record before. Another worker of the world may
    write its own much later.

    Args:
        group: The process group; None for that of all workers.
    """
    size = process_groups.world_size(group)
    _read_records([process_groups.global_rank(rank, group) for rank in range(size)])


def _read_records(ranks: Iterable[int]) -> None:
    """Read the records of workers that are not known yet, if all of these have written theirs."""
    unknown = [rank for rank in ranks if rank not in _known.records]
    if not _known.of_this_group() or not unknown:
        return
    keys = [_key("record", rank) for rank in unknown]
    with contextlib.suppress(RuntimeError):
        store = process_groups.store()
        if not store.check(keys):
            return
        machine = _machine()
        for rank, key in zip(unknown, keys, strict=True):
            record = _Record(**json.loads(store.get(key)))
            _known.records[rank] = record
            if record.machine == machine != "":
                # None remains if the process has ended already.
                _known.processes[rank] = None
                with contextlib.suppress(psutil.NoSuchProcess):
                    _known.processes[rank] = psutil.Process(record.pid)


def _name(rank: int) -> str:
    record = _known.records.get(rank)
    if record is None:
        return f"worker {rank}"
    return f"worker {rank} ({record})"


def _key(kind: str, rank: int) -> str:
    return f"mlbench/{kind}/{rank}"


def _machine() -> str:
    """Return a name of the running kernel and its namespace of process ids; empty if unknown."""
    # Containers of one host have one kernel, but do not see each other's
    # process ids: hence the namespace.
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
