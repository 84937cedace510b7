"""Describe the REST API in OpenAPI as it is served: bodies, answers, errors and authentication.

FastAPI derives only a part of it, because the routes read bodies and queries themselves: a body may be JSON or a form.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, TypeAdapter

from mlbench_master.goals import RunGoal
from mlbench_master.schemas import MAX_BATCH

__all__ = [
    "Added",
    "Entry",
    "Health",
    "Logs",
    "Metrics",
    "MetricsOfAll",
    "Pod",
    "RunGoal",
    "RunOut",
    "documented",
    "parameters",
    "request_body",
    "set_description",
]

State = Literal["initialized", "started", "finished", "failed"]
# The guard and the limits of connections answer on every path.
_ALWAYS = (401, 403, 429, 503)
_MEANINGS = {
    400: "The request is malformed; the message names the field.",
    401: "The token is missing or wrong.",
    403: "The Host or the Origin of the request may not use this master.",
    404: "It does not exist.",
    408: "The request did not arrive in time.",
    409: "The name is in use, or the run was imported before.",
    413: "The body is too long.",
    415: "The body is neither JSON nor a URL-encoded form.",
    429: "Too many wrong tokens were sent.",
    503: "The database failed, or too many connections or event streams are open; try again later.",
}


class Error(BaseModel):
    """The reason of a refusal."""

    status: str
    message: str


class Health(BaseModel):
    """The state of the master."""

    model_config = ConfigDict(extra="allow")

    status: Literal["ok"]
    version: str
    engine: str


class Pod(BaseModel):
    """A worker. The labels are JSON as text, as in version 3.0."""

    name: str
    labels: str
    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
    ip: str


class JobMetadata(BaseModel):
    """Details of a run's job; the output is the last lines, and empty in a list of runs."""

    model_config = ConfigDict(extra="allow")

    command: str
    stdout: list[str]
    stderr: list[str]
    notes: list[str]


class RunOut(BaseModel):
    """A run. Dates are ISO 8601 in UTC, with microseconds.

    ``goal`` is null until the workers have sent the result of the goal. ``goal_result`` is its text, as in version 3.0.
    """

    id: int
    name: str
    created_at: str
    started_at: str | None
    finished_at: str | None
    state: State
    job_id: str
    job_metadata: JobMetadata
    num_workers: int
    num_cpus: float
    max_bandwidth: float
    image: str
    backend: str
    run_all_nodes: bool
    command: str
    gpu_enabled: bool
    light_target: bool
    goal_result: str | None
    goal: RunGoal | None


class Point(BaseModel):
    """One value of a metric. The date is ISO 8601 in UTC."""

    date: str
    value: str
    cumulative: bool


class FullPoint(Point):
    """One value of a metric with its name and its metadata."""

    name: str
    metadata: str


class Entry(FullPoint):
    """One value of a metric, as it was stored."""

    run_id: int | None
    pod_name: str | None
    id: str | None


class Added(BaseModel):
    """The answer to a list of metrics. Metrics that were delivered before are not added again."""

    status: Literal["ok"]
    received: int
    added: int


Metrics = dict[str, list[Point]]


class MetricsOfAll(BaseModel):
    """Every metric, by the names of pods and runs."""

    pod_metrics: dict[str, dict[str, list[FullPoint]]]
    run_metrics: dict[str, dict[str, list[FullPoint]]]


class LogLine(BaseModel):
    """A line of a worker, or of the master if the rank is null."""

    rank: int | None
    stream: str
    text: str
    date: str


class Logs(BaseModel):
    """A page of a log, and the number of the line after it. There are no more lines if it is empty."""

    lines: list[LogLine]
    next: int


def documented(
    model: Any, *errors: int, status: int = 200, media: tuple[str, ...] = ("application/json",)
) -> dict[str, Any]:
    """Return arguments of a route that describe its answers.

    Args:
        model: Type of the answer, or None for one without a schema.
        *errors: Statuses of errors, in addition to those that every path has.
        status: Status of success.
        media: Media types of the answer.
    """
    responses: dict[int | str, Any] = {
        code: {"model": Error, "description": _MEANINGS[code]} for code in sorted({*errors, *_ALWAYS})
    }
    ok: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if model is not None:
        ok["model"] = model
    for kind in media:
        if kind != "application/json":
            schema = {"type": "string", "format": "binary"} if kind == "application/zip" else {"type": "string"}
            ok.setdefault("content", {})[kind] = {"schema": schema}
    responses[status] = ok
    # By default, FastAPI describes an answer as JSON, too.
    response_class = {} if "application/json" in media else {"response_class": StreamingResponse}
    return {"response_model": None, "status_code": status, "responses": responses, **response_class}


def request_body(model: type[BaseModel], *, many: bool = False) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route for its body, JSON or a form.

    Args:
        model: Type of the body.
        many: True if it may also be a JSON list of such objects.
    """
    one = model.model_json_schema()
    several = {"type": "array", "maxItems": MAX_BATCH, "items": one}
    content = {
        "application/json": {"schema": {"oneOf": [one, several]} if many else one},
        "application/x-www-form-urlencoded": {"schema": one},
    }
    return {"requestBody": {"required": True, "content": content}}


def parameters(model: type[BaseModel]) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route for its query parameters, which are the fields of a model."""
    found = []
    for name, schema in TypeAdapter(model).json_schema()["properties"].items():
        # A parameter cannot be null: it is left out instead.
        kinds = [kind for kind in schema.pop("anyOf", [schema]) if kind.get("type") != "null"]
        shown = {key: value for key, value in {**schema, **kinds[0]}.items() if key not in ("title",)}
        if shown.get("default") is None:
            shown.pop("default", None)
        found.append({"name": name, "in": "query", "required": False, "schema": shown})
    return {"parameters": found}


def set_description(app: FastAPI) -> None:
    """Let an application serve a description with the facts that FastAPI cannot know, and without unsent answers."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema["components"]["securitySchemes"] = {
                "token": {"type": "http", "scheme": "bearer", "description": "The master's token."},
            }
            schema["security"] = [{"token": []}]
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    # Malformed requests are answered with 400, in the master's own form.
                    operation["responses"].pop("422", None)
                    if path == "/api/health/":  # the only one that needs no token
                        operation["security"] = []
                        for status in ("401", "429"):
                            operation["responses"].pop(status)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]
