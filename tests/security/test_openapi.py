"""The description of the API is what is served."""

from __future__ import annotations

import html
import json
import re
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

pytest.importorskip("fastapi", reason="needs the [master] extra")

from mlbench_master import create_app
from mlbench_master.api import examples
from mlbench_master.api import openapi as described
from tests.master.helpers import TestClient
from tests.security.helpers import all_routes


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    app = create_app(data_dir=tmp_path, token="sesame")
    app.state.scheduler.start = lambda: None
    headers = {"Authorization": "Bearer sesame"}
    with TestClient(app, base_url="http://127.0.0.1:5080", headers=headers) as test_client:
        yield test_client


@pytest.fixture
def run(client: Any) -> dict[str, Any]:
    made: dict[str, Any] = client.post(
        "/api/runs/", json={"name": "r", "num_workers": 1, "command": "true"}
    ).json()
    return made


ERRORS = {
    ("get", "/api/health/"): set(),
    ("get", "/api/pods/"): {400},
    ("get", "/api/pods/{name}/curves/"): {400, 404},
    ("get", "/api/events/"): set(),
    ("get", "/api/metrics/"): set(),
    ("get", "/api/metrics/{owner_id}/"): {400, 404},
    ("post", "/api/metrics/"): {400, 404, 408, 413, 415},
    ("get", "/api/runs/"): {400},
    ("post", "/api/runs/"): {400, 408, 409, 413, 415},
    ("post", "/api/runs/import/"): {400, 408, 409, 413, 415},
    ("get", "/api/runs/{run_id}/"): {404},
    ("patch", "/api/runs/{run_id}/"): {400, 404, 408, 413, 415},
    ("delete", "/api/runs/{run_id}/"): {404},
    ("post", "/api/runs/{run_id}/stop/"): {404},
    ("get", "/api/runs/{run_id}/curves/"): {400, 404},
    ("get", "/api/runs/{run_id}/logs/"): {400, 404},
    ("get", "/api/runs/{run_id}/result/"): {404},
}


def test_every_operation_names_its_statuses_and_its_authentication(client: Any) -> None:
    schema = client.get("/openapi.json").json()
    found = {}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            found[method, path] = {
                int(status) for status in operation["responses"] if int(status) >= 400
            }
            is_open = path == "/api/health/"
            assert found[method, path] >= {403, 503} | (set() if is_open else {401, 429})
            assert operation.get("security", schema["security"]) == (
                [] if is_open else [{"token": []}]
            )
            for status, answer in operation["responses"].items():
                if int(status) >= 400:
                    reference = answer["content"]["application/json"]["schema"]["$ref"]
                    assert reference == "#/components/schemas/Error"
    assert {key: errors - {401, 403, 429, 503} for key, errors in found.items()} == ERRORS
    assert schema["components"]["securitySchemes"]["token"]["scheme"] == "bearer"


def test_parameters_and_bodies_are_described(client: Any) -> None:
    paths = client.get("/openapi.json").json()["paths"]

    def query(path: str) -> dict[str, Any]:
        parameters = paths[path]["get"]["parameters"]
        return {item["name"]: item["schema"] for item in parameters if item["in"] == "query"}

    of_metrics = query("/api/metrics/{owner_id}/")
    assert set(of_metrics) == {
        "metric_type",
        "since",
        "summarize",
        "metric_filter",
        "last_n",
        "format",
    }
    assert of_metrics["since"] == {"type": "string", "format": "date-time"}
    assert set(query("/api/runs/")) == {"state", "name", "sort", "limit", "after", "offset"}
    assert set(query("/api/pods/")) == {"limit", "after"}
    of_curves = query("/api/pods/{name}/curves/")
    assert of_curves["metric"]["type"] == "array" and of_curves["points"]["maximum"] == 2000
    assert query("/api/runs/{run_id}/logs/")["since_line"]["type"] == "integer"
    listed = {item["name"]: item for item in paths["/api/runs/"]["get"]["parameters"]}
    assert listed["state"]["schema"]["items"]["enum"] == [
        "initialized",
        "started",
        "finished",
        "failed",
    ]
    assert {"created_at", "-created_at"} <= set(listed["sort"]["schema"]["enum"])
    assert listed["after"]["description"] == "Only runs with a larger id."
    body = paths["/api/metrics/"]["post"]["requestBody"]["content"]
    one, many = body["application/json"]["schema"]["oneOf"]
    assert (many["type"], many["items"], many["maxItems"]) == ("array", one, 10_000)
    assert body["application/x-www-form-urlencoded"]["schema"] == one
    assert one["properties"]["date"]["anyOf"][0] == {"type": "string", "format": "date-time"}
    media = {
        path: set(paths[path]["get"]["responses"]["200"]["content"])
        for path in ("/api/events/", "/api/metrics/{owner_id}/", "/api/runs/")
    }
    assert list(media.values()) == [
        {"text/event-stream"},
        {"application/json", "application/zip", "text/csv"},
        {"application/json"},
    ]


