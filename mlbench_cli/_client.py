"""The master's REST API, as the command uses it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mlbench_core.client.rest import RestClient, path_part
from mlbench_core.errors import MasterRequestError
from mlbench_master.engines.interface import STOPPED

__all__ = [
    "FINAL_STATES",
    "MasterClient",
    "RunSource",
    "find_run",
    "names_of",
    "reason_of",
    "state_of",
]

FINAL_STATES = frozenset({"finished", "failed", "stopped", "lost"})
"""States that a run never leaves."""


def reason_of(run: Mapping[str, Any]) -> str:
    """Return why a run waits or has failed, or an empty text."""
    return str((run.get("job_metadata") or {}).get("reason") or "")


def state_of(run: Mapping[str, Any]) -> str:
    """Return the state of a run for people.

    In the API, a run that a user stopped has the state ``failed``, and only its reason tells the
    difference.

    Example:
        >>> state_of({"state": "failed", "job_metadata": {"reason": "stopped by a user"}})
        'stopped'
    """
    state = str(run.get("state"))
    # Lines about missing metrics may follow the reason.
    if state == STOPPED.state and reason_of(run).startswith(STOPPED.reason):
        return "stopped"
    return state


def names_of(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of runs."""
    return [str(run.get("name")) for run in runs]


def find_run(runs: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Return the latest run with a name, or with an id if no run has the name."""
    # Names come first: a run may have a name that is the id of another run.
    for key in ("name", "id"):
        for run in reversed(runs):
            if str(run.get(key)) == name:
                return run
    return None


class RunSource(Protocol):
    """A source of runs: a master, or the engine itself without one."""

    def runs(self) -> list[dict[str, Any]]:
        """Return all runs."""

    def create(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start a run and return it."""

    def check(self, request: Mapping[str, Any]) -> None:
        """Raise an error if a request would be refused for another reason than its name.

        The name is that of an existing run.
        """

    def run(self, run_id: Any) -> dict[str, Any]:
        """Return the run with an id."""

    def stop(self, run_id: Any) -> None:
        """Stop a run and keep its metrics."""

    def delete(self, run_id: Any) -> None:
        """Stop a run and delete all of it."""

    def logs(self, run_id: Any) -> tuple[list[dict[str, Any]], int]:
        """Return all lines of a run's log, and their number."""

    def metrics(
        self, run_id: Any, metric_filter: str | None = None, last_n: int | None = None
    ) -> dict[str, list[dict[str, Any]]]:
        """Return metrics of a run."""

    def fetch_result(self, run_id: Any, target: Path) -> bool:
        """Write the result folder of a run to a folder; return False if there is none."""

    def stop_command(self, runs: Sequence[Mapping[str, Any]]) -> str:
        """Return the command that stops runs."""

    def log_place(self, run: Mapping[str, Any]) -> str:
        """Return the place of a run's log, for people."""


class MasterClient(RestClient):
    """A client of the master.

    A method raises ``MasterRequestError`` with a one-line message if a request fails.
    """

    def health(self) -> dict[str, Any]:
        """Return ``{"status": "ok", "version": ...}``."""
        return self.json(dict, "GET", "health/")

    def runs(self) -> list[dict[str, Any]]:
        """Return all runs."""
        return self.json(list, "GET", "runs/")

    def run(self, run_id: int | str) -> dict[str, Any]:
        """Return the run with an id."""
        return self.json(dict, "GET", f"runs/{path_part(run_id)}/")

    def find(self, name: str) -> dict[str, Any]:
        """Return the run with a name, or with an id if no run has the name.

        Raises:
            MasterRequestError: No such run exists; the message lists the latest runs.
        """
        runs = self.runs()
        run = find_run(runs, name)
        if run is not None:
            return run
        latest = ", ".join(names_of(runs[-10:])) or "none yet"
        raise MasterRequestError(f"no run {name!r} at {self.url}; runs there: {latest}", 404)

    def create(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start a run and return it."""
        return self.json(dict, "POST", "runs/", json=dict(request))

    def check(self, request: Mapping[str, Any]) -> None:
        """Raise an error if a request would be refused for another reason than its name.

        The name is that of an existing run.
        """
        try:
            run = self.create(request)
        except MasterRequestError as error:
            # The master looks at the name last.
            if error.status != 409:
                raise
        else:
            # The existing run was deleted a moment ago.
            self.delete(run["id"])

    def import_run(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Add the record of a run that ended without the master, and return the run."""
        return self.json(dict, "POST", "runs/import/", json=dict(record))

    def add_metrics(self, metrics: Sequence[Mapping[str, Any]]) -> None:
        """Add up to 10,000 metrics; those with an id that the master knows are not added again."""
        self.send("POST", "metrics/", json=list(metrics))

    def check_workers(self, num_workers: int, oversubscribe: bool) -> None:
        """Refuse more workers than the master will start, before any run of a series starts.

        Raises:
            MasterRequestError: There are too many; the message has the number that fits.
        """
        # Older masters do not send this field, and accept any number.
        most = self.health().get("most_workers")
        if most is not None and num_workers > most and not oversubscribe:
            raise MasterRequestError(
                f"the number of workers must be at most {most} at {self.url}, not {num_workers}: "
                "more of them on its cores mostly wait for each other; start fewer, or give "
                "--oversubscribe"
            )

    def stop(self, run_id: int | str) -> None:
        """Stop a run and keep its metrics."""
        self.send("POST", f"runs/{path_part(run_id)}/stop/")

    def delete(self, run_id: int | str) -> None:
        """Stop a run and delete its record, metrics and logs."""
        self.send("DELETE", f"runs/{path_part(run_id)}/")

    def logs(
        self, run_id: int | str, since_line: int = 0, filters: Mapping[str, Any] | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """Return all lines of a run's log from ``since_line`` on.

        The second value is the number of the line after the last one.

        Args:
            run_id: The run.
            since_line: Number of the first line wanted, from 0.
            filters: Which lines are wanted: ``rank``, ``stream`` and ``search``, as in the REST
                API.
        """
        lines: list[dict[str, Any]] = []
        # One answer of the master has a limited number of lines, and it may have none before the
        # end of a search.
        while True:
            params = {**(filters or {}), "since_line": since_line}
            answer = self.json(dict, "GET", f"runs/{path_part(run_id)}/logs/", params=params)
            page = answer.get("lines") or []
            lines += page
            # A master that answers without progress must not keep this loop running.
            next_line = int(answer.get("next", since_line + len(page)))
            if next_line <= since_line:
                return lines, since_line
            since_line = next_line

    def metrics(
        self, run_id: int | str, metric_filter: str | None = None, last_n: int | None = None
    ) -> dict[str, list[dict[str, Any]]]:
        """Return metrics of a run, oldest first.

        They have the form ``{name: [{"date", "value", "cumulative"}, ...]}``.

        Args:
            run_id: The run.
            metric_filter: Return only the metric with exactly this name.
            last_n: Return at most this many of the latest entries of each metric.
        """
        params = {"metric_type": "run", "metric_filter": metric_filter, "last_n": last_n}
        return self.json(dict, "GET", f"metrics/{path_part(run_id)}/", params=params)

    def download_metrics(self, run_id: int | str, target: Path) -> int:
        """Stream the zip file of a run's metrics into ``target`` and return its size in bytes."""
        params = {"metric_type": "run", "format": "zip"}
        return self.download(f"metrics/{path_part(run_id)}/", target, params=params)

    def fetch_result(self, run_id: int | str, target: Path, *, unfinished: bool = False) -> bool:
        """Download the result folder of a run.

        Args:
            run_id: The run.
            target: The folder to create. If it exists, it is replaced.
            unfinished: True to accept raw lines without a ``result.json``, as a stopped run leaves
                them.

        Returns:
            False if the master has no raw lines or, unless ``unfinished``, no ``result.json``. Then
            nothing is written.

        Raises:
            ConfigurationError: The download is damaged.
        """
        from mlbench_core.comparison.load_results import unpack

        # Unpacked only after the whole download, which may break off.
        with tempfile.TemporaryDirectory() as temporary:
            archive = Path(temporary, "run.zip")
            self.download_metrics(run_id, archive)
            return unpack(archive, target, unfinished=unfinished)

    def stop_command(self, runs: Sequence[Mapping[str, Any]]) -> str:
        """Return the command that stops runs."""
        return " ".join(["mlbench stop", *names_of(runs)])

    def log_place(self, run: Mapping[str, Any]) -> str:
        """Return the command that shows a run's log."""
        return f"mlbench logs {run['name']}"
