"""``mlbench import``: result folders of runs without a master, in a real one."""

from __future__ import annotations

import json
import socket
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="needs the extra 'master'")

import uvicorn

from mlbench_cli.commands import imports
from mlbench_core.comparison.load_results import load
from mlbench_core.results.upload import metrics_of
from mlbench_master import create_app
from tests.cli.conftest import Call
from tests.master.helpers import IdleEngine, wait_for
from tests.results.helpers import change, write_run


class CountingEngine(IdleEngine):
    """Starts nothing, and counts the wishes."""

    started = 0

    def start(self, job: Any) -> str:
        self.started += 1
        return super().start(job)


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def master(
    tmp_path: Path, engine: CountingEngine, patch: pytest.MonkeyPatch
) -> Iterator[httpx.Client]:
    """A real server in a thread, which the environment names."""
    app = create_app(data_dir=tmp_path / "data", engine=engine)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: server.started, what="the server")
        patch.setenv("MLBENCH_MASTER_URL", url)
        try:
            with httpx.Client(base_url=f"{url}/api/") as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


def test_an_imported_run_is_like_any_other(
    master: httpx.Client, engine: CountingEngine, call: Call, tmp_path: Path
) -> None:
    folder = write_run(
        tmp_path / "out" / "task1a" / "My run_7", backend="nccl", threads=3, light=True
    )
    write_run(
        tmp_path / "out" / "task1a" / "missed", accuracies=(10.0, 20.0), threads=3, light=True
    )
    told = call("import", str(tmp_path / "out"), "--json")
    added = json.loads(told.stdout)
    assert [(entry["run"], entry["metrics"]) for entry in added] == [
        ("my-run-7", 15),
        ("missed", 10),
    ]

    run = master.get(f"runs/{added[0]['id']}/").json()
    assert (run["name"], run["state"], run["num_workers"], run["backend"]) == (
        "my-run-7",
        "finished",
        2,
        "nccl",
    )
    assert (run["num_cpus"], run["light_target"], run["job_metadata"]["notes"]) == (
        3, True, ["imported from a result folder"]
    )  # fmt: skip
    result = json.loads((folder / "result.json").read_text())
    for name, written in (
        ("created_at", "started_at"),
        ("started_at", "started_at"),
        ("finished_at", "ended_at"),
    ):
        assert run[name] == result["run"][written].replace("+00:00", "Z"), name
    assert run["goal"]["reached"] and run["goal"]["time_to_goal_s"] == pytest.approx(30.1)
    assert run["goal_result"] == "90% reached in 30.0 seconds"

    metrics = master.get(f"metrics/{run['id']}/", params={"metric_type": "run"}).json()
    assert sorted(metrics) == [
        "TaskResult @ 0", "goal @ 0", "result @ 0", "train_loss @ 0", "train_loss @ 1",
        "val_global_Prec@1 @ 0",
        "val_global_Prec@1 @ 1",
    ]  # fmt: skip
    raw = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [
        (line["time"][:26], line["value"])
        for line in raw
        if line.get("name") == "train_loss" and line["rank"]
    ]
    assert [
        (entry["date"][:26], float(entry["value"])) for entry in metrics["train_loss @ 1"]
    ] == losses

    compared = json.loads(call("compare", "my-run-7", "missed", "--json").stdout)
    assert [(row["workers"], row["reached"]) for row in compared["rows"]] == [(2, 0), (2, 1)], (
        compared["rows"]
    )
    call("download", "my-run-7", "-o", str(tmp_path / "zip.zip"))
    with zipfile.ZipFile(tmp_path / "zip.zip") as archive:
        assert json.loads(archive.read("result.json")) == result
    [record] = load([tmp_path / "zip.zip"])
    assert record.time_to_goal_s == pytest.approx(30.1)
    assert (
        master.get(f"{str(master.base_url).removesuffix('api/')}runs/{run['id']}/").status_code
        == 200
    )
    assert engine.started == 0


