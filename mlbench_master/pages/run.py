"""The page of one run."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from mlbench_master.dates import format_date
from mlbench_master.export import result_json
from mlbench_master.launchers.interface import Launcher
from mlbench_master.pages.logs import log_view
from mlbench_master.pages.render import page
from mlbench_master.results import RESULT_METRIC, ResultFolder
from mlbench_master.routes import LauncherPart, StorePart, results_of, run_or_404
from mlbench_master.store import Run, run_owner

__all__ = ["router"]

router = APIRouter()


@router.get("/runs/{run_id}/")
def run_page(run_id: str, request: Request, store: StorePart, launcher: LauncherPart) -> HTMLResponse:
    run = run_or_404(store, run_id)
    return page(
        request,
        "run.html",
        run=run,
        facts=_facts(run, launcher),
        has_result=result_json(store, run, results_of(run, launcher)) is not None,
        # The page has a link to the result, which is a text of several kilobytes.
        metrics=[item for item in store.latest(run_owner(run.id)) if item[0] != RESULT_METRIC],
        log=log_view(run, launcher),
    )


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
