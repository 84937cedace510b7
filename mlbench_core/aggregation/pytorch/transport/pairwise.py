"""Average over the workers of one machine by sends and receives, bit for bit as Gloo's all-reduce.

With k workers, a message is cut into k parts. Every worker sends part j to worker j, which averages
the k versions of its part and sends the result to all others. For a message of n bytes, a worker
sends 2 n (k - 1) / k bytes, as in a ring, but in two steps for any k. (It is a reduce-scatter and
an all-gather, as for long messages in R. Thakur, R. Rabenseifner and W. Gropp: Optimization of
Collective Communication Operations in MPICH, 2005, doi:10.1177/1094342005051521.)

Parts are cut into pieces, so that the received versions need little memory. A batch of pieces is on
its way at a time::

    each batch:    exchange versions -> average -> start to send, receive averages -> (next batch)
    at the end:    wait for the averages of all batches

Gloo's all-reduce is a ring of 2 (k - 1) steps. A thread of the process group runs the ring of one
message, and waits for the neighbor in every step. Between workers of one machine, the processors
limit the speed, and each step switches between threads. Here, torch adds and divides block by block
in the cache, and only transfers need another thread.
"""

from __future__ import annotations

import hashlib
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.transport.messages import BLOCK_ELEMENTS
from mlbench_core.distributed.pytorch import process_groups

__all__ = ["average", "is_on_one_machine", "suits"]

# Bytes of a piece, over all its parts. With four workers, smaller pieces take longer. Larger ones
# need more memory for received versions.
_PIECE_BYTES = 16 << 20
# Bytes of the received versions of one batch.
_ROOM_BYTES = 64 << 20
# Sends of this process with other tags are not mistaken for parts of a message.
_VERSION_TAG, _AVERAGE_TAG = 0x6D6C01, 0x6D6C02
_SEGMENT_BYTES = 1 << 20  # of Gloo's ring

# By group. A weak reference, because a process group keeps its store and the port of its
# rendezvous.
_is_on_one_machine: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def suits(tensor: Tensor, group: Any = None) -> bool:
    """Return whether :func:`average` can average such tensors; the same on all workers.

    Args:
        tensor: One of the tensors, or a message of them.
        group: A process group of more than one worker; None for that of all workers.
    """
    return (
        tensor.device.type == "cpu"
        and (tensor.is_floating_point() or tensor.is_complex())
        and dist.get_backend(group) == dist.Backend.GLOO
        # At this level, torch checks that all workers call the same collective operation with the
        # same shapes. Sends and receives would bypass this check.
        and dist.get_debug_level() != dist.DebugLevel.DETAIL
        and is_on_one_machine(group)
    )


def is_on_one_machine(group: Any = None) -> bool:
    """Return True if all workers of a group of Gloo have the same machine.

    See :func:`~mlbench_core.distributed.pytorch.process_groups.machine`. The first call for a group
    is a collective operation.

    Args:
        group: The group; None for all workers.
    """
    key = group
    if key is None:
        key = dist.group.WORLD
    if key not in _is_on_one_machine:
        # A worker without a name gets a random one, which equals no other.
        name = process_groups.machine() or secrets.token_hex()
        # Seven bytes, because eight may not fit into a signed int64.
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        # The maximum of the negated numbers is the negated minimum.
        largest = torch.tensor([number, -number])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        _is_on_one_machine[key] = int(largest.sum()) == 0
    return _is_on_one_machine[key]


