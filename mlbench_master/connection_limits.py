"""Limit the number and the time of connections, and the lines that they cause in the master's log.

A connection goes through these states, each with its own limit::

    header -- complete within HEADER_S --------------------------> body, else closed (status 408)
    body ---- at least BODY_BYTES_PER_S after the first BODY_S --> answer, else closed (status 408)
    answer -- the client reads some of it within WRITE_S --------> idle, else closed
    idle ---- the next request within uvicorn's keep-alive time -> header, else closed
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mlbench_core.addresses import is_loopback

__all__ = ["ACCEPTED_AT_ONCE", "LISTEN_BACKLOG", "Connection", "LogLimit", "max_connections"]

# Seconds for the header of a request; a browser may open a connection before it needs it.
HEADER_S = 10.0
# A body may take this long, and longer only at the speed that a slow network still has.
BODY_S = 20.0
BODY_BYTES_PER_S = 10_000
# Seconds in which a client reads nothing of an answer that waits for it.
WRITE_S = 60.0
# A client on this machine is not limited beyond the total: a proxy here may speak for many clients.
MAX_PER_ADDRESS = 128
_MAX_CONNECTIONS = 1024
# asyncio accepts this number of connections at once, before this module can count and refuse them.
ACCEPTED_AT_ONCE = 64
# The system holds this number of connections before they are accepted. Others wait a second.
LISTEN_BACKLOG = 1024


def max_connections() -> int:
    """Return the number of connections for which this process has descriptors.

    The other half is for the database, whose connections have three descriptors each, and for logs.
    """
    if sys.platform == "win32":
        return _MAX_CONNECTIONS
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(16, min(_MAX_CONNECTIONS, limit // 2))


class Connection(H11Protocol):
    """A connection of a client, with limits against clients that are slow on purpose (slow loris).

    If the master or an address has too many connections, a new one takes the place of the
    connection that has waited longest for a complete request. So an attacker, whose connections
    never send one, cannot keep others out. A new connection is refused only if all others are in
    use.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        # Start of the header or body that is not complete, or of the idle time.
        self._waits_since = 0.0
        self._received = 0  # bytes of the body

    @property
    def is_waiting(self) -> bool:
        """Return whether the client has not sent a complete request, or has its answer."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        others = [other for other in self.connections if isinstance(other, Connection)]
        others.remove(self)  # uvicorn has added it
        address = self._address
        neighbors = [other for other in others if other._address == address]
        if len(neighbors) >= MAX_PER_ADDRESS and not is_loopback(address):
            self._take_place_of(neighbors)
        elif len(others) >= max_connections():
            self._take_place_of(others)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        was_waiting = self.is_waiting
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self.is_waiting:
            self._cancel_timer()
        elif self._timer is None or not was_waiting:
            # The first byte of the next request on this connection; the following ones do not
            # extend its time.
            self._await_request()

    def on_response_complete(self) -> None:
        self._cancel_timer()
        self._waits_since = self.loop.time()
        super().on_response_complete()
        # The rest of a body that nobody has read still arrives, so it has to end at some time.
        if not self.transport.is_closing() and self.conn.their_state is h11.SEND_BODY:
            self._await_request()

    def send_400_response(self, msg: str) -> None:
        # uvicorn's own answer is plain text, unlike every other one of the master.
        message = "the request must be HTTP/1.1, with a header of at most 16 KiB"
        self._refuse("400 Bad Request", message)

    def pause_writing(self) -> None:
        super().pause_writing()
        # An answer that nobody reads would otherwise keep its memory and its connection.
        self._write_timer = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _await_request(self) -> None:
        self._cancel_timer()
        self._waits_since = self.loop.time()
        self._received = 0
        self._timer = self.loop.call_later(HEADER_S, self._check)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """Close the connection if its request is late, or look again when it will be."""
        allowed = HEADER_S
        if self.conn.their_state is h11.SEND_BODY:
            allowed = BODY_S + self._received / BODY_BYTES_PER_S
        left = self._waits_since + allowed - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._check)
        else:
            self._refuse("408 Request Timeout", f"the request did not arrive within {allowed:g} s")

    def _take_place_of(self, others: Iterable[Connection]) -> None:
        waiting = []
        for other in others:
            if other.is_waiting and not other.transport.is_closing():
                waiting.append(other)
        if not waiting:
            message = "too many connections are open; try again later"
            self._refuse("503 Service Unavailable", message)
            return
        # A client that has sent a request before is more likely an honest one between two requests.
        oldest = min(waiting, key=lambda other: (other.cycle is not None, other._waits_since))
        oldest.transport.abort()
        self.connections.discard(oldest)

    def _refuse(self, status: str, message: str) -> None:
        """Answer without the application and close the connection."""
        is_started = self.cycle is not None and self.cycle.response_started
        # The application may have answered before the end of the body.
        if not (is_started and self.conn.their_state is h11.SEND_BODY):
            body = json.dumps({"status": status[4:], "message": message})
            self.transport.write(
                f"HTTP/1.1 {status}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                f"Retry-After: 1\r\nConnection: close\r\n\r\n{body}".encode()
            )
        self.transport.close()


class LogLimit(logging.Filter):
    """A filter that lets only some records of each cause pass.

    Without it, a client could fill the disk with a log. A cause is the line of code that logs, with
    the type of the exception. The first record after a silence has the number of those left out.

    Args:
        records: Number of records of a cause in each period.
        period_s: Length of the period in seconds.
    """

    def __init__(self, records: int = 5, period_s: float = 60.0) -> None:
        super().__init__()
        self._records = records
        self._period_s = period_s
        self._lock = threading.Lock()
        # Start of the period and number of records in it, by cause. The lines of code bound the
        # number of causes.
        self._causes: dict[tuple[str, int, object], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record."""
        exception = record.exc_info[0] if record.exc_info else None
        cause = (record.pathname, record.lineno, exception)
        now = time.monotonic()
        with self._lock:
            start, count = self._causes.get(cause, (now, 0))
            left_out = 0
            if now - start >= self._period_s:
                left_out = max(0, count - self._records)
                start, count = now, 0
            self._causes[cause] = (start, count + 1)
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} more of these since the last one)"
            record.args = None
        return count < self._records
