"""Where the token and the database's password may be read, and which tokens can be sent."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

import httpx
import psutil
import pytest

from mlbench_core.client.api import ApiClient
from mlbench_core.errors import MasterTokenError
from mlbench_core.paths import user_folder
from mlbench_master import create_app
from tests.master.helpers import server, wait_for
from tests.security.helpers import as_another_user
from tests.security.test_token import mlbench

TOKEN = "a-token-that-a-user-chose"
# In front of the path, SQLAlchemy takes a password for SQLite, too, but SQLite would refuse it.
DATABASE = "sqlite:///{}?timeout=17"


def modes(folder: Path) -> dict[str, int]:
    found = {}
    for path in (folder, *folder.iterdir()):
        # A master that runs deletes files of its database.
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = stat.S_IMODE(path.stat().st_mode)
    return found


def test_no_process_shows_the_token_or_the_database_in_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    database = DATABASE.format(tmp_path / "other.db")
    with monkeypatch.context() as patch:
        patch.setenv("MLBENCH_DATABASE_URL", database)
        context = server(tmp_path / "data", token=("--token-file", str(tmp_path / "token")))
        with context as (base, master), ApiClient(url=base) as client:
            assert (tmp_path / "other.db").exists(), "the variable counts"
            # Runs inherit the master's environment.
            command = "sh -c 'echo database=$MLBENCH_DATABASE_URL; sleep 300'"
            assert (
                client.create_run(
                    "r", 1, custom_image_name="custom_image", custom_image_command=command
                )
                .result()
                .ok
            )
            wait_for(
                lambda: client.get_run(1).result().json()["state"] == "started", what="the start"
            )
            headers = {"Authorization": f"Bearer {TOKEN}"}

            def lines() -> list[str]:
                answer = httpx.get(f"{base}/api/runs/1/logs/", headers=headers)
                return [line["text"] for line in answer.json()["lines"]]

            wait_for(
                lambda: "database=" in lines(), what="the command's output, without the database"
            )
            processes = [
                psutil.Process(master.pid),
                *psutil.Process(master.pid).children(recursive=True),
            ]
            arguments = [" ".join(process.cmdline()) for process in processes]
            assert len(arguments) >= 3
            assert not [line for line in arguments if TOKEN in line or "timeout=17" in line]
            client.delete_run(1).result()
    help_text = " ".join(mlbench("master", "--help").stdout.split())
    assert help_text.count("'ps' shows it to others") == 2


@pytest.mark.parametrize(
    "token", [" x-y ", "two words", "line\nbreak", "final\n", "ключ", "ü", "", "\x00"]
)
def test_a_token_that_cannot_be_sent_is_refused_in_one_sentence(token: str, tmp_path: Path) -> None:
    with pytest.raises(
        MasterTokenError, match="token must be one or more printable ASCII characters"
    ):
        create_app(data_dir=tmp_path, token=token)
    if not token:
        return
    with pytest.raises(ValueError, match="token must be") as error:
        ApiClient(url="127.0.0.1:1", token=token)
    assert token.strip() not in str(error.value)


def test_the_command_refuses_such_a_token_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for done in (
        mlbench("master", "--port", "0", "--token", " x"),
        mlbench("master", "--port", "0", "--token-file", str(tmp_path / "empty")),
        mlbench("status", "-u", "127.0.0.1:1", MLBENCH_TOKEN="x\ny"),
        mlbench("status", "-u", "127.0.0.1:1", MLBENCH_TOKEN="ключ"),
    ):
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert done.stderr.startswith("mlbench: token must be")


def test_an_open_data_folder_is_closed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    for name in ("master.db", "master.log"):
        (data / name).touch(mode=0o644)
    log = user_folder("master.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch(mode=0o644)
    with server(data):
        found = modes(data)
        assert found.pop("data") == 0o700
        assert {
            name: mode
            for name, mode in found.items()
            if name.endswith((".log", "-wal", ".db", "secret"))
        } == {
            name: 0o600
            for name in ("master.db", "master.db-wal", "master.log", "secret")
            if name in found
        }
        tmp_path.chmod(0o755)
        denied = as_another_user(lambda: (data / "master.log").read_text())
        assert denied.startswith("PermissionError")


def test_the_background_masters_log_is_private() -> None:
    user_folder().mkdir(parents=True, exist_ok=True)
    log = user_folder("master.log")
    log.touch(mode=0o644)
    try:
        assert mlbench("run", "r", "1", "--command", "true").returncode == 0
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert modes(user_folder("master"))["master"] == 0o700
    finally:
        assert mlbench("master", "--stop").returncode == 0


def test_a_folder_of_all_users_is_not_closed(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    done = mlbench("master", "--port", "0", "--data-dir", str(shared))
    assert done.returncode == 1
    assert "is shared by all users: choose a private folder with --data-dir" in done.stderr
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777


def test_a_damaged_secret_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / "secret").write_text("short")
    done = mlbench("master", "--port", "0", "--data-dir", str(data))
    assert done.returncode == 1 and f"{data / 'secret'} is damaged" in done.stderr


def test_every_loopback_address_and_port_zero_need_no_chosen_token(tmp_path: Path) -> None:
    with (
        server(tmp_path / "data", "--host", "127.0.0.2", token=()) as (base, _),
        ApiClient(url=base) as client,
    ):
        assert base.startswith("http://127.0.0.2:")
        assert "the network can read" not in (tmp_path / "master.log").read_text()
        assert client.get_runs().result().json() == []


def test_a_short_token_and_a_network_without_https_are_warned_of(tmp_path: Path) -> None:
    with server(tmp_path / "data", "--host", "0.0.0.0", token=("--token", "short")):
        log = (tmp_path / "master.log").read_text()
    assert "the token can be guessed: use at least 16 random characters" in log
    assert "the network can read the token: use --certificate" in log