def test_the_answers_are_those_described(client: Any, run: dict[str, Any]) -> None:
    def check(model: Any, answer: Any) -> None:
        TypeAdapter(model).validate_json(answer.content, strict=True)

    metric = {"run_id": run["id"], "name": "m", "value": 1, "metadata": {"a": [1]}}
    assert set(run) == set(described.RunOut.model_fields)
    check(described.Entry, client.post("/api/metrics/", json=metric))
    check(described.Added, client.post("/api/metrics/", json=[metric, {**metric, "id": "x"}]))
    check(described.Health, client.get("/api/health/"))
    check(list[described.Pod], client.get("/api/pods/"))
    check(described.MetricsOfAll, client.get("/api/metrics/"))
    check(described.Metrics, client.get(f"/api/metrics/{run['id']}/?metric_type=run"))
    check(list[described.RunOut], client.get("/api/runs/"))
    check(described.RunOut, client.get(f"/api/runs/{run['id']}/"))
    goal = {
        **metric,
        "name": "goal @ 0",
        "value": '{"reached": true, "epochs": 3, "phases_s": {"compute": 1.5}}',
    }
    client.post(
        "/api/metrics/",
        json=[goal, {**metric, "name": "result @ 0", "value": '{"schema_version": 1}'}],
    )
    reached = client.get(f"/api/runs/{run['id']}/")
    check(described.RunOut, reached)
    assert set(reached.json()["goal"]) == set(described.RunGoal.model_fields)
    check(dict[str, Any], client.get(f"/api/runs/{run['id']}/result/"))
    check(described.Logs, client.get(f"/api/runs/{run['id']}/logs/"))
    check(described.RunOut, client.post(f"/api/runs/{run['id']}/stop/"))
    for query in ("", "metric=m&metric=goal+@+0&points=2"):
        check(described.Curves, client.get(f"/api/runs/{run['id']}/curves/?{query}"))
    check(described.Error, client.get("/api/runs/77/"))
    packed = client.get(f"/api/metrics/{run['id']}/?metric_type=run&format=zip")
    assert packed.headers["content-type"] == "application/zip" and zipfile.is_zipfile(
        BytesIO(packed.content)
    )


def test_every_operation_has_examples_and_everything_a_description(client: Any) -> None:
    schema = client.get("/openapi.json").json()
    tags = {tag["name"] for tag in schema["tags"]}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"] and set(operation["tags"]) <= tags
            assert all(
                item["description"]
                for item in operation.get("parameters", ())
                if item["in"] == "query"
            )
            for answer in [
                *operation["responses"].values(),
                operation.get("requestBody", {"description": "x"}),
            ]:
                assert answer.get("description", "body")
                for kind, content in answer.get("content", {}).items():
                    assert (
                        kind == "application/zip"
                        or content.get("example")
                        or content.get("examples")
                    ), (
                        method,
                        path,
                    )
            for content in operation.get("requestBody", {}).get("content", {}).values():
                one = next(
                    (kind for kind in content["schema"].get("oneOf", ()) if "properties" in kind),
                    content["schema"],
                )
                assert all(field["description"] for field in one["properties"].values())
    for model in schema["components"]["schemas"].values():
        assert (
            model["description"]
            and "Attributes:" not in model["description"]
            and "``" not in model["description"]
        )


def test_the_page_of_the_api_shows_the_examples(client: Any) -> None:
    page = html.unescape(client.get("/docs/").text)
    for named in (examples.REQUESTS, examples.ANSWERS):
        for titles in named.values():
            assert all(title in page for title in titles)
    assert all(message in page for message in examples.MESSAGES.values())
    assert "Only runs in one of these states" in page


def test_examples_of_answers_have_every_field_and_no_other(client: Any) -> None:
    models = {
        (method.lower(), path): route.responses[route.status_code].get("model")
        for method, path, route in all_routes(client.app)
        if path.startswith("/api/") and route.include_in_schema
    }
    assert set(examples.ANSWERS) == set(models) - {("delete", "/api/runs/{run_id}/")}
    for key, answers in examples.ANSWERS.items():
        for title, answer in answers.items():
            adapter: TypeAdapter[Any] = TypeAdapter(
                models[key] or str
            )  # the stream of events is text
            read = adapter.validate_json(json.dumps(answer), strict=True)
            assert adapter.dump_python(read, mode="json") == answer, (key, title)


@pytest.mark.parametrize("kind", ["json", "form"])
def test_every_example_of_a_body_is_accepted(client: Any, run: dict[str, Any], kind: str) -> None:
    client.delete(f"/api/runs/{run['id']}/")
    # The runs come first: the metrics belong to one of them.
    for method, path in sorted(examples.REQUESTS, key=lambda key: key[1] != "/api/runs/"):
        for title, body in examples.REQUESTS[method, path].items():
            if kind == "form" and isinstance(body, list):
                continue
            items = body if isinstance(body, list) else [body]
            items = [
                {**item, "run_id": run["id"] + 1} if "run_id" in item else item for item in items
            ]
            sent = (
                {"data": items[0]}
                if kind == "form"
                else {"json": items if isinstance(body, list) else items[0]}
            )
            place = path.replace("{run_id}", str(run["id"] + 1))
            answer = client.request(method, place, **sent)
            assert answer.status_code == (200 if method == "patch" else 201), (title, answer.text)
            shapes = [shape(example) for example in examples.ANSWERS[method, path].values()]
            assert shape(answer.json()) in shapes, (title, answer.json())


