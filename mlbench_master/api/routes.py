"""The REST API; paths end with a slash, and the application adds a missing one."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

import mlbench_core
from mlbench_master.access.guard import client_address
from mlbench_master.api import export
from mlbench_master.api.bodies import MAX_CHANGE_BYTES, MAX_METRICS_BYTES, MAX_RUN_BYTES, read_body
from mlbench_master.api.intake import read_metrics
from mlbench_master.api.openapi import (
    Added,
    Curves,
    Entry,
    Health,
    Logs,
    Metrics,
    MetricsOfAll,
    Pod,
    RunOut,
    documented,
    parameters,
    request_body,
)
from mlbench_master.api.schemas import (
    DEFAULT_BANDWIDTH,
    MAX_BATCH,
    MAX_ID,
    CurvesQuery,
    LogsQuery,
    MetricIn,
    MetricQuery,
    PodsQuery,
    RunChange,
    RunImport,
    RunIn,
    RunsQuery,
    describe_error,
)
from mlbench_master.database.curves import curves_json, start_of
from mlbench_master.database.store import (
    NameInUseError,
    NewMetric,
    Run,
    Store,
    pod_owner,
    run_owner,
)
from mlbench_master.database.writer import UnknownRunError
from mlbench_master.dates import now_us, to_us
from mlbench_master.engines.interface import Engine, LogPage, LogRange
from mlbench_master.events import EventBus
from mlbench_master.runs.result_files import RESULT_METRIC
from mlbench_master.runs.scheduler import Scheduler
from mlbench_master.runs.start_runs import start_runs

__all__ = ["POD_PHASES", "change_run", "read_query", "results_of", "router", "run_or_404"]

POD_PHASES = {
    "initialized": "Pending",
    "started": "Running",
    "finished": "Succeeded",
    "failed": "Failed",
}
_FEW_METRICS = 100
_read_metrics = read_body(MAX_METRICS_BYTES)


def _part(name: str) -> Any:
    """Make the dependency on a part of the application.

    :func:`~mlbench_master.app.create_app` has set the part.
    """

    # FastAPI runs a function that is not async in a thread, which costs more than this lookup.
    async def part(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(part)


StorePart = Annotated[Store, _part("store")]
SchedulerPart = Annotated[Scheduler, _part("scheduler")]
EnginePart = Annotated[Engine, _part("engine")]
EventsPart = Annotated[EventBus, _part("events")]


general_router = APIRouter()
metrics_router = APIRouter(prefix="/metrics")
runs_router = APIRouter(prefix="/runs")
router = APIRouter(prefix="/api")
"""The routes below ``/api``."""


@general_router.get("/health/", summary="Whether the master answers", **documented(Health))
def health(store: StorePart, scheduler: SchedulerPart, engine: EnginePart) -> dict[str, Any]:
    store.check()  # an error of the database is answered with status 503
    if not scheduler.is_in_charge:
        message = "another master has taken over the database, or it cannot be written"
        raise HTTPException(503, message)
    return {
        "status": "ok",
        "version": mlbench_core.__version__,
        "engine": engine.name,
        "most_workers": engine.most_workers,
    }


@general_router.get(
    "/pods/",
    summary="The workers of all runs, or a page of them",
    openapi_extra=parameters(PodsQuery),
    **documented(list[Pod], 400, in_pages=True),
)
def pods(request: Request, store: StorePart) -> JSONResponse:
    query = read_query(PodsQuery, request)
    run_id, after_rank = map(int, query.after.split("-"))
    most_runs = None
    if query.limit is not None:
        # Each run has a worker, so one run more than pods is enough.
        most_runs = query.limit + 1
    runs = store.runs(after=run_id - 1, limit=most_runs)
    page = list(itertools.islice(_workers_after(runs, run_id, after_rank), query.limit))
    follows = query.limit is not None and len(page) == query.limit
    after = ""
    if page:
        run, rank, _ = page[-1]
        after = f"{run.id}-{rank}"
    headers = _link(request, follows, after=after)
    return JSONResponse(list(itertools.starmap(_pod, page)), headers=headers)


def _workers_after(
    runs: Iterable[Run], run_id: int, after_rank: int
) -> Iterator[tuple[Run, int, str]]:
    """Yield run, rank and name of each worker of some runs, without the first ones of one run."""
    for run in runs:
        for rank, name in enumerate(run.worker_names()):
            if run.id != run_id or rank > after_rank:
                yield run, rank, name


@general_router.get(
    "/pods/{name}/curves/",
    summary="The metrics of a pod for charts",
    openapi_extra=parameters(CurvesQuery),
    **documented(Curves, 400, 404),
)
def pod_curves(name: str, request: Request, store: StorePart) -> StreamingResponse:
    _pod_or_404(store, name)
    start_us = None
    # Only the metrics of a pod whose run was deleted have no run.
    run = store.run_named(name.rpartition("-worker-")[0])
    if run is not None:
        start_us = start_of(run)
    return _curves(request, store, pod_owner(name), start_us)


@general_router.get(
    "/events/",
    summary="Server-sent events: metric, state, log, deleted, lost",
    **documented(None, media=("text/event-stream",)),
)
async def stream_events(request: Request, events: EventsPart) -> StreamingResponse:
    # nginx would collect events in a buffer, unless its header X-Accel-Buffering forbids it.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    stream = events.subscribe(client_address(request.scope))
    return _StreamedResponse(stream, media_type="text/event-stream", headers=headers)


@metrics_router.post(
    "/",
    summary="Keep one metric or many",
    openapi_extra=request_body(MetricIn, many=True),
    **documented(Entry | Added, 400, 404, 408, 413, 415, status=201),
)
async def add_metrics(request: Request) -> Response:
    # Without dependencies: FastAPI takes longer for three of them than the database for a metric.
    body = await _read_metrics(request)
    many = isinstance(body, list)
    items = [body]
    if many:
        items = body
    if len(items) > MAX_BATCH:
        message = (
            f"body: must have at most {MAX_BATCH} metrics, not {len(items)}: "
            "send them in several requests"
        )
        raise HTTPException(400, message)
    try:
        now = now_us()  # the date of all metrics without one
        if len(items) <= _FEW_METRICS:
            # A thread would cost more than the check.
            metrics = read_metrics(items, now, many)
        else:
            metrics = await run_in_threadpool(read_metrics, items, now, many)
        added = await request.app.state.writer.add(metrics)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    except UnknownRunError as error:
        raise HTTPException(404, f"run_id: {error}") from None
    events: EventBus = request.app.state.events
    task = None
    if events.has_subscribers:
        # After the answer: a client need not wait until thousands of events have been encoded.
        task = BackgroundTask(_publish, events, metrics)
    if many:
        answer = {"status": "ok", "received": len(metrics), "added": added}
    else:
        answer = metrics[0].to_json()
    return JSONResponse(answer, 201, background=task)


@metrics_router.get("/", summary="Every metric of every pod and run", **documented(MetricsOfAll))
def all_metrics(store: StorePart) -> StreamingResponse:
    return _StreamedResponse(export.all_metrics_json(store), media_type="application/json")


@metrics_router.get(
    "/{owner_id}/",
    summary="The metrics of a pod or a run",
    openapi_extra=parameters(MetricQuery),
    **documented(Metrics, 400, 404, media=("application/json", "application/zip", "text/csv")),
)
def metrics(
    owner_id: str, request: Request, store: StorePart, engine: EnginePart
) -> StreamingResponse:
    query = read_query(MetricQuery, request)
    run: Run | None = None
    if query.metric_type == "run":
        run = run_or_404(store, owner_id)
        owner = run_owner(run.id)
    else:
        owner = pod_owner(owner_id)
        _pod_or_404(store, owner_id)
    since = None
    if query.since is not None:
        since = to_us(query.since)
    selection = export.Selection(since, query.metric_filter, query.last_n, query.summarize)
    if query.format not in ("zip", "csv"):
        pieces = export.metrics_json(store, owner, selection)
        # Metrics of an earlier version of the master are read slowly, but only once.
        task = BackgroundTask(store.pack_loose, owner)
        return _StreamedResponse(pieces, media_type="application/json", background=task)
    name = export.safe_file_name(owner.replace(":", "_"), set())
    headers = _attachment(f"{name}.{query.format}")
    if query.format == "csv":
        rows = export.metrics_csv(store, owner, selection)
        return _StreamedResponse(rows, media_type="text/csv", headers=headers)
    results = None
    if run is not None:
        results = results_of(run, engine)
    archive = export.metrics_zip(store, owner, run, selection, results)
    return _StreamedResponse(archive, media_type="application/zip", headers=headers)


@runs_router.get(
    "/",
    summary="All runs, or a page of them, without the output of their workers",
    openapi_extra=parameters(RunsQuery),
    **documented(list[RunOut], 400, in_pages=True),
)
def runs(request: Request, store: StorePart, scheduler: SchedulerPart) -> JSONResponse:
    query = read_query(RunsQuery, request, "state")
    page = store.runs(*query.state, **query.model_dump(exclude={"state"}))
    follows = query.limit is not None and len(page) == query.limit
    # An id stays the right position when runs before it are deleted; other orders have none.
    if query.sort == "id":
        last_id = 0
        if page:
            last_id = page[-1].id
        headers = _link(request, follows, after=last_id, offset=None)
    else:
        headers = _link(request, follows, offset=query.offset + len(page))
    # FastAPI would look at every value before it encodes them.
    return JSONResponse([_with_reason(run, scheduler) for run in page], headers=headers)


def _with_reason(run: Run, scheduler: Scheduler) -> dict[str, Any]:
    """Return a run as the API shows it; if it waits, with the reason."""
    shown = run.to_json()
    reason = scheduler.waits_for(run)
    # It is not in the database, because the start of one run can change it for hundreds of others.
    if reason:
        shown["job_metadata"]["reason"] = reason
    return shown


@runs_router.post(
    "/",
    summary="Start a run",
    openapi_extra=request_body(RunIn),
    **documented(RunOut, 400, 408, 409, 413, 415, status=201),
)
def create_run(
    body: Annotated[Any, Depends(read_body(MAX_RUN_BYTES))],
    store: StorePart,
    scheduler: SchedulerPart,
    engine: EnginePart,
    events: EventsPart,
) -> dict[str, Any]:
    wanted = _validated(RunIn, body)
    try:
        (run,) = start_runs([wanted], store, scheduler, engine, events)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    except NameInUseError:
        message = (
            f"name: there is a run named {wanted.name!r}; choose another name or delete that run"
        )
        raise HTTPException(409, message) from None
    return run.to_json()


@runs_router.post(
    "/import/",
    summary="Add a run that ended without this master; nothing is started",
    openapi_extra=request_body(RunImport),
    **documented(RunOut, 400, 408, 409, 413, 415, status=201),
)
def import_run(
    body: Annotated[Any, Depends(read_body(MAX_RUN_BYTES))], store: StorePart, events: EventsPart
) -> dict[str, Any]:
    wanted = _validated(RunImport, body)
    metadata: dict[str, Any] = {"notes": ["imported from a result folder"]}
    if wanted.reason:
        metadata["reason"] = wanted.reason
    created = to_us(wanted.created_at)
    # The state is final from the beginning, so the scheduler never sees the run.
    new = Run(
        created_at=created,
        started_at=created,
        finished_at=to_us(wanted.finished_at),
        max_bandwidth=DEFAULT_BANDWIDTH,
        image="",
        run_all_nodes=True,
        job_metadata=json.dumps(metadata),
        **wanted.model_dump(exclude={"fingerprint", "created_at", "finished_at", "reason"}),
    )
    run = store.import_run(new, wanted.fingerprint)
    # The client sends this metric last. Without it, the import was cut off, and may be continued.
    if store.newest_value(run_owner(run.id), RESULT_METRIC) is not None:
        message = (
            f"fingerprint: it was imported before as {run.name!r} (id {run.id}); "
            "delete that run to import it again"
        )
        raise HTTPException(409, message)
    events.publish("state", {"id": run.id, "name": run.name, "state": run.state})
    return run.to_json()


@runs_router.get("/{run_id}/", summary="One run", **documented(RunOut, 404))
def get_run(run_id: str, store: StorePart, scheduler: SchedulerPart) -> dict[str, Any]:
    run = run_or_404(store, run_id)
    shown = _with_reason(run, scheduler)
    # A run's record gets the last lines of its output only at its end.
    if run.state == "started":
        shown["job_metadata"].update(scheduler.tails(run))
    return shown


@runs_router.patch(
    "/{run_id}/",
    summary="Change the tags and the note of a run",
    openapi_extra=request_body(RunChange),
    **documented(RunOut, 400, 404, 408, 413, 415),
)
def change_run(
    run_id: str,
    body: Annotated[Any, Depends(read_body(MAX_CHANGE_BYTES))],
    store: StorePart,
    events: EventsPart,
) -> dict[str, Any]:
    """Change the tags and the note of a run, and return it as the API shows it."""
    changes = _validated(RunChange, body).model_dump(exclude_none=True)
    run = store.update_run(run_or_404(store, run_id).id, changes)
    if run is None:  # another request has deleted it in the meantime
        raise HTTPException(404, f"id: there is no run {run_id[:80]!r}")
    events.publish("state", {"id": run.id, "name": run.name, "state": run.state})
    return run.to_json()


@runs_router.delete(
    "/{run_id}/", summary="Stop a run and forget it", **documented(None, 404, status=204)
)
def delete_run(run_id: str, store: StorePart, scheduler: SchedulerPart) -> Response:
    scheduler.delete_run(run_or_404(store, run_id).id)
    # To give the space of a large run back takes seconds, for which the client need not wait.
    return Response(status_code=204, background=BackgroundTask(store.reclaim))


@runs_router.post(
    "/{run_id}/stop/", summary="Stop a run, keep its metrics", **documented(RunOut, 404)
)
def stop_run(run_id: str, store: StorePart, scheduler: SchedulerPart) -> dict[str, Any]:
    run = scheduler.stop_run(run_or_404(store, run_id).id)
    if run is None:  # another request has deleted it in the meantime
        raise HTTPException(404, f"id: there is no run {run_id[:80]!r}")
    return run.to_json()


@runs_router.get(
    "/{run_id}/logs/",
    summary="Lines of a run's log",
    openapi_extra=parameters(LogsQuery),
    **documented(Logs, 400, 404, media=("application/json", "text/plain"), in_pages=True),
)
def logs(run_id: str, request: Request, store: StorePart, engine: EnginePart) -> Response:
    run = run_or_404(store, run_id)
    query: LogsQuery = read_query(LogsQuery, request)
    if query.format == "text":
        text = export.log_text(engine, run, query)
        headers = _attachment(export.log_file_name(run, query))
        return _StreamedResponse(text, media_type="text/plain", headers=headers)
    first = query.since_line
    page = LogPage([], first, first)
    if run.job_id is not None:
        wanted = LogRange(first, query.limit, query.before_line, query.wanted)
        page = engine.logs(run.job_id, wanted)
    if query.before_line is None:
        headers = _link(request, page.next > first, since_line=page.next)
    else:
        headers = _link(request, page.previous > first, before_line=page.previous)
    return JSONResponse(asdict(page), headers=headers)


@runs_router.get(
    "/{run_id}/curves/",
    summary="The metrics of a run for charts",
    openapi_extra=parameters(CurvesQuery),
    **documented(Curves, 400, 404),
)
def run_curves(run_id: str, request: Request, store: StorePart) -> StreamingResponse:
    run = run_or_404(store, run_id)
    return _curves(request, store, run_owner(run.id), start_of(run))


@runs_router.get(
    "/{run_id}/result/", summary="The result.json of a run", **documented(dict[str, Any], 404)
)
def get_result(run_id: str, store: StorePart, engine: EnginePart) -> Response:
    run = run_or_404(store, run_id)
    content = export.result_json(store, run, results_of(run, engine))
    if content is None:
        message = (
            f"id: run {run.id} has no valid result.json; a task of MLBench writes it at its end"
        )
        raise HTTPException(404, message)
    return Response(content, media_type="application/json")


class _StreamedResponse(StreamingResponse):
    """A response that fetches its first piece before it sends the status.

    So an error that comes early is reported with its own status.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        iterator = aiter(self.body_iterator)
        try:
            first: Any = await anext(iterator)
        except StopAsyncIteration:
            first = b""

        async def whole() -> AsyncIterator[Any]:
            yield first
            async for piece in iterator:
                yield piece

        self.body_iterator = whole()
        await super().__call__(scope, receive, send)


