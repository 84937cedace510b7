"""Code shared by engines with one folder per run, for its log, results and pending metrics."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from mlbench_core.addresses import is_loopback
from mlbench_core.errors import ConfigurationError
from mlbench_master.engines.interface import (
    FROM_THE_START,
    Engine,
    Job,
    LogLine,
    LogPage,
    LogRange,
)
from mlbench_master.engines.logs import LogReader, append_log, last_file

__all__ = ["FolderEngine", "read_interval", "unreachable_note"]

# All engines have the same folders, so the logs and the results of another one can be read.
_JOB_ID = re.compile(r"[a-z]+-(\d+)")
_INTERVAL_S = 5.0


def read_interval(engine: str) -> float:
    """Return the seconds between two questions to an engine: ``MLBENCH_<engine>_INTERVAL_S``, or 5.

    Raises:
        ConfigurationError: The variable is not a positive number.
    """
    variable = f"MLBENCH_{engine.upper()}_INTERVAL_S"
    text = os.environ.get(variable, "")
    with contextlib.suppress(ValueError):
        interval = float(text or _INTERVAL_S)
        # Comparisons with nan are False, so it is refused, too.
        if 0 < interval < math.inf:
            return interval
    raise ConfigurationError(f"{variable} must be a positive number of seconds, not {text!r}")


def unreachable_note(job: Job) -> list[str]:
    """Return a line for the log if workers on other machines cannot reach the master."""
    url = job.env.get("MLBENCH_MASTER_URL", "")
    if not is_loopback(urlsplit(url).hostname or ""):
        return []
    return [
        f"note: workers on other machines cannot reach the master at {url}, so their metrics "
        "arrive when the run ends; to see them earlier, start the master with --host and an "
        "address of this machine"
    ]


class FolderEngine(Engine):
    """An engine that keeps a run in ``<folder>/<run id>``.

    The files that all of them have are ``log.jsonl`` (see the module ``logs``), ``load/`` (see the
    module ``load_sampler``), ``spool/`` and ``output/``.

    Args:
        folder: Folder for the folders of runs; it is created if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser().absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._readers: dict[Path, LogReader] = {}

    def logs(self, job_id: str, lines: LogRange = FROM_THE_START) -> LogPage:
        """Return lines of a job's log; see :meth:`Engine.logs`."""
        return self._reader(self._job_folder(job_id)).read(*lines)

    def log_end(self, job_id: str) -> int:
        """Return the number of the line after the last one; see :meth:`Engine.log_end`."""
        return self._reader(self._job_folder(job_id)).end()

    def log_tail(self, job_id: str, max_bytes: int = 65_536) -> list[LogLine]:
        """Return the last lines of a job's log; see :meth:`Engine.log_tail`."""
        return self._reader(self._job_folder(job_id)).tail(max_bytes)

    def load(self, job_id: str, since_line: int = 0, limit: int = 1000) -> LogPage:
        """Return lines with the load of a job's workers; see :meth:`Engine.load`."""
        return self._reader(self._job_folder(job_id) / "load").read(since_line, limit)

    def spool(self, job_id: str) -> Path:
        """Return the folder with metrics that were not delivered; see :meth:`Engine.spool`."""
        return self._job_folder(job_id) / "spool"

    def results(self, job_id: str) -> Path:
        """Return the folder for the results of a job's workers; see :meth:`Engine.results`."""
        return self._job_folder(job_id) / "output"

    def note(self, job_id: str, text: str) -> None:
        """Add a line of the master to a job's log; see :meth:`Engine.note`."""
        # A full disk must not keep the master from recording the end of the run.
        with contextlib.suppress(OSError):
            append_log(last_file(self._job_folder(job_id)), None, "system", text)

    def remove(self, job_id: str) -> None:
        """Delete a job's folder; see :meth:`Engine.remove`."""
        folder = self._job_folder(job_id)
        # The next run with this id must not get a reader that continues where this log ended.
        for path in (folder, folder / "load"):
            self._readers.pop(path, None)
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Forget the readers of logs; see :meth:`Engine.close`."""
        self._readers.clear()

    def _reader(self, folder: Path) -> LogReader:
        # In one step, because several threads read logs: all must get the same reader.
        return self._readers.setdefault(folder, LogReader(folder))

    def _job_folder(self, job_id: str) -> Path:
        match = _JOB_ID.fullmatch(job_id)
        if match is None:
            raise ValueError(
                f"job_id must be {self.name}-NUMBER, not {job_id!r}: "
                "give the id that start returned"
            )
        return self._folder / match[1]
