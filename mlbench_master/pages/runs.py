"""The list of the runs."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from mlbench_master.pages.render import page
from mlbench_master.routes import StorePart

__all__ = ["router"]

router = APIRouter()


@router.get("/")
@router.get("/runs/")
def runs_page(request: Request, store: StorePart) -> HTMLResponse:
    return page(request, "runs.html", runs=store.runs()[::-1])
