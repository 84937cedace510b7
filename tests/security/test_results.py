"""Workers that put links, pipes and devices in the place of their results."""

from __future__ import annotations

import io
import os
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the [master] extra")

from mlbench_master import create_app
from mlbench_master.database.store import new_run
from mlbench_master.engines.local.engine import LocalEngine
from mlbench_master.runs import result_files
from mlbench_master.runs.result_files import FILES, ResultFolder
from tests.master.helpers import TestClient

SECRET = '{"secret": "of somebody else"}'


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "1" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(SECRET)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of the results of run 1."""
    path = LocalEngine(tmp_path / "runs").results("local-1")
    path.mkdir(parents=True)
    return path


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    app = create_app(data_dir=tmp_path)
    app.state.scheduler.start = lambda: None
    values = {
        "num_cpus": 1.0,
        "max_bandwidth": 1.0,
        "image": "i",
        "backend": "gloo",
        "command": "true",
    }
    app.state.store.add_run(new_run(name="r", num_workers=1, job_id="local-1", **values))
    with TestClient(
        app, base_url="http://127.0.0.1:5080", raise_server_exceptions=False
    ) as test_client:
        yield test_client


def answers(client: Any) -> tuple[int, zipfile.ZipFile]:
    """Return the status of the result, and the archive; neither may have the secret, and the page
    must answer."""
    result = client.get("/api/runs/1/result/")
    packed = client.get("/api/metrics/1/?metric_type=run&format=zip")
    assert client.get("/runs/1/").status_code == 200
    archive = zipfile.ZipFile(io.BytesIO(packed.content))
    for content in (result.content, *map(archive.read, archive.namelist())):
        assert b"somebody else" not in content
    return result.status_code, archive


def test_links_pipes_and_devices_are_not_followed(
    client: Any, root: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = root / "task1a" / "1"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "result.json").symlink_to(secret)
    other = secret.with_name("other")
    other.write_text(SECRET)
    os.link(other, folder / "environment.json")
    os.mkfifo(folder / "official_result.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(folder)  # the path of a socket has at most about 100 characters
        listener.bind("mlperf.log")
        status, archive = answers(client)
    assert (status, archive.namelist()) == (404, ["run.json", "metrics.jsonl", "left_out.txt"])
    refused = [line.split(":")[0] for line in archive.read("left_out.txt").decode().splitlines()]
    assert refused == ["result.json", "environment.json", "official_result.txt", "mlperf.log"]


def test_a_file_without_an_end_is_not_read(client: Any, root: Path) -> None:
    folder = root / "task1a" / "1"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text("{}")
    with (folder / "metrics.jsonl").open("wb") as sparse:
        sparse.truncate(2 * 10**9 + 1)  # a file of zeros that needs no room on the disk
    (folder / "mlperf.log").mkdir()
    (folder / "environment.json").symlink_to("/dev/zero")
    status, archive = answers(client)
    assert (status, archive.namelist()) == (200, ["run.json", "result.json", "left_out.txt"])
    assert "at most 2000000000" in archive.read("left_out.txt").decode()


@pytest.mark.parametrize("level", ["root", "task", "run", "up"])
def test_folders_that_are_links_lead_nowhere(
    client: Any, root: Path, secret: Path, level: str
) -> None:
    if level == "root":
        root.rmdir()
        root.symlink_to(secret.parents[1])
        (secret.parents[1] / "task").symlink_to(secret.parents[1])
    elif level == "task":
        (root / "task1a").symlink_to(secret.parents[1])
    elif level == "run":
        (root / "task1a").mkdir()
        (root / "task1a" / "1").symlink_to(secret.parent)
    else:
        (root / "..link").symlink_to("../..")
        (root / "task1a").mkdir()
        (root / "task1a" / "1").symlink_to("../../../../elsewhere/1")
    status, archive = answers(client)
    assert (status, archive.namelist()) == (404, ["run.json"])


def test_a_folder_that_becomes_a_link_stays_the_one_that_was_found(
    root: Path, secret: Path
) -> None:
    folder = root / "task1a" / "1"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text("{}")
    with ResultFolder.find(root) as found:  # type: ignore[union-attr]
        folder.rename(root / "away")
        folder.symlink_to(secret.parent)
        assert found.read("result.json") == b"{}"


def test_any_number_of_folders_costs_little(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_files, "_MOST_FOLDERS", 3)
    for task in range(10):
        for run in range(10):
            (root / str(task) / str(run)).mkdir(parents=True)
            (root / str(task) / str(run) / "result.json").touch()
    opened = []
    real_open = os.open

    def count(*args: Any, **options: Any) -> int:
        opened.append(args[0])
        return real_open(*args, **options)

    monkeypatch.setattr(os, "open", count)
    monkeypatch.setattr(os, "supports_dir_fd", {count})
    found = ResultFolder.find(root)
    assert found is not None and len(opened) <= 1 + 3 * (1 + 3) + 2
    with found:
        assert {name: found.read(name) for name in FILES}["result.json"] == b""
