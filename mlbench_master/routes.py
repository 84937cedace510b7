"""The REST API; paths end with a slash, and the application adds a missing one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

import mlbench_core
from mlbench_master import export
from mlbench_master.bodies import read_body
from mlbench_master.commands import check_wishes, resolve_backend, resolve_command
from mlbench_master.dates import format_date, now_us, to_us
from mlbench_master.events import EventBus
from mlbench_master.launchers.interface import Launcher
from mlbench_master.scheduler import Scheduler
from mlbench_master.schemas import MAX_BATCH, MAX_ID, MetricIn, MetricQuery, RunIn, describe_error
from mlbench_master.store import NameInUseError, NewMetric, Run, Store, new_run, pod_owner, run_owner

__all__ = ["make_router"]

_PHASES = {"initialized": "Pending", "started": "Running", "finished": "Succeeded", "failed": "Failed"}
_MAX_LINE = 2**31
Body = Annotated[Any, Depends(read_body)]


def make_router(store: Store, scheduler: Scheduler, launcher: Launcher, events: EventBus) -> APIRouter:
    """Make the routes below ``/api``.

    Args:
        store: The database of runs and metrics.
        scheduler: The scheduler, which starts and stops runs.
        launcher: The launcher, which has the logs.
        events: The bus that notifies subscribers.

    Returns:
        The router.
    """
    router = APIRouter(prefix="/api")
    _add_general_routes(router, store, events)
    _add_metric_routes(router, store, events)
    _add_run_routes(router, store, scheduler, launcher, events)
    return router


def _add_general_routes(router: APIRouter, store: Store, events: EventBus) -> None:
    @router.get("/health/", summary="Whether the master answers")
    def health() -> dict[str, str]:
        return {"status": "ok", "version": mlbench_core.__version__}

    @router.get("/pods/", summary="The workers of all runs")
    def pods() -> list[dict[str, Any]]:
        return [pod for run in store.runs() for pod in _pods(run)]

    @router.get("/events/", summary="Server-sent events: metric, state, log, deleted")
    async def stream_events() -> StreamingResponse:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_encoded(events.subscribe()), media_type="text/event-stream", headers=headers)


def _add_metric_routes(router: APIRouter, store: Store, events: EventBus) -> None:
    @router.get("/metrics/", summary="Every metric of every pod and run")
    def all_metrics() -> StreamingResponse:
        return _StreamedResponse(export.all_metrics_json(store), media_type="application/json")

    @router.get("/metrics/{owner_id}/", summary="The metrics of a pod or a run")
    def metrics(owner_id: str, request: Request) -> StreamingResponse:
        query = _validated(MetricQuery, dict(request.query_params))
        run: Run | None = None
        if query.metric_type == "run":
            run = _run_or_404(store, owner_id)
            owner = run_owner(run.id)
        else:
            owner = pod_owner(owner_id)
            _pod_or_404(store, owner_id)
        since = None if query.since is None else to_us(query.since)
        selection = export.Selection(since, query.metric_filter, query.last_n, query.summarize)
        if query.format != "zip":
            return _StreamedResponse(export.metrics_json(store, owner, selection), media_type="application/json")
        archive = export.metrics_zip(store, owner, run, selection)
        name = export.safe_file_name(owner.replace(":", "_"), set())
        headers = {"Content-Disposition": f'attachment; filename="{name}.zip"'}
        return _StreamedResponse(archive, media_type="application/zip", headers=headers)

    @router.post("/metrics/", status_code=201, summary="Keep one metric or many", openapi_extra=_body_of(MetricIn))
    def add_metrics(body: Body) -> dict[str, Any]:
        many = isinstance(body, list)
        items = body if many else [body]
        if len(items) > MAX_BATCH:
            raise HTTPException(400, f"body: {len(items)} metrics; at most {MAX_BATCH} in one request")
        now = now_us()  # metrics without a date share this one
        parsed = [_validated(MetricIn, item, f"[{index}]." if many else "") for index, item in enumerate(items)]
        missing = {m.run_id for m in parsed if m.run_id is not None}
        missing -= store.existing_runs(i for i in missing if i is not None)
        if missing:
            raise HTTPException(404, f"run_id: there is no run {min(i for i in missing if i is not None)}")
        fresh = [_new_metric(metric, now) for metric in parsed]
        added = store.add_metrics(fresh)
        if events.has_subscribers:
            for metric, new in zip(parsed, fresh, strict=True):
                events.publish("metric", _entry(metric, new))
        if many:
            return {"status": "ok", "received": len(fresh), "added": added}
        return _entry(parsed[0], fresh[0])


def _add_run_routes(
    router: APIRouter, store: Store, scheduler: Scheduler, launcher: Launcher, events: EventBus
) -> None:
    @router.get("/runs/", summary="All runs")
    def runs() -> list[dict[str, Any]]:
        return [run.to_json() for run in store.runs()]

    @router.post("/runs/", status_code=201, summary="Start a run", openapi_extra=_body_of(RunIn))
    def create_run(body: Body) -> dict[str, Any]:
        wanted = _validated(RunIn, body)
        try:
            image, command = resolve_command(wanted)
            backend = resolve_backend(wanted)
            all_nodes, notes = check_wishes(wanted, launcher)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        keep = ("name", "num_workers", "num_cpus", "max_bandwidth", "gpu_enabled", "light_target")
        run = new_run(
            image=image,
            command=command,
            backend=backend,
            run_all_nodes=all_nodes,
            job_metadata=json.dumps({"notes": notes}),
            **wanted.model_dump(include=set(keep)),
        )
        try:
            run = store.add_run(run)
        except NameInUseError:
            message = f"name: there is a run named {wanted.name!r}; choose another name or delete that run"
            raise HTTPException(409, message) from None
        events.publish("state", {"id": run.id, "name": run.name, "state": run.state})
        scheduler.wake()
        return run.to_json()

    @router.get("/runs/{run_id}/", summary="One run")
    def get_run(run_id: str) -> dict[str, Any]:
        run = _run_or_404(store, run_id)
        shown = run.to_json()
        # A run's record gets the last lines of its output only at its end.
        if run.state == "started":
            shown["job_metadata"].update(scheduler.tails(run))
        return shown

    @router.delete("/runs/{run_id}/", status_code=204, summary="Stop a run and forget it")
    def delete_run(run_id: str) -> Response:
        scheduler.delete_run(_run_or_404(store, run_id).id)
        return Response(status_code=204)

    @router.post("/runs/{run_id}/stop/", summary="Stop a run, keep its metrics")
    def stop_run(run_id: str) -> dict[str, Any]:
        run = scheduler.stop_run(_run_or_404(store, run_id).id)
        if run is None:
            raise HTTPException(404, f"id: there is no run {run_id[:80]!r}")
        return run.to_json()

    @router.get("/runs/{run_id}/logs/", summary="Lines of a run's log")
    def logs(run_id: str, since_line: str = "0") -> dict[str, Any]:
        run = _run_or_404(store, run_id)
        if not (since_line.isascii() and since_line.isdigit() and len(since_line) < 20):
            raise HTTPException(400, f"since_line: must be a whole number from 0 on (got {since_line[:80]!r})")
        first = min(int(since_line), _MAX_LINE)
        if run.job_id is None:
            return {"lines": [], "next": first}
        page = launcher.logs(run.job_id, first)
        return {"lines": page.lines, "next": page.next}


class _StreamedResponse(StreamingResponse):
    """A response that fetches its first piece before it sends the status, so that an early error is still reported."""

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


async def _encoded(texts: AsyncIterator[str]) -> AsyncIterator[bytes]:
    async for text in texts:
        yield text.encode()


def _validated(model: type[Any], data: Any, prefix: str = "") -> Any:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise HTTPException(400, describe_error(error, prefix)) from None


def _run_or_404(store: Store, run_id: str) -> Run:
    run = None
    if run_id.isascii() and run_id.isdigit() and len(run_id) < 20 and int(run_id) <= MAX_ID:
        run = store.run(int(run_id))
    if run is None:
        raise HTTPException(404, f"id: there is no run {run_id[:80]!r}")
    return run


def _pod_or_404(store: Store, name: str) -> None:
    if "\x00" not in name and len(name) <= 253:
        if store.metric_counts([pod_owner(name)]):
            return
        if any(name in run.worker_names() for run in store.runs()):
            return
    raise HTTPException(404, f"id: there is no pod {name[:80]!r}; for a run's metrics add metric_type=run")


def _pods(run: Run) -> list[dict[str, Any]]:
    labels = {"app": "mlbench", "component": "worker", "run": run.name, "run_id": str(run.id)}
    return [
        {
            "name": name,
            "labels": json.dumps({**labels, "rank": str(rank)}),  # text, as in version 3.0
            "phase": _PHASES[run.state],
            "ip": "127.0.0.1",
        }
        for rank, name in enumerate(run.worker_names())
    ]


def _new_metric(metric: MetricIn, now: int) -> NewMetric:
    return NewMetric(
        owner=pod_owner(metric.pod_name) if metric.run_id is None else run_owner(metric.run_id),  # type: ignore[arg-type]
        name=metric.name,
        date=now if metric.date is None else to_us(metric.date),
        value=metric.value,
        cumulative=metric.cumulative,
        extra=metric.metadata,
        client_id=metric.id,
    )


def _entry(metric: MetricIn, new: NewMetric) -> dict[str, Any]:
    return {
        "run_id": metric.run_id,
        "pod_name": metric.pod_name,
        "name": new.name,
        "value": new.value,
        "date": format_date(new.date),
        "metadata": new.extra,
        "cumulative": new.cumulative,
        "id": new.client_id,
    }


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Describe the body in OpenAPI, since FastAPI does not parse it: it may be JSON or a form."""
    schema = model.model_json_schema()
    kinds = ("application/json", "application/x-www-form-urlencoded")
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in kinds}}}
