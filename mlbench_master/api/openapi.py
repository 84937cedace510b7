"""Describe the REST API in OpenAPI as it is served: bodies, answers, errors and authentication.

FastAPI derives only a part of it, because the routes read bodies and queries themselves: a body may
be JSON or a form.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, TypeAdapter

from mlbench_master.api.examples import ANSWERS, MESSAGES, REQUESTS
from mlbench_master.api.schemas import MAX_BATCH, State
from mlbench_master.runs.run_goals import RunGoal

__all__ = [
    "Added",
    "Curves",
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

_TAGS = {
    "health": "The master itself.",
    "pods": "The workers of the runs, by the name that version 3.0 has for them.",
    "events": "What happens, while it happens.",
    "metrics": "The values that runs and workers send.",
    "runs": "Runs: start, stop, read and delete them.",
}
_NEXT = 'The address of the next page, as `<ADDRESS>; rel="next"`. The last page is without it.'
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
    """The state of the master.

    ``most_workers`` is the largest number of workers of a run, null if it does not know.
    """

    model_config = ConfigDict(extra="allow")

    status: Literal["ok"]
    version: str
    engine: str
    most_workers: int | None


class Pod(BaseModel):
    """A worker. The labels are JSON as text, as in version 3.0."""

    name: str
    labels: str
    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
    ip: str


class JobMetadata(BaseModel):
    """Details of a run's job; the output is the last lines, and empty in a list of runs.

    A run that waits or has failed may have a ``reason``.
    """

    model_config = ConfigDict(extra="allow")

    command: str
    stdout: list[str]
    stderr: list[str]
    notes: list[str]


class RunOut(BaseModel):
    """A run. Dates are ISO 8601 in UTC, with microseconds.

    A run that a user stopped has the state ``failed``, as in version 3.0, and ``stopped`` is true.
    ``tags`` and ``note`` are words of people about it. ``goal`` is null until the workers have sent
    the result of the goal. ``goal_result`` is its text, as in version 3.0.
    """

    id: int
    name: str
    tags: list[str]
    note: str
    created_at: str
    started_at: str | None
    finished_at: str | None
    state: State
    stopped: bool
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


class Curve(BaseModel):
    """The entries of a metric for a chart, by date and thinned.

    It has only name and count if no metric was requested. ``count`` is the number of all entries.
    The lists have the same length: seconds since the start of the run, the epoch of the metadata,
    the number of the entry within its metric (from 0), and the value. A missing epoch is null, and
    so is a value that is not a finite number.
    """

    name: str
    count: int
    time_s: list[float] = []
    epoch: list[float | None] = []
    step: list[int] = []
    value: list[float | None] = []


class Curves(BaseModel):
    """Curves, and the id of the latest entry that is certainly part of them."""

    curves: list[Curve]
    last_id: int


class LogLine(BaseModel):
    """A line of a worker, or of the master if the rank is null, and its number in the whole log."""

    line: int
    rank: int | None
    stream: str
    text: str
    date: str


class Logs(BaseModel):
    """The wanted lines of a range of a log.

    The range goes from ``previous`` to the line before ``next``. It ends at the limit of lines,
    after 1 MiB of them, or after a second of search. ``matches`` is the number of wanted lines in
    it.
    """

    lines: list[LogLine]
    next: int
    previous: int
    matches: int


def documented(
    model: Any,
    *errors: int,
    status: int = 200,
    media: tuple[str, ...] = ("application/json",),
    in_pages: bool = False,
) -> dict[str, Any]:
    """Return arguments of a route that describe its answers.

    Args:
        model: Type of the answer, or None for one without a schema.
        *errors: Statuses of errors, in addition to those that every path has.
        status: Status of success.
        media: Media types of the answer.
        in_pages: True if the header ``Link`` has the address of the next page.
    """
    responses: dict[int | str, Any] = {
        code: {"model": Error, "description": _MEANINGS[code]}
        for code in sorted({*errors, *_ALWAYS})
    }
    ok: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if model is not None:
        ok["model"] = model
    for kind in media:
        if kind != "application/json":
            schema = {"type": "string"}
            if kind == "application/zip":
                schema["format"] = "binary"
            ok.setdefault("content", {})[kind] = {"schema": schema}
    if in_pages:
        ok["headers"] = {"Link": {"description": _NEXT, "schema": {"type": "string"}}}
    responses[status] = ok
    arguments: dict[str, Any] = {"response_model": None, "status_code": status}
    arguments["responses"] = responses
    if "application/json" not in media:
        # By default, FastAPI describes an answer as JSON, too.
        arguments["response_class"] = StreamingResponse
    return arguments


def request_body(model: type[BaseModel], *, many: bool = False) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route for its body, JSON or a form.

    Args:
        model: Type of the body.
        many: True if it may also be a JSON list of such objects.
    """
    one = _with_descriptions(model.model_json_schema())
    several = {"type": "array", "maxItems": MAX_BATCH, "items": one}
    json_schema = {"oneOf": [one, several]} if many else one
    content = {
        "application/json": {"schema": json_schema},
        "application/x-www-form-urlencoded": {"schema": one},
    }
    return {"requestBody": {"required": True, "content": content}}


