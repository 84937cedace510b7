"""The log of a run: a part of its page, and a separate page that also filters without a script."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from mlbench_master.api.routes import EnginePart, StorePart, read_query, run_or_404
from mlbench_master.api.schemas import MAX_ID, LogsQuery
from mlbench_master.database.store import Run
from mlbench_master.engines.interface import Engine, LogPage, LogRange
from mlbench_master.web.render import page

__all__ = ["log_view", "router"]

_LINES = 200
# A longer list of workers would make every page of the run large; the user types a rank instead.
_MOST_CHOICES = 64

# A line that reports an error, for Python and JavaScript alike. The stream does not show it:
# loggers write to standard error.
ERROR_LINE = re.compile(
    r"^(\[rank\d+\]: ?)?"
    r"(Traceback \(most recent call last\)|[A-Za-z_.]*(Error|Exception|Interrupt)\b)"
    r"|^(Fatal |E\d{4} |\[E\d)"
    r"|^[^\s:]+: error: |\b(ERROR|CRITICAL|FATAL)\b"
)

router = APIRouter()


@router.get("/runs/{run_id}/logs/")
def logs_page(run_id: str, request: Request, store: StorePart, engine: EnginePart) -> HTMLResponse:
    run = run_or_404(store, run_id)
    query = read_query(LogsQuery, request)
    return page(request, "logs.html", run=run, log=log_view(run, engine, query))


def log_view(run: Run, engine: Engine, query: LogsQuery | None = None) -> dict[str, Any]:
    """Return the values of the template ``run_logs.html``.

    Args:
        run: The run.
        engine: The engine that has its log.
        query: The lines to show; by default the last ones.
    """
    query = query or LogsQuery()
    before = query.before_line
    # A number after the end means the end of the log.
    if before is None:
        before = MAX_ID
    log_page = LogPage([], 0)
    if run.job_id is not None:
        log_page = engine.logs(run.job_id, LogRange(0, _LINES, before, query.wanted))
    wanted = asdict(query.wanted)
    chosen = {name: value for name, value in wanted.items() if value not in (None, "")}
    earlier = urlencode({**chosen, "before_line": log_page.previous})
    download = urlencode({**chosen, "format": "text"})
    # A menu of hundreds of ranks is of no use, and a field for the number takes its place.
    ranks = None
    if run.worker_count <= _MOST_CHOICES:
        ranks = range(run.worker_count)
    return {
        "lines": log_page.lines,
        "next": log_page.next,
        "previous": log_page.previous,
        "ranks": ranks,
        "wanted": query.wanted,
        "is_filtered": bool(chosen),
        "errors": ERROR_LINE.pattern,
        "is_error": ERROR_LINE.search,
        "earlier": f"/runs/{run.id}/logs/?{earlier}",
        "download": f"/api/runs/{run.id}/logs/?{download}",
    }
