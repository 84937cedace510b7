"""Render the dashboard's pages; the templates escape all text from users."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import jinja2
from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from mlbench_master.bodies import read_login
from mlbench_master.dates import format_date
from mlbench_master.launchers.interface import Launcher, LogLine
from mlbench_master.routes import run_or_404
from mlbench_master.security import COOKIE, session_cookie, token_matches
from mlbench_master.store import Run, Store, run_owner

__all__ = ["make_pages"]

_LOG_LINES = 200
# The pages load nothing from other servers, cannot be framed, and are not cached, since they show users' data.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    # With no-referrer, browsers send "Origin: null" with the form of the login page, which the guard refuses.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)
_templates.filters["date"] = format_date


def make_pages(store: Store, launcher: Launcher, token: str | None) -> APIRouter:
    """Make the dashboard's routes.

    Args:
        store: The runs and their metrics.
        launcher: The source of the logs.
        token: The secret that the login page asks for, or None.

    Returns:
        The router.
    """
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    def main_page() -> HTMLResponse:
        return _page("runs.html", runs=store.runs()[::-1])

    @router.get("/runs/{run_id}/")
    def run_page(run_id: str) -> HTMLResponse:
        run = run_or_404(store, run_id)
        lines, next_line = _last_lines(launcher, run)
        return _page(
            "run.html",
            run=run,
            facts=_facts(run),
            metrics=store.latest(run_owner(run.id)),
            log="".join(f"{_log_line(line)}\n" for line in lines),
            next_line=next_line,
        )

    @router.get("/login/")
    def login_page() -> HTMLResponse:
        return _page("login.html", message="")

    @router.post("/login/")
    def login(form: Annotated[dict[str, str], Depends(read_login)]) -> Response:
        if token is None or token_matches(form.get("token", ""), token):
            response = RedirectResponse("/", status_code=303)
            if token is not None:
                # Scripts cannot read the cookie, and links from other sites do not send it.
                response.set_cookie(COOKIE, session_cookie(token), httponly=True, samesite="strict")
            return response
        return _page("login.html", status=401, message="This is not the master's token.")

    return router


def _page(template: str, status: int = 200, **values: Any) -> HTMLResponse:
    # A text may hold half of a surrogate pair, which UTF-8 cannot encode.
    html = _templates.get_template(template).render(values)
    return HTMLResponse(html.encode("utf-8", "replace"), status_code=status, headers=_HEADERS)


def _last_lines(launcher: Launcher, run: Run) -> tuple[list[LogLine], int]:
    """Return the last lines of a run's log, and the number of the next line, with which live lines continue."""
    if run.job_id is None:
        return [], 0
    end = launcher.log_end(run.job_id)
    count = _LOG_LINES
    while True:
        page = launcher.logs(run.job_id, max(0, end - count), count)
        # An answer is limited in bytes, too, so it may end before the end of the log: fewer lines are then shown.
        if page.next >= end or count == 1:
            return page.lines, page.next
        count //= 2


def _facts(run: Run) -> dict[str, str]:
    return {
        "Workers": f"{run.num_workers}, cores per worker: {run.num_cpus:g}",
        "Backend": run.backend,
        "Image": run.image,
        "Command": run.command,
        "Created": format_date(run.created_at),
        "Finished": "" if run.finished_at is None else format_date(run.finished_at),
        "Notes": " ".join(run.metadata_dict().get("notes", ())),
        "Reason": str(run.metadata_dict().get("reason") or ""),
        "Goal": run.goal_result or "",
    }


def _log_line(line: LogLine) -> str:
    who = "master" if line["rank"] is None else f"rank {line['rank']}"
    return f"{line['date']} {who:>7} | {line['text']}"