def test_a_run_is_imported_once_and_names_are_unique(
    master: httpx.Client, call: Call, tmp_path: Path
) -> None:
    first = write_run(tmp_path / "a" / ("x" * 70))
    second = write_run(tmp_path / "b" / ("x" * 70))
    assert f"added as {'x' * 63} (id 1," in call("import", str(first)).stdout
    assert f"added as {'x' * 61}-2 (id 2," in call("import", str(second)).stdout
    again = call("import", str(tmp_path), code=1)
    assert f"imported before as '{'x' * 63}' (id 1)" in again.stderr
    assert "2 of 2 result folders were not imported" in again.stderr
    assert len(master.get("runs/").json()) == 2
    call("delete", "--yes", "x" * 63)
    assert "(id 3," in call("import", str(first)).stdout


def test_a_damaged_folder_needs_force(master: httpx.Client, call: Call, tmp_path: Path) -> None:
    changed = write_run(tmp_path / "changed")
    change(changed / "metrics.jsonl", '"value":80.0', '"value":81.0')
    told = call("import", str(tmp_path), code=1)
    assert (
        "metrics.jsonl was changed" in told.stderr and "--force adds it nevertheless" in told.stderr
    )
    assert master.get("runs/").json() == []
    call("import", str(tmp_path), "--force")

    killed = write_run(tmp_path / "killed", finish=False)
    with (killed / "metrics.rank-0.jsonl").open("a") as file:
        place = '"epoch":2,"step":30,"time_s":31.5,"time":"2026-01-01T00:00:00+00:00"'
        file.write(f'{{"rank":0,"kind":"stat","name":"val_loss",{place},"value":null}}\n{{"ran')
    assert "result.json is missing" in call("import", str(killed), code=1).stderr
    call("import", str(killed), "--force")
    run = master.get("runs/2/").json()
    assert (run["name"], run["state"], run["job_metadata"]["reason"][:7]) == (
        "killed",
        "failed",
        "2 of 2 ",
    )
    metrics = master.get("metrics/2/", params={"metric_type": "run"}).json()
    assert [entry["value"] for entry in metrics["val_loss @ 0"]] == ["nan"]
    call("compare", "killed", "changed", "--json")


def test_an_import_that_was_cut_off_continues(
    master: httpx.Client, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "r")
    patch.setattr(imports, "_MOST_CHARACTERS", 100)
    with pytest.MonkeyPatch.context() as patcher:
        sent: list[Any] = []

        def cut(client: Any, metrics: Any) -> None:
            if len(sent) == 2:
                raise OSError("the cable was pulled")
            sent.append(metrics)
            client.send("POST", "metrics/", json=metrics)

        patcher.setattr(imports.MasterClient, "add_metrics", cut)
        call("import", str(folder), code=1)
    assert "added as r (id 1, 15 metrics)" in call("import", str(folder)).stdout
    metrics = master.get("metrics/1/", params={"metric_type": "run"}).json()
    assert sum(map(len, metrics.values())) == 15


def test_refused_metrics_leave_no_run_behind(
    master: httpx.Client, call: Call, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any) -> Iterator[dict[str, Any]]:
        for metric in metrics_of(*arguments):
            yield {**metric, "name": "x" * 256}

    patch.setattr(imports, "metrics_of", wrong)
    assert "[0].name" in call("import", str(write_run(tmp_path / "r")), code=1).stderr
    assert master.get("runs/").json() == []


def test_the_api_names_wrong_fields_and_starts_nothing(
    master: httpx.Client, engine: CountingEngine
) -> None:
    good = {
        "fingerprint": "0" * 64, "name": "r", "state": "finished", "num_workers": 1,
        "created_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T00:01:00Z",
    }  # fmt: skip
    for name, value in [
        ("fingerprint", "0" * 63), ("fingerprint", "%" * 64), ("name", "<b>"), ("state", "started"),
        ("state", "initialized"), ("created_at", 5), ("finished_at", None), ("num_workers", 0),
         ("command", "\x00"),
    ]:  # fmt: skip
        answer = master.post("runs/import/", json={**good, name: value})
        assert (answer.status_code, name in answer.json()["message"]) == (400, True), answer.text
    assert master.post("runs/import/", json=good).status_code == 201
    assert master.post("runs/import/", data=good).json()["id"] == 1
    assert engine.started == 0
