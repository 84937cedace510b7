"""The main page: the workers and their load, the runs that run or wait, and the latest results."""

from __future__ import annotations

import math

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from mlbench_master.api.routes import LauncherPart, StorePart
from mlbench_master.database.store import Run
from mlbench_master.launchers.interface import Launcher
from mlbench_master.web.render import page
from mlbench_master.web.runs import list_runs
from mlbench_master.web.workers import list_workers

__all__ = ["router"]

_MOST_WORKERS = 32
_MOST_RUNS = 50
_LATEST = 5

router = APIRouter()


@router.get("/")
def main_page(request: Request, store: StorePart, launcher: LauncherPart) -> HTMLResponse:
    started = store.runs("started")
    places = [(run, rank) for run in started for rank in range(run.worker_count)]
    return page(
        request,
        "main.html",
        machine=_machine(launcher, started),
        started=len(started),
        waiting=store.count_runs("initialized"),
        # Thousands of runs may wait.
        open_runs=list_runs(
            store, [*started, *store.runs("initialized", limit=_MOST_RUNS)][:_MOST_RUNS]
        ),
        latest=list_runs(
            store, store.runs("finished", "failed", sort="-finished_at", limit=_LATEST)
        ),
        workers=list_workers(store, places[:_MOST_WORKERS]),
        num_workers=len(places),
    )


@router.get("/favicon.ico")
def icon() -> RedirectResponse:
    # Browsers ask for it with answers that are not pages, such as JSON.
    return RedirectResponse("/static/icon.svg")


def _machine(launcher: Launcher, started: list[Run]) -> dict[str, str]:
    """Return how much of each resource of the launcher the runs use."""
    used = f"{sum(_cores(run) for run in started):g}"
    resources = {
        "Cores": f"{used} of {launcher.capacity:g}" if math.isfinite(launcher.capacity) else used
    }
    gpus = launcher.gpus
    if gpus:
        lent = sum(run.worker_count for run in started if run.gpu_enabled)
        resources["GPUs"] = f"{lent} of {len(gpus)}"
    return resources


def _cores(run: Run) -> float:
    # A damaged record may hold anything.
    return run.worker_count * (run.num_cpus if isinstance(run.num_cpus, int | float) else 0)
