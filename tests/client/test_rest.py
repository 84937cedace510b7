"""HTTP rules that ApiClient and the command share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import mlbench_core
from mlbench_cli._client import MasterClient
from mlbench_core.client.api import ApiClient
from mlbench_core.errors import MasterRequestError
from tests.client.stub_master import StubMaster


def test_only_reading_follows_a_redirect(
    master: StubMaster, connect: Callable[..., ApiClient]
) -> None:
    """A redirected DELETE would become a GET: nothing is deleted, and the answer is 200."""
    master.respond = lambda method, path, body: (
        None if path.startswith("/new/") else (301, f"/new{path}")
    )
    client = connect()
    assert client.get_runs().result(60).json()["path"] == "/new/api/runs/"
    assert client.delete_run(3).result(60).status_code == 301
    with MasterClient(master.url) as command:
        for change in (command.delete, command.stop):
            with pytest.raises(
                MasterRequestError, match=r"redirects to /new/api/runs/3/.* \(HTTP 301\): use that"
            ):
                change(3)
    assert [path for method, path, *_ in master.requests if method != "GET"] == [
        *("/api/runs/3/", "/api/runs/3/", "/api/runs/3/stop/")
    ]


@pytest.mark.parametrize(
    "url", ["http://me:secret@host:1", "me:secret@host", "http://secret@host/?x"]
)
def test_a_password_in_the_address_is_not_shown(url: str) -> None:
    for kind in (ApiClient, MasterClient):
        with pytest.raises(ValueError, match="MLBENCH_TOKEN") as caught:
            kind(url=url)
        assert "secret" not in str(caught.value)


def test_no_other_module_speaks_http() -> None:
    """Downloads of data sets are the exception: they go to other servers, in pieces that can be
    continued."""
    root = Path(mlbench_core.__file__).parent
    speaks = re.compile(r"\b(requests\.(Session|request|get|post|adapters)|urlopen|http\.client)\b")
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if speaks.search(path.read_text("utf-8"))
    }
    assert found == {"client/proven_server.py", "client/rest.py", "dataset/download.py"}
