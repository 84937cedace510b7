"""Measure the time of collective operations, and check their results.

:func:`measure` times one collective on one size and type. It follows the practice of nccl-tests:

* The first operations are a warm-up that is not counted, because they set up connections and fill
  caches.
* A barrier precedes every repetition, without a pause before or after it. After a pause an
  operation is slower, because the threads that do it have gone to sleep.
* There are enough operations between two readings of the clock that the time of reading does not
  matter. Their number follows from the times of the warm-up and is the same on all workers.
* On GPUs the clock is a pair of CUDA events around these operations, without synchronization
  between them.
* The time of a repetition is that of its slowest worker. Workers exchange times after all
  repetitions.
* The results are compared with the expected ones. The values are small integers, whose sums are
  exact in every type.
"""

from __future__ import annotations

import importlib.util
import math
import operator
import os
import platform
import socket
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from latency import Measurement
from torch import Tensor

from mlbench_core import __version__
from mlbench_core.arguments import check_int, check_positive
from mlbench_core.errors import ConfigurationError

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Collective",
    "Reduce",
    "ReduceScatter",
    "SendRecv",
    "describe_machine",
    "describe_versions",
    "measure",
    "why_not",
]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""Types of elements by name."""

# Period of the values. Sizes are usually round numbers or powers of two. A prime period does not
# divide them, so values that arrive in the wrong place differ from the expected ones.
PERIOD = 8191
# bfloat16 has 8 significant bits, so whole numbers up to 256 are exact in it.
EXACT = 256
# The warm-up lasts about this long, with at least the first and at most the second of these numbers
# of runs.
WARM_UP_S = 0.02
WARM_UP_RUNS = (2, 100)
# Largest number of runs between two readings of the clock.
MAX_RUNS = 1000
# Number of repetitions that are done even if they take longer than the budget.
MIN_REPETITIONS = 3


class Collective(ABC):
    """One collective operation on its own buffers, with values whose results are known.

    The values of worker r repeat a sequence :math:`v_r` of random whole numbers from 0 to ``256 //
    world_size``. In the part of a buffer that worker j receives, the sequence is rolled by j
    (:meth:`torch.Tensor.roll`). Workers from rank 256 on have zeros, so that every sum is exact in
    bfloat16.

    Args:
        elements: Number of elements of this worker's larger buffer; a multiple of the world size if
            the collective cuts it into parts.
        dtype: Type of the elements.
        device: Device of the buffers.
        group: The process group; None is the default one.

    Attributes:
        elements: As given.

    Raises:
        ConfigurationError: This process has no process group.
        ValueError: ``elements`` is below 1, or is not a multiple of the world size although it must
            be.
    """

    name: ClassVar[str]
    """Its name in :data:`COLLECTIVES`."""
    is_cut: ClassVar[bool] = False
    """True if the larger buffer is cut into one part for each worker."""
    is_in_place: ClassVar[bool] = False
    """True if results overwrite the values sent, so that values grow with each repetition."""
    trips: ClassVar[int] = 1
    """Number of operations that one :meth:`run` does, one after the other."""

    def __init__(
        self,
        elements: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigurationError(
                "this process has no process group: measure in `with initialize_backends(...)`"
            )
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if operator.index(elements) < 1 or (self.is_cut and elements % self.world_size):
            allowed = "at least 1"
            if self.is_cut:
                allowed += f" and a multiple of the {self.world_size} workers"
            raise ValueError(f"elements must be {allowed} for {self.name}, not {elements}")
        self.elements, self.dtype, self.device = elements, dtype, torch.device(device)
        self.buffer = self._new(elements)

    @abstractmethod
    def fill(self) -> None:
        """Write the values to send, and other values into the buffer for receiving."""

    @abstractmethod
    def run(self) -> None:
        """Do the operation: on return it is done, or on GPUs enqueued on the current stream."""

    @abstractmethod
    def count_wrong(self) -> int:
        """Count this worker's wrong elements after :meth:`fill` and :meth:`run`."""

    def _new(self, elements: int) -> Tensor:
        return torch.empty(elements, dtype=self.dtype, device=self.device)

    def _part(self, index: int) -> Tensor:
        """Return the part of the larger buffer that belongs to a worker, as a view."""
        size = self.elements // self.world_size
        return self.buffer[index * size : (index + 1) * size]

    def _values(self, rank: int, receiver: int = 0) -> Tensor:
        """Return one period of the values from ``rank`` to ``receiver``: shape (PERIOD,)."""
        return _sequence(rank, self.world_size).roll(receiver).to(self.device, self.dtype)

    def _sum(self, receiver: int = 0) -> Tensor:
        """Return one period of the sum of the values that all workers send."""
        ranks = range(min(self.world_size, EXACT))
        sequences = [_sequence(rank, self.world_size) for rank in ranks]
        return torch.stack(sequences).sum(0).roll(receiver).to(self.device, self.dtype)

    def _peer(self, rank: int) -> int:
        """Convert a rank in this group to one in the default group, which torch takes as a root."""
        if self.group is None:
            return rank
        return dist.get_global_rank(self.group, rank)


