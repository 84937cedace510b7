"""The results of a run: the files that its workers leave, and the outcome of its goal."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_core.comparison.load_results import load, unpack
from mlbench_core.errors import ConfigurationError
from mlbench_core.results.configuration import Configuration
from mlbench_master import create_app
from mlbench_master.database.store import Run, new_run
from mlbench_master.runs import result_files
from mlbench_master.runs.result_files import FILES, ResultFolder
from mlbench_master.runs.run_goals import read_goal
from tests.master.engines.test_local_engine import create, wait_state
from tests.master.helpers import IdleEngine, TestClient

GOAL = {
    "metric": "val_global_Prec@1",
    "threshold": 95.0,
    "minimize": False,
    "budget_s": None,
    "reached": True,
    "value": None,
    "time_to_goal_s": 407.123,
    "unit": "epochs",
    "epochs": 3,
    "steps": None,
    "phases_s": {"compute": 300.0, "communication": 100.04, "metrics": 5.0, "data": 2.0},
}


class FolderEngine(IdleEngine):
    """An idle engine whose runs have the same folder of results."""

    folder: Path | None = None

    def results(self, job_id: str) -> Path | None:
        return self.folder


@pytest.fixture
def engine() -> FolderEngine:
    return FolderEngine()


@pytest.fixture
def client(tmp_path: Path, engine: FolderEngine) -> Iterator[Any]:
    app = create_app(data_dir=tmp_path / "data", engine=engine)
    app.state.scheduler.start = lambda: None
    with TestClient(
        app, base_url="http://127.0.0.1:5080", raise_server_exceptions=False
    ) as test_client:
        yield test_client


@pytest.fixture
def run(client: Any) -> Run:
    values = {
        "num_cpus": 1.0,
        "max_bandwidth": 1.0,
        "image": "i",
        "backend": "gloo",
        "command": "true",
    }
    made: Run = client.app.state.store.add_run(
        new_run(name="r", num_workers=1, job_id="idle-1", **values)
    )
    return made


@pytest.fixture
def folder(tmp_path: Path, engine: FolderEngine) -> Path:
    """The result folder of the run, with a line in every file."""
    engine.folder = tmp_path / "output"
    made = engine.folder / "task1a" / "7"
    made.mkdir(parents=True)
    for name in FILES:
        (made / name).write_text(f'{{"file": "{name}"}}\n')
    return made


def send(client: Any, run: Run, name: str, value: str, second: int = 0) -> None:
    item = {
        "run_id": run.id,
        "name": name,
        "value": value,
        "date": f"2026-01-01T00:00:{second:02d}",
    }
    assert client.post("/api/metrics/", json=[item]).status_code == 201


def archive(client: Any, run: Run) -> zipfile.ZipFile:
    opened = zipfile.ZipFile(
        io.BytesIO(client.get(f"/api/metrics/{run.id}/?metric_type=run&format=zip").content)
    )
    assert opened.testzip() is None
    return opened


def goal_of(client: Any, run: Run) -> Any:
    return client.get(f"/api/runs/{run.id}/").json()["goal"]


def test_the_zip_has_the_result_files(client: Any, run: Run, folder: Path, tmp_path: Path) -> None:
    (folder / "summary.json").write_text("not one of them")
    send(client, run, "TaskResult @ 0", "text of the metric")
    found = archive(client, run)
    assert found.namelist() == ["run.json", "result_TaskResult @ 0.json", *FILES]
    for name in FILES:
        assert found.read(name) == (folder / name).read_bytes()
    assert client.get(f"/api/runs/{run.id}/result/").json() == {"file": "result.json"}
    assert (
        f'<a href="/api/runs/{run.id}/result/">result.json</a>'
        in client.get(f"/runs/{run.id}/").text
    )
    assert str(folder) in client.get(f"/runs/{run.id}/").text
    (tmp_path / "zips").mkdir()
    (tmp_path / "zips" / "r.zip").write_bytes(found.fp.getvalue())  # type: ignore[union-attr]
    # The reader finds the result in it, and refuses this one, which has no version.
    with pytest.raises(ConfigurationError, match=r"result.json in .*r.zip is None, not 1"):
        load([tmp_path / "zips"])


def test_the_newest_result_counts(client: Any, run: Run, folder: Path) -> None:
    for index, name in enumerate(("8", "9", "10")):
        other = folder.with_name(name)
        other.mkdir()
        file = other / ("environment.json" if name == "10" else "result.json")
        file.write_text(f'{{"of": {name}}}')
        os.utime(file, (2e9 + index, 2e9 + index))
    assert client.get(f"/api/runs/{run.id}/result/").json() == {"of": 9}
    assert "environment.json" not in archive(client, run).namelist()
    for name in ("7", "8", "9"):
        (folder.with_name(name) / "result.json").unlink()
    # A run that continues or was killed has some of the files, but no result.
    assert archive(client, run).read("environment.json") == b'{"of": 10}'
    assert client.get(f"/api/runs/{run.id}/result/").status_code == 404


def test_a_file_that_is_too_large_is_left_out_and_named(
    client: Any, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(result_files.FILES, "metrics.jsonl", 9)
    (folder / "metrics.jsonl").write_text("0123456789")
    found = archive(client, run)
    assert "metrics.jsonl" not in found.namelist() and "mlperf.log" in found.namelist()
    assert (
        found.read("left_out.txt")
        == b"metrics.jsonl: it has 10 bytes, and at most 9 are passed on\n"
    )
    (folder / "metrics.jsonl").write_text("012345678")
    assert "left_out.txt" not in archive(client, run).namelist()


def test_a_run_without_result_has_the_lines_of_its_workers(
    client: Any, run: Run, folder: Path, tmp_path: Path
) -> None:
    start: dict[str, Any] = {
        "kind": "start",
        "time": "2026-01-01T00:00:00+00:00",
        "run_id": "7",
        "step": 0,
        "epoch": 0,
    }
    start["configuration"] = Configuration(workers=3).to_dict()
    lines = [json.dumps({"rank": rank, **start}) for rank in range(3)]
    # A killed worker can leave half a line.
    (folder / "metrics.rank-0.jsonl").write_text(f'{lines[0]}\n{{"rank": 0, "ki')
    (folder / "metrics.rank-2.jsonl").write_text(f"{lines[2]}\n")
    (tmp_path / "secret").write_text("secret")
    (folder / "metrics.rank-1.jsonl").symlink_to(tmp_path / "secret")
    assert archive(client, run).read("metrics.jsonl") == b'{"file": "metrics.jsonl"}\n'
    (folder / "metrics.jsonl").unlink()
    (folder / "result.json").unlink()
    found = archive(client, run)
    assert found.read("metrics.jsonl").decode() == f'{lines[0]}\n{{"rank": 0, "ki\n{lines[2]}\n'
    assert found.read("left_out.txt").startswith(
        b"metrics.rank-1.jsonl: it cannot be read as a regular file"
    )
    (tmp_path / "r.zip").write_bytes(found.fp.getvalue())  # type: ignore[union-attr]
    assert not unpack(tmp_path / "r.zip", tmp_path / "result")
    assert unpack(tmp_path / "r.zip", tmp_path / "result", unfinished=True)
    assert not (tmp_path / "result" / "result.json").exists()
    (tmp_path / "result" / "environment.json").unlink()
    (record,) = load([tmp_path / "result"])
    assert (record.state, record.workers) == ("unfinished", 3)


def test_each_of_many_workers_has_its_lines(tmp_path: Path) -> None:
    folder = tmp_path / "task" / "1"
    folder.mkdir(parents=True)
    (folder / "environment.json").write_text("{}")
    names = [f"metrics.rank-{rank}.jsonl" for rank in range(300)]
    for name in [*names, "metrics.rank-1.jsonl.gz", "other.jsonl"]:
        (folder / name).touch()
    with ResultFolder.find(tmp_path) as found:  # type: ignore[union-attr]
        assert found.lines_of_workers() == sorted(names)


def test_a_file_that_grows_is_read_to_the_size_that_it_had(
    client: Any, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_and_grow(found: ResultFolder, name: str) -> Any:
        opened = open_file(found, name)
        with (folder / name).open("a") as growing:
            growing.write("}\n")
        return opened

    open_file = ResultFolder.open
    monkeypatch.setattr(ResultFolder, "open", open_and_grow)
    assert archive(client, run).read("metrics.jsonl") == b'{"file": "metrics.jsonl"}\n'
    (folder / "result.json").write_text("{}")
    assert client.get(f"/api/runs/{run.id}/result/").content == b"{}"


def test_without_a_folder_the_metric_has_the_result(client: Any, run: Run) -> None:
    address = f"/api/runs/{run.id}/result/"
    refused = client.get(address)
    assert (refused.status_code, refused.json()["message"][:31]) == (
        404,
        f"id: run {run.id} has no valid result.j",
    )
    for second, damaged in enumerate(('{"run": ', "[1]", '{"value": NaN}', "[" * 60_000, "0.5")):
        send(client, run, "result @ 0", damaged, second)
        assert client.get(address).status_code == 404
        assert archive(client, run).namelist() == ["run.json", "result_result @ 0.json"]
    send(client, run, "result @ 0", '{"schema_version": 1}', 30)
    assert (
        client.get(address).content
        == archive(client, run).read("result.json")
        == b'{"schema_version": 1}'
    )
    page = client.get(f"/runs/{run.id}/").text
    assert f'href="/api/runs/{run.id}/result/"' in page and "schema_version" not in page


def test_a_damaged_file_gives_way_to_the_metric(client: Any, run: Run, folder: Path) -> None:
    (folder / "result.json").write_bytes(b'{"run": \xff')
    assert client.get(f"/api/runs/{run.id}/result/").status_code == 404
    send(client, run, "result @ 0", "{}")
    assert archive(client, run).read("result.json") == b'{"run": \xff'
    assert archive(client, run).namelist().count("result.json") == 1
    assert client.get(f"/api/runs/{run.id}/result/").content == b"{}"


def test_workers_write_their_results_below_the_folder_of_the_run(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, pathlib\n"
        "folder = pathlib.Path(os.environ['MLBENCH_OUTPUT'], 'task1a', "
        "os.environ['MLBENCH_RUN_ID'])\n"
        "folder.mkdir(parents=True)\n"
        "(folder / 'result.json').write_text('{\"rank\": ' + os.environ['RANK'] + '}')\n"
    )
    with TestClient(
        create_app(data_dir=tmp_path / "data"), base_url="http://127.0.0.1:5080"
    ) as client:
        made = create(client, f"python {script}", workers=1)
        done = wait_state(client, made["id"], "finished", "failed")
        assert done["state"] == "finished", done
        assert client.get(f"/api/runs/{made['id']}/result/").json() == {"rank": 0}
        output = tmp_path / "data" / "runs" / str(made["id"]) / "output"
        assert str(output / "task1a" / str(made["id"])) in client.get(f"/runs/{made['id']}/").text
        assert client.delete(f"/api/runs/{made['id']}/").status_code == 204
        assert not output.exists()


def test_the_goal_is_part_of_the_record(client: Any, run: Run) -> None:
    assert goal_of(client, run) is None
    send(client, run, "goal @ 0", json.dumps({**GOAL, "reached": False, "unknown": 1}))
    assert ">not reached yet</" in client.get(f"/runs/{run.id}/").text
    send(client, run, "goal @ 0", json.dumps(GOAL), 2)
    send(client, run, "TaskResult @ 0", "80% in some words")
    record = client.get(f"/api/runs/{run.id}/").json()
    assert (record["goal"], record["goal_result"]) == (GOAL, "80% in some words")
    assert client.get("/api/runs/").json()[0]["goal"] == GOAL
    assert json.loads(archive(client, run).read("run.json"))["goal"] == GOAL
    for page in (client.get("/"), client.get(f"/runs/{run.id}/")):
        assert (
            "reached in 407.1 s (3 epochs)" in page.text and "in some words</dd>" not in page.text
        )
    assert ": Prec@1 &gt;= 95</" in page.text
    for phase in (
        "Compute: 5 min",
        "Exposed communication: 1 min 40 s",
        "Metrics: 5.0 s",
        "Data: 2.0 s",
    ):
        assert f"<title>{phase}</title>" in page.text


def test_the_latest_goal_counts_and_nonsense_is_a_plain_metric(client: Any, run: Run) -> None:
    send(client, run, "goal @ 0", "0.5", 6)
    send(client, run, "goal @ 0", json.dumps(GOAL), 5)
    send(client, run, "goal @ 0", json.dumps({**GOAL, "epochs": 2}), 4)  # a late delivery
    send(client, run, "goal @ 0", "", 7)
    send(client, run, "goal @ 1", json.dumps({**GOAL, "epochs": 9}), 7)
    assert goal_of(client, run) == GOAL
    entries = client.get(f"/api/metrics/{run.id}/?metric_type=run").json()["goal @ 0"]
    assert [entry["value"] for entry in entries][-2:] == ["0.5", ""]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yes",
        "[]",
        "{}",
        '{"reached": "true"}',
        '{"reached": 1}',
        '{"reached": true, "time_to_goal_s": NaN}',
        '{"reached": true, "time_to_goal_s": 1e999}',
        '{"reached": true, "time_to_goal_s": -1}',
        '{"reached": true, "epochs": 2.5}',
        '{"reached": true, "epochs": 1' + "0" * 5000 + "}",
        '{"reached": true, "metric": "\\ud800"}',
        json.dumps({"reached": True, "metric": "x" * 256}),
        json.dumps({"reached": True, "phases_s": {"x" * 256: 1.0}}),
        json.dumps({"reached": True, "phases_s": {str(n): 1.0 for n in range(17)}}),
        json.dumps({"reached": True, "other": "x" * 9000}),
        "[" * 100_000,
        b"\xff",
        5,
    ],
    ids=range(19),
)
def test_nonsense_is_no_goal(text: Any) -> None:
    assert read_goal('{"reached": true, "phases_s": {"compute": 1}}') is not None
    assert read_goal(text) is None