def _attachment(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}


def _validated(model: type[Any], data: Any) -> Any:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise HTTPException(400, describe_error(error)) from None


def read_query(model: type[Any], request: Request, *lists: str) -> Any:
    """Return the query parameters of a request, or raise an HTTPException with status 400.

    Args:
        model: Their model.
        request: The request.
        *lists: The parameters that may be given several times.
    """
    values: dict[str, Any] = {**request.query_params}
    for name in lists:
        # HTML forms send the fields that the user left empty.
        values[name] = list(filter(None, request.query_params.getlist(name)))
    return _validated(model, values)


def run_or_404(store: Store, run_id: str) -> Run:
    """Return the run with the id in a path, or raise an HTTPException with status 404."""
    # isdigit alone accepts digits of other scripts, and int of thousands of digits is slow.
    is_id = run_id.isascii() and run_id.isdigit() and len(run_id) < 20 and int(run_id) <= MAX_ID
    run = None
    if is_id:
        run = store.run(int(run_id))
    if run is None:
        raise HTTPException(404, f"id: there is no run {run_id[:80]!r}")
    return run


def results_of(run: Run, engine: Engine) -> Path | None:
    """Return the folder for the results of a run's workers, None if the master cannot read it."""
    if run.job_id is None:
        return None
    return engine.results(run.job_id)