@torch.no_grad()
def average(messages: Sequence[Tensor], divisor: Denominator | None, group: Any = None) -> None:
    """Replace messages by their sum over the workers of a group divided by a number, in place.

    The sums are those of Gloo's all-reduce to the last bit. All workers get the same. Received
    versions need up to 64 MiB until this returns.

    Args:
        messages: One-dimensional, contiguous, real, of one dtype, in the host's memory; on every
            worker of the same lengths.
        divisor: The number; None to keep the sum.
        group: The process group, of the backend Gloo and more than one worker; None for that of all
            workers.

    Raises:
        RuntimeError: A worker was lost.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    first = messages[0]
    if isinstance(divisor, Tensor):
        divisor = divisor.cpu()
    batches = list(_batches(messages, size))
    # For each piece of a batch, the number of elements to receive: k - 1 versions of the own part.
    counts_of = []
    for batch in batches:
        counts_of.append([(size - 1) * len(parts[rank]) for parts in batch])
    # Each batch overwrites the versions of the one before.
    memory = first.new_empty(max(map(sum, counts_of)))
    exchanges: list[_Exchange] = []
    for batch, counts in zip(batches, counts_of, strict=True):
        received = memory[: sum(counts)].split(counts)
        started = []
        for parts, versions in zip(batch, received, strict=True):
            started.append(_Exchange(rank, parts, versions, group))
        # All pieces of the batch travel before the first one is averaged.
        for exchange in started:
            exchange.reduce(divisor)
        exchanges += started
    for exchange in exchanges:
        exchange.finish()


def _batches(messages: Sequence[Tensor], world_size: int) -> Iterator[list[list[Tensor]]]:
    """Cut messages into pieces of one part per worker; yield as many at a time as have room."""
    batch: list[list[Tensor]] = []
    used_bytes = 0
    for message in messages:
        for parts in _pieces(message, world_size):
            received_bytes = (world_size - 1) * parts[0].nbytes
            if batch and used_bytes + received_bytes > _ROOM_BYTES:
                yield batch
                batch, used_bytes = [], 0
            batch.append(parts)
            used_bytes += received_bytes
    if batch:
        yield batch


def _pieces(message: Tensor, world_size: int) -> Iterator[list[Tensor]]:
    """Cut a message into the parts that Gloo's workers sum up, and these into pieces."""
    count = _part_elements(message, world_size)
    most = max(1, _PIECE_BYTES // message.element_size() // world_size)
    for start in range(0, count, most):
        stop = min(start + most, count)
        yield [message[rank * count + start : rank * count + stop] for rank in range(world_size)]


def _part_elements(message: Tensor, world_size: int) -> int:
    """Return the number of elements of each part; the last parts may be shorter or empty.

    As in ``gloo/allreduce.cc``, a message is cut into segments of equal size, at most 1 MiB. Each
    worker gets the same number of them, at least two.
    """
    segments = max(-(-message.nbytes // _SEGMENT_BYTES), 2 * world_size)
    of_worker = -(-segments // world_size)
    return of_worker * -(-message.numel() // (of_worker * world_size))


class _Exchange:
    """A piece of a message on its way.

    The constructor starts to send and receive versions. :meth:`reduce` waits for the versions of
    this worker's part, averages them, and starts to send and receive averages. :meth:`finish` waits
    for these. Every worker takes the steps of all pieces in the same order.
    """

    def __init__(self, rank: int, parts: Sequence[Tensor], received: Tensor, group: Any) -> None:
        self._group = group
        size = len(parts)
        # The order of Gloo's ring, in which part j is added up from worker j - 1 down to worker j.
        self._others = [(rank - distance) % size for distance in range(1, size)]
        self._own = parts[rank]
        self._other_parts = [parts[other] for other in self._others]
        self._versions = received.view(size - 1, len(self._own))
        self._receives = self._start(dist.irecv, self._versions, _VERSION_TAG)
        self._sends = self._start(dist.isend, self._other_parts, _VERSION_TAG)

    def reduce(self, divisor: Denominator | None) -> None:
        """Average this worker's part, send it, and begin to receive the averages of the others."""
        for work in self._receives:
            work.wait()
        # Block by block, so that the numbers stay in the cache.
        blocks = [part.split(BLOCK_ELEMENTS) for part in (self._own, *self._versions)]
        for own, total, *others in zip(*blocks, strict=True):
            for other in others:
                total.add_(other)
            total.add_(own)
            if divisor is None:
                own.copy_(total)
            else:
                torch.div(total, divisor, out=own)
        copies = [self._own] * len(self._others)
        sends = self._start(dist.isend, copies, _AVERAGE_TAG)
        # The averages overwrite the other parts, so the versions must have been sent.
        for work in self._sends:
            work.wait()
        self._receives = self._start(dist.irecv, self._other_parts, _AVERAGE_TAG)
        self._sends = sends

    def finish(self) -> None:
        """Wait for the averages of the other parts, and until that of this one has left."""
        for work in (*self._receives, *self._sends):
            work.wait()

    def _start(self, transfer: Callable[..., Any], parts: Iterable[Tensor], tag: int) -> list[Any]:
        """Start to send or receive a part for each other worker; empty parts are not sent."""
        works = []
        for rank, part in zip(self._others, parts, strict=True):
            if len(part):
                works.append(transfer(part, None, self._group, tag, rank))
        return works
