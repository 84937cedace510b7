"""Render the dashboard's pages; the templates escape all text from users."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jinja2
from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from mlbench_master.dates import format_date
from mlbench_master.export import result_json
from mlbench_master.launchers.interface import Launcher, LogLine
from mlbench_master.results import RESULT_METRIC, ResultFolder
from mlbench_master.routes import results_of, run_or_404
from mlbench_master.store import Run, Store, run_owner

__all__ = ["make_pages", "render"]

_LOG_LINES = 200
_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)
_templates.filters["date"] = format_date
_templates.filters["json"] = functools.partial(json.dumps, indent=2, ensure_ascii=False)


def make_pages(store: Store, launcher: Launcher, can_log_out: bool) -> APIRouter:
    """Make the dashboard's routes.

    Args:
        store: The runs and their metrics.
        launcher: The source of the logs.
        can_log_out: Show the button that ends the browser's session.

    Returns:
        The router.
    """
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    def main_page() -> HTMLResponse:
        return render("runs.html", runs=store.runs()[::-1], can_log_out=can_log_out)

    @router.get("/runs/{run_id}/")
    def run_page(run_id: str) -> HTMLResponse:
        run = run_or_404(store, run_id)
        lines, next_line = _last_lines(launcher, run)
        return render(
            "run.html",
            can_log_out=can_log_out,
            run=run,
            facts=_facts(run, launcher),
            has_result=result_json(store, run, results_of(run, launcher)) is not None,
            # The page has a link to the result, which is a text of several kilobytes.
            metrics=[item for item in store.latest(run_owner(run.id)) if item[0] != RESULT_METRIC],
            log="".join(f"{_log_line(line)}\n" for line in lines),
            next_line=next_line,
        )

    return router


def render(template: str, status: int = 200, headers: dict[str, str] | None = None, **values: Any) -> HTMLResponse:
    """Return a page.

    Args:
        template: The file of the template.
        status: The status of the answer.
        headers: Its headers.
        **values: The variables of the template.
    """
    # A text may hold half of a surrogate pair, which UTF-8 cannot encode.
    html = _templates.get_template(template).render(values)
    return HTMLResponse(html.encode("utf-8", "replace"), status_code=status, headers=headers)


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


def _facts(run: Run, launcher: Launcher) -> dict[str, str]:
    goal = run.goal_record
    phases = {} if goal is None else goal.phases_s
    folder = ResultFolder.find(results_of(run, launcher))
    place = ""
    if folder is not None:
        with folder:
            place = str(folder.path)
    return {
        "Workers": f"{run.num_workers}, cores per worker: {run.num_cpus:g}",
        "Backend": run.backend,
        "Image": run.image,
        "Command": run.command,
        "Created": format_date(run.created_at),
        "Finished": "" if run.finished_at is None else format_date(run.finished_at),
        "Notes": " ".join(run.metadata_dict().get("notes", ())),
        "Reason": str(run.metadata_dict().get("reason") or ""),
        "Goal": "" if goal is None else goal.aim,
        "Goal result": (run.goal_result or "") if goal is None else goal.outcome,
        "Time by phase": ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases.items()),
        "Result folder": place,
    }


def _log_line(line: LogLine) -> str:
    who = "master" if line["rank"] is None else f"rank {line['rank']}"
    return f"{line['date']} {who:>7} | {line['text']}"
