"""Rows that the master did not write, disk space of deleted rows, and lists that stay short."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the [master] extra")
pytest.importorskip("httpx", reason="needs httpx")

from mlbench_master import create_app
from mlbench_master.database.store import NewMetric, Run, new_run, run_owner
from tests.master.helpers import TestClient, wait_for


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    app = create_app(data_dir=tmp_path)
    app.state.scheduler.start = lambda: None  # nothing starts, so the runs keep their states
    with TestClient(
        app, base_url="http://127.0.0.1:5080", raise_server_exceptions=False
    ) as test_client:
        yield test_client


def made(client: Any, name: str, **values: Any) -> Run:
    common = {
        "num_workers": 1,
        "num_cpus": 1.0,
        "max_bandwidth": 1000.0,
        "image": "i",
        "backend": "gloo",
    }
    run: Run = client.app.state.store.add_run(
        new_run(name=name, command="true", **common, **values)
    )
    client.app.state.store.update_run(run.id, state="finished")
    return run


POISON = [
    "UPDATE metrics SET date = 'yesterday' WHERE value = '2'",
    "UPDATE metrics SET date = 1.5e300 WHERE value = '2'",
    "UPDATE metrics SET value = x'ff00fe' WHERE value = '2'",
    "UPDATE metrics SET value = CAST(x'ff00fe' AS TEXT), metadata = x'ff' WHERE value = '2'",
    "UPDATE metrics SET name = x'ff' WHERE value = '2'",
    "UPDATE metrics SET name = CAST(x'ff' AS TEXT), cumulative = 'perhaps' WHERE value = '2'",
    "UPDATE runs SET job_metadata = '{not JSON' WHERE name = 'bad'",
    (
        "UPDATE runs SET job_metadata = '[1]', created_at = "
        "'today', finished_at = 1e300 WHERE name = 'bad'"
    ),
    "UPDATE runs SET job_metadata = CAST(x'ff' AS TEXT), num_workers = 'many' WHERE name = 'bad'",
    (
        "UPDATE runs SET state = 'exploded', goal_result = x'ff', command = "
        "x'ff', num_cpus = 9e999 WHERE name = 'bad'"
    ),
]


@pytest.mark.parametrize("poison", POISON, ids=range(len(POISON)))
def test_a_row_that_cannot_be_read_does_not_hide_the_others(
    client: Any, tmp_path: Path, poison: str
) -> None:
    good, bad = made(client, "good"), made(client, "bad")
    for run in (good, bad):
        items = [{"run_id": run.id, "name": "m", "value": value} for value in (1, 2, 3)]
        assert client.post("/api/metrics/", json=items[: 3 if run is bad else 1]).status_code == 201
    with sqlite3.connect(tmp_path / "master.db") as database:
        assert database.execute(poison).rowcount == 1
    database.close()
    assert client.get(f"/api/metrics/{good.id}/?metric_type=run").json()["m"][0]["value"] == "1"
    values = [
        entry["value"]
        for entry in client.get(f"/api/metrics/{bad.id}/?metric_type=run").json()["m"]
    ]
    assert {"1", "3"} <= set(values)
    assert {run["name"] for run in client.get("/api/runs/").json()} == {"good", "bad"}
    for path in (
        "/",
        "/api/pods/",
        "/api/metrics/",
        f"/runs/{good.id}/",
        f"/api/runs/{bad.id}/",
        f"/runs/{bad.id}/",
    ):
        assert client.get(path).status_code == 200, path
    for query in ("summarize=1", "last_n=1", "since=1970-01-01"):
        assert client.get(f"/api/metrics/{bad.id}/?metric_type=run&{query}").status_code == 200, (
            query
        )
    for points in (2, 2000):
        [curve] = client.get(f"/api/runs/{bad.id}/curves/?metric=m&points={points}").json()[
            "curves"
        ]
        assert len(curve["value"]) >= 2
    archive = zipfile.ZipFile(
        BytesIO(client.get(f"/api/metrics/{bad.id}/?metric_type=run&format=zip").content)
    )
    assert archive.testzip() is None
    assert client.delete(f"/api/runs/{bad.id}/").status_code == 204


def test_the_list_of_runs_has_no_output_and_comes_in_pages(client: Any) -> None:
    output = json.dumps(
        {"notes": ["a note"], "stdout": ["x" * 100] * 160, "stderr": ["y" * 100] * 160}
    )
    for number in range(30):
        made(client, f"run-{number}", job_metadata=output)
    whole = client.get("/api/runs/")
    assert len(whole.content) < 30 * 1000
    assert "link" not in whole.headers
    assert [run["name"] for run in whole.json()] == [f"run-{number}" for number in range(30)]
    shown = whole.json()[3]["job_metadata"]
    assert (shown["stdout"], shown["stderr"], shown["notes"]) == ([], [], ["a note"])
    assert len(client.get("/api/runs/4/").json()["job_metadata"]["stdout"]) == 160

    paged, address = [], "/api/runs/?limit=12"
    while address:
        page = client.get(address)
        assert len(page.json()) <= 12
        paged += page.json()
        address = page.links.get("next", {}).get("url")
    assert paged == whole.json()
    for query in ("limit=0", "limit=x", "after=-1", "limit=99999999"):
        refused = client.get(f"/api/runs/?{query}")
        assert (refused.status_code, refused.json()["message"].split(":")[0]) == (
            400,
            query.split("=")[0],
        )


def test_deleting_a_large_run_gives_its_disk_space_back(client: Any, tmp_path: Path) -> None:
    large, small = made(client, "large"), made(client, "small")
    store = client.app.state.store
    store.add_metrics([NewMetric(run_owner(small.id), "m", 0, "1")])
    store.add_metrics(
        [NewMetric(run_owner(large.id), f"m{n % 9}", n, "x" * 500) for n in range(10_000)]
    )

    def size() -> int:
        found = 0
        for path in tmp_path.glob("master.db*"):
            # SQLite deletes a file whose content it has moved to the database.
            with contextlib.suppress(FileNotFoundError):
                found += path.stat().st_size
        return found

    assert size() > 5_000_000
    assert client.delete(f"/api/runs/{large.id}/").status_code == 204
    wait_for(lambda: size() < 500_000, what="the space")
    assert store.metric_counts([run_owner(small.id)]) == {(run_owner(small.id), "m"): 1}


def test_a_database_of_an_earlier_version_shrinks_as_well(tmp_path: Path) -> None:
    path = tmp_path / "master.db"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA journal_mode=WAL")
        # A file that was written before keeps its way of freeing space.
        database.execute("CREATE TABLE other (text)")
        database.execute("DROP TABLE other")
    database.close()
    app = create_app(data_dir=tmp_path)
    store = app.state.store
    run = store.add_run(
        new_run(
            name="r",
            num_workers=1,
            num_cpus=1.0,
            max_bandwidth=1.0,
            image="i",
            backend="b",
            command="c",
        )
    )
    store.add_metrics([NewMetric(run_owner(run.id), "m", n, "x" * 500) for n in range(10_000)])
    store.delete_run(run.id)
    store.reclaim()
    assert sum(file.stat().st_size for file in tmp_path.glob("master.db*")) < 500_000
    store.close()
