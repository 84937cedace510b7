"""Start and follow runs without a master.

Their jobs are submitted here, and their results are read from their folders. This is for an engine
with its own queue, on a machine on which no master may stay. The runs of one name share a folder,
which all nodes must see::

    <folder>/<number>/           the run's folder, see the module ``engines.slurm``
    <folder>/<number>/run.json   the run as the API of a master would show it
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError
from typing_extensions import Self

from mlbench_core.errors import ConfigurationError
from mlbench_core.files import creating_folder, lock, replacing
from mlbench_core.results.folder import FILES, RESULT, find_folders, read_result
from mlbench_core.results.raw_lines import read_lines
from mlbench_core.results.upload import metrics_of
from mlbench_master.api.schemas import RunIn, describe_error
from mlbench_master.database.store import Run
from mlbench_master.dates import now_us
from mlbench_master.engines.interface import STOPPED, LogPage, LogRange
from mlbench_master.engines.slurm.engine import SlurmEngine
from mlbench_master.runs.new_runs import make_job, make_run

__all__ = ["MasterlessRuns"]

_RECORD = "run.json"
_RAW_LINES = re.compile(r"metrics\.rank-\d+\.jsonl")
_STATES = {"waiting": "initialized", "running": "started", "finished": "finished"}

_Metrics = dict[str, list[dict[str, Any]]]


class MasterlessRuns:
    """Runs of Slurm without a master.

    It has the methods of the client of a master that ``mlbench run`` uses. Use it as a context
    manager. Its end leaves the jobs as they are.

    Args:
        folder: Folder for the runs, on a file system that all nodes share.

    Raises:
        ConfigurationError: Slurm's commands were not found.
    """

    def __init__(self, folder: Path) -> None:
        self._engine = SlurmEngine(folder)
        self.folder = folder.expanduser().absolute()
        self._runs: dict[int, Run] = {}
        # The sizes of the files when each selection of metrics was read. They grow about once per
        # epoch, and metrics are requested once per second.
        self._read: dict[tuple[Any, ...], tuple[list[int], _Metrics]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._engine.close()

    def runs(self) -> list[dict[str, Any]]:
        """Return all runs of the folder as they were recorded last."""
        records = []
        for number in self._numbers():
            with contextlib.suppress(OSError, ValueError):
                text = (self.run_folder(number) / _RECORD).read_text(encoding="utf-8")
                records.append({**json.loads(text), "id": number})
        return records

    def create(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Submit a run, and return it.

        Args:
            request: The body of ``POST /api/runs/`` of a master.

        Raises:
            ConfigurationError: The request cannot be fulfilled.
            EngineError: Slurm refuses the job, or does not answer.
        """
        run = self._made(request)
        # Two commands at the same time must not choose the same number.
        with lock(self.folder / ".lock"):
            run.id = max(self._numbers(), default=0) + 1
            job_id = _job_id(run.id)
            try:
                self._engine.start(make_job(run, self._engine, {}))
            except BaseException:
                # Also after Ctrl-C: without a record, no command could find the job again.
                self._engine.remove(job_id)
                raise
            run.job_id = job_id
            self._runs[run.id] = run
            slurm_job = self._engine.slurm_id(job_id)
            self._record(run, slurm_job=slurm_job, folder=str(self.run_folder(run.id)))
        return run.to_json()

    def check(self, request: Mapping[str, Any]) -> None:
        """Raise an error if a run would be refused.

        Raises:
            ConfigurationError: The request cannot be fulfilled.
        """
        self._made(request)

    def _made(self, request: Mapping[str, Any]) -> Run:
        try:
            return make_run(RunIn.model_validate(request), self._engine)
        except ValidationError as error:
            raise ConfigurationError(describe_error(error)) from None
        except ValueError as error:
            raise ConfigurationError(str(error)) from None

    def run(self, run_id: int) -> dict[str, Any]:
        """Return a run that was created here, with its present state."""
        run = self._runs[run_id]
        status = self._engine.poll(_job_id(run_id))
        state = _STATES.get(status.state, "failed")
        began_s = self._began_s(run_id)
        # Until Slurm has been asked, its jobs count as running.
        if state == "started" and began_s is None:
            state = "initialized"
        if run.state != state:
            run.state = state
            run.started_at = None
            if began_s is not None:
                run.started_at = int(began_s * 1e6)
            if state in ("finished", "failed"):
                run.finished_at = now_us()
                if status.finished_at is not None:
                    run.finished_at = int(status.finished_at * 1e6)
            self._record(run, reason=status.reason, returncode=status.returncode)
        return run.to_json()

    def stop(self, run_id: int) -> None:
        """Cancel a run, and wait until its processes are gone.

        Raises:
            EngineError: Slurm does not answer.
        """
        self._engine.stop(_job_id(run_id))
        run = self._runs.get(run_id)
        if run is not None and run.state in ("initialized", "started"):
            run.state, run.finished_at = "failed", now_us()
            self._record(run, reason=STOPPED.reason)

    def delete(self, run_id: int) -> None:
        """Cancel a run, and delete its folder."""
        self.stop(run_id)
        self._engine.remove(_job_id(run_id))

    def logs(self, run_id: int) -> tuple[list[dict[str, Any]], int]:
        """Return the lines of a run's log, and their number."""
        lines: list[dict[str, Any]] = []
        page = LogPage([], 0)
        while True:
            page = self._engine.logs(_job_id(run_id), LogRange(page.next))
            if not page.lines:
                return lines, page.next
            lines += [dict(line) for line in page.lines]

    def metrics(
        self, run_id: int, metric_filter: str | None = None, last_n: int | None = None
    ) -> _Metrics:
        """Return metrics of a run as a master has them.

        Args:
            run_id: The run.
            metric_filter: Return only the metric with exactly this name.
            last_n: Return at most this many of the latest entries of each metric.

        Returns:
            ``{name: [{"date", "value", "cumulative"}, ...]}``.
        """
        key = (run_id, metric_filter, last_n)
        sizes_before, metrics = self._read.get(key, ([], {}))
        # At the end of a run, its worker 0 joins the files, which disappear meanwhile.
        with contextlib.suppress(OSError):
            folder = self._result_folder(run_id)
            if folder is None:
                return metrics
            paths = [*read_lines(folder).paths, folder / RESULT]
            sizes = [path.stat().st_size for path in paths if path.exists()]
            if sizes != sizes_before:
                metrics = _newest(_metrics_in(folder), metric_filter, last_n)
                self._read[key] = sizes, metrics
        return metrics

    def fetch_result(self, run_id: int, target: Path) -> bool:
        """Copy the result folder of a run, also of one that was killed.

        Args:
            run_id: The run.
            target: The folder to create. If it exists, it is replaced.

        Returns:
            False, and nothing is written, if the run has no raw lines.
        """
        source = self._result_folder(run_id)
        if source is None:
            return False
        # The earlier folder stays until the new one is complete.
        new = target.with_name(f".{target.name}.new")
        with creating_folder(new) as temporary:
            for path in source.iterdir():
                is_result = path.name in FILES or _RAW_LINES.fullmatch(path.name)
                if is_result and path.is_file() and not path.is_symlink():
                    shutil.copyfile(path, temporary / path.name)
        shutil.rmtree(target, ignore_errors=True)
        new.replace(target)
        return True

    def run_folder(self, run_id: int) -> Path:
        """Return the folder of a run."""
        return self.folder / str(run_id)

    def stop_command(self, runs: Sequence[Mapping[str, Any]]) -> str:
        """Return the command that ends runs."""
        jobs = [str(run["job_metadata"]["slurm_job"]) for run in runs]
        return " ".join(["scancel", *jobs])

    def log_place(self, run: Mapping[str, Any]) -> str:
        """Return the place of a run's log, for people."""
        return str(self.run_folder(run["id"]) / "log.jsonl")

    def _numbers(self) -> list[int]:
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

    def _began_s(self, run_id: int) -> float | None:
        """Return when the script of a run began, in seconds since 1970, or None if it has not."""
        with contextlib.suppress(OSError):
            return (self.run_folder(run_id) / "begun").stat().st_mtime
        return None

    def _result_folder(self, run_id: int) -> Path | None:
        root = self._engine.results(_job_id(run_id))
        if not root.is_dir():
            return None
        # Of several programs that a command started, the one that wrote last counts.
        dated = []
        for folder in find_folders(root):
            for path in read_lines(folder).paths:
                dated.append((path.stat().st_mtime, folder))
        if not dated:
            return None
        return max(dated)[1]

    def _record(self, run: Run, **facts: Any) -> None:
        run.job_metadata = json.dumps({**run.metadata_dict(), **facts})
        with replacing(self.run_folder(run.id) / _RECORD) as temporary:
            temporary.write_text(json.dumps(run.to_json(), indent=1) + "\n", encoding="utf-8")


