"""The main page: the workers and their load, the runs that run or wait, and the latest results."""

from __future__ import annotations

import math

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from mlbench_master.api.routes import EnginePart, StorePart
from mlbench_master.database.store import Run
from mlbench_master.engines.interface import Engine
from mlbench_master.web.render import page
from mlbench_master.web.runs_page import list_runs
from mlbench_master.web.worker_page import list_workers

__all__ = ["router"]

_MOST_WORKERS = 32
_MOST_RUNS = 50
_LATEST = 5

router = APIRouter()


@router.get("/")
def main_page(request: Request, store: StorePart, engine: EnginePart) -> HTMLResponse:
    started = store.runs("started")
    # Thousands of runs may wait.
    open_runs = [*started, *store.runs("initialized", limit=_MOST_RUNS)][:_MOST_RUNS]
    latest = store.runs("finished", "failed", sort="-finished_at", limit=_LATEST)
    workers = [(run, rank) for run in started for rank in range(run.worker_count)]
    return page(
        request,
        "main.html",
        machine=_machine(engine, started),
        started=len(started),
        waiting=store.count_runs("initialized"),
        open_runs=list_runs(store, open_runs),
        latest=list_runs(store, latest),
        workers=list_workers(store, workers[:_MOST_WORKERS]),
        num_workers=len(workers),
    )


@router.get("/favicon.ico")
def icon() -> RedirectResponse:
    # Browsers ask for it with answers that are not pages, such as JSON.
    return RedirectResponse("/static/icon.svg")


def _machine(engine: Engine, started: list[Run]) -> dict[str, str]:
    """Return how much of each resource of the engine the runs use."""
    cores = f"{sum(map(_cores, started)):g}"
    # An engine with its own queue has no limit.
    if math.isfinite(engine.capacity):
        cores += f" of {engine.capacity:g}"
    resources = {"Cores": cores}
    gpus = engine.gpus
    if gpus:
        lent = sum(run.worker_count for run in started if run.gpu_enabled)
        resources["GPUs"] = f"{lent} of {len(gpus)}"
    return resources


def _cores(run: Run) -> float:
    # A damaged record may hold anything.
    if not isinstance(run.num_cpus, int | float):
        return 0
    return run.most_workers * run.num_cpus
