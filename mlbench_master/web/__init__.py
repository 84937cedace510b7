"""The pages of the dashboard: HTML that the master renders and scripts in ``static/`` update."""

from __future__ import annotations

from fastapi import APIRouter

from mlbench_master.web import compare, logs, main, run, runs, start, workers

__all__ = ["make_pages"]


def make_pages() -> APIRouter:
    """Make the routes of all pages.

    They need the state of :func:`~mlbench_master.app.create_app`.
    """
    router = APIRouter(include_in_schema=False)
    # The form is at /runs/new/, which could also be the page of a run.
    for page in (main, runs, start, run, logs, workers, compare):
        router.include_router(page.router)
    return router
