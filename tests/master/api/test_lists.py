"""Lists of the API: filters, orders, and pages that the header Link leads through."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the [master] extra")
pytest.importorskip("httpx", reason="needs httpx")

from mlbench_master import create_app
from mlbench_master.database.store import new_run
from tests.master.helpers import IdleEngine, TestClient


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    app = create_app(data_dir=tmp_path, engine=IdleEngine())
    app.state.scheduler.start = lambda: None  # nothing starts, so the runs keep their states
    with TestClient(app, base_url="http://127.0.0.1:5080") as test_client:
        yield test_client


def add_runs(client: Any) -> None:
    """Six runs: a-1 to a-3 with 3, 1 and 2 workers, then b_-1 to b_-3."""
    for index, (name, workers, state) in enumerate(
        [
            ("a-1", 3, "finished"),
            ("a-2", 1, "failed"),
            ("a-3", 2, "initialized"),
            ("b-1", 1, "finished"),
            ("b-2", 2, "started"),
            ("b-3", 1, "finished"),
        ]
    ):
        common = {
            "num_cpus": 1.0,
            "max_bandwidth": 1.0,
            "image": "",
            "backend": "gloo",
            "command": "true",
        }
        run = client.app.state.store.add_run(new_run(name=name, num_workers=workers, **common))
        ended = 100 - index if state in ("finished", "failed") else None
        client.app.state.store.update_run(run.id, state=state, finished_at=ended)


def pages(client: Any, address: str) -> list[Any]:
    """The pages from an address on."""
    found = []
    while address:
        answer = client.get(address)
        assert answer.status_code == 200, answer.text
        found.append(answer.json())
        address = answer.links.get("next", {}).get("url", "")
        assert len(found) < 20
    return found


def names(page: list[dict[str, Any]]) -> str:
    return " ".join(item["name"] for item in page)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", "a-1 a-2 a-3 b-1 b-2 b-3"),
        ("state=finished", "a-1 b-1 b-3"),
        ("state=initialized&state=&state=started", "a-3 b-2"),
        ("name=B-", "b-1 b-2 b-3"),
        ("name=-2&state=failed", "a-2"),
        ("name=%25", ""),
        ("name=_", ""),
        ("sort=-id", "b-3 b-2 b-1 a-3 a-2 a-1"),
        ("sort=num_workers", "a-2 b-1 b-3 a-3 b-2 a-1"),
        ("sort=-num_workers", "a-1 b-2 a-3 b-3 b-1 a-2"),
        ("sort=finished_at", "b-3 b-1 a-2 a-1 a-3 b-2"),
        ("sort=-finished_at", "a-1 a-2 b-1 b-3 b-2 a-3"),
        ("sort=name&offset=4", "b-2 b-3"),
        ("after=4", "b-2 b-3"),
    ],
)
def test_runs_are_filtered_and_sorted_as_a_whole_and_in_pages(
    client: Any, query: str, found: str
) -> None:
    add_runs(client)
    assert [names(page) for page in pages(client, f"/api/runs/?{query}")] == [found]
    in_pages = pages(client, f"/api/runs/?{query}&limit=2")
    assert " ".join(names(page) for page in in_pages if page) == found
    assert all(len(page) == 2 for page in in_pages[:-1])


def test_a_run_that_is_deleted_between_two_pages_moves_no_other(client: Any) -> None:
    add_runs(client)
    first = client.get("/api/runs/?limit=2&csrfmiddlewaretoken=%22%0a")
    for run in first.json():
        client.app.state.store.delete_run(run["id"])
    assert names(client.get(first.links["next"]["url"]).json()) == "a-3 b-1"


def test_pods_come_in_pages_of_whole_and_of_parts_of_runs(client: Any) -> None:
    add_runs(client)
    [whole] = pages(client, "/api/pods/")
    assert names(whole[:4]) == "a-1-worker-0 a-1-worker-1 a-1-worker-2 a-2-worker-0"
    assert len(whole) == 10
    assert json.loads(whole[2]["labels"])["rank"] == "2"
    for limit in (1, 2, 3, 4, 10, 11):
        in_pages = pages(client, f"/api/pods/?limit={limit}")
        assert list(itertools.chain(*in_pages)) == whole, limit
        assert all(len(page) == limit for page in in_pages[:-1])
    for query in ("after=1", "after=x-1", "after=-1", "after=1-1-1", "limit=0"):
        assert client.get(f"/api/pods/?{query}").status_code == 400, query


def test_a_log_comes_in_pages(tmp_path: Path) -> None:
    app = create_app(data_dir=tmp_path)
    app.state.scheduler.start = lambda: None
    with TestClient(app, base_url="http://127.0.0.1:5080") as client:
        run = client.post(
            "/api/runs/", json={"name": "r", "num_workers": 1, "command": "true"}
        ).json()
        address = f"/api/runs/{run['id']}/logs/"
        assert pages(client, address) == [{"lines": [], "next": 0, "previous": 0, "matches": 0}], (
            "it has not started"
        )
        app.state.store.update_run(run["id"], job_id=f"local-{run['id']}")
        (tmp_path / "runs" / str(run["id"])).mkdir(parents=True)
        lines = [
            {"rank": 0, "stream": "stdout", "text": str(number), "date": ""} for number in range(7)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "runs" / str(run["id"]) / "log.jsonl").write_text(text)
        found = pages(client, f"{address}?limit=3")
        assert [[line["text"] for line in page["lines"]] for page in found] == [
            list("012"),
            list("345"),
            ["6"],
            [],
        ]
        assert [page["next"] for page in found] == [3, 6, 7, 7]
        for query in ("limit=-1", "limit=5001", "limit=x"):
            assert client.get(f"{address}?{query}").status_code == 400, query


@pytest.mark.parametrize(
    "query",
    ["state=lost", "state=failed&" * 5, "sort=command", "sort=--id", "offset=-1", "limit=10001"],
)
def test_a_wrong_query_names_the_parameter(client: Any, query: str) -> None:
    answer = client.get(f"/api/runs/?{query}")
    assert (answer.status_code, answer.json()["message"].split(":")[0].split(".")[0]) == (
        400,
        query.split("=")[0],
    )
