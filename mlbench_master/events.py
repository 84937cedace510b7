"""Server-sent events, which push changes in the master to subscribers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

__all__ = ["EventBus"]

_CLOSE = ""


class EventBus:
    """A bus that passes events from any thread to the subscribers of ``GET /api/events/``.

    A subscriber that does not keep up loses its oldest events, so memory stays bounded. The API still has the state.

    Args:
        queue_size: Number of events that a subscriber may lag behind.
    """

    def __init__(self, queue_size: int = 1000) -> None:
        self._queue_size = queue_size
        self._lock = threading.Lock()
        self._subscribers: dict[asyncio.Queue[str], asyncio.AbstractEventLoop] = {}
        self._closed = False

    @property
    def has_subscribers(self) -> bool:
        """Return whether anybody is subscribed."""
        return bool(self._subscribers)

    def publish(self, kind: str, data: dict[str, Any]) -> None:
        """Send an event to all subscribers without blocking.

        Args:
            kind: ``"metric"``, ``"state"``, ``"log"`` or ``"deleted"``.
            data: The content of the event, as JSON-ready values.
        """
        if not self._subscribers:
            return
        # JSON has no line break here: a line break would end the field of the event.
        self._send(f"event: {kind}\ndata: {json.dumps(data)}\n\n")

    def close(self) -> None:
        """End every subscription, now and in the future; a second call has no effect."""
        self._closed = True
        self._send(_CLOSE)

    async def subscribe(self, keep_alive_s: float = 15.0) -> AsyncIterator[str]:
        """Yield the events from now on, in the wire format of server-sent events.

        Args:
            keep_alive_s: Seconds of silence after which a comment is sent, so that proxies keep the connection open.

        Yields:
            Event texts, each ending with an empty line.
        """
        queue: asyncio.Queue[str] = asyncio.Queue(self._queue_size)
        with self._lock:
            self._subscribers[queue] = asyncio.get_running_loop()
        try:
            yield ": connected\n\n"
            while not self._closed:
                try:
                    text = await asyncio.wait_for(queue.get(), keep_alive_s)
                except (asyncio.TimeoutError, TimeoutError):
                    text = ": still here\n\n"
                if text == _CLOSE:
                    return
                yield text
        finally:
            with self._lock:
                self._subscribers.pop(queue, None)

    def _send(self, text: str) -> None:
        with self._lock:
            subscribers = list(self._subscribers.items())
        for queue, loop in subscribers:
            # asyncio's queues are not thread-safe: only the subscriber's own loop may touch its queue.
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put, queue, text)


def _put(queue: asyncio.Queue[str], text: str) -> None:
    # A subscriber that is too slow loses its oldest event.
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(text)
