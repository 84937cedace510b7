"""A master behind a proxy that serves it below a path: every path of an answer begins with this
path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_master import create_app
from mlbench_master.access.proxies import check_root_path
from tests.master.helpers import IdleEngine, TestClient, wait_for

ROOT = "/user/me%40x.org/proxy/5080"
TOKEN = "a-token-of-the-test"
HOST = "http://bench.example.org"
STATIC = Path(__file__).parents[2] / "mlbench_master" / "web" / "static"
LINK = re.compile(
    r'\b(?:href|src|action|hx-get|data-post|data-delete|data-then|formaction|poster|srcset)="([^"#]*)"'
)


@pytest.fixture(params=["the option", "the option, path removed", "the header"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A function that sends a request to an address below ROOT, as a browser would through the
    proxy."""
    option = ROOT if "option" in request.param else ""
    app = create_app(data_dir=tmp_path, engine=IdleEngine(), token=TOKEN, root_path=option)
    headers = {} if option else {"X-Forwarded-Prefix": f"{ROOT}/"}
    with TestClient(app, base_url=HOST, headers=headers, follow_redirects=False) as opened:

        def send(method: str, url: str, **options: Any) -> Any:
            path = url.removeprefix(HOST)
            assert path.startswith(f"{ROOT}/"), f"{path} is another program's"
            if request.param != "the option":
                path = path.removeprefix(ROOT)
            # The cookies of a browser belong to paths of the proxy.
            cookies = "; ".join(
                f"{name}={value}" for name, value in options.pop("session", {}).items()
            )
            opened.cookies.clear()
            extra = {"Cookie": cookies} if cookies else {}
            return opened.request(
                method, path, headers={**extra, **options.pop("headers", {})}, **options
            )

        yield send


def log_in(send: Any) -> dict[str, str]:
    answer = send(
        "POST",
        f"{ROOT}/login/",
        data={"token": TOKEN},
        headers={"Origin": HOST, "Accept": "text/html"},
    )
    assert (answer.status_code, answer.headers["location"]) == (303, f"{ROOT}/")
    cookie = answer.headers["set-cookie"]
    # Other programs of the proxy must not receive it.
    assert re.search(rf"; Path={re.escape(ROOT)}(;|$)", cookie)
    name, _, value = cookie.partition(";")[0].partition("=")
    return {name: value}


def test_every_link_of_every_page_leads_to_the_master(client: Any) -> None:
    authorized = {"Authorization": f"Bearer {TOKEN}"}
    body = {"name": "a", "num_workers": 2, "command": 'python x.py href="/not/a/link"'}
    run_id = client("POST", f"{ROOT}/api/runs/", json=body, headers=authorized).json()["id"]
    session = log_in(client)
    wait_for(
        lambda: (
            client("GET", f"{ROOT}/api/runs/{run_id}/", session=session).json()["state"]
            == "started"
        )
    )
    waiting, seen = [HOST + ROOT + "/", f"{HOST}{ROOT}/compare/?run={run_id}"], set()
    while waiting:
        url = waiting.pop()
        if url in seen:
            continue
        seen.add(url)
        answer = client("GET", url, session=session, headers={"Accept": "text/html"})
        if "/stop/" in url:
            assert answer.status_code == 405
            continue
        if urlsplit(url).path.endswith(("/logout/", "/result/")):
            continue
        assert answer.status_code == 200, f"{answer.status_code}: {url}"
        if answer.headers["content-type"].startswith("text/html"):
            waiting += [
                urljoin(url, link.replace("&amp;", "&")) for link in LINK.findall(answer.text)
            ]
            assert "href=&#34;/not/a/link&#34;" in answer.text or "not/a/link" not in answer.text
    pages = {urlsplit(url).path.removeprefix(ROOT) for url in seen}
    assert pages >= {
        "/",
        "/runs/",
        "/runs/new/",
        f"/runs/{run_id}/",
        "/compare/",
        "/docs/",
        "/openapi.json",
    }
    assert pages >= {"/workers/a-worker-0/", "/static/app.js", "/static/style.css", "/logout/"}


def test_redirects_further_pages_and_the_description_stay_below_the_path(client: Any) -> None:
    answer = client("GET", f"{ROOT}/runs/", headers={"Accept": "text/html"})
    assert (answer.status_code, answer.headers["location"]) == (303, f"{ROOT}/login/")
    session = log_in(client)
    for name in ("a", "b"):
        client(
            "POST",
            f"{ROOT}/api/runs/",
            json={"name": name, "num_workers": 1, "command": "x"},
            session=session,
        )
    link = client("GET", f"{ROOT}/api/runs/?limit=1", session=session).headers["link"]
    assert link.startswith(f"<{ROOT}/api/runs/?")
    description = client("GET", f"{ROOT}/openapi.json", session=session).json()
    assert description["servers"] == [{"url": ROOT}]
    code = client("POST", f"{ROOT}/api/login/", session=session).json()["path"]
    answer = client("GET", f"{ROOT}{code}", headers={"Accept": "text/html"})
    assert answer.headers["location"] == f"{ROOT}/"
    answer = client("POST", f"{ROOT}/logout/", session=session)
    assert f"Path={ROOT}" in answer.headers["set-cookie"]
    assert answer.headers["location"] == f"{ROOT}/login/"


def test_scripts_find_the_path_in_their_own_address() -> None:
    scripts = list(STATIC.glob("*.js"))
    assert len(scripts) > 5
    for script in scripts:
        assert not re.search(
            r"""["'`]/(?:api|runs|compare|workers|static|docs|login)""", script.read_text()
        ), script


@pytest.mark.parametrize(
    "prefix",
    ["//evil.example", "/a//b", "evil", "https://evil.example",
     "/a/../b", "/a/%2e%2e/b", "/./a", '/a"onload="x', "/a<b>",
     "/a\\b", "/a b", "/a?b", "/a#b", "/a;b", "/é", "/a\tb", "/" + "a" * 600, "/a%", "/a, /b"],
)  # fmt: skip
def test_a_prefix_that_is_not_a_path_is_ignored(prefix: str, tmp_path: Path) -> None:
    app = create_app(data_dir=tmp_path, engine=IdleEngine(), token=TOKEN)
    with TestClient(app, base_url=HOST, follow_redirects=False) as opened:
        headers = {"Accept": "text/html", "X-Forwarded-Prefix": prefix.encode()}
        assert opened.get("/", headers=headers).headers["location"] == "/login/"
        assert 'action="/login/"' in opened.get("/login/", headers=headers).text


@pytest.mark.parametrize("path", ["user", "//x", "/a/../b", "/a b", "/a%0", "https://x/y"])
def test_a_root_path_must_be_a_path(path: str) -> None:
    with pytest.raises(ConfigurationError, match="--root-path must be a path such as"):
        check_root_path(path)


def test_the_option_comes_before_the_header(tmp_path: Path) -> None:
    app = create_app(data_dir=tmp_path, engine=IdleEngine(), token=TOKEN, root_path="/mine/")
    with TestClient(app, base_url=HOST, follow_redirects=False) as opened:
        headers = {"Accept": "text/html", "X-Forwarded-Prefix": "/other"}
        assert opened.get("/mine/runs", headers=headers).headers["location"] == "/mine/login/"
        # Only whole steps of the path count.
        assert opened.get("/minerals/", headers=headers).headers["location"] == "/mine/login/"
