"""Write the tables of the page on the REST API from its OpenAPI description.

The page ``docs/reference/rest_api.md`` names a part of the API in the marker ``{requests} runs``;
the marker without a name becomes the table of all requests."""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from mlbench_master.api.openapi import set_description
from mlbench_master.api.routes import router

# Every request can have these errors; the page lists them once.
COMMON_ERRORS = {"401", "403", "429", "503"}


@cache
def describe_api() -> dict[str, Any]:
    """Return the OpenAPI description that a master serves, without starting one."""
    app = FastAPI(title="MLBench master")
    app.include_router(router)
    set_description(app)
    return app.openapi()


def list_requests() -> list[tuple[str, str, dict[str, Any]]]:
    """Return method, path and description of all requests, ordered by path."""
    requests = []
    for path, operations in sorted(describe_api()["paths"].items()):
        for method, operation in operations.items():
            requests.append((method.upper(), path, operation))
    return requests


def write_requests(tag: str) -> str:
    """Write the text that replaces a marker.

    Args:
        tag: First part of the paths after ``/api/``; an empty text for the table of all requests.

    Returns:
        Markdown: the table of all requests, or the fields of each request of the tag.
    """
    if not tag:
        return _write_overview()
    sections = []
    for method, path, operation in list_requests():
        if tag in operation["tags"]:
            sections.append(_write_fields(method, path, operation))
    return "\n".join(filter(None, sections))


def _write_overview() -> str:
    """Write the table of all requests."""
    lines = ["| request | answer or effect | parameters or fields | errors |", "|---|---|---|---|"]
    for method, path, operation in list_requests():
        fields = ", ".join(f"`{name}`" for name, *_ in _fields(operation))
        statuses = set(operation["responses"]) - COMMON_ERRORS - _successes(operation)
        summary = operation["summary"].replace("|", r"\|")
        errors = ", ".join(sorted(statuses))
        lines.append(f"| `{method} {path}` | {summary} | {fields} | {errors} |")
    return "\n".join([*lines, ""])


def _write_fields(method: str, path: str, operation: dict[str, Any]) -> str:
    """Write the heading and the table of a request's parameters, or of the fields of its body."""
    rows = [f"| `{name}` | {' | '.join(columns)} |" for name, *columns in _fields(operation)]
    if not rows:
        return ""
    status = min(_successes(operation))
    title = "field of the body" if "requestBody" in operation else "parameter"
    lead = f"{operation['summary']}. Status {status} ({HTTPStatus(int(status)).phrase}) on success."
    table = [f"| {title} | type | meaning | default |", "|---|---|---|---|", *rows, ""]
    return "\n".join([f"### `{method} {path}`", "", lead, "", *table])


def _successes(operation: dict[str, Any]) -> set[str]:
    return {status for status in operation["responses"] if int(status) < 400}


def _fields(operation: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return name, type, meaning and default of a body's fields or a query's parameters.

    A required field has the default ``required``. The parameters in the path are left out: the path
    shows them."""
    fields = {}
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "query":
            description = parameter["description"]
            fields[parameter["name"]] = {**parameter["schema"], "description": description}
    required: list[str] = []
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        # A list of such objects is allowed, too.
        schema = schema.get("oneOf", [schema])[0]
        fields, required = schema["properties"], schema.get("required", [])
    rows = []
    for name, field in fields.items():
        default = "required" if name in required else _show_default(field.get("default"))
        meaning = field.get("description", "").replace("|", r"\|")
        rows.append((name, _show_type(field), meaning, default))
    return rows


def _show_default(value: Any) -> str:
    """Return a default as Markdown; an empty one means that the field is left out."""
    if value in (None, "", []):
        return ""
    if isinstance(value, bool):
        value = str(value).lower()
    return f"`{value}`"


def _show_type(field: dict[str, Any]) -> str:
    """Return the type of a field in words, with its limits or its allowed values."""
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    if len(kinds) == 1:
        # Other entries beside anyOf, such as a limit, apply to the one kind.
        others = dict(field)
        others.pop("anyOf", None)
        kinds = [{**others, **kinds[0]}]
    return " or ".join(dict.fromkeys(map(_show_one_type, kinds)))


def _show_one_type(kind: dict[str, Any]) -> str:
    if "anyOf" in kind:
        return _show_type(kind)
    if "enum" in kind:
        return "one of " + ", ".join(f"`{value}`" for value in kind["enum"])
    if kind.get("type") == "array":
        return f"list ({_show_type(kind['items'])})"
    if kind.get("format") == "date-time":
        return "date"
    words = {"integer": "whole number", "boolean": "true or false", "string": "text"}
    if "type" not in kind:
        return "any JSON"
    return words.get(kind["type"], kind["type"]) + _show_limits(kind)


def _show_limits(kind: dict[str, Any]) -> str:
    """Return the limits of a number or of the length of a text, with a comma before them."""
    least, most = kind.get("minimum"), kind.get("maximum")
    # The limit of 64 bits is that of the database, and nobody reaches it.
    if most is not None and most > 2**62:
        most = None
    if kind.get("type") == "string":
        if 1 < kind.get("maxLength", 0) < 2**17:
            return f", at most {kind['maxLength']:,} characters"
        return ""
    if "exclusiveMinimum" in kind:
        limits = f", more than {kind['exclusiveMinimum']:g}"
        if most is not None:
            limits += f", at most {most:,.0f}"
        return limits
    if least is None:
        return ""
    if most is None:
        return f", at least {least:,.0f}"
    return f", {least:,.0f} to {most:,.0f}"
