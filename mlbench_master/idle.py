"""Track idle time, so that an auto-started master can exit."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["IdleClock"]

# Between two polls, the machine may be suspended with its runs and clients. At most this time of it
# counts as idle.
_LONGEST_STEP_S = 1.0


class IdleClock:
    """A middleware that measures the time since the last request or run.

    A request counts until its answer has ended. A dashboard that is open therefore counts as long
    as its event stream.

    Args:
        app: The application.
        has_runs: Function that returns True while a run is waiting or running.
    """

    def __init__(self, app: ASGIApp, has_runs: Callable[[], bool]) -> None:
        self._app = app
        self._has_runs = has_runs
        self._open = 0
        self._was_used = True
        self._looked_at = time.monotonic()
        self._idle_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            # A request may begin and end between two looks, so it also leaves a mark.
            self._open -= 1
            self._was_used = True

    def look(self) -> float:
        """Return the seconds since the last request or run; call it at least once per second."""
        now = time.monotonic()
        if self._open or self._was_used or self._has_runs():
            self._idle_s = 0.0
        else:
            self._idle_s += min(now - self._looked_at, _LONGEST_STEP_S)
        self._was_used = False
        self._looked_at = now
        return self._idle_s