class AllReduce(Collective):
    """The sum over all workers, at every worker, in place."""

    name = "all_reduce"
    is_in_place = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Made once, because fill() runs before every repetition, and a pause makes the next
        # operation slower.
        self._own = self._values(self.rank)

    def fill(self) -> None:
        _repeat(self._own, self.buffer)

    def run(self) -> None:
        dist.all_reduce(self.buffer, group=self.group)

    def count_wrong(self) -> int:
        return _count_different(self.buffer, self._sum())


class Reduce(AllReduce):
    """The sum over all workers at worker 0, in place."""

    name = "reduce"

    def run(self) -> None:
        dist.reduce(self.buffer, self._peer(0), group=self.group)

    def count_wrong(self) -> int:
        if self.rank != 0:
            return 0
        return super().count_wrong()


class Broadcast(Collective):
    """Worker 0's values at every worker."""

    name = "broadcast"

    def fill(self) -> None:
        if self.rank == 0:
            _repeat(self._values(0), self.buffer)
        else:
            # No worker sends this value, so an element that does not arrive counts as wrong.
            self.buffer.fill_(-1)

    def run(self) -> None:
        dist.broadcast(self.buffer, self._peer(0), group=self.group)

    def count_wrong(self) -> int:
        return _count_different(self.buffer, self._values(0))


