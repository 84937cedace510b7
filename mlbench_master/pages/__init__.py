"""The pages of the dashboard: HTML that the master renders, which scripts in ``static/`` keep current."""

from __future__ import annotations

from fastapi import APIRouter

from mlbench_master.pages import logs, run, runs

__all__ = ["make_pages"]


def make_pages() -> APIRouter:
    """Make the routes of all pages, which need the state of :func:`~mlbench_master.app.create_app`."""
    router = APIRouter(include_in_schema=False)
    for page in (runs, run, logs):
        router.include_router(page.router)
    return router
