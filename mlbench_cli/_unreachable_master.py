"""Read the logs of runs and stop runs without the master, while it does not answer.

A run does not need the master: a supervisor, or the queue of an engine, looks after it. So its
files are enough. The master finds out about a stopped run when it answers again.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlbench_cli import _embedded
from mlbench_cli._client import FINAL_STATES, MasterClient, find_run
from mlbench_cli._output import clean, remark
from mlbench_core.client.masters import read_record
from mlbench_core.errors import MasterRequestError
from mlbench_core.paths import user_folder

__all__ = ["StateFiles", "connect_or_read"]

_COLUMNS = ("id", "name", "state", "job_id", "num_workers", "backend", "command")
# SQLite waits this long for a master that holds a lock.
_BUSY_S = 5.0


class StateFiles:
    """The runs in a master's data folder.

    It has the methods of :class:`MasterClient` that need no master.

    Args:
        folder: The data folder.
        engine: The name of the master's engine.
        problem: The reason why the master cannot be asked.
    """

    def __init__(self, folder: Path, engine: str, problem: str) -> None:
        _embedded.check_installed()
        # After the check, because this import fails if a package of the master is missing.
        from mlbench_master.engines import make_engine

        self._database = folder / "master.db"
        self._problem = problem
        if not self._database.is_file():
            raise MasterRequestError(
                f"{problem}; its runs are in a database that only the master knows"
            )
        self._engine = make_engine(engine, folder)

    def runs(self) -> list[dict[str, Any]]:
        """Return all runs, as they were when the master answered last."""
        # Read-only, because the database is still that of the master.
        address = f"{self._database.as_uri()}?mode=ro"
        query = f"SELECT {', '.join(_COLUMNS)} FROM runs ORDER BY id"
        try:
            connection = sqlite3.connect(address, uri=True, timeout=_BUSY_S)
            with contextlib.closing(connection) as database:
                rows = database.execute(query).fetchall()
        except sqlite3.Error as error:
            raise MasterRequestError(
                f"{self._problem}; its database cannot be read either: {error}"
            ) from error
        return [dict(zip(_COLUMNS, row, strict=True)) for row in rows]

    def find(self, name: str) -> dict[str, Any]:
        """Return the run with a name, or with an id if no run has the name."""
        run = find_run(self.runs(), name)
        if run is None:
            raise MasterRequestError(f"no run {name!r} in {self._database}", 404)
        return run

    def run(self, run_id: int) -> dict[str, Any]:
        """Return the run with an id; its state is that of its engine if it has started."""
        (run,) = [run for run in self.runs() if run["id"] == run_id]
        if run["state"] == "started" and run["job_id"]:
            status = self._engine.poll(run["job_id"])
            if status.state not in ("waiting", "running"):
                run["state"] = "failed"
                if status.state == "finished":
                    run["state"] = "finished"
                run["job_metadata"] = {"reason": status.reason}
        return run

    def logs(
        self, run_id: int, since_line: int = 0, filters: Mapping[str, Any] | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """Return all lines of a run's log; see :meth:`MasterClient.logs`."""
        from mlbench_master.engines.interface import LogFilter, LogRange

        job_id = self.run(run_id)["job_id"]
        wanted: dict[str, Any] = {}
        for name, value in (filters or {}).items():
            if name == "rank" and str(value).isdecimal():
                wanted[name] = int(value)
            elif value is not None:
                wanted[name] = value
        lines: list[dict[str, Any]] = []
        while job_id is not None:
            page = self._engine.logs(job_id, LogRange(since_line, wanted=LogFilter(**wanted)))
            lines += [dict(line) for line in page.lines]
            if page.next <= since_line:
                break
            since_line = page.next
        return lines, since_line

    def stop(self, run_id: int) -> None:
        """Stop a run."""
        run = self.run(run_id)
        if run["state"] in FINAL_STATES:
            return
        if run["job_id"] is None:
            raise MasterRequestError(
                f"{self._problem}; run {run['name']} waits for its start, and only the master can "
                "remove it: try again when it answers, or end it with 'mlbench master --stop'"
            )
        self._engine.note(run["job_id"], "stopped by a user, while the master did not answer")
        self._engine.stop(run["job_id"])


@contextlib.contextmanager
def connect_or_read(dashboard_url: str | None) -> Iterator[MasterClient | StateFiles]:
    """Yield a client of the master, or its files if it runs and does not answer.

    Args:
        dashboard_url: Value of ``--dashboard-url``.
    """
    try:
        location = _embedded.find(dashboard_url)
        record = read_record()
        if record is not None and record.url == location.url:
            # The user may have named it. This raises an error if it does not answer.
            _embedded.embedded()
        client = MasterClient(location.url, location.token)
    except _embedded.SilentMasterError as error:
        remark(f"{clean(str(error))}; reading its files instead")
        record = error.record
        if record.folder:
            folder = Path(record.folder)
        else:
            # A record of an earlier version.
            folder = user_folder("master")
        yield StateFiles(folder, record.engine, str(error))
        return
    with client:
        yield client
