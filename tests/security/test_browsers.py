"""What browsers may do: logging in and out, guessing, and pages of other sites."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_master import create_app
from tests.master.helpers import TestClient

HTML = {"accept": "text/html"}
TOKEN = "a-token-that-a-user-chose"
PATHS = (
    "/",
    "/login/",
    "/docs/",
    "/openapi.json",
    "/api/health/",
    "/api/runs/",
    "/static/style.css",
    "/nothing",
)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    app = create_app(data_dir=tmp_path / "data", token=TOKEN)
    with TestClient(
        app, base_url="http://mlbench.example:5080", follow_redirects=False
    ) as test_client:
        yield test_client


def log_in(client: TestClient) -> None:
    answer = client.post(
        "/login/", data={"token": TOKEN}, headers={"Origin": "http://mlbench.example:5080"}
    )
    assert (answer.status_code, answer.headers["location"]) == (303, "/")


def test_without_a_token_only_names_of_loopback_are_answered(tmp_path: Path) -> None:
    # The local network may resolve names without a dot, and a page can rebind them.
    foreign = ("evil", "evil:5080", "wpad", "evil.example", "127.0.0.1:5080@evil.com",
    "127.0.0.1.evil.com", "10.0.0.1",
               "", "x.localhost", "localhost:5080:80", "[::1", "::1", "[::2]", "0.0.0.0", "127.1",
               "localhost.evil.com",
               "localhost:x", "localhost/", " localhost")  # fmt: skip
    with TestClient(create_app(data_dir=tmp_path), base_url="http://127.0.0.1:5080") as client:
        for host in foreign:
            run = {"name": "e", "num_workers": 1, "command": "true"}
            answer = client.post(
                "/api/runs/", json=run, headers={"Host": host, "Origin": f"http://{host}"}
            )
            assert answer.status_code == 403, host
        for host in ("localhost", "LOCALHOST:5080", "127.0.0.1:1", "127.0.0.2", "[::1]:5080"):
            assert client.get("/api/runs/", headers={"Host": host}).status_code == 200, host


def test_every_answer_forbids_other_sites_to_load_or_frame_it(client: TestClient) -> None:
    log_in(client)
    for path in PATHS:
        headers = client.get(path).headers
        policy = headers["content-security-policy"].split("; ")
        assert {
            "default-src 'self'",
            "frame-ancestors 'none'",
            "object-src 'none'",
            "base-uri 'none'",
        } <= set(policy)
        assert "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["x-frame-options"]) == (
            "nosniff",
            "DENY",
        )


def test_the_api_page_loads_nothing_from_other_hosts(client: TestClient) -> None:
    log_in(client)
    for path in ("/docs", "/docs/", "/", "/login/"):
        page = client.get(path).text
        loaded = re.findall(r"""<(?:script|link|img|iframe)[^>]*?(?:src|href)="([^"]*)""", page)
        assert loaded and all(address.startswith("/static/") for address in loaded)
        assert not re.search(r"<script(?! src=)|<style|\bon\w+=|style=", page), (
            "the policy forbids them"
        )
    page = client.get("/docs/").text
    for operation in (
        "<strong>POST</strong> /api/runs/",
        "<strong>GET</strong> /api/metrics/{owner_id}/",
    ):
        assert operation in page
    assert client.get("/redoc").status_code == 404
    client.cookies.clear()
    assert client.get("/docs/").status_code == client.get("/openapi.json").status_code == 401


def test_the_login_page_has_its_style_without_a_login(client: TestClient) -> None:
    for address in re.findall(r'(?:src|href)="(/static/[^"]*)"', client.get("/login/").text):
        assert client.get(address).status_code == 200
    assert client.get("/", headers=HTML).headers["location"] == "/login/"
    assert client.get("/static/../app.py").status_code in (401, 404)


def test_guesses_of_the_token_are_limited(client: TestClient) -> None:
    for guess in range(10):
        assert client.post("/login/", data={"token": f"guess {guess}"}).status_code == 401
    for token in (
        "guess",
        TOKEN,
    ):  # otherwise the answer would still tell a right guess from a wrong one
        answer = client.post("/login/", data={"token": token})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "60")
    assert client.get("/api/runs/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 429
    access = client.app.state.access
    assert not access.must_wait("10.0.0.1") and not access.limits_tokens_of("127.0.0.1")
    access._guesses = {key: [then - 61 for then in times] for key, times in access._guesses.items()}
    log_in(client)


def test_a_logout_ends_the_session(client: TestClient, tmp_path: Path) -> None:
    log_in(client)
    assert 'action="/logout/"' in client.get("/").text
    ((name, cookie),) = client.cookies.items()
    assert stat.S_IMODE((tmp_path / "data" / "sessions.json").stat().st_mode) == 0o600
    assert cookie not in (tmp_path / "data" / "sessions.json").read_text()
    # A restarted master knows the session.
    with TestClient(
        create_app(data_dir=tmp_path / "data", token=TOKEN), cookies={name: cookie}
    ) as again:
        assert again.get("/api/runs/").status_code == 200
    assert client.post("/logout", headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.post("/logout").headers["location"] == "/login/"
    assert client.get("/api/runs/", headers={"Cookie": f"{name}={cookie}"}).status_code == 401


def test_two_masters_of_one_host_do_not_share_a_cookie(tmp_path: Path) -> None:
    cookies: dict[str, str] = {}
    clients = [TestClient(create_app(data_dir=tmp_path / name, token=TOKEN)) for name in ("a", "b")]
    for client in clients:
        with client:
            client.post("/login/", data={"token": TOKEN})
            cookies.update(client.cookies.items())
    assert len(cookies) == 2
    for client in clients:
        with client:
            client.cookies.update(cookies)
            assert client.get("/api/runs/").status_code == 200


def test_a_session_ends_after_a_week_and_is_random(client: TestClient) -> None:
    log_in(client)
    first = dict(client.cookies)
    access = client.app.state.access
    access._sessions = {digest: end - 7 * 86_400 for digest, end in access._sessions.items()}
    assert client.get("/api/runs/").status_code == 401
    client.cookies.clear()
    log_in(client)
    assert dict(client.cookies) != first
    for cookie in ("", "x", "\xff", next(iter(first.values()))):
        headers = {"Cookie": f"{access.cookie}={cookie}".encode("latin-1")}
        client.cookies.clear()
        assert client.get("/api/runs/", headers=headers).status_code == 401


def test_codes_of_addresses_expire(client: TestClient) -> None:
    assert client.post("/api/login/").status_code == 401
    path = client.post("/api/login/", headers={"Authorization": f"Bearer {TOKEN}"}).json()["path"]
    access = client.app.state.access
    access._codes = {code: end - 600 for code, end in access._codes.items()}
    assert client.get(path).status_code == 401
    assert client.get("/api/runs/").status_code == 401
