"""Ask Kubernetes about the Jobs and pods of a master: two calls per interval for all of them.

A list has the present state of all of them, so a lost connection or an expired answer needs no
repair: the next list has everything.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from mlbench_master.engines.interface import EngineError
from mlbench_master.engines.kubernetes.api import ApiError, KubernetesApi
from mlbench_master.engines.kubernetes.manifests import CONTAINER, RUN_ID, selector
from mlbench_master.engines.kubernetes.states import Trouble, find_trouble, rank_of

__all__ = ["JobView", "KubernetesQueue"]

_log = logging.getLogger(__name__)

_SHORTEST_PAUSE_S = 1.0
# A metrics server measures every 15 seconds, unless it is configured otherwise.
_LOAD_INTERVAL_S = 15.0
# Until the next attempt: the cluster may get a metrics server, or this master the right to ask it.
_NO_LOAD_PAUSE_S = 600.0
# An ended Job is kept for a day, but only for this time once its end is recorded.
_KEPT_AFTER_RECORD_S = 600
_NO_METRICS = (
    HTTPStatus.NOT_FOUND,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.SERVICE_UNAVAILABLE,
)


@dataclass
class JobView:
    """A Job and its pods as Kubernetes described them last.

    Attributes:
        job: The Job; None if it does not exist.
        pods: Its pods.
        troubles: The ends of pods that were seen, by rank; Kubernetes may have deleted these pods
            since.
        was_seen: True if the Job has been seen resumed.
    """

    job: dict[str, Any] | None = None
    pods: list[dict[str, Any]] = field(default_factory=list)
    troubles: dict[int, Trouble] = field(default_factory=dict)
    was_seen: bool = False


class KubernetesQueue:
    """The latest answers of Kubernetes about the Jobs of a master, which a thread renews.

    Args:
        api: The API.
        mark: The mark of the master.
        interval_s: Seconds between two queries. There are none while no Job is watched.
        on_load: Called with the id of a run, a rank and the load of this worker.

    Attributes:
        problem: One line on why Kubernetes does not answer; empty while it does.
    """

    def __init__(
        self,
        api: KubernetesApi,
        mark: str,
        interval_s: float,
        on_load: Callable[[int, int, dict[str, Any]], None],
    ) -> None:
        self.problem = ""
        self._api = api
        self._mark = mark
        self._interval_s = interval_s
        self._on_load = on_load
        self._lock = threading.Lock()
        # The times at which watching began, by the ids of runs.
        self._watched: dict[int, float] = {}
        self._views: dict[int, JobView] = {}
        self._retired: set[str] = set()
        self._asked_at = -1.0  # the begin of the latest query that succeeded
        self._load_at = 0.0
        self._load_dates: dict[str, str] = {}
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, run_id: int) -> None:
        """Include a run in the next queries."""
        with self._lock:
            if run_id in self._watched:
                return
            self._watched[run_id] = time.monotonic()
            self._views[run_id] = JobView()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name="mlbench-kubernetes", daemon=True
                )
                self._thread.start()
        self._wake.set()

    def forget(self, run_id: int) -> None:
        """Leave a run out of the next queries."""
        with self._lock:
            self._watched.pop(run_id, None)
            self._views.pop(run_id, None)

    def retire(self, run_id: int) -> None:
        """Leave out a run whose end is recorded, and let Kubernetes delete its Job soon."""
        with self._lock:
            view = self._views.get(run_id)
            if view is not None and view.job is not None:
                self._retired.add(view.job["metadata"]["name"])
        self.forget(run_id)
        self._wake.set()

    def view(self, run_id: int) -> JobView | None:
        """Return the latest view of a watched run; None before a query that began after watch()."""
        with self._lock:
            # A query that began before the Job was created lacks it.
            if self._asked_at < self._watched.get(run_id, time.monotonic()):
                return None
            return self._views.get(run_id)

    def views(self) -> dict[int, JobView]:
        """Return the views of all watched runs by their ids."""
        with self._lock:
            return dict(self._views)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self._shorten_lives()
                if self._watched:
                    self._ask()
                    self._ask_load()
            except Exception:  # the thread must outlive an answer of an unknown form
                _log.exception("looking at the Jobs of Kubernetes failed; trying again")
                self.problem = "the answer of Kubernetes cannot be read; see the log of the master"
            interval_s = None
            if self._watched:
                interval_s = self._interval_s
            self._wake.wait(interval_s)
            self._wake.clear()
            # Several changes at a time do not lead to a call each.
            pause_s = min(_SHORTEST_PAUSE_S, self._interval_s)
            self._closed.wait(max(0.0, began + pause_s - time.monotonic()))

    def _ask(self) -> None:
        asked_at = time.monotonic()
        try:
            jobs = self._api.jobs(selector(self._mark))
            # After the Jobs, so that the pods of a Job that has ended are as they were at its end,
            # or later.
            pods = self._api.pods(selector(self._mark))
        except EngineError as error:
            if self.problem != str(error):
                _log.warning("%s", error)
            self.problem = str(error)
            return
        self.problem = ""
        jobs_by_run = {_run_id(job): job for job in jobs}
        pods_by_run: dict[int | None, list[dict[str, Any]]] = {}
        for pod in pods:
            pods_by_run.setdefault(_run_id(pod), []).append(pod)
        with self._lock:
            for run_id, view in self._views.items():
                job, pods = jobs_by_run.get(run_id), pods_by_run.get(run_id, [])
                self._views[run_id] = _renewed(view, job, pods)
            self._asked_at = asked_at

    def _ask_load(self) -> None:
        """Pass on the load of the workers; a cluster without a metrics server is not a problem."""
        if time.monotonic() < self._load_at:
            return
        self._load_at = time.monotonic() + max(_LOAD_INTERVAL_S, self._interval_s)
        try:
            metrics = self._api.pod_metrics(selector(self._mark))
        except ApiError as error:
            if error.status in _NO_METRICS:
                self._load_at = time.monotonic() + _NO_LOAD_PAUSE_S
            _log.info("no load of workers: %s", error)
            return
        workers: dict[str, tuple[int, int]] = {}
        for run_id, view in self.views().items():
            for pod in view.pods:
                rank = rank_of(pod)
                if rank is not None:
                    workers[pod["metadata"]["name"]] = (run_id, rank)
        dates = {}
        for item in metrics:
            name, date = item["metadata"]["name"], str(item.get("timestamp"))
            dates[name] = date
            load = _load(item)
            # The same measurement may come twice.
            if name in workers and load and self._load_dates.get(name) != date:
                self._on_load(*workers[name], load)
        self._load_dates = dates

    def _shorten_lives(self) -> None:
        """Let Kubernetes delete the Jobs whose ends are recorded."""
        # Otherwise, every list would have them for the whole day.
        with self._lock:
            retired, self._retired = self._retired, set()
        for name in retired:
            # A Job that stays does no harm.
            with contextlib.suppress(EngineError):
                self._api.patch_job(name, {"ttlSecondsAfterFinished": _KEPT_AFTER_RECORD_S})


def _renewed(view: JobView, job: dict[str, Any] | None, pods: list[dict[str, Any]]) -> JobView:
    """Return the view after another query."""
    troubles = dict(view.troubles)
    if job is not None:
        for trouble in filter(None, map(find_trouble, pods)):
            # The first trouble of a pod counts: a pod that is being deleted also ends with an exit
            # status, because of that.
            troubles.setdefault(trouble.rank, trouble)
    is_resumed = job is not None and not job.get("spec", {}).get("suspend")
    return JobView(job, pods, troubles, view.was_seen or is_resumed)


def _run_id(item: dict[str, Any]) -> int | None:
    text = item.get("metadata", {}).get("labels", {}).get(RUN_ID, "")
    # Another program may have set the label to anything.
    if not (text.isascii() and text.isdecimal()):
        return None
    return int(text)


def _load(item: dict[str, Any]) -> dict[str, Any]:
    """Return the CPU in percent of one core, and the memory in bytes, of a pod's worker."""
    from kubernetes.utils.quantity import parse_quantity

    for container in item.get("containers") or ():
        if container.get("name") == CONTAINER:
            usage = container.get("usage", {})
            with contextlib.suppress(KeyError, ValueError, TypeError):
                cpu, memory = parse_quantity(usage["cpu"]), parse_quantity(usage["memory"])
                return {"cpu": round(float(cpu) * 100, 1), "memory": int(memory)}
    return {}
