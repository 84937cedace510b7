"""Sums over the workers of one machine, through memory that they share.

Gloo sends messages between processes of one machine through the loopback device. The kernel then
copies every byte into a socket and out of it. Here each worker has memory that the others read.
Sockets carry only notifications of a few bytes. With k workers a message is split into k parts, and
worker j sums up part j. On each worker, a message passes through these states::

    start()             copies all parts but its own into its memory        notifies: OFFERED
      |
      v
    offered             waits for OFFERED of all others, then adds their    notifies: SUMMED
      |                 values to its own part, and puts the sum into its
      |                 memory
      v
    summed              waits for SUMMED of all others, then copies the     notifies: COLLECTED
      |                 sums of the other parts into the message
      v
    unannounced         waits until its own SUMMED has left for all others
      |
      v
    done                waits for COLLECTED of all others, then releases
                        the memory of the message

An all-reduce is therefore a reduce-scatter and an all-gather, as for long messages in R. Thakur, R.
Rabenseifner and W. Gropp: Optimization of Collective Communication Operations in MPICH, 2005,
doi:10.1177/1094342005051521. Of a message of n bytes a worker writes n bytes into its memory and
reads 2 n (k - 1) / k bytes from the memory of the others.

No thread does this. A worker takes the steps whenever it starts a message, polls it or waits for
it. During a backward pass it does so after each gradient.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import json
import mmap
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mlbench_core.distributed.pytorch import process_groups
from mlbench_core.distributed.pytorch.lost_workers import naming_lost_workers
from mlbench_core.errors import BackendError

__all__ = ["Arena", "Exchange", "SharedMemorySum"]

_OFFERED, _SUMMED, _COLLECTED = range(3)
# A notification: the step that was done, and for an offer its offset in the sender's memory, its
# bytes and its dtype.
_NOTIFICATION = struct.Struct("<BQQ16s")
_RANK = struct.Struct("<I")
# Process, user and group, as Linux reports them for the other end of a socket.
_CREDENTIALS = struct.Struct("3i")
_ALIGNMENT_BYTES = 64
_GROWTH_BYTES = 1 << 21
_LONGEST_SLEEP_S = 60.0
# Elements summed and copied at a time, so that they stay in the processor's cache.
_BLOCK_ELEMENTS = 1 << 16

_in_use: weakref.WeakSet[SharedMemorySum] = weakref.WeakSet()


class Arena:
    """Memory of one worker that others map.

    It is a file without a name, which is deleted when the last process closes it.

    Args:
        descriptor: The open file; the arena closes it.

    Example:
        >>> mine = Arena.make()
        >>> offset = mine.reserve(8)
        >>> _ = mine.view(offset, 2, torch.float32).fill_(3)
        >>> theirs = Arena(os.dup(mine.descriptor))
        >>> theirs.view(offset, 2, torch.float32)
        tensor([3., 3.])
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._taken: list[tuple[int, int]] = []
        self.close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def make(cls) -> Arena:
        """Make an empty arena."""
        return cls(os.memfd_create("mlbench", os.MFD_CLOEXEC))

    def reserve(self, size_bytes: int) -> int:
        """Reserve the first free range that is large enough; grow the file if there is none.

        Returns:
            The offset of the range in bytes, a multiple of 64.

        Raises:
            OSError: The file cannot grow or be mapped.
        """
        size_bytes = max(1, -(-size_bytes // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES
        # First fit: the ranges in use are sorted, and released ones leave gaps between them.
        offset = 0
        for begin, end in self._taken:
            if begin - offset >= size_bytes:
                break
            offset = end
        if offset + size_bytes > len(self._bytes):
            # The size is at least doubled, since every growth makes this worker and
            # all others map the file again.
            wanted = max(offset + size_bytes, 2 * len(self._bytes))
            os.ftruncate(self.descriptor, -(-wanted // _GROWTH_BYTES) * _GROWTH_BYTES)
            self._map()
        bisect.insort(self._taken, (offset, offset + size_bytes))
        return offset

    def release(self, offset: int) -> None:
        """Free the range that :meth:`reserve` returned."""
        del self._taken[bisect.bisect_left(self._taken, (offset,))]

    def view(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return the ``count`` numbers at ``offset`` as a flat view of the memory."""
        end = offset + count * dtype.itemsize
        # The owner has grown the file since this process mapped it.
        if end > len(self._bytes):
            self._map()
        return self._bytes[offset:end].view(dtype)

    def _map(self) -> None:
        # Views of the previous mapping keep it alive, and show the same memory as the new one.
        memory = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)


@dataclass
class _Peer:
    """Another worker.

    Attributes:
        rank: Its rank.
        socket: The socket for notifications in both directions; it does not block.
        arena: Its memory.
        received: Number of notifications received from it, by kind.
        sent: Number of notifications sent to it, by kind.
        offers: Offsets, bytes and dtypes of its messages, from the first that was not collected
            here.
        unsent: Notifications that did not fit into the socket's buffer, with their kinds.
        is_listening: False once it has closed its end.
        is_gone: True once it has closed its end and all its notifications were read.
    """

    rank: int
    socket: socket.socket
    arena: Arena
    received: list[int] = field(default_factory=lambda: [0, 0, 0])
    sent: list[int] = field(default_factory=lambda: [0, 0, 0])
    offers: deque[tuple[int, int, str]] = field(default_factory=deque)
    unsent: deque[tuple[int, bytes]] = field(default_factory=deque)
    is_listening: bool = True
    is_gone: bool = False

    def flush(self) -> None:
        """Send as many notifications as the socket's buffer takes."""
        try:
            while self.unsent:
                kind, notification = self.unsent[0]
                self.socket.send(notification)
                self.unsent.popleft()
                self.sent[kind] += 1
        # A wait for this worker raises the error, not a send to it.
        except (BrokenPipeError, ConnectionResetError):
            self.is_listening = False
            self.unsent.clear()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM):
                raise

    def listen(self) -> None:
        """Read the notifications that have arrived from it."""
        while not self.is_gone:
            try:
                notification = self.socket.recv(_NOTIFICATION.size)
            except BlockingIOError:
                return
            # Reported once; notifications that arrived before can still be read.
            except ConnectionResetError:
                continue
            if not notification:
                self.is_gone = True
                return
            kind, offset, size_bytes, dtype = _NOTIFICATION.unpack(notification)
            self.received[kind] += 1
            if kind == _OFFERED:
                self.offers.append((offset, size_bytes, dtype.rstrip(b"\0").decode()))


class Exchange:
    """A message on its way; torch's handles have the same two methods.

    Attributes:
        number: Number of messages started before it.
        message: The tensor that receives the sum.
        offset: Offset of the message in this worker's memory, in bytes.
        is_done: True once the sum is in the message, and all others are notified of this worker's
            part.
    """

    def __init__(self, owner: SharedMemorySum, number: int, message: Tensor, offset: int) -> None:
        self.number = number
        self.message = message
        self.offset = offset
        self.is_done = False
        self._owner = owner

    def is_completed(self) -> bool:
        """Take all steps that need no waiting, and return whether the sum is in the message.

        Raises:
            ValueError: Another worker's message has another size or dtype.
        """
        if not self.is_done:
            self._owner.progress()
        return self.is_done

    def wait(self) -> None:
        """Return once the sum is in the message.

        Raises:
            RuntimeError: A worker that it needs has ended, or did not come in time.
            ValueError: Another worker's message has another size or dtype.
        """
        self._owner.finish(self)


class SharedMemorySum:
    """A sum of flat messages over all workers of a process group, who must run on one machine.

    The constructor is a collective operation. Afterwards all workers start messages of the same
    sizes in the same order. Only memory limits the number of messages on their way. Every worker
    gets the same bits, because each sum is computed once. Workers only work on messages while they
    start, poll or wait for one. They must therefore wait for messages and call other collective
    operations in the same order.

    Args:
        group: The process group; None for that of all workers.

    Raises:
        BackendError: The system is not Linux, the process group has no store, or the workers do not
            run on one machine and in one network namespace.
        WorkerError: Another worker did not come.
    """

    def __init__(self, group: Any = None) -> None:
        _check_system()
        self._rank, self._world_size = process_groups.rank(group), process_groups.world_size(group)
        self._timeout_s = process_groups.timeout_s(group)
        # A subgroup ends with the group of all workers.
        self._world = weakref.ref(process_groups.dist.group.WORLD)
        self._arena = Arena.make()
        with naming_lost_workers():
            try:
                self._peers = _meet(self._arena, self._timeout_s, group)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise BackendError(f"workers cannot share memory: {error}") from error
                raise RuntimeError(f"no connection with the other workers: {error}") from error
        self._close = weakref.finalize(self, _close, self._arena, self._peers)
        self._started = self._collected = self._released = 0
        self._offered: deque[Exchange] = deque()
        self._summed: deque[Exchange] = deque()
        self._unannounced: deque[Exchange] = deque()
        self._offsets: deque[int] = deque()
        _in_use.add(self)

    def start(self, message: Tensor) -> Exchange:
        """Begin to sum a flat message; it must not be touched until its sum is there.

        Args:
            message: One-dimensional, contiguous, of any dtype that can be added, in the host's
                memory.

        Returns:
            Its handle.

        Raises:
            ValueError: The message is on another device.
        """
        message = message.detach()
        if message.device.type != "cpu":
            raise ValueError(f"shared memory is the host's, and the message is on {message.device}")
        offset = self._arena.reserve(message.numel() * message.element_size())
        offered = self._arena.view(offset, message.numel(), message.dtype)
        # Only this worker reads its own part, and it has it in the message.
        own = self._part(message, self._rank)
        offered[: own.start].copy_(message[: own.start])
        offered[own.stop :].copy_(message[own.stop :])
        exchange = Exchange(self, self._started, message, offset)
        self._started += 1
        self._offered.append(exchange)
        self._offsets.append(offset)
        self._notify(_OFFERED, offset, message)
        self.progress()
        return exchange

    def is_of_this_group(self) -> bool:
        """Return whether this object was made in the current process group."""
        return process_groups.is_distributed() and self._world() is process_groups.dist.group.WORLD

    def progress(self) -> None:
        """Take all steps that are possible without waiting.

        Raises:
            ValueError: Another worker's message has another size or dtype.
        """
        for peer in self._peers:
            if peer.unsent:
                peer.flush()
            peer.listen()
        while self._offered and self._all_have(_OFFERED, self._offered[0].number):
            self._sum(self._offered[0])
            self._summed.append(self._offered.popleft())
        # Messages end in the order in which they began, so only the oldest one is looked at.
        while self._summed and self._all_have(_SUMMED, self._summed[0].number):
            self._collect(self._summed[0])
            self._unannounced.append(self._summed.popleft())
        # A worker that has all its sums may never call this again. So a message counts as done only
        # once the notification that this worker has summed its part has left for everybody.
        while self._unannounced and not self._not_notified(self._unannounced[0]):
            self._unannounced.popleft().is_done = True
        # Memory is reused only after all others have copied their sums out of it.
        while self._offsets and self._all_have(_COLLECTED, self._released):
            self._arena.release(self._offsets.popleft())
            self._released += 1

    def finish(self, exchange: Exchange) -> None:
        """Take part until a message's sum is there; see :meth:`Exchange.wait`."""
        deadline = time.monotonic() + self._timeout_s
        while not exchange.is_completed():
            missing = self._missing()
            gone = [peer for peer in missing if peer.is_gone]
            if gone:
                raise RuntimeError(f"connection closed by {_ranks_of(gone)}")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RuntimeError(
                    f"timed out: {_ranks_of(missing)} did not come within {self._timeout_s:g} s"
                )
            # A sleep for this sum alone would miss the notifications for the others.
            others = [other for other in _in_use if other is not self]
            _sleep([self, *others], left_s)
            # Another worker may wait for this worker's part in another sum
            # before it takes part in this one.
            for other in others:
                other.progress()

    # ------------------------------------------------------------------ the three steps

    def _part(self, message: Tensor, rank: int) -> slice:
        """Return the part of a message that a worker sums up."""
        share = -(-message.numel() // self._world_size)
        return slice(min(message.numel(), rank * share), min(message.numel(), (rank + 1) * share))

    def _sum(self, exchange: Exchange) -> None:
        """Add the others' values to this worker's part, and publish the sum."""
        message = exchange.message
        part = self._part(message, self._rank)
        published = self._arena.view(exchange.offset, message.numel(), message.dtype)[part]
        others = []
        for peer in self._peers:
            # Offers leave the queue when their message is collected, so the first one in it has the
            # number `_collected`.
            offset, *theirs = peer.offers[exchange.number - self._collected]
            own = [message.numel() * message.element_size(), _name(message.dtype)]
            if theirs != own:
                # This sum can never finish, so waits for other sums need not advance it.
                _in_use.discard(self)
                raise ValueError(
                    f"worker {peer.rank} sends a message of {theirs[0]:,} bytes of "
                    f"{theirs[1]} where this worker sends one of {own[0]:,} bytes of "
                    f"{own[1]}: all workers need the same model and settings"
                )
            others.append(peer.arena.view(offset, message.numel(), message.dtype)[part])
        # Block by block, each sum is copied to the shared memory while it is still in the cache.
        tensors = message[part], published, *others
        blocks = [tensor.split(_BLOCK_ELEMENTS) for tensor in tensors]
        for own_block, published_block, *other_blocks in zip(*blocks, strict=True):
            for block in other_blocks:
                own_block.add_(block)
            published_block.copy_(own_block)
        self._notify(_SUMMED)

    def _collect(self, exchange: Exchange) -> None:
        """Copy the sums of the other parts into the message."""
        message = exchange.message
        for peer in self._peers:
            offset, *_ = peer.offers.popleft()
            part = self._part(message, peer.rank)
            message[part].copy_(peer.arena.view(offset, message.numel(), message.dtype)[part])
        self._collected += 1
        self._notify(_COLLECTED)

    # ------------------------------------------------------------------ notifications

    def _notify(self, kind: int, offset: int = 0, message: Tensor | None = None) -> None:
        """Notify all others that this worker has finished a step."""
        size_bytes, dtype = 0, ""
        if message is not None:
            size_bytes, dtype = message.numel() * message.element_size(), _name(message.dtype)
        notification = _NOTIFICATION.pack(kind, offset, size_bytes, dtype.encode())
        for peer in self._peers:
            # Queued even if the socket has room: notifications must leave in their order.
            peer.unsent.append((kind, notification))
            peer.flush()

    def _all_have(self, kind: int, number: int) -> bool:
        """Return whether all others have notified this worker of a step for this message."""
        return all(peer.received[kind] > number for peer in self._peers)

    def _not_notified(self, exchange: Exchange) -> list[_Peer]:
        """Return the workers to which the notification of a sum could not be sent yet."""
        return [
            peer
            for peer in self._peers
            if peer.is_listening and peer.sent[_SUMMED] <= exchange.number
        ]

    def _missing(self) -> list[_Peer]:
        """Return the workers that hold up the oldest message on its way."""
        if self._unannounced:
            return self._not_notified(self._unannounced[0])
        if self._summed:
            kind, exchange = _SUMMED, self._summed[0]
        else:
            kind, exchange = _OFFERED, self._offered[0]
        return [peer for peer in self._peers if peer.received[kind] <= exchange.number]


def _sleep(sums: Iterable[SharedMemorySum], at_most_s: float) -> None:
    """Sleep until a notification arrives, or until a full socket has room again."""
    poll = select.poll()
    for one in sums:
        for peer in one._peers:
            if peer.is_gone:
                continue
            events = select.POLLIN
            # Only then: a socket with room would wake this worker at once.
            if peer.unsent:
                events |= select.POLLOUT
            poll.register(peer.socket, events)
    poll.poll(1000 * min(at_most_s, _LONGEST_SLEEP_S))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _close(arena: Arena, peers: Iterable[_Peer]) -> None:
    """Close files and sockets, which shows other workers that this one is gone."""
    arena.close()
    for peer in peers:
        peer.arena.close()
        peer.socket.close()


def _close_in_child() -> None:
    """Close everything in a forked process, such as a DataLoader's.

    An open copy of the sockets would hide from the other workers that this worker has ended.
    """
    for user in list(_in_use):
        user._close()
    _in_use.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _ranks_of(peers: Iterable[_Peer]) -> str:
    return ", ".join(f"worker {peer.rank}" for peer in peers)


# ---------------------------------------------------------------------- how workers meet


def _check_system() -> None:
    if not hasattr(os, "memfd_create") or not process_groups.machine():
        raise BackendError("sums through shared memory need Linux: leave shared_memory out")
    try:
        process_groups.store()
    except RuntimeError as error:
        raise BackendError(
            f"{error}, through which workers could meet: leave shared_memory out"
        ) from error


def _meet(arena: Arena, timeout_s: float, group: Any) -> list[_Peer]:
    """Connect with all other workers, and exchange memory."""
    rank, world_size = process_groups.rank(group), process_groups.world_size(group)
    store = process_groups.store()
    meeting = process_groups.get_backend_tensor(torch.tensor(secrets.randbits(62)), group)
    # The store may still have the entries of an earlier group. A random key, sent by the backend,
    # keeps them apart.
    process_groups.dist.broadcast(meeting, process_groups.global_rank(0, group), group=group)
    key = f"mlbench/shared_memory/{meeting.item():x}"
    with contextlib.closing(_socket(timeout_s)) as listener:
        # The zero byte makes an address without a file, which nobody has to delete.
        address = f"\0mlbench-{secrets.token_hex(16)}"
        listener.bind(address)
        listener.listen(world_size)
        record = {"machine": process_groups.machine(), "address": address}
        store.set(f"{key}/{rank}", json.dumps(record))
        # get() waits until the other worker has written its record.
        records = [json.loads(store.get(f"{key}/{other}")) for other in range(world_size)]
        elsewhere = []
        for other, record in enumerate(records):
            if record["machine"] != records[0]["machine"]:
                elsewhere.append(str(other))
        if elsewhere:
            raise BackendError(
                f"worker {', '.join(elsewhere)} and worker 0 share no memory, since they "
                "run on different machines, in different network namespaces or as "
                "different users: leave shared_memory out"
            )
        # Each worker connects to those of lower rank, and accepts the connections of the others.
        peers = []
        for record in records[:rank]:
            connection = _connect(record["address"], timeout_s)
            peers.append(_exchange_memory(connection, rank, arena))
        while len(peers) < world_size - 1:
            connection, _ = listener.accept()
            # An accepted socket does not inherit the listener's timeout.
            connection.settimeout(timeout_s)
            # Any process of the machine can connect to an abstract socket, so
            # those of other users are refused.
            if _is_own_user(connection):
                peers.append(_exchange_memory(connection, rank, arena))
            else:
                connection.close()
    for peer in peers:
        # From here on, a step of progress() must not wait for a single worker.
        peer.socket.setblocking(False)
    return sorted(peers, key=lambda peer: peer.rank)


def _socket(timeout_s: float) -> socket.socket:
    # This type keeps the borders of messages, so that one call receives one notification.
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(timeout_s)
    return made


def _connect(address: str, timeout_s: float) -> socket.socket:
    connection = _socket(timeout_s)
    connection.connect(address)
    if not _is_own_user(connection):
        connection.close()
        raise BackendError("another user's process answered in a worker's place")
    return connection


def _is_own_user(connection: socket.socket) -> bool:
    """Return whether the other end belongs to the same user; any local process can connect."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _exchange_memory(connection: socket.socket, rank: int, arena: Arena) -> _Peer:
    """Exchange ranks and file descriptors of the shared memory over a connection."""
    socket.send_fds(connection, [_RANK.pack(rank)], [arena.descriptor])
    rank_bytes, descriptors, flags, _ = socket.recv_fds(connection, _RANK.size, 1)
    # Linux drops a descriptor if this process may not open another file.
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not descriptors:
        raise RuntimeError("connection closed while workers met")
    # A received descriptor would otherwise stay open in child processes.
    os.set_inheritable(descriptors[0], False)
    return _Peer(_RANK.unpack(rank_bytes)[0], connection, Arena(descriptors[0]))
