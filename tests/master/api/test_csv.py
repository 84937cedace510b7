"""The download of metrics as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_master import create_app
from tests.master.helpers import IdleEngine, TestClient

DATE = "2026-01-02T03:04:05.000006Z"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    app = create_app(data_dir=tmp_path, engine=IdleEngine(), token=None)
    with TestClient(app, base_url="http://127.0.0.1:5080") as opened:
        yield opened


def rows_of(client: TestClient, *metrics: dict[str, Any]) -> list[list[str]]:
    run = client.post("/api/runs/", json={"name": "a", "num_workers": 1, "command": "true"}).json()
    items = [{"run_id": run["id"], "date": DATE, **metric} for metric in metrics]
    assert client.post("/api/metrics/", json=items).status_code == 201
    answer = client.get(f"/api/metrics/{run['id']}/?metric_type=run&format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"] == f'attachment; filename="run_{run["id"]}.csv"'
    return list(csv.reader(io.StringIO(answer.text, newline="")))


def test_each_entry_is_a_row_with_rank_and_epoch(client: TestClient) -> None:
    metrics = [
        {"name": "loss @ 1", "value": "0.5", "metadata": '{"rank": 1, "epoch": 2}'},
        {"name": "text", "value": 'a,"b"\nc', "metadata": "not JSON"},
        {"name": "z", "value": "1", "metadata": '{"rank": "<b>", "epoch": true}'},
    ]
    assert rows_of(client, *metrics) == [
        ["name", "date", "rank", "epoch", "value"],
        ["loss @ 1", DATE, "1", "2", "0.5"],
        ["text", DATE, "", "", 'a,"b"\nc'],
        ["z", DATE, "", "", "1"],
    ]


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("\t=1", "'\t=1"),
        ("-2.5e-3", "-2.5e-3"),
        ("+3", "+3"),
        ("-inf", "-inf"),
        ("\x1b]0;title\x07", "]0;title"),
    ],
)
def test_no_cell_is_a_formula(client: TestClient, value: str, cell: str) -> None:
    assert [row[-1] for row in rows_of(client, {"name": "m", "value": value})] == ["value", cell]


def test_a_name_is_no_formula_and_a_run_without_metrics_has_a_header(client: TestClient) -> None:
    assert rows_of(client) == [["name", "date", "rank", "epoch", "value"]]
    client.post("/api/metrics/", json={"run_id": 1, "name": "=now()", "value": "1"})
    assert "'=now()," in client.get("/api/metrics/1/?metric_type=run&format=csv").text
