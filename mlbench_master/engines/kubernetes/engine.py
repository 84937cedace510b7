"""Run workers as pods of a Kubernetes cluster.

A run is one Indexed Job with a headless Service and a Secret; see the module ``manifests``. The
master runs in the cluster or outside. The files in the run's folder, which belong to the master,
are::

    job.json         written before the Job is created: text by which a later master recognizes it
    started          written after the Job was resumed; without it, the run can start again
    ended.json       how the run ended; the Job is not needed any more
    log.jsonl        lines of the workers and of the master; see the two modules ``logs``
    log_places.json  the place up to which the log of each worker has been read
    load/            the load of the workers
    spool/, output/  undelivered metrics, and results, if master and workers share a volume

Three threads use the API: one asks about all runs (``queue``), one copies logs (``logs``), and that
of the scheduler starts runs. Readers of states, logs and load get what these threads have found.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlbench_core.addresses import is_loopback
from mlbench_core.errors import ConfigurationError
from mlbench_master.engines.error_search import ErrorSearch, is_consequence
from mlbench_master.engines.folders import FolderEngine, read_interval
from mlbench_master.engines.interface import EngineError, Job, JobStatus, LogFilter, LogRange
from mlbench_master.engines.kubernetes.api import ApiError, KubernetesApi
from mlbench_master.engines.kubernetes.job_states import JobView, KubernetesQueue
from mlbench_master.engines.kubernetes.logs import LogCollector, PodLogs
from mlbench_master.engines.kubernetes.manifests import (
    ATTEMPT,
    RUN_ID,
    check_job,
    job_manifest,
    job_name,
    secret_manifest,
    selector,
    service_manifest,
)
from mlbench_master.engines.kubernetes.options import parse_options
from mlbench_master.engines.kubernetes.settings import PREFIX, read_setting, variable
from mlbench_master.engines.kubernetes.states import Trouble, end_of, ended_status, waiting_reason
from mlbench_master.engines.logs import LogWriter, dropping_problem, log_limit_bytes, open_at_once
from mlbench_master.engines.supervisor.supervise import write_json

__all__ = ["KubernetesEngine"]

_STOP_S = 60.0
_LAST_LINES_S = 10.0
# After the end of a run, the logs of pods that do not end, as on a lost node, are waited for no
# longer than this.
_LOGS_S = 60.0
_LOAD_BYTES = 4 * 2**20
_STATE_BYTES = 2**20
_ERROR_LINES = 200


@dataclass
class _PodRun:
    """A run that this engine looks after."""

    run_id: int
    folder: Path
    logs: PodLogs
    ended_since: float | None = None
    status: JobStatus | None = None


class KubernetesEngine(FolderEngine):
    """An engine that starts each run as a Job of Kubernetes.

    Args:
        folder: Folder for the folders of runs.
        interval_s: Seconds between two queries of the cluster, each about all runs; by default
            ``MLBENCH_KUBERNETES_INTERVAL_S``, or 5.

    Raises:
        ConfigurationError: There is no configuration of a cluster, or a setting is wrong.
        MissingDependencyError: The package ``kubernetes`` is not installed.
    """

    name = "kubernetes"
    options_example = "--memory 4Gi --time 1h"
    starts_containers = True
    starts_first_worker_alone = False

    def __init__(self, folder: Path, interval_s: float | None = None) -> None:
        if interval_s is None:
            interval_s = read_interval(self.name)
        api = KubernetesApi(variable("NAMESPACE"))
        super().__init__(folder)
        self._api = api
        self._setting = read_setting(self._folder, self._api.namespace)
        # A master with the same mark and another folder finds the Jobs, but cannot know which runs
        # had not begun.
        self.place = (
            f"kubernetes:{self._setting.namespace}/{self._setting.mark}:{self._setting.folder_id}"
        )
        self._limit_bytes = log_limit_bytes()
        self._jobs: dict[int, _PodRun] = {}
        self._queue = KubernetesQueue(self._api, self._setting.mark, interval_s, self._write_load)
        self._collector = LogCollector(self._api, interval_s, self._log_sources)

    @property
    def capacity(self) -> float:
        """Return infinity, because Kubernetes has its own queue."""
        return math.inf

    def check_options(self, options: Sequence[str]) -> None:
        """Refuse options that a run does not have; see :meth:`Engine.check_options`."""
        parse_options(options)

    def check_workers(self, num_workers: int, backend: str, options: Sequence[str]) -> None:
        """Refuse MPI between pods; see :meth:`Engine.check_workers`."""
        if backend == "mpi" and num_workers > 1:
            raise ValueError(
                f"backend: must be gloo or nccl for {num_workers} workers on Kubernetes, not mpi: "
                "mpirun cannot start a program in another pod"
            )

    def start(self, job: Job) -> str:
        """Create the objects of a run; see :meth:`Engine.start`."""
        job_id = f"{self.name}-{job.run_id}"
        options = parse_options(job.options)
        check_job(job, options, self._setting)
        folder = self._job_folder(job_id)
        if folder.exists():  # a new database reuses the ids of runs
            self.remove(job_id)
        attempt = str(uuid.uuid4())
        mount = self._setting.shared_mount
        claim_path = ""
        if mount is not None:
            claim_path = folder.relative_to(mount).as_posix()
        manifest = job_manifest(job, options, self._setting, attempt=attempt, folder=claim_path)
        try:
            for part in ("output", "spool"):
                (folder / part).mkdir(parents=True)
            write_json(folder / "job.json", {"attempt": attempt})
        except OSError as error:
            raise ConfigurationError(
                f"cannot start run {job.run_id} in {folder}: {error}"
            ) from error
        run = self._run(job.run_id)
        name = manifest["metadata"]["name"]
        command = shlex.join(manifest["spec"]["template"]["spec"]["containers"][0]["command"])
        for note in (*job.notes, *self._notes(job), f"image: {job.image}", f"command: {command}"):
            run.logs.note(note)
        # The Job is suspended at first: Secret and Service belong to it by its uid, and its pods
        # need them when they start.
        uid = self._create_job(manifest, attempt)
        try:
            self._api.create_secret(secret_manifest(job, self._setting, uid))
            self._api.create_service(service_manifest(job, self._setting, uid))
            self._api.patch_job(name, {"suspend": False})
        except ApiError:
            # Its pods may exist, if only the answer was lost.
            with contextlib.suppress(ApiError):
                self._api.delete_job(name)
            raise
        with contextlib.suppress(OSError):
            # Without this file and a Job, the next master knows that the run has never started.
            (folder / "started").touch()
        run.logs.note(f"created Job {name} in namespace {self._setting.namespace}")
        self._watch(run)
        return job_id

    def poll(self, job_id: str) -> JobStatus:
        """Return the status of a run; see :meth:`Engine.poll`."""
        run = self._run_by(job_id)
        # An earlier master may have recorded the end, and let Kubernetes delete the Job.
        run.status = run.status or _read_status(run.folder)
        if run.status is not None:
            return run.status
        self._watch(run)
        view = self._queue.view(run.run_id)
        if view is None:
            return JobStatus("running", self._queue.problem)
        if not view.was_seen and not (run.folder / "started").exists():
            return JobStatus(
                "unstarted", "an earlier master ended before it started the run on Kubernetes"
            )
        # A master with a new folder goes on with the Jobs of the earlier one.
        with contextlib.suppress(OSError):
            run.folder.mkdir(parents=True, exist_ok=True)
        if view.job is None:
            return self._record(run, self._missing(run, view))
        end = end_of(view.job, view.pods)
        if end is not None:
            return self._look_at_end(run, view, end)
        problem = self._queue.problem
        if view.job.get("metadata", {}).get("deletionTimestamp"):
            deleted = f"Job {self._name(run)} is being deleted, but not by MLBench"
            return JobStatus("running", problem or deleted)
        waiting = ""
        # The troubles of a pod end the Job in a moment.
        if not view.troubles:
            waiting = waiting_reason(view.job, view.pods)
        if waiting:
            return JobStatus("waiting", problem or waiting)
        return JobStatus("running", problem or dropping_problem(run.folder) or run.logs.problem)

    def stop(self, job_id: str) -> None:
        """Delete the Job of a run, and wait until its pods are gone; see :meth:`Engine.stop`.

        Raises:
            EngineError: Kubernetes does not answer, or has not ended the pods.
        """
        run = self._run_by(job_id)
        if run.status is not None or _read_status(run.folder) is not None:
            return
        run_selector = selector(self._setting.mark, run.run_id)
        # A job that continues may write its last lines now, which are lost with its pods.
        until = time.monotonic() + _LAST_LINES_S
        with contextlib.suppress(EngineError):
            for pod in run.logs.unread(self._api.pods(run_selector)):
                if time.monotonic() < until:
                    run.logs.collect(self._api, pod)
        self._api.delete_and_wait(self._name(run), run_selector, _STOP_S)
        self._queue.forget(run.run_id)

    def note(self, job_id: str, text: str) -> None:
        """Add a line of the master to a run's log; see :meth:`Engine.note`."""
        self._run_by(job_id).logs.note(text)

    def remove(self, job_id: str) -> None:
        """Delete a run's folder, and its Job if it still exists; see :meth:`Engine.remove`."""
        run = self._run_by(job_id)
        self._queue.forget(run.run_id)
        self._jobs.pop(run.run_id, None)
        # Otherwise Kubernetes deletes it some time after its end.
        with contextlib.suppress(ApiError):
            self._api.delete_job(self._name(run))
        super().remove(job_id)

    def close(self) -> None:
        """End the threads; the Jobs continue."""
        self._queue.close()
        self._collector.close()
        self._api.close()
        self._jobs.clear()
        super().close()

    def _run_by(self, job_id: str) -> _PodRun:
        return self._run(int(self._job_folder(job_id).name))

    def _run(self, run_id: int) -> _PodRun:
        run = self._jobs.get(run_id)
        if run is None:
            folder = self._folder / str(run_id)
            run = _PodRun(run_id, folder, PodLogs(folder, self._limit_bytes))
            # Another thread may have been faster.
            run = self._jobs.setdefault(run_id, run)
        return run

    def _name(self, run: _PodRun) -> str:
        return job_name(self._setting.mark, run.run_id)

    def _watch(self, run: _PodRun) -> None:
        self._queue.watch(run.run_id)
        self._collector.start()

    def _notes(self, job: Job) -> list[str]:
        """Return notes for the log on features that a run lacks in this cluster."""
        notes = []
        url = self._setting.master_url or job.env.get("MLBENCH_MASTER_URL", "")
        lost = ""
        if not self._setting.shared_claim:
            lost = ", and no volume keeps them, so they are lost"
        if is_loopback(urlsplit(url).hostname or ""):
            notes.append(
                f"note: pods cannot reach the master at {url}, so metrics do not arrive while "
                f"the run continues{lost}; set {PREFIX}MASTER_URL, or start the master with "
                "--host and an address that pods can reach"
            )
        if not self._setting.shared_claim:
            notes.append(
                "note: files that workers write into MLBENCH_OUTPUT end with their pods, "
                "because master and workers share no volume"
            )
        return notes

    def _create_job(self, manifest: dict[str, Any], attempt: str) -> str:
        """Create a Job and return its uid, also if only the answer was lost."""
        name, labels = manifest["metadata"]["name"], manifest["metadata"]["labels"]
        run_selector = selector(self._setting.mark, int(labels[RUN_ID]))
        # The second time, an old Job of the same name is gone.
        for is_last in (False, True):
            try:
                return str(self._api.create_job(manifest)["metadata"]["uid"])
            except (ApiError, KeyError) as error:
                status = 0
                if isinstance(error, ApiError):
                    status = error.status
                # After these errors, the Job may exist nevertheless.
                if not status or status == HTTPStatus.CONFLICT or status >= 500:
                    for job in self._api.jobs(run_selector):
                        if job["metadata"].get("annotations", {}).get(ATTEMPT) == attempt:
                            return str(job["metadata"]["uid"])
                if is_last or status != HTTPStatus.CONFLICT:
                    raise EngineError(f"cannot create Job {name}: {error}") from error
                # A new database reuses the ids of runs that may still be running.
                self._api.delete_and_wait(name, run_selector, _STOP_S)
        raise AssertionError

    def _log_sources(self) -> list[tuple[PodLogs, list[dict[str, Any]]]]:
        sources = []
        for run_id, view in self._queue.views().items():
            if view.pods:
                sources.append((self._run(run_id).logs, view.pods))
        return sources

    def _write_load(self, run_id: int, rank: int, load: dict[str, Any]) -> None:
        folder = self._folder / str(run_id) / "load"
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
        writer = LogWriter(folder, _LOAD_BYTES)
        writer.write(rank, "load", json.dumps(load))
        writer.close()

    def _missing(self, run: _PodRun, view: JobView) -> JobStatus:
        """Return the status of a run whose Job does not exist any more."""
        name = self._name(run)
        if view.was_seen:
            return JobStatus("failed", f"Job {name} was deleted, but not by MLBench")
        reason = f"lost: Job {name} does not exist any more, and nobody saw its end"
        return JobStatus("lost", reason)

    def _look_at_end(self, run: _PodRun, view: JobView, end: dict[str, Any]) -> JobStatus:
        """Return how a run has ended, or that it runs as long as its logs are being read."""
        now = time.monotonic()
        if run.ended_since is None:
            run.ended_since = now
            self._collector.look_soon()
        # Once the end is recorded, Kubernetes deletes the Job with its pods, and their logs with
        # them.
        if run.logs.unread(view.pods) and now - run.ended_since < _LOGS_S:
            return JobStatus("running")
        status, trouble = ended_status(self._name(run), end, view.troubles.values())
        if trouble is not None and trouble.has_error:
            error = self._error_of(run, trouble)
            if is_consequence(error):
                # The worker that is the cause: it did not fail because another one had gone.
                for other in view.troubles.values():
                    if not other.has_error:
                        continue
                    other_error = self._error_of(run, other)
                    if other_error and not is_consequence(other_error):
                        trouble, error = other, other_error
                        break
            if error:
                reason = f"{trouble.reason}: {error}"
                status = JobStatus("failed", reason, trouble.returncode, status.finished_at)
        return self._record(run, status)

    def _record(self, run: _PodRun, status: JobStatus) -> JobStatus:
        run.status = status
        run.logs.note(status.reason or "finished")
        # Before the Job goes: the database may not have the end yet when this master dies.
        with contextlib.suppress(OSError):
            write_json(run.folder / "ended.json", asdict(status))
        self._queue.retire(run.run_id)
        return status

    def _error_of(self, run: _PodRun, trouble: Trouble) -> str:
        """Return the line in which a worker says why it ended."""
        wanted = LogRange(0, _ERROR_LINES, 2**62, LogFilter(rank=trouble.rank))
        search = ErrorSearch()
        for line in self.logs(f"{self.name}-{run.run_id}", wanted).lines:
            search.add(line["text"])
        return search.said(trouble.returncode or 0)


def _read_status(folder: Path) -> JobStatus | None:
    """Return how a run has ended, if a master has recorded it."""
    with (
        contextlib.suppress(OSError, ValueError, TypeError),
        open_at_once(folder / "ended.json") as file,
    ):
        return JobStatus(**json.loads(file.read(_STATE_BYTES)))
    return None