class AllGather(Collective):
    """All workers' values, one after the other, at every worker."""

    name = "all_gather"
    is_cut = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent = self._new(self.elements // self.world_size)
        # torch before 2.13 has only the older name; from 2.13 on, the older name warns.
        self._gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def fill(self) -> None:
        _repeat(self._values(self.rank), self.sent)
        self.buffer.fill_(-1)

    def run(self) -> None:
        self._gather(self.buffer, self.sent, group=self.group)

    def count_wrong(self) -> int:
        wrong = 0
        for rank in range(self.world_size):
            wrong += _count_different(self._part(rank), self._values(rank))
        return wrong


class ReduceScatter(Collective):
    """The sum over all workers, of which each worker receives one part."""

    name = "reduce_scatter"
    is_cut = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received = self._new(self.elements // self.world_size)
        # As in AllGather, torch before 2.13 has the older name only.
        self._scatter: Any = (
            getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        )

    def fill(self) -> None:
        for receiver in range(self.world_size):
            _repeat(self._values(self.rank, receiver), self._part(receiver))
        self.received.fill_(-1)

    def run(self) -> None:
        self._scatter(self.received, self.buffer, group=self.group)

    def count_wrong(self) -> int:
        return _count_different(self.received, self._sum(self.rank))


class AllToAll(Collective):
    """A different part from every worker to every worker."""

    name = "all_to_all"
    is_cut = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received, self.sent = self.buffer, self._new(self.elements)

    def fill(self) -> None:
        size = self.elements // self.world_size
        for receiver in range(self.world_size):
            part = self.sent[receiver * size : (receiver + 1) * size]
            _repeat(self._values(self.rank, receiver), part)
        self.received.fill_(-1)

    def run(self) -> None:
        dist.all_to_all_single(self.received, self.sent, group=self.group)

    def count_wrong(self) -> int:
        wrong = 0
        for rank in range(self.world_size):
            wrong += _count_different(self._part(rank), self._values(rank, self.rank))
        return wrong


class SendRecv(Collective):
    """Ping-pong between worker 2 i and worker 2 i + 1, all pairs at once.

    Worker 2 i sends its values and receives them back. The time of one operation is that of one
    way, half a round trip. With an odd number of workers, the last one has no partner and does
    nothing."""

    name = "send_recv"
    trips = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.partner = self.rank ^ 1
        self.returned = self._new(self.elements)
        self._to = self._peer(self.partner) if self.partner < self.world_size else None

    def fill(self) -> None:
        if self.rank % 2 == 0:
            _repeat(self._values(self.rank), self.buffer)
        else:
            self.buffer.fill_(-1)
        self.returned.fill_(-1)

    def run(self) -> None:
        if self._to is None:
            return
        if self.rank % 2 == 0:
            dist.send(self.buffer, self._to, group=self.group)
            dist.recv(self.returned, self._to, group=self.group)
        else:
            # The odd rank receives first: if both sent first, they could wait for each other.
            dist.recv(self.buffer, self._to, group=self.group)
            dist.send(self.buffer, self._to, group=self.group)

    def count_wrong(self) -> int:
        if self._to is None:
            return 0
        even_rank = min(self.rank, self.partner)
        received = self.returned if self.rank == even_rank else self.buffer
        return _count_different(received, self._values(even_rank))


COLLECTIVES: dict[str, type[Collective]] = {
    kind.name: kind
    for kind in (AllReduce, Broadcast, AllGather, ReduceScatter, AllToAll, Reduce, SendRecv)
}
"""The collectives that can be measured, by name."""


def measure(
    collective: str,
    elements: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    group: dist.ProcessGroup | None = None,
    repetitions: int = 100,
    operations: int | None = None,
    block_s: float = 1e-3,
    budget_s: float | None = None,
) -> Measurement:
    """Measure the time of a collective by the method that the module describes.

    Every worker of the group must call it with the same arguments.

    Args:
        collective: Name of one of :data:`COLLECTIVES`.
        elements: Number of elements of one worker's larger buffer; a multiple of the number of
            workers for ``all_gather``, ``reduce_scatter`` and ``all_to_all``.
        dtype: Type of the elements.
        device: Device of the tensors; on GPUs the time is the device's.
        group: The process group; None is the default one.
        repetitions: Number of repetitions, at least 1.
        operations: Number of operations between two readings of the clock (for ``send_recv``, of
            round trips). None chooses it by ``block_s``.
        block_s: Smallest time between two readings of the clock, in seconds. If a single operation
            takes longer, each one is timed separately.
        budget_s: Seconds that all repetitions may take together; None for no limit. If they would
            take longer, fewer than ``repetitions`` are done, but at least 3. Workers may give
            different budgets; the smallest counts.

    Returns:
        The measurement, the same on every worker.

    Raises:
        ConfigurationError: This process has no process group, or the group has only one worker.
        ValueError: An argument is unknown or out of its range.

    Example:
        >>> def latency_of_100_floats():
        ...     return measure("all_reduce", 100).statistics.p50_s
    """
    check_int("repetitions", repetitions)
    if operations is not None:
        check_int("operations", operations)
    check_positive("block_s", block_s)
    operation = _make(collective, elements, dtype, device, group)
    if operation.world_size < 2:
        raise ConfigurationError("the world size must be at least 2, not 1: start more workers")
    operation.fill()
    start = time.perf_counter()
    operation.run()
    # On a GPU, reading the result waits for the operation, so first_s includes all of it.
    wrong = operation.count_wrong()
    first_s = time.perf_counter() - start
    run_s, budget_s = _pilot(operation, first_s, math.inf if budget_s is None else budget_s)
    # All terms are the same on every worker, so all do the same number of collectives.
    runs = operations or min(math.ceil(block_s / run_s), MAX_RUNS)
    count = repetitions
    if budget_s != math.inf:
        count = min(repetitions, max(int(budget_s / (runs * run_s)), MIN_REPETITIONS))
    own_seconds = [_repetition(operation, runs) / (runs * operation.trips) for _ in range(count)]
    return Measurement(
        collective=collective,
        backend=dist.get_backend(group),
        device=operation.device.type,
        dtype=str(dtype).removeprefix("torch."),
        world_size=operation.world_size,
        elements=elements,
        size_bytes=elements * dtype.itemsize,
        operations=runs * operation.trips,
        seconds=tuple(_over_workers(own_seconds, operation, dist.ReduceOp.MAX)),
        wrong_elements=int(_over_workers([float(wrong)], operation, dist.ReduceOp.SUM)[0]),
    )


def why_not(
    collective: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> str | None:
    """Try a collective once, and return the reason if the backend cannot do it for this type.

    Every worker of the group must call it.

    Args:
        collective: Name of one of :data:`COLLECTIVES`.
        dtype: Type of the elements.
        device: Device of the tensors.
        group: The process group; None is the default one.

    Returns:
        None if it succeeded on every worker, else the backend's error in one line.

    Raises:
        ConfigurationError: This process has no process group.
        ValueError: The collective is unknown.

    Example:
        >>> def left_out():
        ...     return {name: why_not("all_reduce", dtype) for name, dtype in DTYPES.items()}
    """
    elements = dist.get_world_size(group) if dist.is_initialized() else 1
    operation = _make(collective, elements, dtype, device, group)
    reason = None
    try:
        operation.fill()
        operation.run()
        # A GPU reports an error only when results are read.
        operation.count_wrong()
    except (RuntimeError, TypeError, ValueError, NotImplementedError, KeyError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    # Every worker takes part in this exchange, also after an error, because the others wait for it.
    failed = _over_workers([float(reason is not None)], operation, dist.ReduceOp.MAX)[0]
    if reason is None and failed:
        return "it failed on another worker"
    return reason


def describe_machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Describe the machines that the workers run on. Every worker calls it.

    Args:
        device: Device of this worker's tensors.

    Returns:
        ``hosts`` (the host names of all workers, by rank), ``cores`` (of this worker's machine),
        ``system`` (its platform), and with a CUDA device ``gpu`` (the name of the device).

    Example:
        >>> def hosts():
        ...     return describe_machine()["hosts"]
    """
    device = torch.device(device)
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    machine = {"hosts": hosts, "cores": os.cpu_count(), "system": platform.platform()}
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
    return machine


def describe_versions() -> dict[str, str]:
    """Return the versions of the software that takes part in a communication.

    Returns:
        Version by name; with the backends NCCL and MPI also theirs.

    Example:
        >>> sorted(describe_versions())
        ['mlbench_core', 'numpy', 'python', 'torch']
    """
    versions = {
        "mlbench_core": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
    backend = dist.get_backend() if dist.is_initialized() else None
    if backend == "nccl":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if backend == "mpi" and importlib.util.find_spec("mpi4py"):
        library = importlib.import_module("mpi4py.MPI").Get_library_version()
        versions["mpi"] = library.replace("\0", "").splitlines()[0]
    return versions


def _make(
    collective: str,
    elements: int,
    dtype: torch.dtype,
    device: torch.device | str,
    group: dist.ProcessGroup | None,
) -> Collective:
    if collective not in COLLECTIVES:
        raise ValueError(f"collective must be one of {', '.join(COLLECTIVES)}, not {collective!r}")
    return COLLECTIVES[collective](elements, dtype, device, group)


def _pilot(operation: Collective, first_s: float, budget_s: float) -> tuple[float, float]:
    """Warm up, and return the seconds per run of the slowest worker and the smallest budget.

    ``first_s`` is the time of the first operation, which decides how many runs the warm-up has.
    """
    least, most = WARM_UP_RUNS
    slowest_s = _over_workers([first_s], operation, dist.ReduceOp.MAX)[0]
    runs = min(max(int(WARM_UP_S / slowest_s), least), most)
    own_s = _repetition(operation, runs) / runs
    # The smallest budget is the largest negative one, so a single maximum serves both.
    run_s, negative_budget_s = _over_workers([own_s, -budget_s], operation, dist.ReduceOp.MAX)
    return max(run_s, 1e-9), -negative_budget_s


def _repetition(operation: Collective, runs: int) -> float:
    """Return the seconds of several runs on this worker, after a barrier."""
    # In place, each run sums the result of the run before, so without new values the sums would
    # overflow.
    if operation.is_in_place:
        operation.fill()
    # NCCL's barrier needs the device as an argument; other backends refuse it.
    device_ids = None
    if dist.get_backend(operation.group) == "nccl" and operation.device.index is not None:
        device_ids = [operation.device.index]
    dist.barrier(group=operation.group, device_ids=device_ids)
    if operation.device.type == "cuda":
        return _cuda_seconds(operation, runs)
    return _host_seconds(operation, runs)


def _host_seconds(operation: Collective, runs: int) -> float:
    """Return the process's time from before the first run to after the last."""
    run = operation.run
    start = time.perf_counter()
    for _ in range(runs):
        run()
    return time.perf_counter() - start


def _cuda_seconds(operation: Collective, runs: int) -> float:
    """Return the device's time from before the first run to after the last."""
    with torch.cuda.device(operation.device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(runs):
            operation.run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def _over_workers(values: list[float], operation: Collective, op: Any) -> list[float]:
    """Reduce the values of all workers element by element; the result is the same on each."""
    device = torch.device("cpu")
    # NCCL sends from GPUs only.
    if dist.get_backend(operation.group) == "nccl":
        device = operation.device
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op, group=operation.group)
    return list(map(float, tensor.tolist()))


def _sequence(rank: int, world_size: int) -> Tensor:
    """Return one period of the values of a worker: shape (PERIOD,), int64, on the CPU."""
    if rank >= EXACT:
        return torch.zeros(PERIOD, dtype=torch.int64)
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, max(1, EXACT // world_size) + 1, (PERIOD,), generator=generator)


def _repeat(sequence: Tensor, out: Tensor) -> None:
    """Fill a tensor with repetitions of a sequence."""
    # One call for small sizes: they are filled before every repetition, and a pause makes the next
    # operation slower.
    if len(out) <= len(sequence):
        out.copy_(sequence[: len(out)])
        return
    whole = len(out) // PERIOD * PERIOD
    out[:whole].view(-1, PERIOD).copy_(sequence.expand(whole // PERIOD, PERIOD))
    out[whole:].copy_(sequence[: len(out) - whole])


def _count_different(tensor: Tensor, sequence: Tensor) -> int:
    """Count the elements that differ from a sequence that repeats; nan differs from everything."""
    whole = len(tensor) // PERIOD * PERIOD
    in_whole = (tensor[:whole].view(-1, PERIOD) != sequence).sum()
    return int(in_whole + (tensor[whole:] != sequence[: len(tensor) - whole]).sum())
