"""Logins and logouts of browsers while the disk is full."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from mlbench_master import create_app
from mlbench_master.access.credentials import Access
from tests.faults.helpers import full
from tests.master.helpers import TestClient


def _with(access: Access, cookie: str) -> bool:
    return access.has_session(Headers({"cookie": f"{access.cookie}={cookie}"}))


def test_a_login_on_a_full_disk_works_until_the_end_of_the_master(
    small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_disk / "data"
    app = create_app(f"sqlite:///{tmp_path / 'master.db'}", folder, "t" * 32)
    access: Access = app.state.access
    with TestClient(app, base_url="http://127.0.0.1:5080") as client:
        code = access.new_code()
        with full(small_disk), caplog.at_level(logging.WARNING, "mlbench_master"):
            answer = client.get("/login/", params={"code": code}, follow_redirects=False)
            assert answer.status_code == 303 and access.cookie in answer.cookies
            assert client.get("/", follow_redirects=False).status_code == 200
        assert "logins are lost when the master ends, because" in caplog.text
        assert client.get("/login/", params={"code": code}, headers={"cookie": ""}).status_code in (
            200,
            401,
        )


def test_a_logout_on_a_full_disk_lasts_after_a_restart(small_disk: Path) -> None:
    folder = small_disk / "data"
    folder.mkdir(mode=0o700)
    access = Access(folder, "t" * 32)
    left, stays = access.open_session(), access.open_session()
    with full(small_disk):
        access.close_session(Headers({"cookie": f"{access.cookie}={left}"}))
        assert not _with(access, left) and _with(access, stays)
        assert not _with(Access(folder, "t" * 32), left), "the logout counts after a restart"
    access.open_session()
    again = Access(folder, "t" * 32)
    assert not _with(again, left) and _with(again, stays), "the next write has all sessions"


def test_a_logout_that_cannot_be_stored_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access = Access(tmp_path, "t" * 32)
    cookie = access.open_session()
    (tmp_path / "sessions.json").unlink()
    (tmp_path / "sessions.json").mkdir()
    (tmp_path / "sessions.json" / "file").touch()
    access.close_session(Headers({"cookie": f"{access.cookie}={cookie}"}))
    assert "a logout ends with this master, because" in caplog.text
    assert not _with(access, cookie) and os.listdir(tmp_path)
