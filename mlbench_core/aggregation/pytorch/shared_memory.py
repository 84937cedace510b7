"""Sums over the workers of one machine, through memory that they share.

Gloo sends what stays on the machine through its loopback too: the kernel copies every byte into a socket and out of it.
Here each worker has memory that the others read. Sockets carry signs of a few bytes only, which say that something is
there. With k workers a message is split into k parts, and worker j sums up part j:

1. *offer*: a worker copies all parts but its own into its memory, and tells the others where they are;
2. *sum*: once all have told, it adds the others' values to its own part, and puts the sum into its memory;
3. *collect*: once all have summed, it copies the sums of the other parts into its message.

There is no thread for that. A worker takes the steps whenever it starts, looks after or waits for a message; during a
backward pass that is after each gradient.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
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

import torch
from torch import Tensor

from mlbench_core.errors import BackendError
from mlbench_core.utils.pytorch import distributed
from mlbench_core.utils.pytorch.lost_workers import naming_lost_workers

__all__ = ["Arena", "Exchange", "SharedMemorySum"]

_OFFERED, _SUMMED, _COLLECTED = range(3)
_SIGN = struct.Struct("<BQQ")  # what was done; of an offer, where in the teller's memory it lies and its bytes
_GREETING = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_ALIGNMENT_BYTES = 64
_GROWTH_BYTES = 1 << 21
_BLOCK_ELEMENTS = 1 << 16  # what is summed and shown at a time, so that it stays in the processor's cache

_meetings = itertools.count()
_in_use: weakref.WeakSet[SharedMemorySum] = weakref.WeakSet()


class Arena:
    """Memory of one worker that others map: a file without a name, which is gone when all that have it are.

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
        """A new one, empty."""
        return cls(os.memfd_create("mlbench", os.MFD_CLOEXEC))

    def reserve(self, size_bytes: int) -> int:
        """Take the first free memory that is large enough.

        Returns:
            Where it lies.
        """
        size_bytes = max(1, -(-size_bytes // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES
        offset = 0
        for begin, end in self._taken:
            if begin - offset >= size_bytes:
                break
            offset = end
        bisect.insort(self._taken, (offset, offset + size_bytes))
        if offset + size_bytes > len(self._bytes):
            wanted = max(offset + size_bytes, 2 * len(self._bytes))
            os.ftruncate(self.descriptor, -(-wanted // _GROWTH_BYTES) * _GROWTH_BYTES)
            self._map()
        return offset

    def release(self, offset: int) -> None:
        """Give back what :meth:`reserve` gave."""
        del self._taken[bisect.bisect_left(self._taken, (offset,))]

    def view(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """The ``count`` numbers that lie at ``offset``."""
        end = offset + count * dtype.itemsize
        if end > len(self._bytes):  # its owner has taken more since
            self._map()
        return self._bytes[offset:end].view(dtype)

    def _map(self) -> None:
        memory = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)


@dataclass
class _Peer:
    """Another worker.

    Attributes:
        rank: Its rank.
        socket: Where signs come from and go to; it does not block.
        arena: Its memory.
        told: How often it has told each kind of sign.
        offers: Where its messages lie and how long they are, from the first that was not collected here.
        unsent: Signs that the socket had no room for.
        is_gone: Whether it has closed its end, and all it had told was read.
    """

    rank: int
    socket: socket.socket
    arena: Arena
    told: list[int] = field(default_factory=lambda: [0, 0, 0])
    offers: deque[tuple[int, int]] = field(default_factory=deque)
    unsent: deque[bytes] = field(default_factory=deque)
    is_gone: bool = False

    def flush(self) -> None:
        """Send what the socket has room for."""
        try:
            while self.unsent:
                self.socket.send(self.unsent[0])
                self.unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # it has closed its end; who waits for it will find out
            self.unsent.clear()

    def listen(self) -> None:
        """Read what it has told."""
        while not self.is_gone:
            try:
                sign = self.socket.recv(_SIGN.size)
            except BlockingIOError:
                return
            except ConnectionResetError:  # said once; what it told before that is still there
                continue
            if not sign:
                self.is_gone = True
                return
            kind, offset, size_bytes = _SIGN.unpack(sign)
            self.told[kind] += 1
            if kind == _OFFERED:
                self.offers.append((offset, size_bytes))


class Exchange:
    """A message on its way; torch's handles have the same two methods.

    Attributes:
        number: How many messages were started before it.
        message: Where the sum arrives.
        offset: Where the message lies in this worker's memory.
        is_there: Whether the sum has arrived.
    """

    def __init__(self, owner: SharedMemorySum, number: int, message: Tensor, offset: int) -> None:
        self.number = number
        self.message = message
        self.offset = offset
        self.is_there = False
        self._owner = owner

    def is_completed(self) -> bool:
        """Whether the sum is in the message. Does what can be done for that without waiting."""
        if not self.is_there:
            self._owner.progress()
        return self.is_there

    def wait(self) -> None:
        """Return once the sum is in the message.

        Raises:
            RuntimeError: A worker that it needs has ended, or did not come in time.
        """
        self._owner.finish(self)


class SharedMemorySum:
    """Sums flat messages over all workers of the process group, who must run on one machine.

    Making one is a collective operation. Afterwards all workers start messages of the same sizes in the same order; how
    many are on their way is limited by memory alone. Every worker gets the same bits: a sum is computed once.

    Raises:
        BackendError: The system is not Linux, the process group has no store, or the workers do not run on one machine
            and in one network namespace.
        WorkerError: Another worker did not come.
    """

    def __init__(self) -> None:
        _check_system()
        self._rank, self._world_size = distributed.rank(), distributed.world_size()
        self._timeout_s = distributed.timeout_s()
        self._arena = Arena.make()
        with naming_lost_workers():
            try:
                self._peers = _meet(self._arena, self._timeout_s)
            except OSError as error:
                raise RuntimeError(f"no connection with the other workers: {error}") from error
        self._close = weakref.finalize(self, _close, self._arena, self._peers)
        self._started = self._collected = self._released = 0
        self._offered: deque[Exchange] = deque()
        self._summed: deque[Exchange] = deque()
        self._places: deque[int] = deque()
        _in_use.add(self)

    def start(self, message: Tensor) -> Exchange:
        """Begin to sum a flat message; it must not be touched until its sum is there.

        Args:
            message: One-dimensional, contiguous, in the host's memory.

        Raises:
            ValueError: The message is on another device.
        """
        message = message.detach()
        if message.device.type != "cpu":
            raise ValueError(f"shared memory is the host's, and the message is on {message.device}")
        offset = self._arena.reserve(message.numel() * message.element_size())
        place, own = self._arena.view(offset, message.numel(), message.dtype), self._part(message, self._rank)
        place[: own.start].copy_(message[: own.start])
        place[own.stop :].copy_(message[own.stop :])
        exchange = Exchange(self, self._started, message, offset)
        self._started += 1
        self._offered.append(exchange)
        self._places.append(offset)
        self._tell(_OFFERED, offset, message.numel() * message.element_size())
        self.progress()
        return exchange

    def progress(self) -> None:
        """Do what can be done without waiting.

        Raises:
            ValueError: Another worker's message has another size.
        """
        for peer in self._peers:
            if peer.unsent:
                peer.flush()
            peer.listen()
        while self._offered and self._all_have(_OFFERED, self._offered[0].number):
            self._sum(self._offered[0])
            self._summed.append(self._offered.popleft())
        while self._summed and self._all_have(_SUMMED, self._summed[0].number):
            self._collect(self._summed.popleft())
        while self._places and self._all_have(_COLLECTED, self._released):
            self._arena.release(self._places.popleft())
            self._released += 1

    def finish(self, exchange: Exchange) -> None:
        """Take part until a message's sum is there; see :meth:`Exchange.wait`."""
        deadline = time.monotonic() + self._timeout_s
        while not exchange.is_completed():
            missing = self._missing()
            gone = [peer for peer in missing if peer.is_gone]
            if gone:
                raise RuntimeError(f"connection closed by {_names(gone)}")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RuntimeError(f"timed out: {_names(missing)} did not come within {self._timeout_s:g} s")
            self._sleep(left_s)

    # ------------------------------------------------------------------ the three steps

    def _part(self, message: Tensor, rank: int) -> slice:
        """The part of a message that a worker sums up."""
        share = -(-message.numel() // self._world_size)
        return slice(min(message.numel(), rank * share), min(message.numel(), (rank + 1) * share))

    def _sum(self, exchange: Exchange) -> None:
        """Add the others' values to this worker's part, and show them the sum."""
        message = exchange.message
        part = self._part(message, self._rank)
        shown = self._arena.view(exchange.offset, message.numel(), message.dtype)[part]
        others = []
        for peer in self._peers:
            offset, size_bytes = peer.offers[exchange.number - self._collected]
            if size_bytes != message.numel() * message.element_size():
                raise ValueError(
                    f"worker {peer.rank} sends a message of {size_bytes:,} bytes where this worker sends one of "
                    f"{message.numel() * message.element_size():,}: all workers need the same model and settings"
                )
            others.append(peer.arena.view(offset, message.numel(), message.dtype)[part])
        blocks = (tensor.split(_BLOCK_ELEMENTS) for tensor in (message[part], shown, *others))
        for own_block, shown_block, *other_blocks in zip(*blocks, strict=True):
            for block in other_blocks:
                own_block.add_(block)
            shown_block.copy_(own_block)
        self._tell(_SUMMED)

    def _collect(self, exchange: Exchange) -> None:
        """Copy the sums of the other parts into the message."""
        message = exchange.message
        for peer in self._peers:
            offset, _ = peer.offers.popleft()
            part = self._part(message, peer.rank)
            message[part].copy_(peer.arena.view(offset, message.numel(), message.dtype)[part])
        self._collected += 1
        exchange.is_there = True
        self._tell(_COLLECTED)

    # ------------------------------------------------------------------ signs

    def _tell(self, kind: int, offset: int = 0, size_bytes: int = 0) -> None:
        """Tell all others what this worker has done."""
        for peer in self._peers:
            peer.unsent.append(_SIGN.pack(kind, offset, size_bytes))
            peer.flush()

    def _all_have(self, kind: int, number: int) -> bool:
        """Whether all others have told of the message with this number."""
        return all(peer.told[kind] > number for peer in self._peers)

    def _missing(self) -> list[_Peer]:
        """Who holds up the oldest message on its way."""
        kind, exchange = (_SUMMED, self._summed[0]) if self._summed else (_OFFERED, self._offered[0])
        return [peer for peer in self._peers if peer.told[kind] <= exchange.number]

    def _sleep(self, at_most_s: float) -> None:
        """Sleep until another worker tells something, or takes what it was told."""
        poll = select.poll()
        for peer in self._peers:
            if not peer.is_gone:
                poll.register(peer.socket, select.POLLIN | (select.POLLOUT if peer.unsent else 0))
        poll.poll(1000 * at_most_s)


def _close(arena: Arena, peers: Iterable[_Peer]) -> None:
    """Let go of files and sockets; others that wait for this worker learn that it is gone."""
    arena.close()
    for peer in peers:
        peer.arena.close()
        peer.socket.close()


def _close_in_child() -> None:
    """Let a forked process, such as a DataLoader's, keep nothing open that would look like a sign of life."""
    for user in list(_in_use):
        user._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _names(peers: Iterable[_Peer]) -> str:
    return ", ".join(f"worker {peer.rank}" for peer in peers)


# ---------------------------------------------------------------------- how workers meet


def _check_system() -> None:
    if not hasattr(os, "memfd_create") or not _machine():
        raise BackendError("sums through shared memory need Linux: leave shared_memory out")
    try:
        distributed.store()
    except RuntimeError as error:
        raise BackendError(f"{error}, through which workers could meet: leave shared_memory out") from error


def _machine() -> str:
    """Names the running kernel and the network namespace; empty where the system does not tell.

    Two hosts that are emulated on one machine have namespaces of their own: what passes between them is to cross the
    network between them.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
    except OSError:
        return ""


def _meet(arena: Arena, timeout_s: float) -> list[_Peer]:
    """Connect with all other workers, and exchange memory."""
    rank, store, key = distributed.rank(), distributed.store(), f"mlbench/shared_memory/{next(_meetings)}"
    with contextlib.closing(_socket(timeout_s)) as listener:
        address = f"\0mlbench-{secrets.token_hex(16)}"
        listener.bind(address)
        listener.listen(distributed.world_size())
        store.set(f"{key}/{rank}", json.dumps({"machine": _machine(), "address": address}))
        cards = [json.loads(store.get(f"{key}/{other}")) for other in range(distributed.world_size())]
        strangers = [str(i) for i, card in enumerate(cards) if card["machine"] != cards[0]["machine"]]
        if strangers:
            raise BackendError(
                f"worker {', '.join(strangers)} and worker 0 share no memory, since they run on different machines, in "
                "different network namespaces or as different users: leave shared_memory out"
            )
        peers = [_greet(_connect(card["address"], timeout_s), rank, arena) for card in cards[:rank]]
        while len(peers) < distributed.world_size() - 1:
            connection, _ = listener.accept()
            connection.settimeout(timeout_s)
            if _is_own_user(connection):
                peers.append(_greet(connection, rank, arena))
            else:
                connection.close()
    for peer in peers:
        peer.socket.setblocking(False)
    return sorted(peers, key=lambda peer: peer.rank)


def _socket(timeout_s: float) -> socket.socket:
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
    """Whether the process at the other end belongs to the same user: anybody on the machine could connect."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _greet(connection: socket.socket, rank: int, arena: Arena) -> _Peer:
    """Tell who this is and hand over the memory, and learn the same."""
    socket.send_fds(connection, [_GREETING.pack(rank)], [arena.descriptor])
    greeting, descriptors, _, _ = socket.recv_fds(connection, _GREETING.size, 1)
    if not descriptors:
        raise RuntimeError("connection closed while workers met")
    return _Peer(_GREETING.unpack(greeting)[0], connection, Arena(descriptors[0]))
