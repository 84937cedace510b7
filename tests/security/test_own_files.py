"""Files of a user that other users can change are not trusted."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from mlbench_core.client import settings
from mlbench_core.client.masters import find_credentials, remember_master
from mlbench_core.errors import ConfigurationError
from mlbench_core.files import check_only_own


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with settings."""
    folder = tmp_path / "home"
    monkeypatch.setenv("MLBENCH_HOME", str(folder))
    settings.remember(settings.SETTINGS, {"master_url": "http://127.0.0.1:1", "token": "secret"})
    return folder


@pytest.mark.parametrize("mode", [0o602, 0o666, 0o722])
def test_a_file_that_others_can_write_is_refused(home: Path, mode: int) -> None:
    (home / "settings.json").chmod(mode)
    with pytest.raises(ConfigurationError, match=f"chmod go-w {home / 'settings.json'}$"):
        find_credentials("http://127.0.0.1:1")
    (home / "settings.json").chmod(
        0o644
    )  # others may not write it; what it holds is the user's choice
    assert find_credentials("http://127.0.0.1:1").token == "secret"


def test_a_folder_that_others_can_write_is_refused(home: Path) -> None:
    home.chmod(0o777)
    with pytest.raises(ConfigurationError, match=f"chmod go-w {home}$"):
        find_credentials("http://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match=f"chmod go-w {home}$"):
        remember_master("http://127.0.0.1:1", os.getpid(), None, "key")
    assert not (home / "master.json").exists()


def test_a_umask_that_lets_others_write_locks_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    before = os.umask(0)
    try:
        (tmp_path / "home" / "datasets").mkdir(parents=True)
        settings.remember(settings.LAST_RUN, {"task": "1a"})
        assert settings.read(settings.LAST_RUN) == {"task": "1a"}
    finally:
        os.umask(before)
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "home" / "last-run.json").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_shared_on_purpose_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o2777)
    with pytest.raises(ConfigurationError, match="chmod go-w"):
        settings.remember(settings.LAST_RUN, {"task": "1a"})
    assert (tmp_path / "home").stat().st_mode & 0o7777 == 0o2777


def test_files_of_another_user_are_refused(home: Path) -> None:
    found = os.stat_result((0o100600, 0, 0, 1, os.geteuid() + 54321, 0, 0, 0, 0, 0))
    with pytest.raises(ConfigurationError, match=f"belongs to user {found.st_uid}, who could"):
        check_only_own(home / "settings.json", found)


def test_the_group_of_this_user_alone_may_write(home: Path) -> None:
    """Many systems give each user a group of the same name, and a umask that lets it write."""
    import grp
    import pwd

    user = pwd.getpwuid(os.geteuid())
    alone = grp.struct_group((user.pw_name, "x", user.pw_gid, []))
    shared = grp.struct_group((user.pw_name, "x", user.pw_gid, ["somebody"]))
    (home / "settings.json").chmod(0o660)
    with mock.patch("grp.getgrgid", return_value=alone):
        assert settings.read(settings.SETTINGS)["token"] == "secret"
    with (
        mock.patch("grp.getgrgid", return_value=shared),
        pytest.raises(ConfigurationError, match="chmod go-w"),
    ):
        settings.read(settings.SETTINGS)


def test_a_pipe_or_a_huge_file_in_place_of_settings(home: Path) -> None:
    (home / "settings.json").unlink()
    os.mkfifo(home / "settings.json", 0o600)
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        settings.read(settings.SETTINGS)
    (home / "settings.json").unlink()
    with (home / "settings.json").open("wb") as file:
        file.truncate(2**40)
    (home / "settings.json").chmod(0o600)
    assert settings.read(settings.SETTINGS) == {}
    assert settings.read("missing.json") == {}
