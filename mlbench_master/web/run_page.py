"""The page of one run."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic_core
from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from mlbench_core.comparison.master_metrics import describe_run
from mlbench_core.run_terms import PaidSamples
from mlbench_master.api.bodies import MAX_CHANGE_BYTES, read_body
from mlbench_master.api.export import result_json
from mlbench_master.api.routes import (
    EnginePart,
    EventsPart,
    StorePart,
    change_run,
    results_of,
    run_or_404,
)
from mlbench_master.database.curves import start_of
from mlbench_master.database.store import Point, Run, run_owner
from mlbench_master.dates import now_us
from mlbench_master.engines.interface import Engine
from mlbench_master.runs.phases import (
    PHASE_TITLES,
    epoch_phases,
    is_measured,
    longest_s,
    total_phases,
)
from mlbench_master.runs.progress import progress_of
from mlbench_master.runs.result_files import RESULT_METRIC, ResultFolder
from mlbench_master.runs.run_goals import GOAL_METRIC, PLAN_METRIC
from mlbench_master.web.log_page import log_view
from mlbench_master.web.render import moment, page
from mlbench_master.web.runs_by_field import condition
from mlbench_master.web.worker_page import list_workers

__all__ = ["router"]

# A worker may send any number of metrics and values of any length, but a page must stay small.
_LAST_LINES = 15
_MOST_ROWS = 200
_MOST_NAMES = 1000
_MOST_CHARACTERS = 200
_MOST_WORKERS = 32
_MOST_FACTS = 500
_RANKED = re.compile(r"(.*) @ (\d{1,6})")
_FAILED_RANK = re.compile(r"\b(?:worker|rank) (\d{1,6})\b")
# Metrics that charts show without being asked come first in the list of names.
_FIRST = re.compile(r"train_|val_|lr$|samples_per_s$|tokens_per_s$")

router = APIRouter()


@router.get("/runs/{run_id}/")
def run_page(run_id: str, request: Request, store: StorePart, engine: EnginePart) -> HTMLResponse:
    run = run_or_404(store, run_id)
    owner = run_owner(run.id)
    # The page has a link to the result, which is a text of several kilobytes.
    latest = [item for item in store.latest(owner) if item[0] != RESULT_METRIC]
    folder = _Folder.of(run, engine)
    result = _parsed(result_json(store, run, results_of(run, engine)))
    wanted = request.query_params.get("filter", "")[:255]
    listed = [item for item in latest if wanted.lower() in item[0].lower()]
    metrics = [(name, point.value[:_MOST_CHARACTERS], point) for name, point in listed[:_MOST_ROWS]]
    goal = run.goal_record
    to_goal: dict[str, float] = {}
    if goal is not None:
        to_goal = goal.phases_s
    totals = total_phases(latest, result, to_goal)
    unknown = _unknown_phases(result)
    if totals and not is_measured(totals, result, run.worker_count):
        unknown |= {"communication", "hidden"}
    progress = progress_of(store, run, dict(latest))
    epochs = epoch_phases(store, owner, latest, progress.plan.unit)
    configuration = result.get("configuration")
    if not configuration:
        configuration = describe_run(run.to_json(), run.num_workers)
    environment = folder.environment
    if not environment:
        environment = {"machine": result.get("machine"), "software": result.get("software")}
    workers = [(run, rank) for rank in range(min(run.worker_count, _MOST_WORKERS))]
    return page(
        request,
        "run.html",
        run=run,
        is_open=run.state in ("initialized", "started"),
        lasted_s=run.lasted_s(now_us()),
        facts=_facts(run, folder),
        reason=str(run.metadata_dict().get("reason") or ""),
        failed=_failure(run, engine),
        progress=progress,
        has_result=bool(result),
        phases=PHASE_TITLES,
        totals=totals,
        longest_total=longest_s(totals),
        unknown=unknown,
        not_measured=_texts(result.get("not_measured")),
        bytes_on_wire=_bytes_on_wire(result),
        epochs=epochs,
        longest_epoch=longest_s(epochs),
        configuration=_flat(configuration),
        environment=_flat(environment),
        start_s=start_of(run) / 1e6,
        workers=list_workers(store, workers),
        curves=_curve_names(latest),
        metrics=metrics,
        metric_count=len(listed),
        filter=wanted,
        log=log_view(run, engine),
        condition=condition,
    )


@router.post("/runs/{run_id}/")
def change(
    run_id: str,
    body: Annotated[Any, Depends(read_body(MAX_CHANGE_BYTES))],
    store: StorePart,
    events: EventsPart,
) -> RedirectResponse:
    """Change the tags and the note of a run by the form of its page."""
    changed = change_run(run_id, body, store, events)
    return RedirectResponse(f"/runs/{changed['id']}/", status_code=303)


@dataclass(frozen=True)
class _Folder:
    """The result folder of a run: its path, empty without one, and its ``environment.json``."""

    path: str
    environment: dict[str, Any]

    @classmethod
    def of(cls, run: Run, engine: Engine) -> _Folder:
        folder = ResultFolder.find(results_of(run, engine))
        if folder is None:
            return cls("", {})
        with folder:
            return cls(str(folder.path), _parsed(folder.read("environment.json")))


def _parsed(content: bytes | None) -> dict[str, Any]:
    """Return the object in JSON that a worker wrote, empty if there is none."""
    try:
        parsed = pydantic_core.from_json(content or b"", allow_inf_nan=False)
    except ValueError:
        return {}
    if not isinstance(parsed, dict):
        return {}
    return parsed


def _unknown_phases(result: Mapping[str, Any]) -> set[str]:
    """Return the phases whose time a result has as unknown."""
    # A worker wrote the result, so it may hold anything.
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        times = result["times"]["rank_0"]
        return {phase for phase in PHASE_TITLES if times.get(f"{phase}_s", 0.0) is None}
    return set()


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list):
        return []
    return list(map(str, value))


def _bytes_on_wire(result: Mapping[str, Any]) -> float | None:
    """Return the bytes of worker 0; None if they are unknown, or if it sent none."""
    with contextlib.suppress(KeyError, TypeError):
        count = result["bytes_on_wire"]["rank_0"]
        if isinstance(count, (int, float)) and count > 0:
            return float(count)
    return None


def _facts(run: Run, folder: _Folder) -> dict[str, str]:
    metadata = run.metadata_dict()
    goodput = ""
    # Only an elastic run counts its samples.
    if metadata.get("samples"):
        goodput = str(PaidSamples(**metadata["samples"]))
    return {
        "Workers": f"{run.num_workers}, cores per worker: {run.num_cpus:g}",
        "Backend": run.backend,
        "Image": run.image,
        "Command": run.command,
        "Folder of the workers": str(metadata.get("cwd") or ""),
        "Created": moment(run.created_at),
        "Finished": moment(run.finished_at),
        "Notes": " ".join(map(str, metadata.get("notes") or ())),
        "Reason": str(metadata.get("reason") or ""),
        "Changes of workers": "; ".join(map(str, metadata.get("changes") or ())),
        "Goodput": goodput,
        "Result folder": folder.path,
    }


def _failure(run: Run, engine: Engine) -> tuple[int, list[str]] | None:
    """Return the worker that made a run fail and its last lines, if the run's reason names one."""
    match = _FAILED_RANK.search(str(run.metadata_dict().get("reason") or ""))
    if run.state != "failed" or match is None or run.job_id is None:
        return None
    rank = int(match[1])
    texts = []
    errors = []
    for line in engine.log_tail(run.job_id):
        if line["rank"] == rank:
            text = line["text"][: _LAST_LINES * _MOST_CHARACTERS]
            texts.append(text)
            if line["stream"] == "stderr":
                errors.append(text)
    # A traceback is on stderr, but some programs print their errors to stdout only.
    texts = (errors or texts)[-_LAST_LINES:]
    if not texts:
        return None
    return rank, texts