def _pod_or_404(store: Store, name: str) -> None:
    # PostgreSQL refuses NUL in a parameter.
    is_name = "\x00" not in name and len(name) <= 253
    # A worker that has not posted yet is a pod without metrics.
    if is_name and (store.run_of_worker(name) or store.metric_counts([pod_owner(name)])):
        return
    message = f"id: there is no pod {name[:80]!r}; for a run's metrics add metric_type=run"
    raise HTTPException(404, message)


def _pod(run: Run, rank: int, name: str) -> dict[str, Any]:
    labels = {
        "app": "mlbench",
        "component": "worker",
        "run": run.name,
        "run_id": str(run.id),
        "rank": str(rank),
    }
    return {
        "name": name,
        "labels": json.dumps(labels),  # text, as in version 3.0
        "phase": POD_PHASES.get(run.state, "Unknown"),
        "ip": "127.0.0.1",
    }


def _curves(request: Request, store: Store, owner: str, start_us: int | None) -> StreamingResponse:
    query = read_query(CurvesQuery, request, "metric")
    pieces = curves_json(store, owner, start_us, query.metric, query.points)
    task = BackgroundTask(store.pack_loose, owner)
    return _StreamedResponse(pieces, media_type="application/json", background=task)


def _link(request: Request, follows: bool, **changes: object) -> dict[str, str]:
    """Return the header with the address of the next page; a list stays a list, as in version 3.0.

    Args:
        request: The request of this page.
        follows: False if this page is the last one.
        **changes: The query parameters that the next page has in place of those of this page; None
            for none.
    """
    if not follows:
        return {}
    query: list[tuple[str, object]] = []
    for name, value in request.query_params.multi_items():
        if name not in changes:
            query.append((name, value))
    query += [(name, value) for name, value in changes.items() if value is not None]
    return {"Link": f'<{request.url.path}?{urlencode(query)}>; rel="next"'}


def _publish(events: EventBus, metrics: list[NewMetric]) -> None:
    events.publish("metric", *map(NewMetric.to_json, metrics))


# The routes are tried in this order, and most requests deliver metrics.
for part in (metrics_router, runs_router, general_router):
    router.include_router(part)
