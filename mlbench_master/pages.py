"""The dashboard's pages, rendered here; whatever users wrote is escaped as text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, HTTPException
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from mlbench_master.bodies import read_login
from mlbench_master.dates import format_date
from mlbench_master.launchers.base import Launcher
from mlbench_master.security import COOKIE, session_cookie, token_matches
from mlbench_master.store import Run, Store, run_owner

__all__ = ["make_pages"]

_TEMPLATES = Path(__file__).parent / "templates"
_LOG_LINES = 200
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def make_pages(store: Store, launcher: Launcher, token: str | None) -> APIRouter:
    """The dashboard's routes.

    Args:
        store: Where runs and metrics are kept.
        launcher: What knows the logs.
        token: The secret that the login page asks for, or None.

    Returns:
        The router.
    """
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    def main_page() -> HTMLResponse:
        rows = "".join(map(_run_row, reversed(store.runs())))
        return _page("MLBench", "runs.html", rows=rows or '<tr><td colspan="6">No runs yet.</td></tr>')

    @router.get("/runs/{run_id}/")
    def run_page(run_id: str) -> HTMLResponse:
        known = run_id.isascii() and run_id.isdigit() and len(run_id) < 19
        run = store.run(int(run_id)) if known else None
        if run is None:
            raise HTTPException(404, f"id: there is no run {run_id[:80]!r}")
        lines = [] if run.job_id is None else launcher.log_tail(run.job_id)[-_LOG_LINES:]
        metrics = "".join(
            _row(name, point.value, format_date(point.date)) for name, point in store.latest(run_owner(run.id))
        )
        return _page(
            f"{run.name} - MLBench",
            "run.html",
            id=str(run.id),
            name=escape(run.name),
            state=escape(run.state),
            facts="".join(_row(key, value) for key, value in _facts(run).items()),
            metrics=metrics or '<tr><td colspan="3">No metrics yet.</td></tr>',
            log=escape("\n".join(_log_line(line) for line in lines)),
        )

    @router.get("/login/")
    def login_page() -> HTMLResponse:
        return _page("MLBench", "login.html", message="")

    @router.post("/login/")
    def login(form: Annotated[dict[str, str], Depends(read_login)]) -> Response:
        if token is None or token_matches(form.get("token", ""), token):
            response = RedirectResponse("/", status_code=303)
            if token is not None:
                response.set_cookie(COOKIE, session_cookie(token), httponly=True, samesite="strict")
            return response
        return _page("MLBench", "login.html", status=401, message="This is not the master's token.")

    return router


def _page(title: str, template: str, status: int = 200, **parts: str) -> HTMLResponse:
    """Fill a template; every part must be HTML already, that is, escaped."""
    content = Template((_TEMPLATES / template).read_text(encoding="utf-8")).substitute(parts)
    layout = Template((_TEMPLATES / "layout.html").read_text(encoding="utf-8"))
    html = layout.substitute(title=escape(title), content=content)
    return HTMLResponse(html.encode("utf-8", "replace"), status_code=status, headers=_HEADERS)


def _run_row(run: Run) -> str:
    link = f'<a href="/runs/{quote(str(run.id))}/">{escape(run.name)}</a>'
    cells = (run.state, str(run.num_workers), run.backend, format_date(run.created_at), run.goal_result or "")
    return f'<tr data-run="{run.id}"><td>{link}</td>' + _cells(cells) + "</tr>\n"


def _facts(run: Run) -> dict[str, str]:
    return {
        "Workers": f"{run.num_workers} with {run.num_cpus:g} cores each",
        "Backend": run.backend,
        "Image": run.image,
        "Command": run.command,
        "Created": format_date(run.created_at),
        "Finished": "" if run.finished_at is None else format_date(run.finished_at),
        "Notes": " ".join(run.metadata_dict().get("notes", ())),
        "Reason": str(run.metadata_dict().get("reason") or ""),
        "Goal": run.goal_result or "",
    }


def _row(*cells: str) -> str:
    head, *rest = cells
    return f'<tr><th scope="row">{escape(head)}</th>' + _cells(rest) + "</tr>\n"


def _cells(cells: Iterable[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _log_line(line: dict[str, Any]) -> str:
    who = "master" if line["rank"] is None else f"rank {line['rank']}"
    return f"{line['date']} {who:>7} | {line['text']}"