def _curve_names(latest: Sequence[tuple[str, Point]]) -> dict[str, list[int]]:
    """Return the names of the metrics that are numbers, without ranks, and the ranks of each."""
    ranks: dict[str, list[int]] = {}
    for name, point in latest:
        if name in (GOAL_METRIC, PLAN_METRIC) or not _is_number(point.value):
            continue
        match = _RANKED.fullmatch(name)
        if match is None:
            ranks.setdefault(name, [])
        else:
            ranks.setdefault(match[1], []).append(int(match[2]))
    names = sorted(ranks, key=lambda name: (_FIRST.match(name) is None, name))[:_MOST_NAMES]
    return {name: sorted(ranks[name]) for name in names}


def _is_number(value: str) -> bool:
    """Return True also for NaN: the curve of a loss that diverged must stay."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _flat(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the values of nested objects with the path to each, as text."""
    facts: list[tuple[str, str]] = []

    def add(path: str, value: Any) -> None:
        if len(facts) >= _MOST_FACTS:
            return
        if isinstance(value, dict):
            for name, inner in value.items():
                inner_path = str(name)
                if path:
                    inner_path = f"{path}.{name}"
                add(inner_path, inner)
        elif isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value):
            facts.append((path, " ".join(map(str, value))))
        elif value not in (None, ""):
            text = value
            if not isinstance(value, str):
                text = json.dumps(value)
            facts.append((path, text))

    add("", values)
    return [(path, text[:5000]) for path, text in facts if text]
