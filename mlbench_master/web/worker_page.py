"""The page of one worker, and the load of workers as pages show it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse

from mlbench_master.api.routes import POD_PHASES, EnginePart, StorePart
from mlbench_master.api.schemas import LogsQuery
from mlbench_master.database.columns import number_of
from mlbench_master.database.curves import start_of
from mlbench_master.database.store import Point, Run, Store, pod_owner
from mlbench_master.engines.supervisor.load_sampler import LOAD_METRICS
from mlbench_master.web.log_page import log_view
from mlbench_master.web.render import page, size

__all__ = ["Figure", "Worker", "list_workers", "router"]

_TITLES = {
    "cpu": "CPU",
    "memory": "Memory",
    "gpu": "GPU",
    "gpu_memory": "GPU memory",
    "network_in": "Network in",
    "network_out": "Network out",
}

router = APIRouter()


@dataclass(frozen=True)
class Figure:
    """One figure of the load of a worker.

    Attributes:
        metric: Name of the metric.
        point: Its latest entry; None if nothing has been measured yet.
    """

    metric: str
    point: Point | None = None

    @property
    def title(self) -> str:
        """Return the title of the figure."""
        return _TITLES[self.metric]

    @property
    def scope(self) -> str:
        """Return a note on a figure that is not of the worker alone."""
        # See the module load_sampler.
        if self.point is not None and '"machine"' in self.point.extra:
            return "machine"
        return ""

    @property
    def text(self) -> str:
        """Return the latest value with its unit, ``-`` without a value."""
        # static/load.js writes the same texts.
        value = None if self.point is None else number_of(self.point.value)
        if value is None:
            return "-"
        if self.metric in ("cpu", "gpu"):
            return f"{value:.0f} %"
        if self.metric.startswith("network"):
            return f"{size(value)}/s"
        return size(value)


@dataclass(frozen=True)
class Worker:
    """A worker of a run with its load.

    Attributes:
        run: The run.
        rank: The worker's rank.
        figures: Its load; without those that are not measured.
    """

    run: Run
    rank: int
    figures: list[Figure]

    @property
    def name(self) -> str:
        """Return the name of the worker's pod."""
        return self.run.worker_name(self.rank)

    @property
    def phase(self) -> str:
        """Return the state in the words of ``GET /api/pods/``, or ``"Stopped"``."""
        if self.run.is_stopped:
            return "Stopped"
        return POD_PHASES.get(self.run.state, "Unknown")


def list_workers(store: Store, places: Sequence[tuple[Run, int]]) -> list[Worker]:
    """Return workers with their latest load, read together.

    Args:
        store: The database.
        places: Run and rank of each worker.
    """
    owners = [pod_owner(run.worker_name(rank)) for run, rank in places]
    latest = store.latest_entries(itertools.product(owners, LOAD_METRICS))
    workers = []
    for (run, rank), owner in zip(places, owners, strict=True):
        is_open = run.state not in ("finished", "failed")
        figures = []
        for metric in LOAD_METRICS:
            point = latest.get((owner, metric))
            # An open run may still measure a figure; a GPU is in the first sample already.
            if point is not None or (is_open and "gpu" not in metric):
                figures.append(Figure(metric, point))
        workers.append(Worker(run, rank, figures))
    return workers


@router.get("/workers/{name}/")
def worker_page(name: str, request: Request, store: StorePart, engine: EnginePart) -> HTMLResponse:
    run = store.run_of_worker(name)
    if run is None:
        message = f"name: there is no worker {name[:80]!r}: the page of a run leads to its workers"
        raise HTTPException(404, message)
    rank = run.worker_names().index(name)
    [worker] = list_workers(store, [(run, rank)])
    dates = [figure.point.date for figure in worker.figures if figure.point is not None]
    return page(
        request,
        "worker.html",
        worker=worker,
        most_rank=run.worker_count - 1,
        start_s=start_of(run) / 1e6,
        sampled_at=max(dates, default=None),
        log=log_view(run, engine, LogsQuery(rank=str(rank))),
    )
