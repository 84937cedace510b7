"""A master's token: made by itself, found by its user's programs, and by nobody else's."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from pathlib import Path

import httpx

from mlbench_core.client import settings
from mlbench_core.client.api import ApiClient
from mlbench_core.client.masters import read_record
from mlbench_core.paths import user_folder
from tests.helpers.processes import environment
from tests.master.helpers import server, wait_for
from tests.security.helpers import as_another_user, request

RUN = {"name": "eve", "num_workers": 1, "command": "id"}


def mlbench(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlbench_cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment(**variables)
    )


def test_another_user_cannot_start_a_command(tmp_path: Path) -> None:
    with server(tmp_path / "data", token=()) as (base, _):
        for method, path in (
            ("POST", "/api/runs/"),
            ("GET", "/api/runs/"),
            ("DELETE", "/api/runs/1/"),
        ):
            status, text = as_another_user(
                lambda method=method, path=path: request(base, method, path, RUN)
            )
            assert status == 401, text
        files = [
            user_folder(settings.MASTER),
            tmp_path / "data" / "secret",
            tmp_path / "data" / "master.db",
        ]
        assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600] * 3
        token = read_record().token
        with ApiClient(url=base) as client:
            assert client.get_runs().result().json() == []
        assert len(token) == 64
        assert token not in (tmp_path / "master.log").read_text()


def test_programs_of_the_same_user_and_workers_find_the_token(tmp_path: Path) -> None:
    # As a script of version 3.0: it knows only the address.
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nfrom mlbench_core.api import ApiClient\nwith ApiClient(in_cluster=False, "
        "url=sys.argv[1]) as client:\n    answer = client.post_metric(sys.argv[2], sys.argv[3], "
        "1).result()\n    assert answer.status_code == 201, answer.text\n"
    )
    with server(tmp_path / "data", token=()) as (base, _):
        place = base.removeprefix("http://")
        # Without the record in the user's folder, a worker has only the variables that the master
        # gives it.
        by_worker = (
            f"env MLBENCH_HOME={tmp_path / 'other'} "
            f"{sys.executable} {script} {place} {{run_id}} worker"
        )
        assert mlbench("run", "r", "1", "--command", by_worker).returncode == 0
        by_name = place.replace("127.0.0.1", "localhost")
        assert mlbench("run", "s", "1", "--command", "true", "-u", by_name).returncode == 0
        command = [sys.executable, str(script), place, "1", "script"]
        subprocess.run(command, env=environment(), check=True, timeout=240)
        with ApiClient(url=base) as client:
            wait_for(
                lambda: client.get_run(1).result().json()["state"] == "finished",
                what="the run's end",
            )
            assert set(client.get_run_metrics(1).result().json()) == {"worker", "script"}
        token = read_record().token
    # After a restart, workers go on with the token that they have.
    with server(tmp_path / "data", token=()) as _:
        assert read_record().token == token


def test_a_second_master_of_the_user_is_found_by_its_address(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        server(tmp_path / "a" / "data", token=()) as (first, _),
        server(tmp_path / "b" / "data", token=()) as (second, _),
    ):
        for base in (first, second):
            with ApiClient(url=base) as client:
                assert client.get_runs().result().status_code == 200
        assert mlbench("get-dashboard-url").stdout == f"{first}\n"
    assert list(user_folder().glob("master*.json")) == []


def test_a_client_that_is_older_than_its_master_finds_the_token_later(tmp_path: Path) -> None:
    with server(tmp_path / "data", token=()) as (base, _):
        record = user_folder(settings.MASTER)
        hidden = record.rename(record.with_suffix(".hidden"))
        with ApiClient(url=base) as client:
            assert client.get_runs().result().status_code == 401
            hidden.rename(record)
            assert client.get_runs().result().status_code == 200


def test_the_printed_address_logs_a_browser_in_once(tmp_path: Path) -> None:
    with server(tmp_path / "data", token=()) as (base, _):
        log = tmp_path / "master.log"
        printed = re.search(
            r"open it in a browser: (\S+)", wait_for(lambda: log.read_text(), what="the log")
        )[1]
        for address in (printed, mlbench("get-dashboard-url", "--login").stdout.strip()):
            assert address.startswith(f"{base}/login/?code=")
            assert httpx.head(address).status_code != 303, "a preview does not use the code up"
            with httpx.Client(base_url=base) as browser:
                answer = browser.get(address)
                assert (answer.status_code, answer.headers["location"]) == (303, "/")
                assert {"HttpOnly", "SameSite=strict"} <= set(
                    answer.headers["set-cookie"].split("; ")
                )
                assert browser.get("/").status_code == 200
                assert browser.get(address).headers["location"] == "/", "it is logged in already"
            again = httpx.get(address)
            assert again.status_code == 401 and "has been used" in again.text
            assert "set-cookie" not in again.headers


def test_no_token_is_a_wish_that_says_its_meaning(tmp_path: Path) -> None:
    with server(tmp_path / "data", "--no-token") as (base, _):
        assert httpx.get(f"{base}/api/runs/").status_code == 200
        assert (
            "every program and user of this machine can run commands as you"
            in (tmp_path / "master.log").read_text()
        )
    done = mlbench("master", "--no-token", "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2 and "--token-file" in done.stderr
    assert mlbench("master", "--no-token", "--token", "x").returncode == 2
