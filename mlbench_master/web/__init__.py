"""The pages of the dashboard: HTML that the master renders and scripts in ``static/`` update."""

from __future__ import annotations

from fastapi import APIRouter

from mlbench_master.web import (
    compare_page,
    log_page,
    main_page,
    run_page,
    runs_page,
    start_page,
    worker_page,
)

__all__ = ["make_pages"]


def make_pages() -> APIRouter:
    """Make the routes of all pages.

    They need the state of :func:`~mlbench_master.app.create_app`.
    """
    router = APIRouter(include_in_schema=False)
    # The form is at /runs/new/, which could also be the page of a run.
    pages = (main_page, runs_page, start_page, run_page, log_page, worker_page, compare_page)
    for page in pages:
        router.include_router(page.router)
    return router
