"""Keep undelivered metrics in a SQLite database until the master has them.

Each metric is a row, and rows are sorted by the time at which they were logged. All clients of a
user for one master share one database in the user's folder. A process inserts rows if the master
does not answer. Any process can then read the oldest rows, post them and delete them; one process
does so at a time. So no metric depends on the process that logged it.

Each client of a worker has its own database in the folder of the run, where the master finds it. It
inserts each metric before sending it, so a killed worker leaves all undelivered metrics there. As
this happens while training waits, the file is not synchronized with the disk: a killed process
loses nothing that it has written, only a machine that stops does.

SQLite protects the database with a rollback journal. Its write-ahead log does not work on network
file systems, on which home folders often are. Each operation opens its own connection, because
neither threads nor a forked process may share one. This takes about 0.1 ms on a local disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

__all__ = ["LOST_NAME", "MAX_BATCH_BYTES", "Outbox"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BATCH_BYTES = 8 * 2**20
"""Approximate limit of a request, in bytes."""

LOST_NAME = r"(\d+)-lost-[0-9a-f]+"
"""Names of the files of :meth:`Outbox.report_lost`; the group is the number of lost metrics."""

# Pages have 4 KiB, so the database has at most 1 GiB.
_MAX_PAGES = 2**18


class Outbox:
    """The undelivered metrics for one master; used by any number of processes and threads.

    A row is a key and the metric's JSON text. Keys sort rows by the time at which the metrics were
    logged, and end with the id of the client.

    Every method raises ``OSError`` or ``sqlite3.Error`` if the disk is full, not readable or not
    writable. The same happens if the database has reached 1 GiB, or if other processes occupy it
    for several seconds. The database is then unchanged. A damaged database is renamed with a
    warning, and the method continues with a new one.

    Args:
        folder: The folder of all outboxes, created when the first row is inserted.
        endpoint: Address of the master's REST interface.
        is_shared: False for a new database of one client, in which each metric is inserted before
            it is sent.

    Attributes:
        path: The database.
        is_shared: The argument.

    Example:
        >>> Outbox(Path("spool"), "http://127.0.0.1:5080/api/").path.name
        'http_127.0.0.1_5080_api.sqlite3'
    """

    def __init__(self, folder: Path, endpoint: str, is_shared: bool = True) -> None:
        name = re.sub(r"[^A-Za-z0-9.-]+", "_", endpoint).strip("_")
        # The master reads databases by name: those of an earlier client of the same worker must
        # come first.
        if not is_shared:
            name += f"-{time.time_ns():020d}-{uuid.uuid4().hex}"
        self.path = folder / f"{name}.sqlite3"
        self.is_shared = is_shared
        # Delivered rows that could not be deleted: a full disk has no room for the journal.
        self._delivered: set[str] = set()

    def insert(self, rows: Sequence[tuple[str, str]]) -> None:
        """Insert all rows or none. A row whose key exists stays unchanged.

        Args:
            rows: Keys and JSON texts.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create_private(self.path)
        query = "INSERT OR IGNORE INTO metrics VALUES (?, ?)"
        self._run(lambda connection: connection.executemany(query, rows))

    def read(self, limit: int, after: str = "") -> list[tuple[str, str]]:
        """Read the oldest rows that fit into one request.

        Args:
            limit: Maximum number of rows.
            after: Read only rows after this key.

        Returns:
            Keys and JSON texts, by key; empty if no row is left.
        """

        def select(connection: sqlite3.Connection) -> list[tuple[str, str]]:
            rows: list[tuple[str, str]] = []
            left_bytes = MAX_BATCH_BYTES
            query = "SELECT * FROM metrics WHERE key > ? ORDER BY key"
            for key, line in connection.execute(query, (after,)):
                if len(rows) == limit or left_bytes <= 0:
                    break
                if key not in self._delivered:
                    rows.append((key, line))
                    left_bytes -= len(line)
            return rows

        return self._run(select)

    def count(self, owner: str) -> int:
        """Count the rows of a client.

        Args:
            owner: The end of its keys.
        """
        query = "SELECT count(*) FROM metrics WHERE substr(key, -?) = ?"
        left: int = self._run(
            lambda connection: connection.execute(query, (len(owner), owner)).fetchone()
        )[0]
        return left - len([key for key in self._delivered if key.endswith(owner)])

    def delete(self, keys: Iterable[str]) -> None:
        """Delete delivered rows.

        If the disk does not allow it, this object no longer reads or counts them.

        Args:
            keys: Keys of the rows; unknown keys are ignored.
        """
        self._delivered.update(keys)
        query = "DELETE FROM metrics WHERE key = ?"
        values = [(key,) for key in self._delivered]
        self._run(lambda connection: connection.executemany(query, values))
        self._delivered.clear()

    def remove(self) -> None:
        """Remove the files of a database that is not used any more; a failure leaves it empty."""
        for suffix in (".lock", ".sqlite3-journal", ".sqlite3"):
            with contextlib.suppress(OSError):
                self.path.with_suffix(suffix).unlink()

    def report_lost(self, count: int) -> None:
        """Leave an empty file with the number of lost metrics in its name."""
        # A full disk often still has room for an empty file.
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create_private(self.path.with_name(f"{count}-lost-{uuid.uuid4().hex}"))

    @contextlib.contextmanager
    def delivering(self, timeout_s: float) -> Iterator[bool]:
        """Acquire the right to deliver rows, which one client has at a time.

        Inserting rows does not need it.

        Args:
            timeout_s: Longest time to wait for another client that delivers, in seconds.

        Yields:
            True if it was acquired.
        """
        # The lock of an empty second database: the system releases it when its holder ends, even by
        # a kill.
        path = self.path.with_suffix(".lock")
        _create_private(path)
        connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None)
        with contextlib.closing(connection):
            try:
                connection.execute("BEGIN EXCLUSIVE")
                has_turn = True
            except sqlite3.OperationalError:
                has_turn = False
            yield has_turn

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run one transaction, with a new database if this one is damaged."""
        inode = self.path.stat().st_ino
        try:
            return self._attempt(work)
        except sqlite3.DatabaseError as error:
            # Subclasses mean busy, full or not writable; the class itself means damaged.
            if type(error) is not sqlite3.DatabaseError:
                raise
            # Another inode means that another process was faster.
            if self.path.stat().st_ino == inode:
                self._set_aside(error)
            return self._attempt(work)

    def _attempt(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = sqlite3.connect(self.path, isolation_level="IMMEDIATE")
        with contextlib.closing(connection), connection:
            # The master refuses a line with damaged text; an exception here would block all lines
            # after it.
            connection.text_factory = lambda data: data.decode(errors="replace")
            if self.is_shared:
                # Without auto_vacuum the file would keep its largest size.
                connection.execute("PRAGMA auto_vacuum = FULL")
            else:
                # Such a file is removed at the end. ext4 writes a file that was shortened to the
                # disk when it is closed, which takes six times as long as the whole transaction
                # without it.
                connection.execute("PRAGMA synchronous = OFF")
            connection.execute(f"PRAGMA max_page_count = {_MAX_PAGES}")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS metrics (key TEXT PRIMARY KEY, line TEXT) WITHOUT ROWID"
            )
            return work(connection)

    def _set_aside(self, error: sqlite3.Error) -> None:
        aside = f"{self.path}.damaged-{time.time_ns()}"
        logger.warning(
            "%s is damaged (%s): its metrics are not delivered, it is now %s",
            self.path, error, aside,
        )  # fmt: skip
        # The journal belongs to the damaged database: SQLite would apply it to the new one.
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{self.path}-journal", f"{aside}-journal")
        os.rename(self.path, aside)
        _create_private(self.path)


def _create_private(path: Path) -> None:
    """Create a file that other users cannot read, which SQLite would not do.

    An existing file must not be opened: closing it would drop the locks of this process's
    connections to it.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