def _job_id(run_id: int) -> str:
    return f"{SlurmEngine.name}-{run_id}"


def _newest(metrics: Iterator[Mapping[str, Any]], name: str | None, last_n: int | None) -> _Metrics:
    newest: dict[str, deque[dict[str, Any]]] = defaultdict(lambda: deque(maxlen=last_n))
    for metric in metrics:
        if name in (None, metric["name"]):
            entry = {"date": metric["date"], "value": metric["value"], "cumulative": False}
            newest[metric["name"]].append(entry)
    return {name: list(entries) for name, entries in newest.items()}


def _metrics_in(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the metrics in the raw lines of a run, and at its end its goal and its result."""
    result = None
    if (folder / RESULT).exists():
        # Without a sound result, the raw lines still count.
        with contextlib.suppress(ConfigurationError):
            result = read_result(folder)
    if result is not None:
        yield from metrics_of(folder, result, run_id=0, prefix="")
        return
    for line in read_lines(folder):
        if line["kind"] == "stat" and isinstance(line.get("time"), str):
            name = f"{line['name']} @ {line['rank']}"
            value = line.get("value")
            text = str(value)
            # The raw lines have null for a value that is not finite.
            if value is None:
                text = "nan"
            yield {"name": name, "date": line["time"], "value": text}