def shape(value: Any) -> Any:
    """The names in a value, without the values."""
    return {k: shape(v) for k, v in value.items()} if isinstance(value, dict) else None


# Requests that are answered with 400; other operations have the parameter `limit`.
WRONG: dict[tuple[str, str], dict[str, Any]] = {
    ("get", "/api/metrics/{owner_id}/"): {"params": "last_n=0"},
    ("get", "/api/pods/{name}/curves/"): {"params": "points=0"},
    ("get", "/api/runs/{run_id}/curves/"): {"params": "points=0"},
    ("get", "/api/runs/{run_id}/logs/"): {"params": "since_line=-1"},
    ("patch", "/api/runs/{run_id}/"): {"json": {"tags": ["a,b"]}},
    ("post", "/api/metrics/"): {"json": {"run_id": 1, "name": "m"}},
    ("post", "/api/runs/"): {"json": {"name": "x", "num_workers": 0}},
    ("post", "/api/runs/import/"): {
        "json": {
            **examples.REQUESTS["post", "/api/runs/import/"]["A finished run"],
            "state": "lost",
        }
    },
}


def test_the_examples_of_errors_are_what_is_sent(client: Any) -> None:
    for path in ("/api/runs/", "/api/runs/import/"):
        client.post(path, json=next(iter(examples.REQUESTS["post", path].values())))
    metric = {"run_id": 2, "name": "result @ 0", "value": "{}"}
    client.post("/api/metrics/", json={"pod_name": "1", "name": "m", "value": 1})
    client.post("/api/metrics/", json=metric)  # without it, the import may be continued
    access = client.app.state.access
    browser = TestClient(
        client.app, base_url=str(client.base_url), cookies={access.cookie: access.open_session()}
    )
    senders = {"401": TestClient(client.app), "403": browser}
    tried = set()
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            first = next(iter(examples.REQUESTS.get((method, path), {"": {}}).values()))
            requests: dict[str, dict[str, Any]] = {
                "400": WRONG.get((method, path), {"params": "limit=0"}),
                "401": {},
                "403": {"headers": {"Origin": "https://example.org"}},
                "404": {"json": {**metric, "run_id": 77}} if method == "post" else {},
                "409": {"json": first},
                "413": {
                    "content": b" " * (2**24 + 1),
                    "headers": {"Content-Type": "application/json"},
                },
                "415": {"files": {"a": b"b"}},
            }
            for status in requests.keys() & operation["responses"].keys():
                if (
                    status == "403" and method == "get"
                ):  # every page may read, and none can see the answer
                    continue
                place = re.sub(r"\{\w+\}", "77" if status == "404" else "1", path)
                answer = senders.get(status, client).request(method, place, **requests[status])
                example = operation["responses"][status]["content"]["application/json"]["example"]
                assert (str(answer.status_code), answer.json()) == (status, example), (
                    method,
                    path,
                    status,
                )
                tried.add(status)
    assert tried == set(requests)


def test_every_path_of_get_answers_head_and_refusals_name_the_methods(
    client: Any, run: dict[str, Any]
) -> None:
    result = {"run_id": run["id"], "name": "result @ 0", "value": "{}"}
    client.post("/api/metrics/", json=result)
    for path, methods in (
        ("/api/health/", "GET, HEAD"),
        ("/api/pods/", "GET, HEAD"),
        ("/api/events/", "GET, HEAD"),
        ("/api/metrics/", "GET, HEAD, POST"),
        (f"/api/metrics/{run['id']}/?metric_type=run", "GET, HEAD"),
        ("/api/runs/", "GET, HEAD, POST"),
        ("/api/pods/r-worker-0/curves/", "GET, HEAD"),
        (f"/api/runs/{run['id']}/curves/", "GET, HEAD"),
        (f"/api/runs/{run['id']}/", "DELETE, GET, HEAD, PATCH"),
        (f"/api/runs/{run['id']}/logs/", "GET, HEAD"),
        (f"/api/runs/{run['id']}/result/", "GET, HEAD"),
        ("/", "GET, HEAD"),
        (f"/runs/{run['id']}/", "GET, HEAD, POST"),
        ("/static/app.js", "GET, HEAD"),
    ):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
        if path != "/api/events/":
            assert answer.headers.get("content-type") == client.get(path).headers["content-type"]
        refused = client.put(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, methods), path
    assert client.get(f"/api/runs/{run['id']}/stop/").headers["allow"] == "POST"
    assert client.put("/api/runs/import/").headers["allow"] == "POST"
    assert client.head("/api/runs/77/").status_code == 404
