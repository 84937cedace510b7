"""What holds for every route of the application, whoever adds it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the [master] extra")
pytest.importorskip("httpx", reason="needs httpx")

from mlbench_master import create_app
from tests.master.helpers import IdleEngine, TestClient
from tests.security.helpers import all_routes

TOKEN = "a-token-that-a-user-chose"
ADDRESS = "http://mlbench.example:5080"
# The state of the master, and what a browser needs for a login.
OPEN = {("GET", "/api/health/"), ("GET", "/login/"), ("POST", "/login/"), ("GET", "/static")}
WRITES = ("DELETE", "PATCH", "POST", "PUT")


@pytest.fixture
def app(tmp_path: Path) -> Any:
    return create_app(data_dir=tmp_path, engine=IdleEngine(), token=TOKEN)


@pytest.fixture
def client(app: Any) -> Iterator[Any]:
    """A program on another machine, without the token."""
    with TestClient(
        app, base_url=ADDRESS, client=("203.0.113.5", 1), follow_redirects=False
    ) as test_client:
        yield test_client


def places(app: Any) -> list[tuple[str, str]]:
    """Method and address of every route, with a run and a worker that exist."""
    run = {"name": "r", "num_workers": 1, "command": "true"}
    TestClient(app, headers={"Authorization": f"Bearer {TOKEN}"}, base_url=ADDRESS).post(
        "/api/runs/", json=run
    )
    found = [(method, path) for method, path, _ in all_routes(app)]
    assert len(found) > 20
    return [
        (
            method,
            re.sub(r"\{(\w+)(:\w+)?\}", lambda m: "r-worker-0" if "name" in m[1] else "1", path),
        )
        for method, path in found
    ]


def test_nobody_without_the_token_gets_past_a_route(app: Any, client: Any) -> None:
    cookie = app.state.access.cookie
    strangers: list[dict[str, str]] = [
        {},
        {"Cookie": f"{cookie}=guess"},
        {"X-Forwarded-For": "127.0.0.1"},
    ]
    closed = [place for place in places(app) if place not in OPEN]
    for method, path in closed:
        for headers in strangers:
            for address in (path, path.rstrip("/") or "/", f"{path}?token={TOKEN}", f"/x/..{path}"):
                answer = client.request(method, address, headers=headers, content=b"{}")
                assert answer.status_code == 401, (method, address, headers)
                assert method == "HEAD" or answer.json()["status"] == "Unauthorized"
        page = client.request(method, path, headers={"Accept": "text/html"})
        is_page = not path.startswith("/api/")
        assert (page.status_code, page.headers.get("location")) == (
            (303, "/login/") if is_page else (401, None)
        ), path
    for method, path in closed[:9]:  # ten wrong tokens are too many
        assert (
            client.request(method, path, headers={"Authorization": "Bearer guess"}).status_code
            == 401
        )
    with TestClient(app, base_url=ADDRESS, headers={"Authorization": f"Bearer {TOKEN}"}) as owner:
        assert [run["name"] for run in owner.get("/api/runs/").json()] == ["r"]


def test_no_route_answers_to_a_foreign_name_of_a_master_without_a_token(tmp_path: Path) -> None:
    app = create_app(data_dir=tmp_path, engine=IdleEngine())
    with TestClient(app, base_url="http://127.0.0.1:5080", follow_redirects=False) as client:
        for method, path, _ in all_routes(app):
            for host in ("evil.example", "127.0.0.1.evil.example", "wpad", ""):
                answer = client.request(
                    method, path, headers={"Host": host, "Origin": f"http://{host}"}
                )
                assert answer.status_code == 403, (method, path, host)


def test_no_route_lets_a_page_of_another_site_write(app: Any, client: Any) -> None:
    client.cookies[app.state.access.cookie] = app.state.access.open_session()
    writing = [(method, path) for method, path in places(app) if method in WRITES]
    assert len(writing) >= 7
    for method, path in writing:
        for origin in (
            "https://evil.example",
            "null",
            "http://mlbench.example",
            f"{ADDRESS}.evil.example",
            "",
        ):
            headers = {"Origin": origin, "Content-Type": "text/plain"}
            answer = client.request(method, path, headers=headers, content=b'{"name": "evil"}')
            assert answer.status_code == 403, (method, path, origin)


BODIES = {
    "long": b'{"name": "' + b"x" * (2**24 + 1) + b'"}',
    "deep": b"[" * 100_000,
    "many": b"[" + b"{}," * 1_000_000 + b"{}]",
    "fields": b"a=b&" * 100_000,
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("body", list(BODIES))
def test_every_route_refuses_or_ignores_a_strange_body(app: Any, client: Any, body: str) -> None:
    client.cookies[app.state.access.cookie] = app.state.access.open_session()
    taken = {
        path
        for path, item in app.openapi()["paths"].items()
        if "requestBody" in item.get("post", ())
    }
    for method, path in places(app):
        if method in WRITES and path != "/logout/":
            kind = (
                "application/x-www-form-urlencoded"
                if body == "fields" or path == "/login/"
                else "application/json"
            )
            answer = client.request(
                method, path, content=BODIES[body], headers={"Content-Type": kind}
            )
            # A route that takes no body ignores it.
            allowed = (
                (400, 413, 415)
                if path in {*taken, "/login/"}
                else (200, 201, 204, 303, 400, 404, 413, 415)
            )
            assert answer.status_code in allowed, (method, path, answer.status_code)


def test_every_route_forbids_other_sites_to_load_or_frame_its_answers(
    app: Any, client: Any
) -> None:
    client.cookies[app.state.access.cookie] = app.state.access.open_session()
    for method, path in places(app):
        if path == "/api/events/":
            method = "HEAD"  # the stream has no end
        headers = client.request(method, path).headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"], (method, path)
        assert (headers["x-content-type-options"], headers["x-frame-options"]) == (
            "nosniff",
            "DENY",
        )
        if path == "/logout/":
            client.cookies[app.state.access.cookie] = app.state.access.open_session()


@pytest.mark.parametrize(
    "part",
    [
        "..%2f..%2fetc%2fpasswd",
        "..%5c..%5cx",
        "%2e%2e/%2e%2e/master.db",
        "....//master.db",
        "%00",
        "1%2f..%2f2",
    ],
)
def test_no_route_leads_to_a_file_outside_of_its_folder(app: Any, client: Any, part: str) -> None:
    client.headers["Authorization"] = f"Bearer {TOKEN}"
    for method, path, _ in all_routes(app):
        if "{" in path or path == "/static":
            address = re.sub(r"\{\w+(:\w+)?\}", part, path) if "{" in path else f"{path}/{part}"
            answer = client.request(method, address)
            assert answer.status_code in (400, 404, 405), (method, address, answer.status_code)