def parameters(model: type[BaseModel]) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route whose query parameters are the fields of a model."""
    described = []
    for name, schema in _with_descriptions(TypeAdapter(model).json_schema())["properties"].items():
        # A parameter cannot be null: it is left out instead.
        kinds = [kind for kind in schema.pop("anyOf", [schema]) if kind.get("type") != "null"]
        shown = {**schema, **kinds[0]}
        shown.pop("title", None)
        shown.pop("description", None)
        if shown.get("default") in (None, "", []):
            shown.pop("default", None)
        parameter = {"name": name, "in": "query", "required": False}
        text = schema.get("description", "")
        described.append({**parameter, "description": text, "schema": shown})
    return {"parameters": described}


def _with_descriptions(schema: dict[str, Any]) -> dict[str, Any]:
    """Move the meaning of each attribute from the docstring of a model to its property."""
    docstring = schema.get("description", "").replace("``", "`")
    text, _, attributes = docstring.partition("\n\nAttributes:\n")
    meanings = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    if text:
        schema["description"] = " ".join(text.split())
    for name, meaning in meanings:
        schema["properties"][name]["description"] = " ".join(meaning.split())
    return schema


def _add_examples(method: str, path: str, operation: dict[str, Any]) -> None:
    bodies = REQUESTS.get((method, path), {})
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        content["examples"] = {}
        for title, body in bodies.items():
            # A form has no lists.
            if kind.endswith("json") or isinstance(body, dict):
                content["examples"][title] = {"value": body}
    for status, answer in operation["responses"].items():
        for kind, content in answer.get("content", {}).items():
            if int(status) >= 400:
                message = MESSAGES.get((int(status), method, path), MESSAGES[int(status)])
                content["example"] = {"status": HTTPStatus(int(status)).phrase, "message": message}
            elif kind != "application/zip":
                answers = ANSWERS.get((method, path), {})
                content["examples"] = {title: {"value": value} for title, value in answers.items()}


def set_description(app: FastAPI) -> None:
    """Let an application serve a description with the facts that FastAPI cannot know.

    Answers that the master never sends are removed.
    """

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema["components"]["securitySchemes"] = {
                "token": {"type": "http", "scheme": "bearer", "description": "The master's token."},
            }
            schema["security"] = [{"token": []}]
            schema["tags"] = [{"name": name, "description": text} for name, text in _TAGS.items()]
            for path, operations in schema["paths"].items():
                for method, operation in operations.items():
                    operation["tags"] = [path.split("/")[2]]
                    # Malformed requests are answered with 400, in the master's own form.
                    operation["responses"].pop("422", None)
                    if path == "/api/health/":  # the only one that needs no token
                        operation["security"] = []
                        for status in ("401", "429"):
                            operation["responses"].pop(status)
                    _add_examples(method, path, operation)
            # FastAPI adds them for the answers with 422.
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            for model in schema["components"]["schemas"].values():
                _with_descriptions(model)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]
