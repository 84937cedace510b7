"""The list of the runs."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from mlbench_master.pages.render import page
from mlbench_master.routes import StorePart

__all__ = ["router"]

router = APIRouter()


@router.get("/runs/")
def runs_page(request: Request, store: StorePart) -> HTMLResponse:
    return page(request, "runs.html", runs=store.runs()[::-1])


def list_runs(store, runs):  # TEMPORARY
    from types import SimpleNamespace as N

    return [
        N(run=run, program=run.image or run.command, details="", goal=run.goal_record, value=None, share=None)
        for run in runs
    ]
