"""Let one master at a time look after the runs of a database.

A lock of the data folder is not enough, because two masters can use one database from different
folders or machines. The database has one row, the lease, with a counter that its holder increases
every few seconds. Another master that sees the same count for longer takes the lease over. So no
clock of a machine matters::

    no lease, or its holder is dead -- acquire --> held -- release --> no lease
    held by another -- its counter grows ----> refused
                    -- its counter stands ---> held
    held -- another master has taken it over --> lost: this master no longer touches runs
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid

from sqlalchemy.exc import SQLAlchemyError

from mlbench_core.errors import ConfigurationError
from mlbench_master.database.store import LeaseRow, Store
from mlbench_master.processes import place, start_mark

__all__ = ["Lease"]

_log = logging.getLogger(__name__)


class Lease:
    """The right of one master to look after the runs of a database.

    Args:
        store: The database.
        expires_s: Seconds after which a lease that is not renewed can be taken over.
    """

    def __init__(self, store: Store, expires_s: float = 15.0) -> None:
        self._store = store
        self._expires_s = expires_s
        self._holder = uuid.uuid4().hex
        self._place = place()
        self._beat = 0
        self._renewed_at = -float("inf")
        self._lost = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_held(self) -> bool:
        """Return whether no other master can have taken over the runs."""
        return not self._lost and time.monotonic() - self._renewed_at < self._expires_s

    def acquire(self) -> None:
        """Acquire the lease; wait for the end of the lease of a master that no longer renews it.

        Raises:
            ConfigurationError: Another master uses the database.
        """
        seen: LeaseRow | None = None
        seen_at = time.monotonic()
        while True:
            row = self._store.lease()
            # A holder that is alive would have renewed it in this time.
            expired = seen is not None and time.monotonic() - seen_at > self._expires_s
            if row is None or self._is_dead(row) or (expired and row == seen):
                if self._write(row):
                    self._lost = False
                    return
            elif seen is None or row == seen:
                seen = row
            else:
                raise ConfigurationError(
                    f"another master uses the database (process {row.pid} on {row.host}); "
                    "stop it, or give another database with --database-url or --data-dir"
                )
            time.sleep(self._expires_s / 100)

    def start(self) -> None:
        """Renew the lease in the background until :meth:`release`."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._renew, name="mlbench-lease", daemon=True)
            self._thread.start()

    def release(self) -> None:
        """Give the lease back, so that the next master need not wait."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with contextlib.suppress(SQLAlchemyError):
            self._store.delete_lease(self._holder)
        self._renewed_at = -float("inf")

    def _renew(self) -> None:
        # Several times before it expires: one renewal may fail or be late.
        while not self._stop.wait(self._expires_s / 5):
            try:
                if not self._write(self._row(self._beat)):
                    self._lost = True
                    _log.error(
                        "another master has taken over the database; "
                        "this one no longer looks after runs"
                    )
                    return
            except SQLAlchemyError as error:
                # The scheduler stops when the lease has expired, and goes on after a renewal.
                reason = str(error).splitlines()[0]
                _log.warning("the lease of the database cannot be renewed: %s", reason)

    def _write(self, expected: LeaseRow | None) -> bool:
        # Not after the statement, or this master would believe in its lease for too long.
        before = time.monotonic()
        if not self._store.replace_lease(expected, self._row(self._beat + 1)):
            return False
        self._beat += 1
        self._renewed_at = before
        return True

    def _row(self, beat: int) -> LeaseRow:
        pid = os.getpid()
        host = socket.gethostname()[:255]
        return LeaseRow(self._holder, beat, host, self._place, pid, start_mark(pid) or "")

    def _is_dead(self, row: LeaseRow) -> bool:
        """Return whether the holder has certainly ended."""
        # Only the holder's own machine and container can know that.
        if row.place != self._place:
            return False
        return row.pid == os.getpid() or start_mark(row.pid) != row.started
