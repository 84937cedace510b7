"""The number of SQL statements of a request does not depend on the number of workers and of
metrics."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from mlbench_master import create_app
from mlbench_master.database import store
from mlbench_master.database.store import NewMetric, Store, new_run, pod_owner, run_owner
from tests.master.helpers import TestClient


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    """A master whose scheduler does not run, so that no other thread sends statements."""
    client = TestClient(create_app(data_dir=tmp_path, token=None), base_url="http://127.0.0.1:5080")
    yield client
    client.app.state.store.close()  # type: ignore[attr-defined]


def statements_of(client: TestClient, path: str) -> list[str]:
    """Get a path; return the statements that its answer needed."""
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    database_engine = client.app.state.store._database_engine  # type: ignore[attr-defined]
    sa.event.listen(database_engine, "before_cursor_execute", note)
    try:
        response = client.get(path)
    finally:
        sa.event.remove(database_engine, "before_cursor_execute", note)
    assert response.status_code == 200
    return statements


def add_run(database: Store, name: str, num_workers: int, names: int, values: int = 3) -> int:
    """Add a run with metrics of its own for each worker, and of each of its pods; return its id."""
    columns = {
        "num_cpus": 1.0,
        "max_bandwidth": 1000.0,
        "image": "i",
        "backend": "gloo",
        "command": "true",
    }
    run = database.add_run(new_run(name=name, num_workers=num_workers, **columns))
    for rank, pod in enumerate(run.worker_names()):
        for owner in (run_owner(run.id), pod_owner(pod)):
            for index in range(names):
                metrics = [
                    NewMetric(owner, f"m{index} @ {rank}", date, str(date))
                    for date in range(values)
                ]
                database.add_metrics(metrics)
    return run.id


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/api/runs/",
        "/api/pods/",
        "/runs/{id}/",
        "/api/runs/{id}/",
        "/api/runs/{id}/curves/",
        "/api/metrics/{id}/?metric_type=run",
        "/api/metrics/{id}/?metric_type=run&last_n=1",
        "/api/metrics/{id}/?metric_type=run&format=zip",
        "/api/metrics/{id}/?metric_type=run&format=zip&summarize=2",
        "/api/metrics/",
    ],
)
def test_statements_do_not_grow_with_workers_and_metrics(client: TestClient, path: str) -> None:
    database = client.app.state.store  # type: ignore[attr-defined]
    small = statements_of(client, path.format(id=add_run(database, "small", 1, 1)))
    large = statements_of(client, path.format(id=add_run(database, "large", 8, 20)))
    assert len(large) == len(small) <= 6


@pytest.mark.parametrize("page", [1, 2, 5, 2000])
@pytest.mark.parametrize(
    ("query", "first"), [("", 0), ("&last_n=2", 1), ("&last_n=9", 0), ("&since=1970-01-01", 0)]
)
def test_entries_read_together_and_page_by_page_are_the_same(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, page: int, query: str, first: int
) -> None:
    monkeypatch.setattr(store, "_PAGE", page)
    run_id = add_run(client.app.state.store, "run", 2, 3)  # type: ignore[attr-defined]
    path = f"/api/metrics/{run_id}/?metric_type=run{query}"
    found = client.get(path).json()
    assert list(found) == sorted(f"m{index} @ {rank}" for index in range(3) for rank in range(2))
    assert all(
        [entry["value"] for entry in entries] == list("012")[first:] for entries in found.values()
    )
    with zipfile.ZipFile(io.BytesIO(client.get(f"{path}&format=zip").content)) as archive:
        for rank, owner in enumerate(("run-worker-0", "run-worker-1")):
            assert json.loads(archive.read(f"{owner}_m2 @ {rank}.json")) == found[f"m2 @ {rank}"]
            assert json.loads(archive.read(f"result_m2 @ {rank}.json")) == found[f"m2 @ {rank}"]
    everything = client.get("/api/metrics/").json()
    assert [
        entry["value"] for entry in everything["pod_metrics"]["run-worker-1"]["m0 @ 1"]
    ] == list("012")
    assert list(everything["run_metrics"]["run"]) == list(found)


def test_the_page_of_a_run_has_the_latest_value_of_each_metric(client: TestClient) -> None:
    database = client.app.state.store  # type: ignore[attr-defined]
    run_id = add_run(database, "run", 1, 2)
    # Two entries of one date: the one that arrived last counts.
    database.add_metrics(
        [NewMetric(run_owner(run_id), "m0 @ 0", 2, "late"), NewMetric(pod_owner("x"), "m9", 9, "9")]
    )
    assert [(name, point.value) for name, point in database.latest(run_owner(run_id))] == [
        ("m0 @ 0", "late"),
        ("m1 @ 0", "2"),
    ]
    assert database.latest(run_owner(77)) == []
