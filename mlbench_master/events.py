"""Server-sent events, which push changes in the master to subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

__all__ = ["EventBus", "TooManyStreamsError"]

# A message of the server is about this long: the least that hides its costs. Each subscriber's
# connection may hold two of them, so a slow subscriber needs little memory.
_CHUNK_BYTES = 65_536
_LOST = b"event: lost\ndata: {}\n\n"


class TooManyStreamsError(Exception):
    """A client, or all clients together, have too many open event streams."""


class EventBus:
    """A bus that passes events from any thread to the subscribers of ``GET /api/events/``.

    Every event is encoded once and kept once, in a ring that all subscribers read at their own
    speed. A subscriber that falls behind the ring gets the event ``lost``, so that it can read the
    state from the API again.

    Args:
        max_bytes: Size of the ring, which is how far a subscriber may fall behind.
        max_streams: Number of subscribers. Each one holds a connection.
        max_per_client: Number of subscribers of one client.
    """

    def __init__(
        self, max_bytes: int = 4 * 2**20, max_streams: int = 256, max_per_client: int = 64
    ) -> None:
        self._max_bytes = max_bytes
        self._max_streams = max_streams
        self._max_per_client = max_per_client
        # Reentrant: a signal may interrupt the thread that holds it, and its handler calls close().
        self._lock = threading.RLock()
        self._chunks: deque[bytes] = deque()
        self._first = 0  # number of the first chunk in the ring
        self._size = 0
        self._subscribers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._clients: Counter[str] = Counter()
        self._closed = False

    @property
    def has_subscribers(self) -> bool:
        """Return whether anybody is subscribed."""
        return bool(self._subscribers)

    def publish(self, kind: str, *events: dict[str, Any]) -> None:
        """Send events to all subscribers without blocking.

        Args:
            kind: ``"metric"``, ``"state"``, ``"log"`` or ``"deleted"``.
            *events: The content of each event, as JSON-ready values.
        """
        if not self._subscribers:
            return
        chunks = list(_in_chunks(kind, events))
        with self._lock:
            self._chunks.extend(chunks)
            self._size += sum(map(len, chunks))
            # The newest chunk stays, even if it alone is larger.
            while self._size > self._max_bytes and len(self._chunks) > 1:
                self._size -= len(self._chunks.popleft())
                self._first += 1
        self._wake()

    def close(self) -> None:
        """End every subscription, now and in the future; a second call has no effect."""
        self._closed = True
        self._wake()

    async def subscribe(self, client: str = "", keep_alive_s: float = 15.0) -> AsyncIterator[bytes]:
        """Yield the events from now on, in the wire format of server-sent events.

        Args:
            client: Address of the subscriber.
            keep_alive_s: Seconds of silence after which a comment is sent, so that proxies keep the
                connection open.

        Yields:
            One or more events, each ending with an empty line.

        Raises:
            TooManyStreamsError: A limit is reached.
        """
        wake = asyncio.Event()
        with self._lock:
            if len(self._subscribers) >= self._max_streams:
                raise TooManyStreamsError(
                    f"events: at most {self._max_streams} streams may be open: try again later"
                )
            if self._clients[client] >= self._max_per_client:
                raise TooManyStreamsError(
                    f"events: at most {self._max_per_client} streams of one client may be open: "
                    "close one of them"
                )
            self._subscribers[wake] = asyncio.get_running_loop()
            self._clients[client] += 1
            position = self._first + len(self._chunks)
        try:
            yield b": connected\n\n"
            while not self._closed:
                wake.clear()
                text, position = self._read(position)
                if not text:
                    try:
                        await asyncio.wait_for(wake.wait(), keep_alive_s)
                    except (asyncio.TimeoutError, TimeoutError):
                        yield b": still here\n\n"
                    continue
                yield text
        finally:
            with self._lock:
                self._subscribers.pop(wake, None)
                self._clients[client] -= 1
                if not self._clients[client]:
                    del self._clients[client]
                if not self._subscribers:
                    self._first += len(self._chunks)
                    self._chunks.clear()
                    self._size = 0

    def _read(self, position: int) -> tuple[bytes, int]:
        """Return the message at a position in the ring and the position after it.

        The message is empty at the end of the ring.
        """
        parts = []
        with self._lock:
            if position < self._first:
                parts.append(_LOST)
                position = self._first
            size = 0
            # Single events are collected in one message, too.
            for index in range(position - self._first, len(self._chunks)):
                chunk = self._chunks[index]
                if parts and size + len(chunk) > _CHUNK_BYTES:
                    break
                parts.append(chunk)
                size += len(chunk)
                position += 1
        return b"".join(parts), position

    def _wake(self) -> None:
        wakes: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Event]] = defaultdict(list)
        with self._lock:
            for wake, loop in self._subscribers.items():
                wakes[loop].append(wake)
        for loop, events in wakes.items():
            # asyncio's events are not thread-safe: only the subscribers' own loop may set them.
            with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(_set, events)


def _set(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()


def _in_chunks(kind: str, events: Iterable[dict[str, Any]]) -> Iterable[bytes]:
    texts: list[str] = []
    size = 0
    for event in events:
        # A line break would end the field "data"; json.dumps writes none without an indent.
        text = f"event: {kind}\ndata: {json.dumps(event)}\n\n"
        texts.append(text)
        size += len(text)
        if size >= _CHUNK_BYTES:
            yield "".join(texts).encode()
            texts, size = [], 0
    if texts:
        yield "".join(texts).encode()
